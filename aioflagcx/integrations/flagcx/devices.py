"""Which devices an engine opens: ours to say, else as FlagCX is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from ...config import Config
from ...topology import Topology

__all__ = ["devices"]


def devices(
    config: Config,
    environ: Mapping[str, str] = os.environ,
    names: Callable[[], Iterable[str]] = lambda: Topology.read().devices,
) -> str:
    """As ``Config.devices``: AIOFLAGCX_DEVICES or, without it, FLAGCX_IB_HCA.

    That lists RDMA devices by the beginnings of their names or, after "=", by their names, or after
    "^" those that are not to be taken; a name with a port, "mlx5_0:1", is a whole one. SGLang's
    plugin sets it to what ``--disaggregation-ib-device`` says. ``names``: this host's RDMA devices.
    """
    chosen = environ.get("FLAGCX_IB_HCA", "")
    if "AIOFLAGCX_DEVICES" in environ or not chosen:
        return config.devices
    without = chosen.startswith("^")
    exact = chosen.removeprefix("^").startswith("=")
    listed = [name.strip() for name in chosen.lstrip("^=").split(",") if name.strip()]
    if not without:
        return ",".join(_port(name) if exact or ":" in name else f"{name}*" for name in listed)

    def excluded(device: str) -> bool:
        return device in listed if exact else device.startswith(tuple(listed))

    # In brackets, so that it is a pattern: of those, ports that are down are left out.
    return ",".join(f"{name[:-1]}[{name[-1]}]" for name in names() if not excluded(name))


def _port(name: str) -> str:
    """A device's first port goes by the device's name."""
    return name.removesuffix(":1")
