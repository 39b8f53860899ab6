"""What transfers are told: pieces in every form, and those that cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.fixtures import Pairs
from conformance.pair import MiB, Pair

from aioflagcx.errors import LocalAddressError, RemoteAddressError


async def test_pieces_in_every_form(pair: Pair) -> None:
    a, b = pair.local.addr, pair.remote.addr
    ours, session = pair.ours, pair.session
    assert await ours.write(session, a, b, 100) == 100
    assert await ours.write(session, [a, a + 100], [b + 500, b], [100, 50]) == 150
    assert await ours.write(session, (a, a + 1), np.array([b, b + 1]), 1) == 2
    index = np.arange(8)
    assert (
        await ours.write(session, a + index * 64, b + index[::-1].astype(np.uint64) * 64, 64) == 512
    )
    assert (pair.dst[:512].reshape(8, 64)[::-1] == pair.src[:512].reshape(8, 64)).all()
    assert await ours.write(session, pair.local, pair.remote, pair.remote) == pair.local.size
    assert (pair.src == pair.dst).all()
    assert await ours.write(session.id, pair.local.at(5), pair.remote.at(9), 3) == 3


async def test_reads(pair: Pair) -> None:
    pair.dst[:] = 7
    assert await pair.ours.read(pair.session, pair.local, pair.remote, 100) == 100
    assert (pair.src[:100] == 7).all()
    assert (pair.src[100:200] != 7).any()


async def test_nothing_to_move_is_a_success(pair: Pair) -> None:
    nowhere = "127.0.0.1:1"  # nobody is asked
    assert await pair.ours.write(nowhere, [], [], []) == 0
    assert await pair.ours.write(nowhere, [], [], 4096) == 0
    assert await pair.ours.write(nowhere, [1, 2], [3, 4], 0) == 0
    transfer = pair.ours.submit_read(nowhere, [], [], [])
    assert await transfer == transfer.bytes_total == 0
    assert transfer.status == "done"
    assert transfer.remote_quiet


async def test_zero_lengths_among_others_are_skipped(pair: Pair) -> None:
    a, b = pair.local.addr, pair.remote.addr
    assert await pair.ours.write(pair.session, [a, 1, a], [b, 1, b + 64], [8, 0, 8]) == 16


async def test_index_arrays_are_copied_before_the_call_returns(pair: Pair) -> None:
    src = np.array([pair.local.addr])
    dst = np.array([pair.remote.addr])
    lens = np.array([pair.local.size])
    transfer = pair.ours.submit_write(pair.session, src, dst, lens)
    src[0] = dst[0] = lens[0] = 1
    assert await transfer == pair.local.size


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("src", 1, -1),
        ("dst", 2, -5),
        ("lens", 0, -1),
        ("src", 3, 2**63 + 1),
        ("dst", 2, 2**63 + 1),
        ("lens", 1, 2**63 + 1),
    ],
)
async def test_values_that_cannot_be_are_named_by_index(
    pair: Pair, name: str, index: int, value: int, wide: bool
) -> None:
    pieces = {"src": [pair.local.addr] * 4, "dst": [pair.remote.addr] * 4, "lens": [8] * 4}
    pieces[name][index] = value
    arrays: list[Any] = list(pieces.values())
    if wide:  # checked natively
        arrays = [np.array(v, np.int64 if min(v) < 0 else np.uint64) for v in arrays]
    with pytest.raises(ValueError, match=rf"\b{index}\b"):
        pair.ours.submit_write(pair.session, *arrays)
    assert not pair.ours.stats().transfers_pending


async def test_the_largest_values_are_just_a_miss(pair: Pair) -> None:
    with pytest.raises(LocalAddressError):
        pair.ours.submit_write(pair.session, 2**63, pair.remote, 2**63)
    with pytest.raises(RemoteAddressError):
        await pair.ours.write(pair.session, pair.local, 2**63, 1)


@pytest.mark.parametrize("bad", [1.5, "1", None, [1.5], np.zeros((2, 2), np.int64)])
async def test_what_is_no_integer(pair: Pair, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        pair.ours.submit_write(pair.session, bad, pair.remote, 1)


async def test_local_misses_are_raised_at_once_with_the_piece(pair: Pair) -> None:
    end = pair.local.addr + pair.local.size
    for address, length in ((end, 1), (end - 1, 2), (pair.local.addr - 1, 1), (8, 8)):
        with pytest.raises(LocalAddressError) as caught:
            pair.ours.submit_write(
                pair.session,
                [pair.local.addr, address],
                [pair.remote.addr, pair.remote.addr],
                [1, length],
            )
        error = caught.value
        assert (error.index, error.address, error.length) == (1, address, length)
    assert not pair.dst.any()


async def test_remote_misses_come_by_awaiting_before_a_byte_moves(pair: Pair) -> None:
    end = pair.remote.addr + pair.remote.size
    transfer = pair.ours.submit_write(
        pair.session, [pair.local.addr] * 2, [pair.remote.addr, end - 1], [512, 2]
    )
    with pytest.raises(RemoteAddressError) as caught:
        await transfer
    error = caught.value
    assert (error.index, error.address, error.length) == (1, end - 1, 2)
    assert error.peer == pair.session.id
    assert transfer.status == "failed"
    assert transfer.remote_quiet
    assert not pair.dst.any()


async def test_access_decides(pairs: Pairs) -> None:
    pair = await pairs()
    readable = await pair.theirs.register(bytes(4096), access="read")
    writable = await pair.theirs.register(bytearray(4096), access="write")
    ours, session = pair.ours, pair.session
    assert await ours.read(session, pair.local, readable, 64) == 64
    assert await ours.write(session, pair.local, writable, 64) == 64
    with pytest.raises(RemoteAddressError):
        await ours.write(session, pair.local, readable, 64)
    with pytest.raises(RemoteAddressError):
        await ours.read(session, pair.local, writable, 64)
    read_only = await ours.register(bytes(64), access="read")
    assert await ours.write(session, read_only, writable, 64) == 64
    with pytest.raises(LocalAddressError):
        ours.submit_read(session, read_only, readable, 64)


@pytest.mark.parametrize("bad", [None, 5, b"127.0.0.1:1", object()])
async def test_a_session_of_the_wrong_type(pair: Pair, bad: Any) -> None:
    with pytest.raises(TypeError):
        pair.ours.submit_write(bad, pair.local, pair.remote, 1)
    with pytest.raises(TypeError):
        await pair.ours.connect(bad)


@pytest.mark.parametrize("bad", ["", "host", "host:", "host:0", "host:99999", "::1:5", "a b:1"])
async def test_text_that_is_no_session_id(pair: Pair, bad: str) -> None:
    with pytest.raises(ValueError, match="address"):
        pair.ours.submit_write(bad, pair.local, pair.remote, 1)
    with pytest.raises(ValueError, match="address"):
        await pair.ours.connect(bad)


async def test_a_session_of_another_engine_is_refused(pair: Pair) -> None:
    region = await pair.theirs.register(bytearray(8))
    with pytest.raises(ValueError, match="another engine"):
        pair.theirs.submit_write(pair.session, region, pair.remote, 8)


async def test_8192_pieces_cost_the_caller_less_than_a_millisecond(
    pairs: Pairs, devices: Devices, record_property: Callable[[str, object], None]
) -> None:
    pair = await pairs(size=32 * MiB)
    rng = np.random.default_rng(7)
    src = pair.local.addr + rng.permutation(8192).astype(np.int64) * 4096
    dst = pair.remote.addr + rng.permutation(8192).astype(np.int64) * 4096
    loop = asyncio.get_running_loop()
    costs = []
    for _ in range(20):
        before = loop.time()
        transfer = pair.ours.submit_write(pair.session, src, dst, 4096)
        costs.append(loop.time() - before)
        assert await transfer == 32 * MiB
    record_property("caller_cost_us", sorted(costs)[10] * 1e6)
    assert sorted(costs)[2] < 0.001 * devices.pace  # the best tell what it costs on an idle machine


@pytest.mark.parametrize("op", ["write", "read"])
async def test_large_transfers_arrive_whole_in_one_piece_and_in_many(
    pairs: Pairs, devices: Devices, op: str
) -> None:
    pair = await pairs(size=devices.largest)
    source, sink = (pair.src, pair.dst) if op == "write" else (pair.dst, pair.src)
    move = pair.ours.write if op == "write" else pair.ours.read
    source[:] = np.random.default_rng(1).integers(0, 256, devices.largest, np.uint8)
    sink[:] = 0
    assert await move(pair.session, pair.local, pair.remote, pair.local) == devices.largest
    assert np.array_equal(source, sink)
    # Blocks of 12 KiB and a bit, of which neither side has neighbours in the same order.
    size, count = 12_345, devices.largest // 12_345
    rng = np.random.default_rng(2)
    here, there = rng.permutation(count), rng.permutation(count)
    sink[:] = 0
    moved = await move(
        pair.session, pair.local.addr + here * size, pair.remote.addr + there * size, size
    )
    assert moved == count * size
    blocks = [memory[: count * size].reshape(count, size) for memory in (source, sink)]
    from_, to = (here, there) if op == "write" else (there, here)
    assert np.array_equal(blocks[0][from_], blocks[1][to])
    assert not sink[count * size :].any()
