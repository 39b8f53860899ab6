"""Each fault happens, and is over after its block."""

from __future__ import annotations

from pathlib import Path

import pytest
from perftest import bandwidth
from softroce.devices import Device, until
from softroce.faults import flap, link_down, netem, no_address

KiB = 1 << 10


def write_bandwidth(device: Device, count: int = 100, timeout: float = 100.0) -> float:
    """MiB/s from `device` to the cable's other end."""
    return bandwidth("ib_write_bw", device.name, device.peer.name, 64 * KiB, count, timeout)


def test_packets_are_delayed(near: Device) -> None:
    with netem(near, "delay", "100ms"):
        delayed = write_bandwidth(near, count=5)
    assert delayed <= 5 * 64 / 1024 / 0.1
    assert write_bandwidth(near) > delayed


def test_lost_packets_are_sent_again(near: Device) -> None:
    with netem(near, "loss", "1%"):
        assert write_bandwidth(near) > 0


def test_nothing_passes_when_all_packets_are_lost(near: Device) -> None:
    # perftest asks for seven retries, which rxe takes for any number.
    with netem(near, "loss", "100%"), pytest.raises(RuntimeError, match="did not end"):
        write_bandwidth(near, timeout=5.0)
    assert write_bandwidth(near) > 0


def test_a_link_that_is_down_takes_both_ports_down(near: Device, far: Device) -> None:
    with link_down(near):
        assert until(lambda: near.state == far.state == "DOWN")
    assert until(lambda: near.state == far.state == "ACTIVE")
    for device in (near, far):
        assert write_bandwidth(device) > 0


def test_a_link_flaps_as_often_as_asked(near: Device) -> None:
    changes = Path(f"/sys/class/net/{near.netdev}/carrier_changes")
    before = int(changes.read_text())
    flap(near, times=3, seconds=0.05)
    assert int(changes.read_text()) == before + 6
    assert until(lambda: near.state == "ACTIVE")
    assert write_bandwidth(near) > 0


def test_a_lost_address_takes_its_gid_along(near: Device, far: Device) -> None:
    def has_gid() -> bool:
        return near.address in {str(gid.address) for gid in near.gids()}

    with no_address(near):
        assert until(lambda: not has_gid())
    assert until(has_gid)
    for device in (near, far):
        assert write_bandwidth(device) > 0


def test_a_fault_that_cannot_be_is_an_error(near: Device) -> None:
    with pytest.raises(AssertionError, match="tc qdisc replace"), netem(near, "no-such-fault"):
        pass
