"""What docs/softroce.md says of the kernel's Soft-RoCE."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from softroce.devices import Device, holding_objects, run

PROGRAM = Path(__file__).parents[2] / "build/softroce/rxe"
"""Made of rxe.cpp by make."""


def facts() -> list[str]:
    """The names of the program's tests."""
    suite, names = "", []
    for line in run(str(PROGRAM), "--gtest_list_tests").splitlines():
        if re.fullmatch(r"\w+\.", line):
            suite = line
        elif line.startswith("  "):
            names.append(suite + line.strip())
    return names


@pytest.mark.parametrize("fact", facts())
def test_of_libibverbs(fact: str) -> None:
    done = subprocess.run([PROGRAM, f"--gtest_filter={fact}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[  PASSED  ] 1 test." in done.stdout


def test_deleting_a_device_waits_for_its_users() -> None:
    device = Device(9)
    run("ip", "link", "add", device.netdev, "type", "veth", "peer", "name", device.peer.netdev)
    try:
        for netdev in (device.netdev, device.peer.netdev):
            run("ip", "link", "set", netdev, "up")
        run("ip", "address", "add", f"{device.address}/24", "dev", device.netdev)
        run("rdma", "link", "add", device.name, "type", "rxe", "netdev", device.netdev)
        with holding_objects(device):
            deletion = subprocess.Popen(["rdma", "link", "delete", device.name])
            with pytest.raises(subprocess.TimeoutExpired):
                deletion.wait(timeout=2)
        assert deletion.wait(timeout=20) == 0
    finally:
        run("ip", "link", "delete", device.netdev)
