"""Who can reach which memory through Mooncake's calls, and who cannot any more."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from conformance.sync.threads_pair import together
from integrations.processes import MiB, Target, until

from aioflagcx.integrations.mooncake import TransferEngine, registrations

Targets = Callable[..., Target]

LATE = 2.0
"""Seconds that a busy machine may be late."""


@pytest.fixture
def source(path: str, engine: TransferEngine) -> np.ndarray:
    memory = np.full(MiB, 0x22, np.uint8)
    assert engine.register_memory(memory.ctypes.data, MiB) == 0
    return memory


def test_nothing_moves_outside_registered_memory(
    engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    target = targets(MiB)
    here, there = source.ctypes.data, target.address
    assert engine.transfer_sync_write(target.session, here, there + 1, MiB) == -1
    assert f"{there + 1:#x}" in engine.last_error()
    assert target.session in engine.last_error()
    assert engine.transfer_sync_write(target.session, here + 1, there, MiB) == -1
    assert f"{here + 1:#x}" in engine.last_error()
    assert engine.transfer_sync_read(target.session, here, there - 1, 2) == -1
    one_bad = [here] * 100, [there] * 99 + [there + MiB], [64] * 100
    assert engine.batch_transfer_sync_write(target.session, *one_bad) == -1
    assert engine.batch_transfer_async_write(target.session, [here, 1], [there, there], [1, 1]) == 0
    assert not target.memory.any(), "something was written"


def test_unregistered_memory_does_not_change_any_more(
    engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    """While writes to it are under way, many times; and it can be registered again."""
    target = targets(MiB)
    pieces = [source.ctypes.data] * 64, [target.address] * 64, [MiB] * 64
    ending = threading.Event()
    codes: list[int] = []

    def hammer() -> None:
        while not ending.is_set():
            codes.append(engine.batch_transfer_sync_write(target.session, *pieces))

    hammering = threading.Thread(target=hammer)
    hammering.start()
    try:
        for _ in range(10):
            target.memory[-1] = 0
            until(lambda: target.memory[-1] == 0x22)
            assert target.ask("unregister") == 0
            target.memory[:] = 0x77
            over = len(codes)
            until(lambda over=over: len(codes) > over + 2)
            assert codes[over + 1 :] == [-1] * len(codes[over + 1 :]), "begun afterwards"
            assert (target.memory == 0x77).all()
            assert target.ask("register") == 0
    finally:
        ending.set()
        hammering.join()
    assert target.ask("unregister") == 0
    assert target.ask("unregister") == -1


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
@pytest.mark.parametrize("at_once", [True, False], ids=["batch", "one-by-one"])
def test_memory_that_is_held_is_unregistered_by_a_later_call(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    engines: Callable[[], TransferEngine],
    targets: Targets,
    at_once: bool,
) -> None:
    """The wait is one for all of a batch. What held it ends between the calls."""
    monkeypatch.setattr(registrations, "_PATIENCE", 0.5)
    monkeypatch.setenv("AIOFLAGCX_KEEPALIVE_TIMEOUT", "60")
    engine, target = engines(), targets(MiB)
    source = np.full(8 * MiB, 0x22, np.uint8)
    here = [source.ctypes.data + start for start in range(0, 8 * MiB, MiB)]
    assert engine.batch_register_memory(here, [MiB] * 8) == 0
    assert engine.transfer_sync_write(target.session, here[0], target.address, MiB) == 0
    target.stop()
    held = engine.batch_transfer_async_write(
        target.session, here * 8, [target.address] * 64, [MiB] * 64
    )
    started = time.monotonic()
    assert engine.batch_unregister_memory(here) == -1
    assert time.monotonic() - started < 0.5 + LATE
    assert "still in use" in engine.last_error()
    assert engine.register_memory(here[0], MiB) == -1, "not before it is unregistered"
    target.resume()
    assert engine.get_batch_transfer_status([held]) == 0
    opened = engine._opened().engine
    until(lambda: opened.stats().regions == 0)
    if at_once:
        assert engine.batch_unregister_memory(here) == 0
    else:
        assert [engine.unregister_memory(address) for address in here] == [0] * 8
    assert engine.unregister_memory(here[0]) == -1
    assert engine.batch_register_memory(here, [MiB] * 8) == 0


def test_an_address_given_twice_is_unregistered_and_told(engine: TransferEngine) -> None:
    memory = np.zeros(4096, np.uint8)
    address = memory.ctypes.data
    assert engine.register_memory(address, 4096) == 0
    assert engine.batch_unregister_memory([address, address]) == -1
    assert f"{address:#x}" in engine.last_error()
    assert engine.register_memory(address, 4096) == 0
    codes = together(8, lambda _: engine.unregister_memory(address))
    assert sorted(codes) == [-1] * 7 + [0]


def test_an_address_is_registered_once_and_other_ranges_may_overlap(
    engines: Callable[[], TransferEngine],
) -> None:
    """Unregistering means that nobody reaches the memory, so one registration must not hide
    another."""
    theirs, ours = engines(), engines()
    session = f"127.0.0.1:{theirs.get_rpc_port()}"
    memory, source = np.zeros(8192, np.uint8), np.ones(8192, np.uint8)
    start, here = memory.ctypes.data, source.ctypes.data
    assert ours.register_memory(here, 8192) == 0

    assert theirs.register_memory(start, 8192) == 0
    for capacity in (8192, 4096):
        assert theirs.register_memory(start, capacity) == -1
        assert f"{start:#x}" in theirs.last_error()
    assert theirs.batch_register_memory([start + 100, start], [1, 1]) == -1
    assert theirs.batch_register_memory([start + 100, start + 100], [1, 1]) == -1
    assert theirs.unregister_memory(start + 100) == -1, "none of a batch that was refused"
    assert theirs.register_memory(start + 4096, 4096) == 0

    assert ours.transfer_sync_write(session, here, start, 8192) == 0
    assert theirs.unregister_memory(start) == 0
    assert ours.transfer_sync_write(session, here, start, 4096) == -1
    assert ours.transfer_sync_write(session, here, start + 4096, 4096) == 0
    assert theirs.unregister_memory(start + 4096) == 0
    assert ours.transfer_sync_write(session, here, start + 4096, 4096) == -1


def test_a_batch_is_registered_as_a_whole_or_not_at_all(
    engines: Callable[[], TransferEngine],
) -> None:
    engine = engines()
    memory = np.zeros(8192, np.uint8)
    start = memory.ctypes.data
    assert engine.batch_register_memory([start, 4096], [4096, 4096]) == -1, (
        "nothing is mapped there"
    )
    assert engine.batch_register_memory([start, start + 4096], [4096]) == -1
    assert engine.batch_register_memory([], []) == 0
    assert engine.batch_register_memory([start, start + 4096], [4096, 4096], "npu:7") == 0
    assert engine.batch_unregister_memory([start, 1, start + 4096]) == -1
    assert f"{1:#x}" in engine.last_error()
    assert engine.batch_register_memory([start, start + 4096], [4096, 4096], location="*") == 0
    assert engine.batch_unregister_memory([start, start + 4096]) == 0


def test_many_threads_register_the_same_address_and_one_of_them_does(
    engine: TransferEngine,
) -> None:
    memory = np.zeros(4096, np.uint8)
    for _ in range(10):
        codes = together(8, lambda _: engine.register_memory(memory.ctypes.data, 4096))
        assert sorted(codes) == [-1] * 7 + [0]
        assert engine.unregister_memory(memory.ctypes.data) == 0


def test_the_first_buffer_of_a_peer_is_what_it_registered_first(
    engines: Callable[[], TransferEngine],
) -> None:
    ours, theirs = engines(), engines()
    session = f"127.0.0.1:{theirs.get_rpc_port()}"
    assert ours.get_first_buffer_address(session) == 0
    memory = np.zeros(8192, np.uint8)
    first, second = memory.ctypes.data + 4096, memory.ctypes.data
    assert theirs.register_memory(first, 4096) == 0
    assert theirs.register_memory(second, 4096) == 0
    assert ours.get_first_buffer_address(session) == first
    assert theirs.unregister_memory(first) == 0
    assert ours.get_first_buffer_address(session) == second


# Managed buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4096, 5000, MiB, MiB + 1, 20 * MiB])
def test_a_managed_buffer_is_memory_that_peers_reach(
    engine: TransferEngine, targets: Targets, length: int
) -> None:
    target = targets(length)
    address = engine.allocate_managed_buffer(length)
    assert address > 0
    content = np.random.default_rng(3).bytes(length)
    assert engine.write_bytes_to_buffer(address, content, length) == 0
    assert engine.transfer_sync_write(target.session, address, target.address, length) == 0
    assert target.memory.tobytes() == content
    target.memory[:] ^= 0xFF
    assert engine.transfer_sync_read(target.session, address, target.address, length) == 0
    assert engine.read_bytes_from_buffer(address, length) == target.memory.tobytes()
    assert engine.free_managed_buffer(address, length) == 0
    assert engine.free_managed_buffer(address, length) == -1


def test_managed_buffers_do_not_overlap_and_are_used_again(engine: TransferEngine) -> None:
    lengths = [1, 4096, 4097, 100_000, 2 * MiB] * 10
    addresses = together(8, lambda _: [engine.allocate_managed_buffer(size) for size in lengths])
    spans = sorted(
        (address, size) for some in addresses for address, size in zip(some, lengths, strict=True)
    )
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    small = sorted(address for address, size in spans if size < MiB)
    for address, size in spans:
        assert engine.free_managed_buffer(address, size) == 0
    again = [engine.allocate_managed_buffer(size) for _, size in spans if size < MiB]
    assert set(again) <= set(small), "pools grow only when they are used up"


def test_bytes_are_copied_only_within_memory_of_the_engine(engine: TransferEngine) -> None:
    memory = np.zeros(4096, np.uint8)
    registered = memory.ctypes.data
    assert engine.write_bytes_to_buffer(registered, b"x", 1) == -1, "not registered yet"
    assert engine.register_memory(registered, 4096) == 0
    managed = engine.allocate_managed_buffer(4096)
    neighbour = engine.allocate_managed_buffer(4096)
    assert engine.write_bytes_to_buffer(neighbour, b"n" * 4096, 4096) == 0
    assert engine.write_bytes_to_buffer(neighbour, "text \u2713", 8) == 0, "as UTF-8"
    assert engine.read_bytes_from_buffer(neighbour, 9) == b"text \xe2\x9c\x93n"
    assert engine.write_bytes_to_buffer(neighbour, b"n" * 8, 8) == 0
    for start in (registered, managed):
        assert engine.write_bytes_to_buffer(start + 4090, b"abcdef", 6) == 0
        assert engine.read_bytes_from_buffer(start + 4090, 6) == b"abcdef"
        assert engine.read_bytes_from_buffer(start, 0) == b""
        for offset, length in ((4090, 7), (-1, 4097), (-1, 2), (0, 4097), (0, -1)):
            assert engine.write_bytes_to_buffer(start + offset, b"z" * 5000, length) == -1
            assert engine.read_bytes_from_buffer(start + offset, length) == b""
        assert engine.write_bytes_to_buffer(start, b"abc", 4) == -1, "more than there is"
    assert engine.read_bytes_from_buffer(neighbour, 4096) == b"n" * 4096
    assert memory[:4090].max() == 0
    assert engine.free_managed_buffer(managed, 4096) == 0
    assert engine.read_bytes_from_buffer(managed, 1) == b"", "freed"
