"""What goes wrong is a code within the time allowed, has a reason, and leaves memory alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.sync.threads_pair import InThread
from integrations.processes import MiB, Target, free_port, until

from aioflagcx.integrations.mooncake import TransferEngine, TransferNotify, TransferOpcode

Targets = Callable[..., Target]
Engines = Callable[..., TransferEngine]

LATE = 2.0
"""Seconds that a busy machine may be late."""

GARBAGE: tuple[Any, ...] = (
    None, -1, 2**64, 2**200, 0, "text", b"bytes", 1.5, [], [None], ["x"], [[1]], [2**200], [-1],
    {}, object(), True, np.zeros((2, 2)), float("nan"), TransferNotify,
)  # fmt: skip

ANSWERS: dict[str, tuple[int, Any]] = {
    # method: number of arguments, its answer on failure
    "initialize": (4, -1),
    "initialize_ext": (5, -1),
    "register_memory": (2, -1),
    "unregister_memory": (1, -1),
    "batch_register_memory": (2, -1),
    "batch_unregister_memory": (1, -1),
    "transfer_sync_write": (4, -1),
    "transfer_sync_read": (4, -1),
    "transfer_sync": (5, -1),
    "transfer_submit_write": (4, 0),
    "transfer_check_status": (1, -1),
    "batch_transfer_sync_write": (4, -1),
    "batch_transfer_sync_read": (4, -1),
    "batch_transfer_sync": (5, -1),
    "batch_transfer_async_write": (4, 0),
    "batch_transfer_async_read": (4, 0),
    "batch_transfer_async": (5, 0),
    "get_batch_transfer_status": (1, -1),
    "get_first_buffer_address": (1, 0),
    "send_probe": (1, -1),
    "allocate_managed_buffer": (1, 0),
    "free_managed_buffer": (2, -1),
    "write_bytes_to_buffer": (3, -1),
    "read_bytes_from_buffer": (2, b""),
}


def sensible(name: str, count: int) -> list[Any]:
    """Arguments that would be right, of an engine that is there."""
    if name.startswith("initialize"):
        return ["127.0.0.1", "P2PHANDSHAKE", "udp", "", "etcd"][:count]
    if name in ("get_first_buffer_address", "send_probe"):
        return ["127.0.0.1:1"]
    if "transfer_" in name and count >= 4:
        batch = name.startswith("batch")
        pieces: list[Any] = [[1], [1], [1]] if batch else [1, 1, 1]
        return ["127.0.0.1:1", *pieces, TransferOpcode.Write][:count]
    if name.startswith("batch_") or name == "get_batch_transfer_status":
        return [[4096], [4096]][:count]
    return [4096, b"bytes", 4] if count == 3 else [4096, 4096][:count]


def is_harmless(name: str, position: int, item: Any) -> bool:
    """Whether it is no garbage to this method."""
    if name.startswith("transfer_") and position == 3:
        return type(item) is int and item == 0  # nothing to move
    if name in ("get_batch_transfer_status", "batch_unregister_memory"):
        return isinstance(item, list | dict) and not item
    return name == "allocate_managed_buffer" and item is True


@pytest.mark.parametrize("name", ANSWERS)
def test_before_initialization_every_call_answers_that_it_failed(
    engines: Engines, name: str
) -> None:
    engine = engines(initialized=False)
    assert engine.last_error() == ""
    count, failure = ANSWERS[name]
    assert getattr(engine, name)(*sensible(name, count)) == failure
    assert engine.last_error().startswith(name if name != "initialize_ext" else "initialize")
    assert engine.get_rpc_port() == -1
    assert engine.get_notifies() == []
    assert engine.close() == 0


@pytest.mark.parametrize("name", ANSWERS)
def test_garbage_is_answered_by_a_code_and_the_engine_goes_on(
    engine: TransferEngine, name: str
) -> None:
    """Each argument in turn, the others being right; too few and too many."""
    count, failure = ANSWERS[name]
    method = getattr(engine, name)
    for position in range(count):
        for item in GARBAGE:
            if is_harmless(name, position, item):
                continue
            arguments = sensible(name, count)
            arguments[position] = item
            assert method(*arguments) == failure, (position, item)
            assert engine.last_error()
    for arguments in ([], [1] * 9):
        assert method(*arguments) == failure
    assert engine.get_notifies("garbage") == []  # type: ignore[call-arg]
    assert engine.last_error().startswith("get_notifies: ")
    memory = np.zeros(4096, np.uint8)
    assert engine.register_memory(memory.ctypes.data, 4096) == 0, "it goes on"
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.transfer_sync_write(session, memory.ctypes.data, memory.ctypes.data, 9) == 0


def test_lists_of_different_lengths_are_refused(engine: TransferEngine) -> None:
    memory = np.zeros(4096, np.uint8)
    here = memory.ctypes.data
    assert engine.register_memory(here, 4096) == 0
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    for lengths in ([1], [1, 1, 1], 1, []):
        batch: Any = session, [here, here], [here + 9, here + 9], lengths
        assert engine.batch_transfer_sync_write(*batch) == -1
        assert engine.batch_transfer_async_read(*batch) == 0


def test_a_notification_that_is_none_moves_nothing(engine: TransferEngine) -> None:
    memory = np.arange(100, dtype=np.uint8)
    here = memory.ctypes.data
    assert engine.register_memory(here, 100) == 0
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    bad: Any
    for bad in ("done", ("name", "msg"), TransferNotify(7, "m"), TransferNotify("n", "\ud800")):  # type: ignore[arg-type]
        assert engine.transfer_sync(session, here, here + 50, 9, TransferOpcode.Write, bad) == -1
        assert engine.transfer_sync(session, here, here + 50, 9, TransferOpcode.Read, bad) == -1
    assert np.array_equal(memory, np.arange(100))
    assert engine.get_notifies() == []


def test_the_reason_is_logged_and_told_to_the_thread_whose_call_failed(
    engine: TransferEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="aioflagcx"):
        assert engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1) == -1
    assert engine.last_error().startswith("transfer_sync_write: ")
    assert engine.last_error().partition(": ")[2] in caplog.text
    ours = engine.last_error()
    other = InThread(
        lambda: (engine.last_error(), engine.unregister_memory(1), engine.last_error())
    )
    before, _, after = other.result()
    assert before == ours, "of any thread, as long as none of its own failed"
    assert after.startswith("unregister_memory: ")
    assert engine.last_error() == ours


# Peers that are not as they should be ------------------------------------------------------------


@pytest.fixture
def source(engine: TransferEngine) -> np.ndarray:
    memory = np.full(MiB, 0x22, np.uint8)
    assert engine.register_memory(memory.ctypes.data, MiB) == 0
    return memory


def test_a_peer_that_is_not_there_fails_calls_at_once(
    engine: TransferEngine, source: np.ndarray
) -> None:
    here, nobody = source.ctypes.data, f"127.0.0.1:{free_port()}"
    assert engine.transfer_sync_write(nobody, here, 4096, 1) == -1
    assert nobody in engine.last_error()
    assert engine.send_probe(nobody) == -1
    assert engine.get_first_buffer_address(nobody) == 0
    number = engine.transfer_submit_write(nobody, here, 4096, 1)
    assert number > 0, "found out later"
    assert engine.get_batch_transfer_status([number]) == -1
    for name in ("", "127.0.0.1", "127.0.0.1:99999", "no such host:1", "[::1]"):
        assert engine.transfer_sync_write(name, here, 4096, 1) == -1
        assert engine.transfer_submit_write(name, here, 4096, 1) == 0


def test_a_stopped_peer_fails_calls_in_time_and_nothing_of_them_comes_later(
    path: str, impatient: float, engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    """A peer that we have no session with yet."""
    target = targets(MiB)
    here = source.ctypes.data
    target.stop()
    number = engine.transfer_submit_write(target.session, here, target.address, MiB)
    started = time.monotonic()
    assert engine.transfer_sync_write(target.session, here, target.address, MiB) == -1
    assert time.monotonic() - started < impatient + LATE
    assert engine.get_batch_transfer_status([number]) == -1
    target.resume()
    assert target.ask("register") == -1, "it is registered already: the peer goes on"
    assert not target.memory.any()
    assert engine.transfer_sync_write(target.session, here, target.address, MiB) == 0
    assert (target.memory == 0x22).all()


@pytest.mark.parametrize("path", ["local"], indirect=True)
def test_a_stopped_peer_on_the_same_host_is_written_to_all_the_same(
    path: str, engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    target = targets(MiB)
    here = source.ctypes.data
    assert engine.transfer_sync_write(target.session, here, target.address, 1) == 0
    target.stop()
    assert engine.transfer_sync_write(target.session, here, target.address, MiB) == 0
    assert (target.memory == 0x22).all(), "0 says that it is there"


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
def test_nothing_of_a_write_to_a_stopped_peer_is_stored_after_it_has_failed(
    path: str, impatient: float, engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    """Its sockets are full of the call's bytes when it goes on, and it stores none of them."""
    target = targets(MiB)
    pieces = [source.ctypes.data] * 64, [target.address] * 64, [MiB] * 64
    for _ in range(3):
        assert engine.batch_transfer_sync_write(target.session, *pieces) == 0
        target.stop()
        started = time.monotonic()
        assert engine.batch_transfer_sync_write(target.session, *pieces) == -1
        assert target.session in engine.last_error()
        assert time.monotonic() - started < impatient + LATE
        target.memory[:] = 0x77
        target.resume()
        assert target.ask("register") == -1, "it is registered already: the peer goes on"
        assert (target.memory == 0x77).all()
    assert engine.batch_transfer_sync_write(target.session, *pieces) == 0
    assert (target.memory == 0x22).all()


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
def test_a_batch_that_is_not_done_in_time_is_told_apart(
    path: str, impatient: float, engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    target = targets(MiB)
    here = source.ctypes.data
    assert engine.transfer_sync_write(target.session, here, target.address, 1) == 0
    target.stop()
    started = time.monotonic()
    number = engine.transfer_submit_write(target.session, here, target.address, MiB)
    code = 0
    while code == 0:
        code = engine.transfer_check_status(number)
    assert code == -2
    assert time.monotonic() - started < impatient + LATE
    assert engine.transfer_check_status(number) == -1, "freed"


def test_other_threads_run_while_a_call_waits(
    impatient: float, engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    """The GIL is released: seven calls wait for a stopped peer, and one moves data."""
    stopped, healthy = targets(MiB), targets(MiB)
    here = source.ctypes.data
    assert engine.transfer_sync_write(healthy.session, here, healthy.address, 1) == 0
    stopped.stop()
    calls = [
        InThread(engine.transfer_sync_write, stopped.session, here, stopped.address, MiB)
        for _ in range(7)
    ]
    for _ in range(200):
        assert engine.transfer_sync_write(healthy.session, here, healthy.address, MiB) == 0
    assert [call.result() for call in calls] == [-1] * 7


def test_a_peer_that_is_killed_fails_calls_soon_and_its_successor_is_connected_to(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    engines: Engines,
    targets: Targets,
) -> None:
    monkeypatch.setenv("AIOFLAGCX_KEEPALIVE_INTERVAL", "0.2")
    monkeypatch.setenv("AIOFLAGCX_KEEPALIVE_TIMEOUT", "2")
    engine = engines()
    source = np.full(MiB, 0x22, np.uint8)
    here = source.ctypes.data
    assert engine.register_memory(here, MiB) == 0
    port = free_port()
    first = targets(MiB, port, MC_LEGACY_RPC_PORT_BINDING="1")
    assert first.port == port
    pieces = [here] * 50_000, [first.address] * 50_000, [MiB] * 50_000
    call = InThread(engine.batch_transfer_sync_write, first.session, *pieces)
    until(lambda: first.memory[-1] == 0x22)
    started = time.monotonic()
    first.kill()
    assert call.result() == -1
    assert first.session in engine.last_error()
    assert time.monotonic() - started < 5
    assert engine.send_probe(first.session) == -1

    second = targets(MiB, port, MC_LEGACY_RPC_PORT_BINDING="1")
    assert engine.transfer_sync_write(second.session, here, second.address, MiB) == 0
    assert (second.memory == 0x22).all()
    assert engine.send_probe(second.session) == 0


def test_a_probe_tells_whether_the_peer_answers(engine: TransferEngine, targets: Targets) -> None:
    target = targets(MiB)
    assert engine.send_probe(target.session) == 0
    target.stop()
    started = time.monotonic()
    assert engine.send_probe(target.session) == -1
    assert time.monotonic() - started < 8
    target.resume()
    until(lambda: engine.send_probe(target.session) == 0)
    assert target.ask("close") == 0
    assert engine.send_probe(target.session) == -1


def test_closing_ends_what_other_threads_wait_for(
    impatient: float, engine: TransferEngine, source: np.ndarray, targets: Targets
) -> None:
    target = targets(MiB)
    target.stop()
    waiting = threading.Event()

    def wait() -> int:
        number = engine.transfer_submit_write(
            target.session, source.ctypes.data, target.address, MiB
        )
        waiting.set()
        return engine.get_batch_transfer_status([number])

    call = InThread(wait)
    assert waiting.wait(20)
    assert engine.close() == 0
    assert call.result() == -1
    assert engine.get_rpc_port() == -1
