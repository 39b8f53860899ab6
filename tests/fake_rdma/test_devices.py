"""Which devices an engine opens, and what it makes of what they report."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest
from fake_rdma.conftest import Nics

from aioflagcx import Config, Engine
from aioflagcx.errors import ConfigError, ConnectError, RegistrationError

SIZE = 1 << 20


async def until(condition: Callable[[], object]) -> None:
    """For what gives no event to wait for."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not come about within 60 s"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ("auto", "on fake0, fake1 (every active RDMA port)"),
        ("fake1", "on fake1 (as configured)"),
        ("fake*", "on fake0, fake1 (as configured)"),
        ("soft", "on soft0 (as configured)"),
    ],
)
async def test_the_log_says_which_devices_are_taken_and_why(
    caplog: pytest.LogCaptureFixture, devices: str, line: str
) -> None:
    with caplog.at_level(logging.INFO, "aioflagcx"):
        async with Engine(devices=devices):
            pass
    assert line in caplog.text


@pytest.mark.parametrize("devices", ["mlx5_0", "mlx5_*", "fake0,mlx5_0"])
async def test_a_device_that_is_not_there_is_told_with_those_that_are(devices: str) -> None:
    there = r"fake0 \(active\), fake1 \(active\), soft"
    with pytest.raises(ConfigError, match=rf"no device 'mlx5_[0*]' here; there are: {there}"):
        async with Engine(devices=devices):
            pass


async def test_a_port_that_goes_down_and_comes_back(
    nics: Nics, caplog: pytest.LogCaptureFixture
) -> None:
    def told(text: str) -> list[str]:
        return [record.levelname for record in caplog.records if text in record.message]

    caplog.set_level(logging.INFO, "aioflagcx")
    async with Engine() as decode, Engine() as prefill:
        await decode.register(bytearray(SIZE), name="kv")
        src = await prefill.register(bytes(SIZE), access="read")
        session = await prefill.connect(decode.session_id)
        await until(lambda: prefill.stats().rails_down == 0)
        nics.report(1, nics.PORT_ERROR)
        await until(lambda: told("device fake1: port error") == ["WARNING"])
        assert await prefill.write(session, src, session.regions["kv"], SIZE) == SIZE
        nics.report(1, nics.PORT_ACTIVE)
        await until(lambda: told("device fake1: port active") == ["INFO"])
        await until(lambda: prefill.stats().rails_down == 0)
        assert await prefill.write(session, src, session.regions["kv"], SIZE) == SIZE
        assert prefill.stats().endpoints_failed == 1


async def test_memory_that_may_not_be_locked_is_told_by_whoever_needs_it(nics: Nics) -> None:
    words = r"fake0: .*(ulimit -l unlimited|out of memory for it)"
    relaxed = Config(relaxed_ordering=True)
    async with Engine(config=relaxed) as decode, Engine() as prefill:
        await decode.register(bytearray(SIZE), name="kv")
        src = await prefill.register(bytes(SIZE), access="read")
        with nics.without_memory():
            with pytest.raises(RegistrationError, match=words):
                await prefill.register(bytearray(64))
            with pytest.raises(ConnectError, match=f"end with a read.*{words}"):
                await prefill.connect(decode.session_id)
        session = await prefill.connect(decode.session_id)
        assert await prefill.write(session, src, session.regions["kv"], SIZE) == SIZE
