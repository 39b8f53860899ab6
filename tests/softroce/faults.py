"""Faults of the guest's network. Each is undone when its block ends, however it ends.

`netem` acts on what a device sends, the others on both directions. The functions run `tc` and `ip`
and return when those are done, after tens of milliseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from softroce.devices import Device, run

__all__ = ["flap", "link_down", "netem", "no_address"]


@contextlib.contextmanager
def netem(device: Device, *settings: str) -> Iterator[None]:
    """What `device` sends is treated as `settings` of tc-netem(8) say: "loss", "5%"."""
    run("tc", "qdisc", "replace", "dev", device.netdev, "root", "netem", *settings)
    try:
        yield
    finally:
        run("tc", "qdisc", "delete", "dev", device.netdev, "root")


@contextlib.contextmanager
def link_down(device: Device) -> Iterator[None]:
    """The network device is down: the port is too, and the peer's has lost its carrier."""
    run("ip", "link", "set", device.netdev, "down")
    try:
        yield
    finally:
        run("ip", "link", "set", device.netdev, "up")
        # It forgot the one neighbour that `setup` told it.
        mac = Path(f"/sys/class/net/{device.peer.netdev}/address").read_text().strip()
        neighbour = (device.peer.address, "lladdr", mac, "dev", device.netdev, "nud", "permanent")
        run("ip", "neighbour", "replace", *neighbour)


def flap(device: Device, times: int, seconds: float) -> None:
    """Take the link down for `seconds` and up for as long, `times` times; it is left up."""
    for _ in range(times):
        with link_down(device):
            time.sleep(seconds)
        time.sleep(seconds)


@contextlib.contextmanager
def no_address(device: Device) -> Iterator[None]:
    """The device has lost its IPv4 address, and with it the GID."""
    run("ip", "address", "delete", f"{device.address}/24", "dev", device.netdev)
    try:
        yield
    finally:
        run("ip", "address", "add", f"{device.address}/24", "dev", device.netdev)
