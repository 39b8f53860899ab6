"""Several rails: connected together, each recovered by itself. Promises are in promises/."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from conformance.fixtures import Pairs
from conformance.pair import MiB, Pair, until

from aioflagcx import Engine, _native, rails
from aioflagcx.connecting import Connecting
from aioflagcx.errors import ConnectError, ConnectTimeout, ProtocolError
from aioflagcx.handshake.messages import Devices, DevicesReply, Error, Message
from aioflagcx.serving import Guest


def native(engine: Engine) -> _native.TransferEngine:
    assert engine._open is not None
    return engine._open.runtime.native


async def unplug(engine: Engine, device: int) -> None:
    await asyncio.to_thread(_native.testing_unplug, native(engine), device)


async def plug(engine: Engine, device: int) -> None:
    await asyncio.to_thread(_native.testing_plug, native(engine), device)


@pytest_asyncio.fixture
async def pair(pairs: Pairs) -> AsyncIterator[Pair]:
    """Two devices on each side, both in use."""
    pair = await pairs(size=32 * MiB, devices="soft:2")
    await until(lambda: not pair.ours.stats().rails_down)
    yield pair


def rails_of(pair: Pair) -> list[Any]:
    return pair.session._link.rails._rails


async def lose(pair: Pair, device: int) -> None:
    """Take a device of ours away, and use it until that has been noticed."""
    await unplug(pair.ours, device)
    while not rails_of(pair)[device].tries:
        await pair.write(pair.local.size)


async def test_a_transfer_that_moved_is_done_once_the_lost_rail_is_fenced(pair: Pair) -> None:
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    gate = asyncio.Event()
    fences = []

    async def waiting(connection: Any, message: Any) -> Any:
        if type(message).__name__ == "Fence":
            fences.append((message.attempt, message.rail))
            await gate.wait()
        return await handle(connection, message)

    assembly.serving.handle = waiting
    for _ in range(50):
        reposted = pair.ours.stats().slices_reposted
        transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, pair.local)
        await until(lambda transfer=transfer: transfer.bytes_done)
        await unplug(pair.ours, 1)
        await until(lambda transfer=transfer: transfer.bytes_done == transfer.bytes_total)
        if pair.ours.stats().slices_reposted > reposted:
            break
        gate.set()
        assert await transfer == pair.local.size
        await plug(pair.ours, 1)
        await until(lambda: not pair.ours.stats().rails_down)
        gate.clear()
    else:
        pytest.fail("the device was never lost in the middle")
    assert await pair.write(64) == 64  # others are not held up
    lost = rails_of(pair)[1]
    await until(lambda: not lost.up and (lost.failed, 1) in fences)
    assert not transfer.done()
    assert {rail for _, rail in fences} == {1}
    gate.set()
    assert await transfer == pair.local.size
    assert (pair.dst == pair.src).all()


async def test_a_lost_rail_rests_longer_and_longer(pair: Pair) -> None:
    await lose(pair, 1)
    rail = rails_of(pair)[1]
    loop = asyncio.get_running_loop()
    await until(lambda: rail.tries >= 2)
    started = loop.time()
    await until(lambda: rail.tries >= 4)
    assert loop.time() - started >= 0.1 + 0.2 - 0.05
    for _ in range(2_000):
        pair.session._link.rails._note_failure(rail, ConnectError("once more"))
    assert 4.9 < rail.rest_until - loop.time() < 5.1
    await plug(pair.ours, 1)
    await pair.session.close()  # does not wait for it


async def test_a_rail_that_fails_whenever_it_is_used_rests_longer_and_longer(pair: Pair) -> None:
    assembly: Any = pair.theirs._open
    [guest] = assembly.serving._guests.values()
    rail = rails_of(pair)[1]
    loop = asyncio.get_running_loop()

    async def fail() -> None:
        attempt = rail.attempt
        await asyncio.to_thread(guest._responder.fence, attempt, 1, 1.0)
        while rail.failed < attempt:
            await pair.write(pair.local.size)

    rests = []
    for _ in range(5):
        await fail()
        failed = loop.time()
        await until(lambda: rail.up)
        rests.append(loop.time() - failed)
    # Less what the last write took after the failure.
    assert rests[3] > 0.1 and rests[4] > 0.25
    assert rails_of(pair)[0].attempt == 1
    rail.up_since -= 60  # as if it had worked for a while
    await fail()
    assert not rail.relapses


async def test_a_resting_rail_is_tried_at_once_when_no_other_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rails, "_LONGEST_PAUSE", 2.0)  # still far beyond all tries of the other one
    await lose(pair, 1)
    rail = rails_of(pair)[1]
    await until(lambda: rail.tries >= 3)
    for _ in range(20):
        pair.session._link.rails._note_failure(rail, ConnectError("once more"))
    tries = rail.tries
    await until(lambda: rail.tries > tries)  # now it rests for as long as it can be
    resting_until = rail.rest_until
    await asyncio.sleep(2 * rails._PAUSE)  # it looks at the others after the first pause
    await plug(pair.ours, 1)
    await unplug(pair.ours, 0)
    assert await pair.write(pair.local.size, timeout=20) == pair.local.size
    assert asyncio.get_running_loop().time() < resting_until
    await until(lambda: rail.up)
    assert pair.session.alive


async def test_a_rail_that_stays_silent_does_not_hold_up_a_connect(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    establish = Connecting.establish
    gate = asyncio.Event()

    async def slow(self: Any, attempt: int, rail: int, theirs: Any, deadline: float) -> str:
        if rail == 1:
            await gate.wait()
        return await establish(self, attempt, rail, theirs, deadline)

    monkeypatch.setattr(Connecting, "establish", slow)
    loop = asyncio.get_running_loop()
    started = loop.time()
    pair = await pairs(devices="soft:2", connect_timeout=30.0)
    assert loop.time() - started < 15
    assert pair.ours.stats().rails_down == 1
    assert await pair.write() == 4096
    gate.set()
    await until(lambda: not pair.ours.stats().rails_down)
    assert rails_of(pair)[1].attempt == rails_of(pair)[0].attempt == 1  # the same connect


async def test_a_peer_that_does_not_tell_its_devices_gives_each_of_ours_one(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Guest.answer

    async def older(self: Any, message: Message) -> Message | None:
        if isinstance(message, Devices):
            return Error(code="unsupported", message="what is that?")
        return await answer(self, message)

    monkeypatch.setattr(Guest, "answer", older)
    pair = await pairs(devices="soft:2")
    await until(lambda: not pair.ours.stats().rails_down)
    assert [rail.index for rail in rails_of(pair)] == [0, 1]
    assert await pair.write() == 4096
    assert (pair.dst[:4096] == pair.src[:4096]).all()


@pytest.mark.parametrize("told", [(), ({"name": "x"},)], ids=["none", "without-subnet"])
async def test_devices_that_make_no_sense_are_a_protocol_error(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    answer = Guest.answer

    async def odd(self: Any, message: Message) -> Message | None:
        if isinstance(message, Devices):
            return DevicesReply(devices=told)
        return await answer(self, message)

    monkeypatch.setattr(Guest, "answer", odd)
    with pytest.raises(ProtocolError, match="device"):
        await pairs()


async def test_a_silent_rail_that_fails_at_last_is_tried_again(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    establish = Connecting.establish
    gate = asyncio.Event()

    async def failing(self: Any, attempt: int, rail: int, theirs: Any, deadline: float) -> str:
        if rail == 1 and attempt == 1:
            await gate.wait()
            raise ConnectTimeout("nobody answers")
        return await establish(self, attempt, rail, theirs, deadline)

    monkeypatch.setattr(Connecting, "establish", failing)
    pair = await pairs(devices="soft:2")
    gate.set()
    await until(lambda: not pair.ours.stats().rails_down)
    assert rails_of(pair)[1].attempt == 2
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "nobody answers" in warning.message


async def test_a_session_that_closes_leaves_no_rail_behind(pair: Pair) -> None:
    await lose(pair, 1)
    keeper = rails_of(pair)[1].keeper
    assert keeper is not None
    await pair.session.close()
    assert keeper.done()
    assert pair.ours.stats().sessions == 0
    assert pair.ours.stats().rails_down == 0
    session = await pair.ours.connect(pair.theirs.session_id)
    assert await pair.ours.write(session, pair.local, pair.remote, 64) == 64
