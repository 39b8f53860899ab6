"""A KV connector of our own for vLLM: prefill servers write to decode servers.

In vLLM's ``--kv-transfer-config``, ``kv_connector`` is "AioFlagcxConnector" and
``kv_connector_module_path`` is "aioflagcx.integrations.vllm". Only :mod:`.connector` imports vLLM;
the other modules work, and are tested, without it.

- :mod:`.scheduler`: which requests are to be loaded, offered, given up; in vLLM's scheduler.
- :mod:`.worker`: one thread with an event loop and an engine; in each of vLLM's workers. On that
  loop :mod:`.prefill` writes and :mod:`.decode` receives.
- :mod:`.channel` and :mod:`.messages`: what the two sides tell each other, over ZeroMQ.
- :mod:`.caches`: from tensors to :class:`aioflagcx.kv.CacheLayout`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AioFlagcxConnector"]


def __getattr__(name: str) -> Any:
    if name == "AioFlagcxConnector":
        from .connector import AioFlagcxConnector

        return AioFlagcxConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
