from __future__ import annotations

from pathlib import Path

import pytest

from aioflagcx.free_memory import HugePages, available, huge_pages

GiB = 1 << 30

MEMINFO = """\
MemTotal:       65536000 kB
MemFree:         1000000 kB
MemAvailable:   33554432 kB
SwapFree:              0 kB
HugePages_Total:      64
HugePages_Free:       16
HugePages_Rsvd:        6
Hugepagesize:       2048 kB
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", MEMINFO)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group(folder: Path, limit: str, usage: int, **stat: int) -> None:
    """A control group of version 2."""
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{usage}\n")
    write(folder / "memory.stat", "".join(f"{name} {value}\n" for name, value in stat.items()))


def test_without_control_groups_it_is_what_the_host_has(root: Path) -> None:
    assert available(root) == 32 * GiB
    write(root / "proc/meminfo", MEMINFO.replace("SwapFree:              0", "SwapFree: 1048576"))
    assert available(root) == 33 * GiB


def test_the_tightest_group_above_this_process_limits(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/one\n")
    groups = root / "sys/fs/cgroup"
    group(groups / "pods", "max", 40 * GiB)
    group(groups / "pods/one", str(16 * GiB), 4 * GiB)
    group(groups / "pods/two", str(1 * GiB), 1 * GiB)  # somebody else's
    assert available(root) == 12 * GiB
    group(groups / "pods", str(30 * GiB), 20 * GiB)
    assert available(root) == 10 * GiB


def test_the_page_cache_of_a_group_can_be_reclaimed(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    stat = {"anon": GiB, "active_file": 2 * GiB, "inactive_file": 3 * GiB, "shmem": GiB}
    group(root / "sys/fs/cgroup", str(8 * GiB), 7 * GiB, **stat)
    assert available(root) == 6 * GiB


def test_groups_of_version_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "3:cpu,cpuacct:/\n2:memory,hugetlb:/docker/4711\n0::/\n")
    # As a container sees it: its own group is the mount, and the path is the host's.
    folder = root / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", str(4 * GiB))
    write(folder / "memory.usage_in_bytes", str(3 * GiB))
    write(folder / "memory.stat", f"active_file 1\ntotal_active_file {GiB}\ninactive_file 0\n")
    assert available(root) == 2 * GiB
    write(folder / "memory.limit_in_bytes", str(2**63 - 4096))  # none
    assert available(root) == 32 * GiB


def test_over_the_limit_nothing_is_left(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    group(root / "sys/fs/cgroup", str(GiB), 2 * GiB)
    assert available(root) == 0


def test_what_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    assert available(tmp_path) == 2**63
    write(tmp_path / "proc/self/cgroup", "0::/../elsewhere\n1:memory:/\n")
    assert available(tmp_path) == 2**63


def test_huge_pages(root: Path, tmp_path: Path) -> None:
    assert huge_pages(root) == HugePages(size=2 << 20, total=64, free=10)
    assert huge_pages(tmp_path / "nothing") == HugePages(0, 0, 0)


def test_this_host() -> None:
    with open("/proc/meminfo") as meminfo:
        total = int(next(meminfo).split()[1]) << 10
    assert 0 < available() <= 2 * total
