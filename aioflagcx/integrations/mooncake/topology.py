"""This host's topology in the words of Mooncake's."""

from __future__ import annotations

from collections.abc import Collection

from ...topology import Topology

__all__ = ["local_topology"]


def local_topology(topology: Topology, names: Collection[str]) -> dict[str, list[list[str]]]:
    """By location, "cpu:N" or "cuda:N": [the nearest devices, all others].

    ``names``: the devices to look at, by name; none means all.
    """
    devices = [name for name in topology.devices if not names or name in names]
    found = {}
    for location in topology.locations or ["cpu:0"]:
        near = topology.nearest(location, devices)
        found[location] = [near, [name for name in devices if name not in near]]
    return found
