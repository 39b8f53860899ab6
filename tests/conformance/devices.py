"""The devices a test runs on. Whatever moves the bytes, the engine promises the same.

By themselves the tests run on every path of the soft device; with `--rdma NEAR,FAR` they run on
those two RDMA devices instead, the near engine on the one and the far engine on the other.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aioflagcx import Config, Engine, sync
from aioflagcx.config import SOFT_PATHS

__all__ = ["Devices", "End", "devices_named", "missing_devices"]

MiB = 1 << 20
SYSFS = Path("/sys/class/infiniband")


@dataclasses.dataclass(frozen=True)
class End:
    """What the near or the far engines have."""

    host: str
    settings: Mapping[str, Any]
    """Of their configuration: the devices, and the paths."""

    def config(self, **settings: Any) -> Config:
        return Config(**{**self.settings, **settings})

    def engine(self, port: int = 0, **settings: Any) -> Engine:
        """One that has not been started."""
        return Engine(self.host, port, config=self.config(**settings))

    def sync_engine(self, port: int = 0, **settings: Any) -> sync.Engine:
        """A blocking one that has not been started."""
        return sync.Engine(self.host, port, config=self.config(**settings))


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of the two engines of a test."""

    name: str
    path: str
    """Of the sessions between them, as Session.path has it."""
    near: End
    far: End
    emulated: bool = False

    @property
    def largest(self) -> int:
        """Bytes of a transfer that is meant to be large."""
        return 64 * MiB if self.emulated else 256 * MiB

    @property
    def pace(self) -> float:
        """How many times longer everything takes than it would on a machine of its own."""
        return 10.0 if self.emulated else 1.0


def devices_named(name: str, *, emulated: bool = False) -> Devices:
    """A soft path, or two RDMA devices with a comma between them."""
    if name in SOFT_PATHS:
        soft = End("127.0.0.1", {"devices": "soft", "soft_paths": (name,)})
        return Devices(name, name, soft, soft, emulated)
    near, far = (End(_host_of(device), {"devices": device}) for device in name.split(","))
    return Devices(name, "ibverbs", near, far, emulated)


def missing_devices(name: str) -> list[str]:
    """Which of the RDMA devices in `name` are not there."""
    return [device for device in name.split(",") if not _port_of(device).exists()]


def _port_of(device: str) -> Path:
    name, _, port = device.partition(":")
    return SYSFS / name / "ports" / (port or "1")


def _host_of(device: str) -> str:
    """The IPv4 address that the device's port can be reached by, or else this host's own."""
    for gid in sorted(_port_of(device).glob("gids/*"), key=lambda path: int(path.name)):
        address = ipaddress.IPv6Address(gid.read_text().strip()).ipv4_mapped
        if address is not None:
            return str(address)
    return "127.0.0.1"
