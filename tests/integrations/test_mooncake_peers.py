"""Every call that needs a peer, while the peer is stopped or dead: over in time, and for good."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.sync.threads_pair import InThread
from integrations.processes import MiB, Target

from aioflagcx.integrations.mooncake import TransferEngine, TransferNotify, TransferOpcode

Targets = Callable[..., Target]

LATE = 2.0
"""Seconds that a busy machine may be late."""

PROBE = 5.0
"""Seconds in which a peer answers."""

READ, WRITE = TransferOpcode
NOTIFY = TransferNotify("name", "message")


def polled(engine: TransferEngine, batch: int) -> int:
    code = 0
    while code == 0:
        time.sleep(0.001)
        code = engine.transfer_check_status(batch)
    return code


CALLS: dict[str, Callable[[TransferEngine, str, int, int], int]] = {
    # of an engine, a session, and addresses of 1 MiB here and there
    "sync write": lambda e, s, here, there: e.transfer_sync_write(s, here, there, MiB),
    "sync read": lambda e, s, here, there: e.transfer_sync_read(s, here, there, MiB),
    "write, notify": lambda e, s, here, there: e.transfer_sync(s, here, there, MiB, WRITE, NOTIFY),
    "read, notify": lambda e, s, here, there: e.transfer_sync(s, here, there, MiB, READ, NOTIFY),
    "notify": lambda e, s, _, __: e.batch_transfer_sync(s, [], [], [], WRITE, NOTIFY),
    "batch write": lambda e, s, here, there: e.batch_transfer_sync_write(
        s, [here] * 99, [there] * 99, [999] * 99
    ),
    "batch read": lambda e, s, here, there: e.batch_transfer_sync_read(
        s, [here] * 99, [there] * 99, [999] * 99
    ),
    "submitted": lambda e, s, here, there: e.get_batch_transfer_status(
        [e.transfer_submit_write(s, here, there, MiB)]
    ),
    "asked for": lambda e, s, here, there: polled(
        e, e.batch_transfer_async_read(s, [here], [there], [MiB])
    ),
    "first buffer": lambda e, s, _, __: e.get_first_buffer_address(s) - 1,
    "probe": lambda e, s, _, __: e.send_probe(s),
}


@pytest.mark.parametrize("path", ["tcp"], indirect=True)
@pytest.mark.parametrize("known", [True, False], ids=["connected", "unknown"])
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_calls_to_a_peer_that_is_gone_fail_in_time_and_nothing_comes_later(
    path: str, impatient: float, engine: TransferEngine, targets: Targets, known: bool, how: str
) -> None:
    target = targets(MiB)
    source = np.full(MiB, 0x22, np.uint8)
    here = source.ctypes.data
    assert engine.register_memory(here, MiB) == 0
    if known:
        assert engine.transfer_sync_write(target.session, here, target.address, MiB) == 0
    if how == "stopped":
        target.stop()
    else:
        target.kill()
    target.memory[:] = 0x77

    def timed(call: Callable[..., int]) -> tuple[int, float]:
        started = time.monotonic()
        return call(engine, target.session, here, target.address), time.monotonic() - started

    calls = {name: InThread(timed, call) for name, call in CALLS.items()}
    for name, call in calls.items():
        code, seconds = call.result()
        assert code in (-1, -2), name
        limit = PROBE if name in ("first buffer", "probe") else impatient
        assert seconds < limit + LATE, name
    source[:] = 0x33  # ours again
    if how == "stopped":
        target.resume()
        assert target.ask("register") == -1, "it is registered already: the peer goes on"
        assert target.ask("notifies") == []
    assert (target.memory == 0x77).all()


def test_an_engine_that_is_closed_fails_the_calls_of_all_threads_and_opens_again(
    engine: TransferEngine, targets: Targets
) -> None:
    """Whatever they are at, many times."""
    target = targets(MiB)
    source = np.full(MiB, 0x22, np.uint8)
    here = source.ctypes.data
    ending: list[bool] = []
    odd: list[Any] = []

    def work(first: int) -> int:
        worked = 0
        for name in itertools.islice(itertools.cycle(CALLS), first, None):
            if ending:
                return worked
            code = CALLS[name](engine, target.session, here, target.address)
            worked += code == 0
            if not (type(code) is int and (code in (0, 1, -1, -2) or name == "first buffer")):
                odd.append((name, code))
        raise AssertionError  # a cycle has no end

    threads = [InThread(work, first) for first in range(6)]
    for _ in range(10):
        assert engine.register_memory(here, MiB) == 0, engine.last_error()
        assert engine.transfer_sync_write(target.session, here, target.address, MiB) == 0
        assert engine.close() == 0
        assert engine.transfer_sync_write(target.session, here, target.address, MiB) == -1
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    ending.append(True)
    assert sum(thread.result() for thread in threads) > 0
    assert odd == []
