"""Which RDMA devices are next to which memory, as the kernel's sysfs has it.

A *location* names memory: "cpu:N" is NUMA node N, "cuda:N" is GPU N of this process, "*" is any
place. How far a device is from it is told in the words of ``nvidia-smi topo``, nearest first:

- PIX: below the same PCIe switch or root port,
- PXB: below the same root port, with several switches between them,
- PHB: at the same host bridge, that is, through the CPU,
- NODE: in the same NUMA node,
- SYS: in another one.

Pure, but for :meth:`Topology.read`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ANYWHERE", "Place", "Topology"]

ANYWHERE = "*"
"""The location of memory that is next to no device, or whose place is not known."""

_LOCATION = re.compile(r"\*|(cpu|cuda):(0|[1-9][0-9]*)", re.ASCII)
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", re.ASCII)

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""The PCI base class of GPUs, with a screen or without."""

_ONE_SWITCH = 4
"""Steps between two devices of one switch: up to its upstream port and down again by two ports."""

_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


class Place(NamedTuple):
    """Where a PCI device is."""

    path: tuple[str, ...]
    """The host bridge, the bridges below it, and last the device; () for one without hardware."""

    node: int
    """Its NUMA node; -1 when the host does not say."""

    @property
    def address(self) -> str | None:
        """Its PCI address."""
        return self.path[-1] if self.path else None


class Topology(NamedTuple):
    """A host's NUMA nodes, RDMA devices and GPUs."""

    nodes: dict[int, tuple[int, ...]]
    """Each NUMA node's distances to all of them, in their order (ACPI SLIT)."""

    devices: dict[str, Place]
    """RDMA devices by name."""

    gpus: dict[str, Place]
    """By location, "cuda:0" and so on."""

    @classmethod
    def read(cls, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Topology:
        """That of this host. Blocks for some reads of files below ``root``.

        GPUs are numbered in the order of their PCI addresses, as CUDA does with
        ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` and, where all are alike, without; those that
        ``CUDA_VISIBLE_DEVICES`` leaves out have no number.
        """
        nodes = {}
        for folder in _by_number(root / "sys/devices/system/node", "node[0-9]*"):
            distances = _text(folder / "distance").split()
            nodes[int(folder.name.removeprefix("node"))] = tuple(map(int, distances))
        devices = {}
        for folder in _by_number(root / "sys/class/infiniband", "*"):
            parent = _text(folder / "parent")  # the network device under one of software
            hardware = root / "sys/class/net" / parent if parent else folder
            devices[folder.name] = _place(hardware / "device")
        found = {}
        for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
            is_gpu = _text(folder / "class").startswith(_DISPLAY)
            if is_gpu and _text(folder / "vendor") == _NVIDIA:
                found[folder.name] = _place(folder)
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        order = list(found) if visible is None else list(_visible(visible, list(found), root))
        gpus = {f"cuda:{index}": found[address] for index, address in enumerate(order)}
        return cls(nodes, devices, gpus)

    @property
    def locations(self) -> list[str]:
        """All there are, but for "*"."""
        return [*(f"cpu:{node}" for node in self.nodes), *self.gpus]

    def nearest(self, location: str, names: Sequence[str]) -> list[str]:
        """Those of the devices ``names`` that are next to ``location``, all that are equally near.

        None for "*", and when no device is one of this host's RDMA devices: soft devices are
        everywhere. A port is called after its device: "mlx5_0:2" is on mlx5_0. ValueError for
        what is no location or is not on this host.
        """
        if not isinstance(location, str) or not _LOCATION.fullmatch(location):
            raise ValueError(
                f'location {location!r}: accepted are "cpu:N" for NUMA node N, "cuda:N" for GPU N '
                f'and "{ANYWHERE}"'
            )
        known = [name for name in names if _device_of(name) in self.devices]
        if location == ANYWHERE or not known:
            return []
        if location not in self.locations:
            raise ValueError(
                f"location {location!r} is not on this host, which has "
                f"{', '.join(self.locations) or 'none that is known'}"
            )
        ranks = {name: self._rank(location, _device_of(name)) for name in known}
        least = min(ranks.values())
        return [name for name in known if ranks[name] == least]

    def distance(self, location: str, device: str) -> str:
        """In one word, how far ``device`` is from ``location``; both exist."""
        return _DISTANCES[self._rank(location, device)[0]]

    def _rank(self, location: str, device: str) -> tuple[int, int]:
        """Smaller is nearer: the index in _DISTANCES, and what tells devices of one kind apart."""
        there = self.devices[device]
        if location in self.gpus:
            here = self.gpus[location]
            pairs = zip(here.path, there.path, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if shared > 1:
                steps = len(here.path) + len(there.path) - 2 * shared
                return (0 if steps <= _ONE_SWITCH else 1), steps
            if shared == 1:
                return 2, 0
            node = here.node
        else:
            node = int(location.partition(":")[2])
        if len(self.nodes) <= 1 or node == there.node >= 0:
            return 3, 0
        return 4, self._node_distance(node, there.node)

    def _node_distance(self, one: int, other: int) -> int:
        order = list(self.nodes)
        far = 255  # SLIT's word for unreachable
        if one not in self.nodes or other not in self.nodes:
            return far
        distances = self.nodes[one]
        index = order.index(other)
        return distances[index] if index < len(distances) else far

    def to_json(self) -> dict[str, Any]:
        """What ``aioflagcx topology --json`` prints."""
        names = list(self.devices)

        def places(found: Mapping[str, Place]) -> list[dict[str, Any]]:
            return [
                {"name": name, "pci": place.address, "node": place.node}
                for name, place in found.items()
            ]

        return {
            "nodes": list(self.nodes),
            "devices": places(self.devices),
            "gpus": places(self.gpus),
            "distances": {
                location: {name: self.distance(location, name) for name in names}
                for location in self.locations
            },
            "nearest": {location: self.nearest(location, names) for location in self.locations},
        }

    def to_table(self) -> str:
        """What ``aioflagcx topology`` prints: a row for each location, a column for each device."""
        if not self.devices:
            return "no RDMA devices on this host"
        names = list(self.devices)
        rows = [["", "node", *names, "nearest"]]
        for location in self.locations:
            place = self.gpus.get(location)
            node = location.partition(":")[2] if place is None else str(place.node)
            near = ",".join(self.nearest(location, names))
            rows.append([location, node, *(self.distance(location, name) for name in names), near])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def _device_of(name: str) -> str:
    return name.partition(":")[0]


def _by_number(folder: Path, pattern: str) -> list[Path]:
    """By name, with numbers in their order: mlx5_10 comes after mlx5_9."""

    def key(path: Path) -> list[tuple[int, str]]:
        return [
            (int(part), "") if part.isdigit() else (-1, part)
            for part in re.split(r"([0-9]+)", path.name)
        ]

    return sorted(folder.glob(pattern), key=key)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _place(device: Path) -> Place:
    """Of a device's folder in sysfs, which is a link to its place in the tree of devices."""
    path: tuple[str, ...] = ()
    with contextlib.suppress(OSError):
        parts = device.resolve(strict=True).parts
        path = tuple(p for p in parts if _HOST_BRIDGE.fullmatch(p) or _PCI_ADDRESS.fullmatch(p))
    node = _text(device / "numa_node")
    return Place(path, int(node) if node else -1)


def _visible(setting: str, addresses: Sequence[str], root: Path) -> Iterator[str]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, in its order, up to the first that is none."""
    for name in filter(None, (part.strip() for part in setting.split(","))):
        if name.isdigit():
            matches = [addresses[int(name)]] if int(name) < len(addresses) else []
        else:  # a UUID, or the beginning of one
            matches = [a for a in addresses if f" {name}" in _gpu_information(root, a)]
        if len(matches) != 1:
            return
        yield matches[0]


def _gpu_information(root: Path, address: str) -> str:
    return _text(root / "proc/driver/nvidia/gpus" / address / "information").replace("\t", " ")
