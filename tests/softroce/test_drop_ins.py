"""Mooncake's and FlagCX's calls over RDMA."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from softroce.devices import Device

from aioflagcx.integrations import flagcx
from aioflagcx.integrations.flagcx import FLAGCXLibrary
from aioflagcx.integrations.mooncake import TransferEngine, TransferNotify, TransferOpcode

SIZE = 1 << 20


def test_a_client_of_mooncake_moves_its_cache(near: Device, far: Device) -> None:
    with contextlib.ExitStack() as stack:
        prefill, decode = TransferEngine(), TransferEngine()
        for engine, device in ((prefill, near), (decode, far)):
            stack.callback(engine.close)
            code = engine.initialize(device.address, "P2PHANDSHAKE", "rdma", device.name)
            assert code == 0, engine.last_error()
        session = f"{far.address}:{decode.get_rpc_port()}"
        assert prefill.send_probe(session) == 0
        cache = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        pool = np.zeros(SIZE, np.uint8)
        here, there = cache.ctypes.data, pool.ctypes.data
        assert prefill.register_memory(here, SIZE) == 0, prefill.last_error()
        assert decode.register_memory(there, SIZE) == 0, decode.last_error()
        half = SIZE // 2
        pieces = [here, here + half], [there + half, there], [half, half]
        done = TransferNotify("request", "done")
        code = prefill.batch_transfer_sync(session, *pieces, TransferOpcode.Write, done)
        assert code == 0, prefill.last_error()
        assert decode.get_notifies() == [done]
        assert np.array_equal(pool, np.roll(cache, half))

        assert decode.unregister_memory(there) == 0
        pool[:] = 0x77
        assert prefill.batch_transfer_sync_write(session, *pieces) == -1
        assert (pool == 0x77).all()


def test_a_client_of_flagcx_moves_its_cache_by_descriptors(
    near: Device, far: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FLAGCXLibrary()
    monkeypatch.setenv("AIOFLAGCX_DEVICES", near.name)
    prefill = library.flagcxP2pEngineCreate()
    monkeypatch.setenv("AIOFLAGCX_DEVICES", far.name)
    decode = library.flagcxP2pEngineCreate()
    try:
        cache, pool = np.arange(SIZE, dtype=np.uint32), np.zeros(SIZE, np.uint32)
        mr = library.flagcxP2pRegister(prefill, cache.ctypes.data, cache.nbytes)
        target = library.flagcxP2pRegister(decode, pool.ctypes.data, pool.nbytes)
        conn = library.flagcxP2pGetConn(
            prefill, f"{far.address}:{library.flagcxP2pGetRpcPort(decode)}"
        )
        desc = flagcx.flagcxP2pEngineMakeDesc(conn, pool.ctypes.data, pool.nbytes)
        assert desc == flagcx.flagcxP2pEnginePrepareDesc(
            decode, target, pool.ctypes.data, pool.nbytes
        )
        flagcx.flagcxP2pEngineWriteVectorSync(
            conn, [mr], [cache.ctypes.data], [cache.nbytes], [desc]
        )
        assert np.array_equal(pool, cache)
    finally:
        library.flagcxP2pEngineDestroy(prefill)
        library.flagcxP2pEngineDestroy(decode)
