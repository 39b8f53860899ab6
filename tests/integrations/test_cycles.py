"""Engines come and go, and leave nothing behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest
from integrations.processes import MiB, until

from aioflagcx.integrations.flagcx import FLAGCXLibrary
from aioflagcx.integrations.mooncake import TransferEngine

CYCLES = 50

memory = np.zeros(2 * MiB, np.uint8)
here: int = memory.ctypes.data
there = here + MiB


def mooncake() -> list[TransferEngine]:
    """Two that have moved data, and still do."""
    ours, theirs = TransferEngine(), TransferEngine()
    for engine, address in (ours, here), (theirs, there):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.register_memory(address, MiB) == 0
    session = f"127.0.0.1:{theirs.get_rpc_port()}"
    assert ours.transfer_sync_write(session, here, there, MiB) == 0
    assert ours.allocate_managed_buffer(100) > 0
    assert ours.batch_transfer_async_write(session, [here], [there], [MiB]) > 0
    return [ours, theirs]


def closed() -> None:
    for engine in mooncake():
        assert engine.close() == 0


def dropped() -> None:
    mooncake()


def refused() -> None:
    engine = TransferEngine()
    assert engine.initialize("192.0.2.77", "P2PHANDSHAKE", "tcp", "") == -1
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "no_such_device") == -1


def destroyed() -> None:
    library = FLAGCXLibrary()
    ours, theirs = library.flagcxP2pEngineCreate(), library.flagcxP2pEngineCreate()
    library.flagcxP2pRegister(ours, here, MiB)
    library.flagcxP2pRegister(theirs, there, MiB)
    session = f"127.0.0.1:{library.flagcxP2pGetRpcPort(theirs)}"
    connection = library.flagcxP2pGetConn(ours, session)
    library.flagcxP2pBatchWriteSync(connection, [here], [there], [MiB])
    for engine in ours, theirs:
        library.flagcxP2pEngineDestroy(engine)


def count(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


@pytest.mark.parametrize("cycle", [closed, dropped, refused, destroyed])
@pytest.mark.filterwarnings("error")
def test_many_engines_leave_no_file_and_no_thread(cycle: Callable[[], None]) -> None:
    for _ in range(3):
        cycle()
    gc.collect()
    files, threads = count("fd"), count("task")
    for _ in range(CYCLES):
        cycle()

    def gone() -> bool:
        gc.collect()  # of event loops there is garbage
        return count("fd") <= files and count("task") <= threads

    until(gone)
