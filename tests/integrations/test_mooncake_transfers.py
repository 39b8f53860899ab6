"""Mooncake's calls move bytes between two processes, and answer 0 only when they have."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.sync.threads_pair import together
from integrations.processes import MiB, Target, until

from aioflagcx.integrations.mooncake import TransferEngine, TransferNotify, TransferOpcode
from aioflagcx.sync import Transfer

Targets = Callable[..., Target]

SIZE = 8 * MiB + 12_345


class Here:
    """An engine and registered memory with random content."""

    def __init__(self, engine: TransferEngine, size: int = SIZE) -> None:
        self.engine = engine
        self.memory = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        self.address: int = self.memory.ctypes.data
        assert engine.register_memory(self.address, size) == 0, engine.last_error()


@pytest.fixture
def here(path: str, engine: TransferEngine) -> Here:
    return Here(engine)


def test_writes_and_reads_move_every_byte(here: Here, targets: Targets) -> None:
    target = targets(SIZE)
    engine = here.engine
    assert engine.transfer_sync_write(target.session, here.address, target.address, SIZE) == 0
    assert np.array_equal(target.memory, here.memory)
    target.memory[:] = target.memory[::-1].copy()
    assert engine.transfer_sync_read(target.session, here.address, target.address, SIZE) == 0
    assert np.array_equal(target.memory, here.memory)


def test_it_does_not_matter_who_was_there_first(
    path: str, engines: Callable[[], TransferEngine], targets: Targets
) -> None:
    early = Here(engines(), 4096)
    target = targets(4096)
    late = Here(engines(), 4096)
    for here in (early, late):
        target.memory[:] = 0
        code = here.engine.transfer_sync_write(target.session, here.address, target.address, 4096)
        assert code == 0, here.engine.last_error()
        assert np.array_equal(target.memory, here.memory)


@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["lists", "tuples", "arrays"])
def test_a_batch_moves_scattered_pieces_either_way(
    here: Here, targets: Targets, kind: Callable[[list[int]], Any]
) -> None:
    target = targets(SIZE)
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 9000, 500)
    ours = np.cumsum(lengths) - lengths
    order = rng.permutation(500)
    theirs = np.empty(500, np.int64)
    theirs[order] = np.cumsum(lengths[order]) - lengths[order]
    batch = (
        kind((ours + here.address).tolist()),
        kind((theirs + target.address).tolist()),
        kind(lengths.tolist()),
    )
    expected = np.zeros(SIZE, np.uint8)
    for our, their, length in zip(ours, theirs, lengths, strict=True):
        expected[their : their + length] = here.memory[our : our + length]
    engine = here.engine
    assert engine.batch_transfer_sync_write(target.session, *batch) == 0, engine.last_error()
    assert np.array_equal(target.memory, expected)

    original = here.memory.copy()
    for read in (
        lambda: engine.batch_transfer_sync_read(target.session, *batch),
        lambda: engine.batch_transfer_sync(target.session, *batch, TransferOpcode.Read),
    ):
        here.memory[: lengths.sum()] = 0
        assert read() == 0, engine.last_error()
        assert np.array_equal(here.memory, original)


def test_opcodes_are_enum_members_or_numbers_by_both_spellings(
    here: Here, targets: Targets
) -> None:
    target = targets(4096)
    engine, here_, there = here.engine, here.address, target.address
    for opcode in (TransferOpcode.Write, TransferOpcode.WRITE, TransferEngine.TransferOpcode(1), 1):
        target.memory[:] = 0
        assert engine.transfer_sync(target.session, here_, there, 4096, opcode) == 0
        assert np.array_equal(target.memory, here.memory[:4096])
    for opcode in (TransferOpcode.Read, TransferOpcode.READ, 0):
        target.memory[:] ^= 0xFF
        assert engine.transfer_sync(target.session, here_, there, 4096, opcode) == 0
        assert np.array_equal(target.memory, here.memory[:4096])


def test_a_notification_comes_after_the_data_it_was_sent_with(here: Here, targets: Targets) -> None:
    target = targets(SIZE)
    for round_ in range(5):
        here.memory[:] = np.random.default_rng(round_).integers(0, 256, SIZE, np.uint8)
        notify = TransferNotify("blocks", f"of request {round_} \u2713")
        code = here.engine.transfer_sync(
            target.session, here.address, target.address, SIZE, TransferOpcode.Write, notify
        )
        assert code == 0, here.engine.last_error()
        digest = hashlib.sha256(here.memory.tobytes()).hexdigest()
        assert target.ask("notified") == [["blocks", notify.msg], digest]


def test_a_batch_and_a_read_notify_as_well(here: Here, targets: Targets) -> None:
    target = targets(4096)
    batch = [here.address, here.address + 1000], [target.address, target.address + 1000], [99, 98]
    for opcode in TransferOpcode:
        notify = TransferNotify(name=opcode.name, msg="")
        assert here.engine.batch_transfer_sync(target.session, *batch, opcode, notify) == 0
        assert target.ask("notified")[0] == [opcode.name, ""]


def test_notifications_are_handed_out_once_and_in_order(
    engines: Callable[[], TransferEngine],
) -> None:
    ours, theirs = engines(), engines()
    assert theirs.get_notifies() == []
    session = f"127.0.0.1:{theirs.get_rpc_port()}"
    for number in range(40):
        notify = TransferNotify("number", str(number))
        code = ours.batch_transfer_sync(session, [], [], [], TransferOpcode.Write, notify)
        assert code == 0, ours.last_error()
    got: list[TransferNotify] = []
    until(lambda: got.extend(theirs.get_notifies()) or len(got) == 40)
    assert got == [TransferNotify("number", str(number)) for number in range(40)]
    assert theirs.get_notifies() == []


def test_eight_threads_transfer_at_the_same_time(here: Here, targets: Targets) -> None:
    target = targets(SIZE)
    part = MiB

    def work(index: int) -> list[int]:
        codes = []
        for round_ in range(20):
            start, size = index * part + round_ * 4096, 4096 << (round_ % 4)
            size = min(size, (index + 1) * part - start)
            codes.append(
                here.engine.transfer_sync_write(
                    target.session, here.address + start, target.address + start, size
                )
            )
        batch = here.engine.batch_transfer_async_write(
            target.session, [here.address + index * part], [target.address + index * part], [part]
        )
        assert batch > 0
        codes.append(here.engine.get_batch_transfer_status([batch]))
        return codes

    assert together(8, work) == [[0] * 21] * 8
    assert np.array_equal(target.memory[: 8 * part], here.memory[: 8 * part])


# By id --------------------------------------------------------------------------------------------


def test_a_submitted_write_is_asked_for_until_it_is_done_and_then_freed(
    here: Here, targets: Targets
) -> None:
    target = targets(SIZE)
    engine = here.engine
    number = engine.transfer_submit_write(target.session, here.address, target.address, SIZE)
    assert number == 1
    codes = set()
    until(lambda: codes.add(engine.transfer_check_status(number)) or codes - {0})
    assert codes <= {0, 1}
    assert np.array_equal(target.memory, here.memory)
    assert engine.transfer_check_status(number) == -1
    assert "has been told" in engine.last_error()


def test_batches_that_nobody_asks_for_keep_their_outcome_and_nothing_else(
    submitted: list[weakref.ref[Transfer]], here: Here, targets: Targets
) -> None:
    """A transfer holds the addresses of all its pieces."""
    target = targets(SIZE)
    engine, piece = here.engine, (here.address, target.address, SIZE)
    good = engine.transfer_submit_write(target.session, *piece)
    bad = engine.batch_transfer_async_read(target.session, [here.address], [1], [1])
    until(lambda: all((transfer := held()) is None or transfer.done() for held in submitted))
    last = engine.transfer_submit_write(target.session, *piece)
    gc.collect()
    assert [held() for held in submitted[:2]] == [None, None]
    assert engine.transfer_check_status(good) == 1
    assert engine.transfer_check_status(bad) == -1
    assert "0x1+1" in engine.last_error()
    assert engine.get_batch_transfer_status([last]) == 0
    assert [engine.transfer_check_status(number) for number in (good, bad, last)] == [-1] * 3


def test_a_status_covers_all_pieces_of_its_batch(here: Here, targets: Targets) -> None:
    """The last piece fails long after the first ones have arrived."""
    target = targets(SIZE)
    engine = here.engine
    good = here.address, target.address, 4096
    bad = here.address, target.address + SIZE - 1, 2
    for pieces, expected in (([good] * 300, 1), ([*[good] * 299, bad], -1)):
        batch = map(list, zip(*pieces, strict=True))
        number = engine.batch_transfer_async_write(target.session, *batch)
        assert number > 0
        code = 0
        while code == 0:
            code = engine.transfer_check_status(number)
        assert code == expected
    assert f"{target.address + SIZE - 1:#x}" in engine.last_error(), "names the bad address"


def test_waiting_for_several_batches_frees_them_all(here: Here, targets: Targets) -> None:
    target = targets(SIZE)
    engine = here.engine
    half = SIZE // 2
    writes = [
        engine.batch_transfer_async(
            target.session,
            [here.address + start],
            [target.address + start],
            [half],
            TransferOpcode.Write,
        )
        for start in (0, half)
    ]
    assert engine.get_batch_transfer_status(writes) == 0
    assert np.array_equal(target.memory[: 2 * half], here.memory[: 2 * half])
    assert [engine.transfer_check_status(number) for number in writes] == [-1, -1]

    read = engine.batch_transfer_async_read(target.session, [here.address], [target.address], [9])
    assert engine.get_batch_transfer_status([read, read]) == 0
    assert engine.get_batch_transfer_status([read]) == -1
    assert engine.get_batch_transfer_status([]) == 0


@pytest.mark.parametrize("garbage", [0, -1, 2**200, None, "1", 1.5, [1]])
def test_what_is_no_id_does_not_keep_from_waiting_for_the_others(
    here: Here, targets: Targets, garbage: Any
) -> None:
    target = targets(SIZE)
    engine = here.engine
    batch = engine.batch_transfer_async_write(
        target.session, [here.address], [target.address], [SIZE]
    )
    assert engine.get_batch_transfer_status([garbage, batch]) == -1
    assert np.array_equal(target.memory, here.memory)
    assert engine.transfer_check_status(batch) == -1, "freed"


def test_one_failure_among_batches_is_told_after_the_others_have_ended(
    here: Here, targets: Targets
) -> None:
    target = targets(SIZE)
    engine = here.engine
    good = engine.batch_transfer_async_write(
        target.session, [here.address], [target.address], [SIZE]
    )
    bad = engine.batch_transfer_async_write(target.session, [here.address], [1], [1])
    assert engine.get_batch_transfer_status([bad, good]) == -1
    assert np.array_equal(target.memory, here.memory)
    again = engine.transfer_submit_write(target.session, here.address, target.address, 1)
    assert engine.get_batch_transfer_status([0, again]) == -1
    assert engine.transfer_check_status(again) == -1
