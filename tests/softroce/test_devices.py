"""What the other tests here take for granted: working devices, and counts that show leaks."""

from __future__ import annotations

import contextlib

import pytest
from perftest import bandwidth
from softroce.devices import Device, holders, holding_objects, no_leaks, object_counts, until

KiB = 1 << 10


def test_both_ends_are_active_and_have_a_rocev2_gid_of_their_address(
    near: Device, far: Device
) -> None:
    for device in (near, far):
        assert device.state == "ACTIVE"
        assert (device.address, "RoCE v2") in [
            (str(gid.address), gid.type) for gid in device.gids()
        ]


@pytest.mark.parametrize("program", ["ib_write_bw", "ib_read_bw"])
def test_perftest_moves_data_in_both_directions(program: str, near: Device, far: Device) -> None:
    for device in (near, far):
        assert bandwidth(program, device.name, device.peer.name, 64 * KiB, 100) > 0


def test_perftest_that_fails_is_an_error(near: Device, far: Device) -> None:
    with pytest.raises(RuntimeError, match="no device rxe9"):
        bandwidth("ib_write_bw", near.name, "rxe9", 64 * KiB, 100)
    with pytest.raises(RuntimeError, match="does not listen"):
        bandwidth("false", near.name, far.name, 64 * KiB, 100)
    with pytest.raises(RuntimeError, match="Iteration num should be"):
        bandwidth("ib_write_bw", near.name, far.name, 64 * KiB, count=1)


def test_objects_are_counted_and_their_holders_named(near: Device) -> None:
    before = object_counts()
    with holding_objects(near) as pid:
        more = object_counts() - before
        assert set(more) == {(near.name, kind) for kind in ("ctx", "pd", "cq", "qp", "mr")}
        assert any(f"pid {pid} " in f"{line} " for line in holders("qp"))
    assert until(lambda: object_counts() == before)


def test_what_is_left_behind_is_an_error_that_names_the_holder(near: Device) -> None:
    message = r"left behind:.*1 qp of rxe0"
    with contextlib.ExitStack() as later:
        with pytest.raises(AssertionError, match=message) as caught, no_leaks(limit=0.0):
            pid = later.enter_context(holding_objects(near))
        assert f"pid {pid}" in str(caught.value)
