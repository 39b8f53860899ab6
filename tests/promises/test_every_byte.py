"""Promise 3: success means that every byte is in the peer's memory, and no other was touched."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import GiB, KiB, MiB, misplaced_words, number_words, random_bytes

from aioflagcx.errors import LocalAddressError, RemoteAddressError

SIZES = (
    1, 2, 3, 7, 8, 63, 64, 65, 4_095, 4_096, 4_097, 65_535, 65_536, 65_537, 131_073,
    MiB - 1, MiB, MiB + 1, 32 * MiB + 13,
)  # fmt: skip
ALIGNMENTS = ((0, 0), (1, 0), (0, 1), (3, 5), (63, 4_095))
UNTOUCHED = 0xEE


async def test_writes_and_reads_of_any_size_and_alignment_move_exactly_their_bytes(
    lab: Lab,
) -> None:
    engine, peer = await lab.engine(), await lab.peer(40 * MiB)
    ours = random_bytes(40 * MiB, 1).copy()
    await engine.register(ours)
    session = await lab.connect(engine, peer)
    for size in SIZES:
        for local_shift, remote_shift in ALIGNMENTS if size < 2 * MiB else ALIGNMENTS[3:]:
            local = slice(4_096 + local_shift, 4_096 + local_shift + size)
            remote = slice(4_096 + remote_shift, 4_096 + remote_shift + size)
            local_address = ours.ctypes.data + local.start
            around = 4_096 + remote.stop
            what = f"{size} bytes from +{local_shift} to +{remote_shift}"

            peer.memory[:around] = UNTOUCHED
            moved = await engine.write(session, local_address, peer.at(remote.start), size)
            assert moved == size, what
            assert np.array_equal(peer.memory[remote], ours[local]), what
            assert (peer.memory[: remote.start] == UNTOUCHED).all(), what
            assert (peer.memory[remote.stop : around] == UNTOUCHED).all(), what

            peer.memory[remote] ^= 0xFF
            before = ours.copy() if size < 2 * MiB else None
            moved = await engine.read(session, local_address, peer.at(remote.start), size)
            assert moved == size, what
            assert np.array_equal(ours[local], peer.memory[remote]), what
            if before is not None:
                before[local] ^= 0xFF
                assert np.array_equal(ours, before), what


@pytest.mark.timeout(300)
async def test_a_gibibyte_arrives_whole_and_comes_back_whole(lab: Lab) -> None:
    engine, peer = await lab.engine(), await lab.peer(GiB)
    ours = np.empty(GiB, np.uint8)
    number_words(ours)
    region = await engine.register(ours)
    session = await lab.connect(engine, peer)
    theirs = session.regions["memory"]

    assert await engine.write(session, region, theirs, region, timeout=120) == GiB
    assert misplaced_words(peer.memory) == 0

    ours[:] = 0
    assert await engine.read(session, region, theirs, region, timeout=120) == GiB
    assert misplaced_words(ours) == 0


async def test_a_region_can_be_used_up_to_its_edges_and_not_a_byte_further(lab: Lab) -> None:
    size = 4_099
    last = size - 1
    engine, peer = await lab.engine(), await lab.peer(3 * size, register=False)
    await peer.run(Host.register, "middle", size, size)
    ours = random_bytes(size, 2).copy()
    region = await engine.register(ours)
    wide = await engine.register(np.zeros(2 * size, np.uint8))
    session = await lab.connect(engine, peer)
    middle = session.regions["middle"]

    peer.memory[:] = UNTOUCHED
    expected = peer.memory.copy()
    await engine.write(session, region.at(0), middle.at(0), 1)
    await engine.write(session, region.at(last), middle.at(last), 1)
    expected[size], expected[2 * size - 1] = ours[0], ours[last]
    assert np.array_equal(peer.memory, expected)
    await engine.write(session, region, middle, region)
    expected[size : 2 * size] = ours
    assert np.array_equal(peer.memory, expected)

    outside = ((-1, 1), (-1, 2), (size, 1), (last, 2), (0, size + 1), (-1, size + 2))
    for offset, length in outside:
        for transfer in (engine.write, engine.read):
            # The first piece is fine; it must not move either.
            with pytest.raises(RemoteAddressError) as remote:
                await transfer(session, wide.addr, middle.addr + offset, length)
            assert (remote.value.index, remote.value.length) == (0, length)
            assert remote.value.address == middle.addr + offset
            with pytest.raises(RemoteAddressError) as remote:
                await transfer(
                    session, [wide.addr] * 2, [middle.addr, middle.addr + offset], [1, length]
                )
            assert remote.value.index == 1
            with pytest.raises(LocalAddressError) as local:
                await transfer(
                    session, [region.addr, region.addr + offset], [middle.addr] * 2, [1, length]
                )
            assert (local.value.index, local.value.length) == (1, length)
            assert local.value.address == region.addr + offset
    assert np.array_equal(peer.memory, expected)
    assert (wide.view() == bytes(2 * size)) and np.array_equal(ours, region.view())


async def test_reads_and_writes_at_the_same_time_never_mix_up_their_bytes(lab: Lab) -> None:
    """Many tasks, each with a part of both memories of its own and a model of both."""
    part, tasks, rounds = 256 * KiB, 24, 30
    engine, peer = await lab.engine(), await lab.peer(part * tasks)
    ours = random_bytes(part * tasks, 3).copy()
    await engine.register(ours)
    session = await lab.connect(engine, peer)

    async def work(index: int) -> None:
        rng = np.random.default_rng(index)
        start = index * part
        local, remote = ours[start : start + part], peer.memory[start : start + part]
        for round_ in range(rounds):
            # Pieces of any length, in any order, that do not overlap on either side.
            cuts = np.unique(rng.integers(0, part + 1, 2 * int(rng.integers(1, 40))))
            offsets, lens = cuts[:-1], np.diff(cuts)
            order = rng.permutation(len(lens))
            targets = np.zeros(len(lens), np.int64)
            targets[order] = np.concatenate(([0], np.cumsum(lens[order])[:-1]))
            expected_local, expected_remote = local.copy(), remote.copy()
            if rng.integers(2):
                transfer = engine.write
                for offset, target, length in zip(offsets, targets, lens, strict=True):
                    expected_remote[target : target + length] = local[offset : offset + length]
            else:
                transfer = engine.read
                for offset, target, length in zip(offsets, targets, lens, strict=True):
                    expected_local[offset : offset + length] = remote[target : target + length]
            moved = await transfer(
                session, ours.ctypes.data + start + offsets, peer.at(start) + targets, lens
            )
            assert moved == lens.sum()
            assert np.array_equal(local, expected_local), (index, round_)
            assert np.array_equal(remote, expected_remote), (index, round_)
            local ^= np.uint8(rng.integers(1, 256))

    await asyncio.gather(*(work(index) for index in range(tasks)))


async def test_a_thousand_awaits_at_once_each_get_their_own_bytes(lab: Lab) -> None:
    count, size = 1_000, 3_001
    engine, peer = await lab.engine(), await lab.peer(count * size)
    ours = random_bytes(count * size, 4).copy()
    await engine.register(ours)
    session = await lab.connect(engine, peer)
    base, places = ours.ctypes.data, np.random.default_rng(4).permutation(count)

    moved = await asyncio.gather(
        *(
            engine.write(session, base + i * size, peer.at(int(place) * size), size)
            for i, place in enumerate(places)
        )
    )
    assert moved == [size] * count
    assert np.array_equal(peer.memory.reshape(count, size)[places], ours.reshape(count, size))

    expected = ours.copy()
    ours[:] = 0
    await asyncio.gather(
        *(
            engine.read(session, base + i * size, peer.at(int(place) * size), size)
            for i, place in enumerate(places)
        )
    )
    assert np.array_equal(ours, expected)
    assert engine.stats().transfers_pending == 0


@pytest.mark.parametrize("block", [4 * KiB, 32 * KiB - 5])
async def test_8192_scattered_pieces_each_land_in_their_place(lab: Lab, block: int) -> None:
    count = 8_192
    engine, peer = await lab.engine(), await lab.peer(count * block)
    ours = random_bytes(count * block, 5).copy()
    await engine.register(ours)
    session = await lab.connect(engine, peer)
    rng = np.random.default_rng(5)
    from_blocks, to_blocks = rng.permutation(count), rng.permutation(count)

    moved = await engine.write(
        session, ours.ctypes.data + from_blocks * block, peer.at(0) + to_blocks * block, block
    )
    assert moved == count * block
    theirs, mine = peer.memory.reshape(count, block), ours.reshape(count, block)
    assert np.array_equal(theirs[to_blocks], mine[from_blocks])

    back = np.zeros(count * block, np.uint8)
    region = await engine.register(back)
    await engine.read(
        session, region.addr + from_blocks * block, peer.at(0) + to_blocks * block, block
    )
    assert np.array_equal(back, ours)
