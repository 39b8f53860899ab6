"""A plugin of vLLM, loaded by each of its processes."""

from __future__ import annotations


def register() -> None:
    """Make up for what vLLM forgets on CPU."""
    import torch

    # Workers with a KV connector ask their accelerator for its index.
    torch.accelerator.current_device_index = lambda: 0
    # The kernel lets a process use AMX when it has asked. oneDNN does so, but with batches as small
    # as a decode server's first one it may not be called before vLLM's attention uses AMX: SIGILL.
    torch.cpu._init_amx()
