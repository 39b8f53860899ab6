"""The provider on real devices: how they are chosen, and what only they can show."""

from __future__ import annotations

import logging
from random import Random

import numpy as np
import pytest
from softroce.devices import Device, device_names

from aioflagcx import Config, Engine
from aioflagcx.errors import ConfigError

SIZE = 1 << 20


async def test_active_devices_are_taken_by_themselves(
    near: Device, caplog: pytest.LogCaptureFixture
) -> None:
    names = ", ".join(device_names())
    with caplog.at_level(logging.INFO, "aioflagcx"):
        async with Engine(near.address):
            pass
    assert f"on {names} (every active RDMA port)" in caplog.text


async def test_a_device_that_is_not_there_is_told_with_those_that_are(near: Device) -> None:
    with pytest.raises(ConfigError, match=r"no device 'mlx5_0' here.*rxe0 \(active\), rxe1"):
        async with Engine(near.address, devices="mlx5_0"):
            pass


@pytest.mark.parametrize("access", ["write", "read_write"])
async def test_writes_with_relaxed_ordering_end_with_a_read(
    near: Device, far: Device, access: str
) -> None:
    config = Config(relaxed_ordering=True)
    async with (
        Engine(near.address, devices=near.name, config=config) as prefill,
        Engine(far.address, devices=far.name, config=config) as decode,
    ):
        content = Random(1).randbytes(SIZE)
        pool = np.zeros(SIZE, np.uint8)
        src = await prefill.register(content, access="read")
        await decode.register(pool, name="kv", access=access)
        session = await prefill.connect(decode.session_id)
        dst = session.regions["kv"]
        assert await prefill.write(session, src, dst, SIZE) == SIZE
        assert pool.tobytes() == content
        slices = SIZE // config.slice_size
        assert prefill.stats().slices_posted == slices + 1
        await prefill.write(session, src, dst, SIZE, notify=("done", b""))
        assert prefill.stats().slices_posted == 2 * slices + 2  # the immediate
