"""The guest's RoCE devices: their state, their GIDs, and the objects that programs hold of them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "Device",
    "Gid",
    "device_names",
    "holders",
    "holding_objects",
    "no_leaks",
    "object_counts",
    "run",
    "until",
]

KINDS = ("ctx", "pd", "cq", "qp", "mr", "srq", "cm_id")
"""What `rdma resource show` counts of each device."""


class Gid(NamedTuple):
    """What a port can be reached by."""

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    type: str
    """"RoCE v2", say."""


class Device(NamedTuple):
    """One of rxe0, rxe1 and so on; 2N and 2N+1 are the ends of a cable."""

    number: int

    @property
    def name(self) -> str:
        return f"rxe{self.number}"

    @property
    def netdev(self) -> str:
        """The network device under it."""
        return f"v{self.number}"

    @property
    def address(self) -> str:
        """The IPv4 address that `setup` has given to it."""
        return f"10.77.{self.number // 2}.{self.number % 2 + 1}"

    @property
    def peer(self) -> Device:
        """The one at the cable's other end."""
        return Device(self.number ^ 1)

    @property
    def state(self) -> str:
        """The port's state: "ACTIVE" or "DOWN"."""
        return self._read("state").partition(": ")[2]

    def gids(self) -> list[Gid]:
        """The GIDs that the port has now."""
        found = []
        for path in self._port.glob("gids/*"):
            address = ipaddress.IPv6Address(path.read_text().strip())
            if int(address):
                with contextlib.suppress(OSError):  # it may be gone by now
                    kind = self._read(f"gid_attrs/types/{path.name}")
                    found.append(Gid(address.ipv4_mapped or address, kind))
        return found

    def gid_index(self, address: str) -> int:
        """Where a RoCE v2 GID is in the port's table."""
        for path in self._port.glob("gids/*"):
            gid = ipaddress.IPv6Address(path.read_text().strip())
            if str(gid.ipv4_mapped or gid) == address:
                with contextlib.suppress(OSError):  # an entry that is not used
                    if self._read(f"gid_attrs/types/{path.name}") == "RoCE v2":
                        return int(path.name)
        raise AssertionError(f"{self.name} has no RoCE v2 GID of {address}: {self.gids()}")

    @property
    def _port(self) -> Path:
        return Path(f"/sys/class/infiniband/{self.name}/ports/1")

    def _read(self, name: str) -> str:
        return (self._port / name).read_text().strip()


def device_names() -> list[str]:
    """Of all RDMA devices that there are."""
    return sorted(path.name for path in Path("/sys/class/infiniband").iterdir())


def object_counts() -> Counter[tuple[str, str]]:
    """How many objects there are, by (device, kind). The kernel itself holds a few."""
    return Counter(
        {(device["ifname"], kind): device[kind] for device in _resources() for kind in KINDS}
    )


def holders(kind: str) -> list[str]:
    """Who holds objects of `kind`, a line for each."""
    return [
        " ".join(f"{name} {value}" for name, value in entry.items() if name != "ifindex")
        for entry in _resources(kind)
    ]


@contextlib.contextmanager
def holding_objects(device: Device) -> Iterator[int]:
    """The id of a process with a context, PD, CQ, QP and MR of `device`."""
    qps = object_counts()[device.name, "qp"]
    # As a server it makes them before it waits for its client.
    command = ["ibv_rc_pingpong", "--ib-dev", device.name, "--gid-idx", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            assert until(lambda: object_counts()[device.name, "qp"] > qps)
            yield process.pid
        finally:
            process.kill()


@contextlib.contextmanager
def no_leaks(limit: float = 10.0) -> Iterator[None]:
    """Raise AssertionError if there are more objects after the block than before it.

    The kernel frees what a process leaves behind after that has ended; up to `limit` seconds are
    waited for it.
    """
    before = object_counts()
    yield
    if not until(lambda: not object_counts() - before, limit):
        more = object_counts() - before
        left = [f"{count} {kind} of {device}" for (device, kind), count in more.items()]
        lines = [line for kind in dict.fromkeys(k for _, k in more) for line in holders(kind)]
        raise AssertionError("\n".join([f"left behind: {', '.join(left)}", *lines]))


def until(condition: Callable[[], bool], limit: float = 10.0) -> bool:
    """Wait until `condition` holds, for at most `limit` seconds; whether it does."""
    deadline = time.monotonic() + limit
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


def run(*command: str) -> str:
    """What `command` prints. Raises AssertionError with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr.strip()}"
    return done.stdout


def _resources(*kind: str) -> list[dict[str, Any]]:
    shown = run("rdma", "-j", "resource", "show", *kind)
    return json.loads(shown) if shown.strip() else []
