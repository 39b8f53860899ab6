"""How much memory this process can still get, from proc(5) and the control groups (cgroups(7)).

Asking the kernel for more does not fail: it kills a process. So whoever is about to ask for much
looks here first. Other processes ask too, so the answer holds for a moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["HugePages", "available", "huge_pages"]


class HugePages(NamedTuple):
    """The system's pool of huge pages of the default size."""

    size: int  # bytes of one; 0 when the kernel has none
    total: int
    free: int  # and not reserved


def available(root: Path = Path("/")) -> int:
    """Bytes: the host's free and reclaimable memory and swap, within the limits of our groups.

    Blocks for some reads of files below ``root``. What cannot be read limits nothing.
    """
    host = _fields(root / "proc/meminfo")
    swap = host.get("SwapFree", 0) << 10
    left = [(host["MemAvailable"] << 10) + swap] if "MemAvailable" in host else []
    for limit, usage, stat in _groups(root):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
            reclaimable = _fields(stat)
            cached = sum(
                # Version 1 has the sum over a group's children in fields of their own.
                reclaimable.get(f"total_{name}", reclaimable.get(name, 0))
                for name in ("active_file", "inactive_file")
            )
            left.append(int(limit.read_text()) - int(usage.read_text()) + cached + swap)
    return max(0, min(left, default=2**63))


def huge_pages(root: Path = Path("/")) -> HugePages:
    """Blocks for reading one file below ``root``."""
    host = _fields(root / "proc/meminfo")
    return HugePages(
        size=host.get("Hugepagesize", 0) << 10,
        total=host.get("HugePages_Total", 0),
        free=host.get("HugePages_Free", 0) - host.get("HugePages_Rsvd", 0),
    )


def _groups(root: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Files with the limit, the usage and the statistics of our group and each above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount, limit, usage = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):  # "." is the last of them
            # In a container the path may be the host's, of which only the mount itself is here.
            folder = root / mount / place
            yield folder / limit, folder / usage, folder / "memory.stat"


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of lines "name number" or "name: number kB"."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
