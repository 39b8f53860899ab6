"""Mooncake's and FlagCX's calls on RDMA devices and memory of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from random import Random

import numpy as np
import pytest
from fake_rdma.conftest import Gpu

from aioflagcx.integrations import flagcx
from aioflagcx.integrations.flagcx import FLAGCXLibrary
from aioflagcx.integrations.mooncake import TransferEngine
from aioflagcx.topology import Place, Topology

SIZE = 300_000

NOWHERE = Place((), -1)

Engines = Callable[..., TransferEngine]


@pytest.fixture
def engines() -> Iterator[Engines]:
    with contextlib.ExitStack() as stack:

        def make(protocol: str, device_name: str) -> TransferEngine:
            engine = TransferEngine()
            stack.callback(engine.close)
            code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device_name)
            assert code == 0, engine.last_error()
            return engine

        yield make


def devices_of(engine: TransferEngine) -> list[str]:
    _, assembly = engine._opened().engine._started()
    return list(assembly.runtime.native.devices)


def test_each_protocol_takes_its_devices(engines: Engines) -> None:
    assert devices_of(engines("rdma", "")) == ["fake0", "fake1"]
    assert devices_of(engines("rdma", "fake1")) == ["fake1"]
    assert devices_of(engines("rdma", "fake1, fake0")) == ["fake1", "fake0"]
    assert devices_of(engines("tcp", "fake0")) == ["soft0"]


def test_a_cache_moves_from_gpu_to_gpu(gpu: Gpu, engines: Engines) -> None:
    """Both by raw addresses, as servers register them."""
    prefill, decode = engines("rdma", ""), engines("rdma", "")
    session = f"127.0.0.1:{decode.get_rpc_port()}"
    content = Random(1).randbytes(SIZE)
    here, there = gpu.alloc(SIZE), gpu.alloc(SIZE)
    gpu.store(here, content)
    assert prefill.batch_register_memory([here], [SIZE], "cuda:0") == 0, prefill.last_error()
    assert decode.batch_register_memory([there], [SIZE]) == 0, decode.last_error()
    half = SIZE // 2
    pieces = [here, here + half], [there + half, there], [half, half]
    assert prefill.batch_transfer_sync_write(session, *pieces) == 0, prefill.last_error()
    assert gpu.load(there, SIZE) == content[half:] + content[:half]
    assert decode.batch_unregister_memory([there]) == 0
    assert prefill.batch_transfer_sync_write(session, *pieces) == -1


def test_memory_of_a_gpu_is_refused_without_an_rdma_device(gpu: Gpu, engines: Engines) -> None:
    engine = engines("tcp", "")
    assert engine.register_memory(gpu.alloc(4096), 4096) == -1
    assert "GPU" in engine.last_error()


@pytest.mark.parametrize(
    ("chosen", "taken"),
    [
        ("fake", ["fake0", "fake1"]),
        ("=fake1", ["fake1"]),
        ("^fake1", ["fake0"]),
        ("fake0:1", ["fake0"]),
    ],
)
def test_flagcx_takes_the_devices_that_it_is_told(
    monkeypatch: pytest.MonkeyPatch, chosen: str, taken: list[str]
) -> None:
    monkeypatch.setenv("FLAGCX_IB_HCA", chosen)
    there = Topology({}, {"fake0": NOWHERE, "fake1": NOWHERE}, {})
    monkeypatch.setattr(Topology, "read", lambda: there)
    library = FLAGCXLibrary()
    engine = library.flagcxP2pEngineCreate()
    try:
        _, assembly = engine.sync._started()
        assert list(assembly.runtime.native.devices) == taken
    finally:
        library.flagcxP2pEngineDestroy(engine)


def test_a_descriptor_has_the_key_of_the_first_rail(gpu: Gpu) -> None:
    library = FLAGCXLibrary()
    ours, theirs = library.flagcxP2pEngineCreate(), library.flagcxP2pEngineCreate()
    try:
        source, address = np.full(SIZE, 7, np.uint8), gpu.alloc(SIZE)
        mr = library.flagcxP2pRegisterHost(ours, source.ctypes.data, SIZE)
        target = library.flagcxP2pRegister(theirs, address, SIZE)
        session = f"127.0.0.1:{library.flagcxP2pGetRpcPort(theirs)}"
        conn = library.flagcxP2pGetConn(ours, session)
        desc = flagcx.flagcxP2pEngineMakeDesc(conn, address, SIZE)
        assert desc == flagcx.flagcxP2pEnginePrepareDesc(theirs, target, address, SIZE)
        assert any(desc[12:16])
        flagcx.flagcxP2pEngineWriteVectorSync(conn, [mr], [source.ctypes.data], [SIZE], [desc])
        assert gpu.load(address, SIZE) == source.tobytes()
    finally:
        library.flagcxP2pEngineDestroy(ours)
        library.flagcxP2pEngineDestroy(theirs)
