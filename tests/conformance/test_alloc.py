"""Memory that the engine owns."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conformance.fixtures import Engines
from conformance.pair import MiB, Pair, until

from aioflagcx import Engine, Region, allocation, free_memory
from aioflagcx._dlpack import export
from aioflagcx.errors import (
    DeregisterTimeout,
    EngineClosed,
    LocalAddressError,
    RegistrationError,
    RemoteAccessError,
    RemoteAddressError,
    TransferCancelled,
)


@pytest.fixture(autouse=True)
async def nothing_of_the_test_before() -> None:
    await all_gone()


def allocations() -> list[str]:
    """Mappings and open files of this process that are engine-owned memory."""
    with open("/proc/self/maps") as maps:
        found = [line for line in maps if "memfd:aioflagcx-alloc" in line]
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            if "memfd:aioflagcx-alloc" in (target := os.readlink(f"/proc/self/fd/{fd}")):
                found.append(target)
    return found


async def all_gone() -> None:
    """Wait for the thread that frees."""
    gc.collect()
    await until(lambda: not allocations())


@pytest.mark.parametrize("size", [1, 4096, 100_000, 3 * MiB + 1])
async def test_it_has_the_size_asked_for_and_is_zero(engine: Engine, size: int) -> None:
    region = await engine.alloc(size, name="kv", access="read")
    assert (region.size, region.name, region.access) == (size, "kv", "read")
    assert region.addr % mmap.PAGESIZE == 0
    assert region.view().nbytes == size
    assert not region.view().readonly
    assert not region.numpy().any()
    assert engine.stats().regions == 1
    session = await engine.connect(engine.session_id)
    theirs = session.regions["kv"]
    assert (theirs.addr, theirs.size, theirs.access) == (region.addr, size, "read")


async def test_it_is_sent_from_and_into(pair: Pair) -> None:
    src, dst = await pair.ours.alloc(MiB), await pair.theirs.alloc(MiB, name="kv")
    src.numpy("uint32")[:] = np.arange(MiB // 4)
    assert await pair.ours.write(pair.session, src, dst.addr, MiB) == MiB
    assert dst.view() == src.view()
    src.numpy()[:] = 0
    assert await pair.ours.read(pair.session, src, dst.addr, MiB) == MiB
    assert src.view() == dst.view()


async def test_its_pages_are_there(engine: Engine) -> None:
    region = await engine.alloc(2 * MiB)
    [target] = [line for line in allocations() if line.startswith("/memfd:")]
    fds = [fd for fd in os.listdir("/proc/self/fd") if _link(fd) == target]
    assert os.stat(f"/proc/self/fd/{fds[0]}").st_blocks * 512 == 2 * MiB
    assert region.size == 2 * MiB


def _link(fd: str) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


async def test_peers_may_do_what_its_access_says(pair: Pair) -> None:
    readable = await pair.theirs.alloc(4096, access="read")
    readable.numpy()[:] = 7
    await pair.session.refresh()
    with pytest.raises(RemoteAddressError):
        await pair.ours.write(pair.session, pair.local, readable.addr, 4096)
    assert await pair.ours.read(pair.session, pair.local, readable.addr, 4096) == 4096
    assert (pair.src[:4096] == 7).all()


# Views -------------------------------------------------------------------------------------------


async def test_numpy_has_the_dtype_and_shape_asked_for(engine: Engine) -> None:
    region = await engine.alloc(4 * 6 * 8)
    array = region.numpy("float32", (4, 6, 2))
    assert (array.dtype, array.shape) == (np.float32, (4, 6, 2))
    array[3, 5, 1] = 1.0
    assert bytes(region.view()[-4:]) == b"\0\0\x80?"
    assert region.numpy().shape == (192,)
    assert region.numpy(np.int16).shape == (96,)
    assert region.numpy("u1", (-1, 64)).shape == (3, 64)
    assert region.numpy("f8", 24).shape == (24,)
    pair_of = np.dtype([("key", "f2"), ("value", "f2")])
    assert region.numpy(pair_of).shape == (48,)


async def test_numpy_refuses_what_does_not_fit(engine: Engine) -> None:
    region = await engine.alloc(100)
    with pytest.raises(ValueError, match=r"100 bytes .* float64, 8 bytes"):
        region.numpy("float64")
    with pytest.raises(ValueError, match=r"25 elements of dtype float32 .* \(5, 6\)"):
        region.numpy("float32", (5, 6))
    with pytest.raises(ValueError, match=r"\(-1, 3\)"):
        region.numpy(shape=(-1, 3))
    for dtype in ("O", [("a", "O")], "V0", "S0"):
        with pytest.raises(ValueError, match="plain memory"):
            region.numpy(dtype)
    with pytest.raises(TypeError):
        region.numpy("no type")


async def test_views_of_registered_memory_are_that_memory(engine: Engine) -> None:
    memory = np.zeros((4, 4), np.float32)
    region = await engine.register(memory)
    region.numpy("float32", (4, 4))[1, 2] = 5
    np.from_dlpack(region)[:4] = 1
    assert memory[1, 2] == 5
    assert memory.view(np.uint8)[0, 0] == 1
    constant = await engine.register(b"1234", access="read")
    assert not constant.numpy().flags.writeable
    assert bytes(constant.numpy()) == b"1234"


async def test_an_array_library_takes_it_by_dlpack(engine: Engine) -> None:
    region = await engine.alloc(64)
    array = np.from_dlpack(region)
    assert (array.dtype, array.shape) == (np.uint8, (64,))
    region.view()[5] = 9
    assert array[5] == 9


class Consumer:
    """Takes over a tensor as dlpack.h demands, and lets go of it when told."""

    def __init__(self, exporter: Any, **options: Any) -> None:
        assert exporter.__dlpack_device__() == (1, 0)  # kDLCPU
        capsule = exporter.__dlpack__(**options)
        name = ctypes.pythonapi.PyCapsule_GetName
        name.restype, name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
        self.tensor = export(exporter)._replace(capsule=None)  # reads a capsule of its own
        self.kind = name(capsule)
        self._managed = pointer(capsule, self.kind)
        self._used = b"used_" + self.kind  # the capsule keeps the pointer, not the text
        rename(capsule, self._used)
        # DLManagedTensor: 48 bytes of DLTensor, the context, the deleter;
        # DLManagedTensorVersioned: the version, the context, the deleter.
        at = 16 if self.kind.endswith(b"versioned") else 56
        self._delete = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(
            ctypes.c_void_p.from_address(self._managed + at).value or 0
        )

    def close(self) -> None:
        self._delete(self._managed)


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
async def test_a_dlpack_consumer_keeps_the_memory_until_it_lets_go(
    engine: Engine, options: dict[str, Any]
) -> None:
    region = await engine.alloc(4096)
    region.numpy()[17] = 3
    consumer = Consumer(region, **options)
    assert consumer.kind == (b"dltensor_versioned" if options else b"dltensor")
    tensor = consumer.tensor
    assert (tensor.addr, tensor.nbytes, tensor.shape) == (region.addr, 4096, (4096,))
    assert not tensor.readonly
    assert not tensor.copied
    await engine.deregister(region)
    await engine.alloc(1)  # what ended before has been freed
    assert (ctypes.c_uint8 * 4096).from_address(tensor.addr)[17] == 3
    consumer.close()
    del region
    await engine.close()
    await all_gone()


async def test_there_are_no_new_views_of_a_region_that_is_gone(engine: Engine) -> None:
    region = await engine.alloc(64)
    await engine.deregister(region)
    for view in (region.view, region.numpy, region.__dlpack__, region.__dlpack_device__):
        with pytest.raises(RegistrationError, match="not registered"):
            view()


# Lifetime ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["deregister", "close"])
async def test_a_view_outlives_everything_else(engines: Engines, end: str) -> None:
    engine = await engines.near()
    region = await engine.alloc(MiB)
    views: list[Any] = [
        region.numpy("uint32", (512, 512))[8:, ::2],
        region.view()[5:],
        np.from_dlpack(region)[7:],
    ]
    region.numpy()[:] = 1
    if end == "deregister":
        await engine.deregister(region)
        await engine.alloc(1)  # what ended before has been freed
    else:
        await engine.close()
    del region
    while views:
        gc.collect()
        view = views.pop(0)
        rows = np.asarray(view)
        assert (rows == (0x01010101 if rows.itemsize == 4 else 1)).all()
        rows[...] = rows + 1
        assert (rows == (0x01010102 if rows.itemsize == 4 else 2)).all()
        rows[...] = rows - 1
        assert allocations()
        del view, rows
    if end == "deregister":
        await engine.close()
    await all_gone()


async def test_memory_goes_with_its_region(engine: Engine) -> None:
    region = await engine.alloc(MiB, name="kv")
    assert len(allocations()) == 2
    await engine.deregister(region)
    await all_gone()  # though `region` is still here
    with pytest.raises(RegistrationError, match="not registered"):
        await engine.deregister(region)
    again = await engine.alloc(MiB, name="kv")
    assert not again.numpy().any()
    await engine.close()
    await all_gone()


async def test_a_peer_cannot_reach_it_after_deregister(pair: Pair) -> None:
    region = await pair.theirs.alloc(4096)
    view = region.numpy()
    assert await pair.ours.write(pair.session, pair.local, region, 4096) == 4096
    await pair.theirs.deregister(region)
    view[:] = 9
    with pytest.raises((RemoteAddressError, RemoteAccessError)):
        await pair.ours.write(pair.session, pair.local, region, 4096)
    assert (view == 9).all()


async def test_it_is_there_until_a_late_deregistration_is_through(pair: Pair) -> None:
    region = await pair.ours.alloc(MiB)
    pieces = np.zeros(200_000, np.int64)
    transfer = pair.ours.submit_write(
        pair.session, pieces + region.addr, pieces + pair.remote.addr, region
    )
    with pytest.raises(DeregisterTimeout):
        await pair.ours.deregister(region, timeout=0.01)
    with pytest.raises(LocalAddressError):
        pair.ours.submit_write(pair.session, region, pair.remote, 1)
    gc.collect()
    assert len(allocations()) == 2
    transfer.cancel()
    await pair.ours.deregister(region)
    with pytest.raises(TransferCancelled):
        await transfer
    await all_gone()


async def test_parts_of_it_can_be_registered_and_keep_it(pair: Pair) -> None:
    pool = await pair.theirs.alloc(4 * MiB)
    layers = pool.numpy("uint8", (4, MiB))
    regions = [await pair.theirs.register(layers[i], name=f"layer {i}") for i in range(4)]
    del layers
    await pair.theirs.deregister(pool)
    await pair.session.refresh()
    dst = pair.session.regions["layer 2"]
    assert dst.addr == regions[2].addr
    assert await pair.ours.write(pair.session, pair.local, dst, MiB) == MiB
    assert (regions[2].numpy() == pair.src).all()
    for region in regions:
        assert allocations()
        await pair.theirs.deregister(region)
    await all_gone()


async def test_two_engines_can_use_it(pair: Pair) -> None:
    region = await pair.theirs.alloc(4096)
    again = await pair.ours.register(region.numpy())
    await pair.theirs.deregister(region)
    assert await pair.ours.write(pair.session, again, pair.remote, 4096) == 4096
    await pair.ours.deregister(again)
    await all_gone()


# What cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, -(2**70), 2**62 + 1, 2**64, 2**70])
async def test_sizes_that_cannot_be(engine: Engine, size: int) -> None:
    with pytest.raises(RegistrationError, match=f"size={size}: accepted is 1 to"):
        await engine.alloc(size)


@pytest.mark.parametrize("size", [True, False, np.True_, 1.0, "4096", None, b"", [1]])
async def test_what_is_no_size(engine: Engine, size: Any) -> None:
    with pytest.raises(TypeError, match="size must be an integer"):
        await engine.alloc(size)


async def test_any_integer_is_a_size(engine: Engine) -> None:
    assert (await engine.alloc(np.int64(4096))).size == 4096  # type: ignore[arg-type]


async def test_names_and_access_are_checked_before_memory_is_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.alloc(64, name="kv")
    monkeypatch.setattr("aioflagcx._native.Allocation", None)
    with pytest.raises(RegistrationError, match="'kv' is in use"):
        await engine.alloc(64, name="kv")
    with pytest.raises(RegistrationError, match="1 to 1024 bytes"):
        await engine.alloc(64, name="")
    with pytest.raises(RegistrationError, match="must be str"):
        await engine.alloc(64, name=5)  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="read, write, read_write"):
        await engine.alloc(64, access="all")


async def test_of_two_that_want_one_name_the_second_fails_and_leaves_nothing(
    engine: Engine,
) -> None:
    outcomes = await asyncio.gather(
        engine.alloc(MiB, name="kv"), engine.alloc(MiB, name="kv"), return_exceptions=True
    )
    [region] = [outcome for outcome in outcomes if isinstance(outcome, Region)]
    [error] = [outcome for outcome in outcomes if not isinstance(outcome, Region)]
    assert isinstance(error, RegistrationError)
    del outcomes, error
    gc.collect()
    await until(lambda: len(allocations()) == 2)
    assert region.numpy().size == MiB


@pytest.mark.parametrize("size", [2**44, 2**61, 2**62])
async def test_more_than_there_is_is_refused_with_the_sizes(engine: Engine, size: int) -> None:
    with pytest.raises(RegistrationError, match=rf"{size} bytes .* and \d+ are left"):
        await engine.alloc(size)
    await all_gone()


async def test_memory_that_others_take_meanwhile_is_missed_in_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([16 * MiB, 16 * MiB, 3 * MiB])
    monkeypatch.setattr(allocation, "_STEP", 2 * MiB)
    monkeypatch.setattr(allocation, "available", lambda: next(left))
    with pytest.raises(RegistrationError, match=rf"{8 * MiB} .* {6 * MiB} .* {3 * MiB} are left"):
        try:
            await engine.alloc(8 * MiB)
        except RegistrationError:
            await until(lambda: not allocations())  # though its traceback is still here
            raise


@contextlib.contextmanager
def limited(limit: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def mapped_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


async def test_without_descriptors_or_address_space_it_says_so(engine: Engine) -> None:
    await engine.deregister(await engine.alloc(1))  # threads and modules are there
    with limited(resource.RLIMIT_NOFILE, 3), pytest.raises(RegistrationError, match="ulimit -n"):
        await engine.alloc(64)
    with limited(resource.RLIMIT_FSIZE, MiB), pytest.raises(RegistrationError, match="ulimit -f"):
        await engine.alloc(2 * MiB)
    with (
        limited(resource.RLIMIT_AS, mapped_bytes() + 256 * MiB),
        pytest.raises(RegistrationError, match="Cannot allocate memory"),
    ):
        await engine.alloc(512 * MiB)
    await engine.alloc(64)


async def test_huge_pages_are_there_or_it_says_how_to_get_them(engine: Engine) -> None:
    """Whatever this system has, one page more than that is too many."""
    pool = free_memory.huge_pages()
    if not pool.size:
        with pytest.raises(RegistrationError, match="this system has none"):
            await engine.alloc(1, huge_pages=True)
        return
    if pool.free:
        region = await engine.alloc(1, huge_pages=True)
        assert region.addr % pool.size == 0
        assert not region.numpy().any()
        await engine.deregister(region)
        await all_gone()
    expected = (
        rf"{pool.free + 1} of {pool.size} bytes are needed and {pool.free} of {pool.total} "
        rf"are free.*vm\.nr_hugepages={pool.total + 1}"
    )
    with pytest.raises(RegistrationError, match=expected):
        await engine.alloc(pool.free * pool.size + 1, huge_pages=True)
    await all_gone()


# Cancellation ------------------------------------------------------------------------------------


async def test_a_cancelled_allocation_leaves_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "_STEP", 1 << 16)
    created = 0
    for turns in range(40):
        task = asyncio.create_task(engine.alloc(MiB))
        for _ in range(turns):
            await asyncio.sleep(0)
        created += bool(allocations())
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # unless it was faster
            await engine.deregister(await task)
        await until(lambda: not allocations())
        assert engine.stats().regions == 0
    assert created, "no allocation was cancelled on its way"


async def test_closing_ends_an_allocation_on_its_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._open is not None
    registry = engine._open.registry
    steps, closing = [], threading.Event()

    def available() -> int:
        steps.append(1)
        assert len(steps) < 3 or closing.wait(20)
        return 2**40

    monkeypatch.setattr(allocation, "_STEP", 1 << 16)
    monkeypatch.setattr(allocation, "available", available)
    task = asyncio.create_task(engine.alloc(64 * MiB))
    await until(lambda: len(steps) == 3)
    end = asyncio.create_task(engine.close())
    await until(lambda: registry._closed)
    closing.set()
    with pytest.raises(EngineClosed):
        await task
    await end
    assert len(steps) == 3  # of 1025
    del task
    await all_gone()
    with pytest.raises(EngineClosed):
        await engine.alloc(64)
