"""Registration and deregistration."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import time
import weakref
from typing import Any

import numpy as np
import pytest
from conformance.pair import MiB, Pair, until

from aioflagcx import Engine
from aioflagcx.errors import (
    DeregisterTimeout,
    LocalAddressError,
    RegistrationError,
    RemoteAccessError,
    RemoteAddressError,
    TransferCancelled,
)


async def test_a_region_tells_what_it_is(engine: Engine) -> None:
    memory = np.zeros(100, np.uint8)
    region = await engine.register(memory, name="kv", access="read")
    assert (region.addr, region.size) == (memory.ctypes.data, 100)
    assert (region.name, region.access) == ("kv", "read")
    assert region.at(0) == region.addr
    assert region.at(99) == region.addr + 99
    for outside in (-1, 100, 2**70):
        with pytest.raises(IndexError):
            region.at(outside)
    with pytest.raises(TypeError):
        region.at(1.0)  # type: ignore[arg-type]


async def test_view_shows_the_memory_itself(engine: Engine) -> None:
    memory = np.zeros((4, 4), np.float32)
    region = await engine.register(memory)
    view = region.view()
    assert (view.format, view.nbytes, view.readonly) == ("B", 64, False)
    view[0:4] = b"\0\0\x80?"
    assert memory[0, 0] == 1.0
    assert (await engine.register(b"1234", access="read")).view().readonly
    await engine.deregister(region)
    with pytest.raises(RegistrationError, match="not registered"):
        region.view()
    assert view.nbytes == 64  # still keeps the memory alive


async def test_the_memory_lives_as_long_as_it_is_registered(engine: Engine) -> None:
    memory = np.zeros(100, np.uint8)
    gone = weakref.ref(memory)
    region = await engine.register(memory)
    del memory
    gc.collect()
    assert gone() is not None
    view = region.view()
    await engine.deregister(region)
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


async def test_the_same_again_is_the_same_region_counted(engine: Engine) -> None:
    memory = np.zeros(64, np.uint8)
    first = await engine.register(memory, name="a")
    second = await engine.register(memory, name="a")
    third = await engine.register((first.addr, 64), name="a")
    assert first is second is third
    assert engine.stats().regions == 1
    for _ in range(2):
        await engine.deregister(first)
        assert await engine.write(engine.session_id, first, first, 64) == 64
    await engine.deregister(first)
    with pytest.raises(LocalAddressError):
        engine.submit_write(engine.session_id, first, first, 64)
    with pytest.raises(RegistrationError, match="not registered"):
        await engine.deregister(first)
    again = await engine.register(memory, name="a")
    assert again is not first


async def test_every_object_that_the_same_memory_was_given_as_is_kept(engine: Engine) -> None:
    memory = bytearray(64)
    arrays = [np.frombuffer(memory, np.uint8) for _ in range(2)]
    gone = [weakref.ref(array) for array in arrays]
    region = await engine.register(memory)
    for _ in range(2):
        for array in arrays:
            assert await engine.register(array) is region
    del array, arrays
    for _ in range(4):
        await engine.deregister(region)
    gc.collect()
    assert all(kept() is not None for kept in gone)
    view = region.view()
    await engine.deregister(region)
    gc.collect()
    assert all(kept() is not None for kept in gone)
    with pytest.raises(BufferError):
        memory.append(0)
    del view
    gc.collect()
    assert [kept() for kept in gone] == [None, None]
    memory.append(0)


async def test_the_same_range_with_another_access_or_name(engine: Engine) -> None:
    memory = bytearray(64)
    await engine.register(memory, name="a")
    for options in (
        {"name": "b"},
        {"name": None},
        {"name": "a", "access": "read"},
        {"name": "a", "location": "cpu:0"},
    ):
        with pytest.raises(RegistrationError, match="registered already"):
            await engine.register(memory, **options)
    with pytest.raises(RegistrationError, match="in use"):
        await engine.register(bytearray(64), name="a")


async def test_a_location_is_any_unless_it_is_told(engine: Engine) -> None:
    assert (await engine.register(bytearray(64))).location == "*"
    region = await engine.register(bytearray(64), location="cpu:0")
    assert region.location == "cpu:0"
    assert await engine.write(engine.session_id, region, region, 64) == 64


@pytest.mark.parametrize("location", ["", "gpu:0", "cpu:x", 3])
async def test_what_is_no_location(engine: Engine, location: Any) -> None:
    with pytest.raises(RegistrationError, match='accepted are "cpu:N" for NUMA node N'):
        await engine.register(bytearray(64), location=location)
    assert engine.stats().regions == 0


async def test_overlapping_regions_are_allowed(engine: Engine) -> None:
    memory = np.zeros(4096, np.uint8)
    await engine.register(memory)
    inner = await engine.register(memory[1000:2000], name="inner")
    session = await engine.connect(engine.session_id)
    assert session.find(inner.addr, 10) == session.regions["inner"]
    assert session.find(inner.addr - 1, 10).size == 4096


@pytest.mark.parametrize("access", ["", "rw", "execute", None, ["read"]])
async def test_unknown_access(engine: Engine, access: Any) -> None:
    with pytest.raises(RegistrationError, match="read, write, read_write"):
        await engine.register(bytearray(8), access=access)


@pytest.mark.parametrize("name", ["", "n" * 1025, 5, b"name", "\ud800"])
async def test_names_that_cannot_be(engine: Engine, name: Any) -> None:
    with pytest.raises(RegistrationError, match="name"):
        await engine.register(bytearray(8), name=name)


@pytest.mark.parametrize("name", ["n" * 1024, "ключ", "a b\n", "\0"])
async def test_names_arrive_as_they_are(engine: Engine, name: str) -> None:
    await engine.register(bytearray(8), name=name)
    session = await engine.connect(engine.session_id)
    assert list(session.regions) == [name]
    assert session.regions[name].size == 8


async def test_read_only_memory_cannot_be_written_by_peers(engine: Engine) -> None:
    for access in ("write", "read_write"):
        with pytest.raises(RegistrationError, match="read-only"):
            await engine.register(b"12345678", access=access)
    # Private: kernels before 6.2 give no NIC what is mapped shared and read-only.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, 4096, flags=private, prot=mmap.PROT_READ)
    where = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    with pytest.raises(RegistrationError, match="mapped read-only"):
        await engine.register((where, 4096))
    await engine.register((where, 4096), access="read")


async def test_memory_that_is_not_mapped(engine: Engine) -> None:
    mapped = mmap.mmap(-1, 8192)
    where = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    for pair in ((4096, 4096), (where, 1 << 45), (2**63, 8)):
        with pytest.raises(RegistrationError, match="not mapped"):
            await engine.register(pair)
    assert engine.stats().regions == 0


@pytest.mark.parametrize("memory", [b"", (4096, 0), np.zeros(8)[::2], None, "text"])
async def test_what_cannot_be_registered(engine: Engine, memory: Any) -> None:
    with pytest.raises(RegistrationError):
        await engine.register(memory)
    assert engine.stats().regions == 0


# Many ------------------------------------------------------------------------------------------


async def test_many_have_one_location(engine: Engine) -> None:
    memories = [np.zeros(4096, np.uint8) for _ in range(3)]
    with pytest.raises(RegistrationError, match="npu:0"):
        await engine.register_many(memories, location="npu:0")
    regions = await engine.register_many(memories, location="cpu:0")
    assert [region.location for region in regions] == ["cpu:0"] * 3


async def test_register_many(engine: Engine) -> None:
    memories = [np.zeros(64, np.uint8) for _ in range(1000)]
    regions = await engine.register_many(memories, names=[f"r{i}" for i in range(1000)])
    assert [region.addr for region in regions] == [m.ctypes.data for m in memories]
    assert [region.name for region in regions[:2]] == ["r0", "r1"]
    assert engine.stats().regions == 1000
    again = await engine.register_many(memories[:3], names=["r0", "r1", "r2"])
    assert again == regions[:3]
    assert await engine.register_many([]) == []


async def test_register_many_is_all_or_nothing(engine: Engine) -> None:
    kept = await engine.register(bytearray(64), name="kept")
    shared = bytearray(64)
    await engine.register(shared)
    good = [bytearray(64) for _ in range(300)]
    for bad in ((4096, 4096), b"read-only", None, b""):
        with pytest.raises(RegistrationError):
            await engine.register_many([*good, shared, bad])
    with pytest.raises(RegistrationError, match="in use"):
        await engine.register_many(good, names=[None] * 299 + ["kept"])
    with pytest.raises(RegistrationError, match="names"):
        await engine.register_many(good, names=["a"])
    assert engine.stats().regions == 2
    assert engine.submit_write(engine.session_id, kept, kept, 64)
    regions = await engine.register_many(good)  # nothing was left reserved
    assert len(regions) == 300


async def test_concurrent_registrations_of_the_same_memory_give_one_region(
    engine: Engine,
) -> None:
    memory = bytearray(64)
    regions = await asyncio.gather(*(engine.register(memory, name="a") for _ in range(10)))
    assert len(set(map(id, regions))) == 1
    for _ in range(9):
        await engine.deregister(regions[0])
    assert engine.stats().regions == 1
    await engine.deregister(regions[0])
    assert engine.stats().regions == 0


async def test_those_who_wait_for_a_registration_that_fails_are_told(engine: Engine) -> None:
    memory = bytearray(64)
    failing = asyncio.create_task(engine.register_many([memory, (4096, 4096)]))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.register(memory))
    for task in (failing, waiting):
        with pytest.raises(RegistrationError):
            await task
    await engine.register(memory)


async def test_a_cancelled_registration_leaves_nothing(engine: Engine) -> None:
    memory = np.zeros(MiB, np.uint8)
    many = [memory[i * 64 : i * 64 + 64] for i in range(2000)]
    for turns in range(0, 24, 3):
        task = asyncio.create_task(engine.register_many(many))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # unless it was faster
            for region in await task:
                await engine.deregister(region)
    regions = await engine.register_many(many)
    assert len({id(region) for region in regions}) == 2000
    session = await engine.connect(engine.session_id)
    assert len(session.all_regions) == 2000


# Deregistration ----------------------------------------------------------------------------------


async def test_a_peer_cannot_reach_deregistered_memory(pair: Pair) -> None:
    region = await pair.theirs.register(np.zeros(4096, np.uint8))
    assert await pair.ours.write(pair.session, pair.local, region, 4096) == 4096
    await pair.theirs.deregister(region)
    # Either the push has been seen, or the device refuses the key.
    with pytest.raises((RemoteAddressError, RemoteAccessError)):
        await pair.ours.write(pair.session, pair.local, region, 4096)
    assert await pair.write() == 4096


async def test_no_byte_changes_after_deregister_while_a_peer_writes(pair: Pair) -> None:
    memory = np.zeros(MiB, np.uint8)
    pieces = np.zeros(200_000, np.int64)
    for _ in range(5):
        region = await pair.theirs.register(memory)
        await pair.session.refresh()
        transfer = pair.ours.submit_write(
            pair.session, pieces + pair.local.addr, pieces + region.addr, region, timeout=None
        )
        await until(lambda transfer=transfer: transfer.bytes_done)
        await pair.theirs.deregister(region)
        memory[:] = 0xA5
        with pytest.raises((RemoteAccessError, RemoteAddressError)):
            await transfer
        assert (memory == 0xA5).all()
        assert await pair.write() == 4096


async def test_deregistering_refuses_new_use_and_waits_for_the_old(pair: Pair) -> None:
    transfer = pair.submit_long()
    with pytest.raises(DeregisterTimeout, match=r"in use after 0\.05 s") as caught:
        await pair.ours.deregister(pair.local, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert not transfer.done()
    with pytest.raises(LocalAddressError):
        pair.ours.submit_write(pair.session, pair.local, pair.remote, 1)
    with pytest.raises(DeregisterTimeout):
        await pair.ours.deregister(pair.local, timeout=0.01)  # waits for the same again
    assert "deregistering" in repr(pair.local)
    waiting = asyncio.create_task(pair.ours.deregister(pair.local))
    await asyncio.sleep(0)
    transfer.cancel()
    await waiting
    with pytest.raises(TransferCancelled):
        await transfer
    assert "deregistered" in repr(pair.local)
    with pytest.raises(RegistrationError):
        await pair.ours.deregister(pair.local)


async def test_memory_is_kept_until_a_late_deregistration_is_through(pair: Pair) -> None:
    memory = np.zeros(MiB, np.uint8)
    gone = weakref.ref(memory)
    region = await pair.ours.register(memory)
    del memory
    pieces = np.zeros(200_000, np.int64)
    transfer = pair.ours.submit_write(
        pair.session, pieces + region.addr, pieces + pair.remote.addr, region
    )
    with pytest.raises(DeregisterTimeout):
        await pair.ours.deregister(region, timeout=0.01)
    gc.collect()
    assert gone() is not None
    transfer.cancel()
    await pair.ours.deregister(region)
    gc.collect()
    assert gone() is None


async def test_one_region_in_use_does_not_hold_up_others(pair: Pair) -> None:
    transfer = pair.submit_long()
    other = await pair.ours.register(bytearray(64))
    with pytest.raises(DeregisterTimeout):
        await pair.ours.deregister(pair.local, timeout=0.01)
    await asyncio.wait_for(pair.ours.deregister(other), 2)
    transfer.cancel()
    await pair.ours.deregister(pair.local)


async def test_closing_ends_a_deregistration_that_could_not_finish(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros(MiB, np.uint8)
    gone = weakref.ref(memory)
    region = await engine.register(memory)
    del memory
    assert engine._open is not None
    monkeypatch.setattr("aioflagcx.registry._CLOSE_TIMEOUT", 0.05)
    monkeypatch.setattr(
        engine._open.registry, "_drain_blocking", lambda ids: time.sleep(0.001) or []
    )
    waiting = asyncio.create_task(engine.deregister(region, timeout=None))
    await asyncio.sleep(0)
    await engine.close()
    await asyncio.wait_for(waiting, 1)
    assert "deregistered" in repr(region)
    gc.collect()
    assert gone() is None


async def test_a_range_can_be_registered_again_at_once(pair: Pair) -> None:
    memory = bytearray(64)
    for _ in range(20):
        region = await pair.theirs.register(memory, name="again")
        await pair.session.refresh()  # else the key of the last time may still be known
        assert await pair.ours.write(pair.session, pair.local, region, 64) == 64
        await pair.theirs.deregister(region)


async def test_deregister_of_something_else(pair: Pair) -> None:
    with pytest.raises(RegistrationError, match="with this engine"):
        await pair.theirs.deregister(pair.local)
    with pytest.raises(TypeError):
        await pair.ours.deregister(pair.remote)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 0"):
        await pair.ours.deregister(pair.local, timeout=0)
