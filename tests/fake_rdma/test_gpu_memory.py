from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import numpy as np
import pytest
from fake_rdma.conftest import Gpu, GpuArray

from aioflagcx import Config, Engine
from aioflagcx.errors import RegistrationError

SIZE = 300_000


@pytest.fixture
async def prefill() -> AsyncIterator[Engine]:
    async with Engine(devices="fake0,fake1") as engine:
        yield engine


@pytest.fixture
async def decode() -> AsyncIterator[Engine]:
    async with Engine(devices="fake0,fake1") as engine:
        yield engine


@pytest.fixture
async def soft() -> AsyncIterator[Engine]:
    async with Engine(devices="soft") as engine:
        yield engine


@pytest.mark.parametrize("access", ["write", "read_write"])
async def test_a_write_into_memory_of_a_gpu(
    gpu: Gpu, prefill: Engine, decode: Engine, access: str
) -> None:
    content = Random(1).randbytes(SIZE)
    address = gpu.alloc(SIZE + 100)
    src = await prefill.register(content, access="read")
    dst = await decode.register((address + 100, SIZE), name="kv", access=access)
    session = await prefill.connect(decode.session_id)
    assert await prefill.write(session, src, session.regions["kv"], SIZE) == SIZE
    assert gpu.load(address + 100, SIZE) == content
    slices = -(-SIZE // Config().slice_size)
    assert prefill.stats().slices_posted > slices  # and a read on each queue pair used
    await decode.deregister(dst)


async def test_a_read_from_memory_of_a_gpu(gpu: Gpu, prefill: Engine, decode: Engine) -> None:
    content = Random(2).randbytes(SIZE)
    address = gpu.alloc(SIZE)
    gpu.store(address, content)
    await decode.register(GpuArray(address, SIZE), name="kv")
    local = np.zeros(SIZE, np.uint8)
    await prefill.register(local)
    session = await prefill.connect(decode.session_id)
    remote = session.regions["kv"]
    assert await prefill.read(session, local.ctypes.data, remote, SIZE) == SIZE
    assert local.tobytes() == content
    assert prefill.stats().slices_posted == -(-SIZE // Config().slice_size)


async def test_from_gpu_to_gpu(gpu: Gpu, prefill: Engine, decode: Engine) -> None:
    content = Random(3).randbytes(SIZE)
    here, there = gpu.alloc(SIZE), gpu.alloc(SIZE)
    gpu.store(here, content)
    src = await prefill.register(GpuArray(here, SIZE))
    await decode.register(GpuArray(there, SIZE), name="kv")
    session = await prefill.connect(decode.session_id)
    await prefill.write(session, src, session.regions["kv"], SIZE, notify=("done", b""))
    assert gpu.load(there, SIZE) == content
    assert (await anext(decode.notifications())).name == "done"


async def test_memory_of_a_gpu_has_no_views(gpu: Gpu, decode: Engine) -> None:
    address = gpu.alloc(SIZE)
    for memory in ((address, SIZE), GpuArray(address, SIZE)):
        region = await decode.register(memory)
        for view in (region.view, region.numpy, region.__dlpack__, region.__dlpack_device__):
            with pytest.raises(RegistrationError, match="memory of a GPU, which has no view"):
                view()
        await decode.deregister(region)


async def test_the_soft_device_does_not_reach_it(gpu: Gpu, soft: Engine) -> None:
    address = gpu.alloc(SIZE)
    words = r"memory of a GPU \(cuda\), which only RDMA devices reach, and this engine has soft0"
    for memory in ((address, SIZE), GpuArray(address, SIZE)):
        with pytest.raises(RegistrationError, match=words) as caught:
            await soft.register(memory)
        assert caught.value.address == address
    assert soft.stats().regions == 0


async def test_what_the_driver_does_not_know_is_not_registered(prefill: Engine) -> None:
    with pytest.raises(RegistrationError, match="no memory of cuda that the CUDA driver knows"):
        await prefill.register(GpuArray(4096, SIZE))
    assert prefill.stats().regions == 0
