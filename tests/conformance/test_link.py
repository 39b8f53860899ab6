"""Fences, the recovery of a failed data path, and what the target's owner can enforce."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.fixtures import Pairs
from conformance.pair import Pair, until

from aioflagcx import _native
from aioflagcx.errors import (
    AioFlagcxError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
)


def hold(pair: Pair, kind: str) -> asyncio.Event:
    """The peer answers no request of this kind until the event is set."""
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    gate = asyncio.Event()

    async def waiting(connection: Any, message: Any) -> Any:
        if type(message).__name__ == kind:
            await gate.wait()
        return await handle(connection, message)

    assembly.serving.handle = waiting
    return gate


def count(pair: Pair, kind: str) -> list[int]:
    """Counts the requests of this kind that the peer gets, in the list's only item."""
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    seen = [0]

    async def counting(connection: Any, message: Any) -> Any:
        seen[0] += type(message).__name__ == kind
        return await handle(connection, message)

    assembly.serving.handle = counting
    return seen


async def break_path(pair: Pair) -> None:
    """Put the queue pairs of the peer, and so ours, into the error state."""
    assembly: Any = pair.theirs._open
    [guest] = assembly.serving._guests.values()
    for rail in pair.session._link.rails._rails:
        await asyncio.to_thread(guest._responder.fence, rail.attempt, rail.index, 1.0)


@pytest.fixture
def aborted(pair: Pair) -> Callable[[], Any]:
    """Makes a transfer that was aborted with slices posted."""

    async def abort(**options: Any) -> Any:
        transfer = pair.submit_long(**options)
        await until(lambda: transfer.bytes_done)
        assert transfer._task is not None
        transfer.cancel()
        if not transfer.done() and transfer._task is not None:
            transfer._task.abort()
        return transfer

    return abort


# The initiator -----------------------------------------------------------------------------------


async def test_old_news_of_a_rail_disturbs_nobody(pair: Pair) -> None:
    connects = count(pair, "Connect")
    await break_path(pair)
    await pair.write()
    link = pair.session._link
    [rail] = link.rails._rails
    await until(lambda: rail.failed and rail.up)
    late = _native.Epoch(rail.failed, 0)
    link.endpoint_down(
        _native.EndpointDown(link.native.id, late, "IBV_WC_RETRY_EXC_ERR", 0, "a device", True)
    )
    assert rail.up and rail.keeper is None
    assert link.alive
    assert connects == [1]
    await pair.write()


async def test_a_recovery_gets_the_table_only_if_it_has_changed(pair: Pair) -> None:
    assembly: Any = pair.theirs._open
    handle = assembly.serving.handle
    tables = []

    async def noting(connection: Any, message: Any) -> Any:
        reply = await handle(connection, message)
        if type(message).__name__ == "Connect":
            tables.append(reply.table)
        return reply

    assembly.serving.handle = noting
    await break_path(pair)
    await pair.write()
    await until(lambda: tables)
    assert tables == [b""]

    link = pair.session._link
    [rail] = link.rails._rails
    await until(lambda: rail.up)
    link.table.pushed = lambda update: asyncio.sleep(0)  # type: ignore[method-assign,assignment]
    await pair.theirs.register(np.zeros(64, np.uint8), name="new")
    await break_path(pair)
    await pair.write()
    await until(lambda: len(tables) == 2 and "new" in pair.session.regions)
    assert tables[1]


async def test_a_failed_path_is_set_up_again_without_anyone_noticing(pair: Pair) -> None:
    writes = [pair.write() for _ in range(50)]
    running = asyncio.gather(*writes)
    await break_path(pair)
    assert await running == [4096] * 50
    assert await asyncio.gather(*(pair.write() for _ in range(50))) == [4096] * 50
    assert pair.session.alive


async def test_data_is_right_although_the_path_fails_again_and_again(pairs: Pairs) -> None:
    pair = await pairs(size=8 << 20, retry_count=255)
    for value in range(3):
        pair.src[:] = value + 1
        write = asyncio.ensure_future(pair.write(pair.local.size))
        for _ in range(3):
            await asyncio.sleep(0)
            await break_path(pair)
        assert await write == pair.local.size
        assert (pair.dst == value + 1).all()


async def test_one_aborted_transfer_does_not_fail_the_others(
    pair: Pair, aborted: Callable[..., Any]
) -> None:
    writes = [asyncio.ensure_future(pair.write()) for _ in range(20)]
    transfer = await aborted()
    writes += [asyncio.ensure_future(pair.write()) for _ in range(20)]
    assert await asyncio.gather(*writes) == [4096] * 40
    with pytest.raises(TransferCancelled) as caught:
        await transfer
    assert caught.value.remote_quiet
    assert transfer.remote_quiet


async def test_without_the_peers_confirmation_remote_quiet_is_false_in_time(
    pairs: Pairs, devices: Devices
) -> None:
    pair = await pairs(drain_timeout=0.2)
    gate = hold(pair, "Fence")
    transfer = pair.submit_long(notify=("never", b""))
    await until(lambda: transfer.bytes_done)
    await break_path(pair)  # slices that are posted end with unknown outcome
    await until(lambda: pair.ours.stats().endpoints_failed)
    loop = asyncio.get_running_loop()
    started = loop.time()
    transfer.cancel()
    with pytest.raises(TransferCancelled, match="did not confirm") as caught:
        await transfer
    assert loop.time() - started < 0.2 + 0.5 * devices.pace
    assert caught.value.remote_quiet is transfer.remote_quiet is False
    assert caught.value.notify_delivered is False
    gate.set()
    assert await pair.write() == 4096


@pytest.mark.parametrize("by", ["close", "quiesce"])
async def test_a_peer_that_ends_the_session_confirms_it_with_its_goodbye(
    pairs: Pairs, by: str
) -> None:
    pair = await pairs(drain_timeout=10)
    hold(pair, "Fence")
    transfers = [pair.submit_long(), pair.submit_long()]
    await until(lambda: all(transfer.bytes_done for transfer in transfers))
    await break_path(pair)  # slices that are posted end with unknown outcome
    await until(lambda: pair.ours.stats().endpoints_failed)
    transfers[0].cancel()
    await (pair.theirs.close() if by == "close" else pair.theirs.quiesce(pair.ours.session_id))
    with pytest.raises(TransferCancelled) as cancelled:
        await transfers[0]
    assert cancelled.value.remote_quiet is transfers[0].remote_quiet is True
    with pytest.raises(PeerLost, match="engine closed" if by == "close" else "quiesced") as lost:
        await transfers[1]
    assert lost.value.remote_quiet is transfers[1].remote_quiet is True
    pair.dst[:] = 77
    assert (pair.dst == 77).all()


async def test_a_recovery_that_meets_the_end_of_the_session_leaves_it_the_last_word(
    pair: Pair,
) -> None:
    """The peer has fenced and not yet said goodbye when we want to connect anew."""
    assembly: Any = pair.theirs._open
    [guest] = assembly.serving._guests.values()
    asked = asyncio.Event()
    answer = guest.answer

    async def answering(message: Any) -> Any:
        if type(message).__name__ == "Connect":
            asked.set()
        return await answer(message)

    guest.answer = answering
    fence_all = guest._fence_all

    async def slow_fence() -> bool:
        fenced = await fence_all()
        await asyncio.wait_for(asked.wait(), 20)
        return bool(fenced)

    guest._fence_all = slow_fence
    transfer = pair.submit_long()
    await until(lambda: transfer.bytes_done)
    await pair.theirs.quiesce(pair.ours.session_id)
    with pytest.raises(PeerLost, match="quiesced") as lost:
        await transfer
    assert lost.value.remote_quiet is True
    assert await pair.write() == 4096


async def test_with_the_peers_confirmation_remote_quiet_is_true(pair: Pair) -> None:
    fences = count(pair, "Fence")
    transfer = pair.submit_long()
    await until(lambda: transfer.bytes_done)
    await break_path(pair)
    transfer.cancel()
    with pytest.raises(TransferCancelled) as caught:
        await transfer
    assert caught.value.remote_quiet is transfer.remote_quiet is True
    assert await pair.write() == 4096
    assert fences[0] == 1


async def test_each_attempt_is_fenced_once(pair: Pair) -> None:
    fences = count(pair, "Fence")
    transfers = [pair.submit_long() for _ in range(8)]
    await until(lambda: all(transfer.bytes_done for transfer in transfers))
    tasks = [transfer._task for transfer in transfers]
    for transfer in transfers:
        transfer.cancel()
    for task in tasks:
        if task is not None:
            task.abort()
    for transfer in transfers:
        with pytest.raises(TransferCancelled):
            await transfer
    await pair.write()
    [rail] = pair.session._link.rails._rails
    assert fences[0] == rail.attempt - 1


async def test_slices_stay_parked_while_the_fence_is_unanswered(pair: Pair) -> None:
    gate = hold(pair, "Fence")
    await break_path(pair)
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, 64)
    await until(lambda: pair.ours.stats().endpoints_failed)
    assert not transfer.done()
    with pytest.raises(TransferTimeout):
        await pair.write(timeout=0.1)
    assert not transfer.done()
    gate.set()
    assert await transfer == 64


async def test_a_peer_that_refuses_the_next_attempt_is_lost(pair: Pair) -> None:
    assembly: Any = pair.theirs._open

    async def refuse(connection: Any, message: Any) -> Any:
        raise AioFlagcxError("no more")

    await break_path(pair)
    assembly.serving.handle = refuse
    with pytest.raises(PeerLost, match=r"could not be set up again|did not fence"):
        await pair.write()
    assert not pair.session.alive
    del assembly.serving.handle
    assert await pair.ours.write(pair.session, pair.local, pair.remote, 64) == 64


# The target --------------------------------------------------------------------------------------


async def test_quiesce_fences_a_peer(pair: Pair) -> None:
    for name in (pair.ours.session_id, pair.ours.engine_id):
        transfer = pair.submit_long()
        await until(lambda transfer=transfer: transfer.bytes_done)
        await pair.theirs.quiesce(name)
        before = pair.dst.copy()
        pair.dst[:] = 0xA5  # the owner uses its memory again
        with pytest.raises(PeerLost, match="quiesced"):
            await transfer
        assert (pair.dst == 0xA5).all()
        assert not pair.session.alive
        assert await pair.write() == 4096  # its next call connects afresh
        pair.dst[:] = before
        pair.session = await pair.ours.connect(pair.theirs.session_id)


async def test_quiesce_of_nobody(pair: Pair) -> None:
    await pair.theirs.quiesce("127.0.0.1:1")
    await pair.theirs.quiesce(pair.theirs.engine_id)


async def test_quiesce_of_what_is_no_id_does_not_pass_for_a_fence(pair: Pair) -> None:
    for no_id in (None, pair.session, pair.ours.engine_id.encode()):
        with pytest.raises(TypeError, match="engine id"):
            await pair.theirs.quiesce(no_id)  # type: ignore[arg-type]
    for no_id in ("", "127.0.0.1", pair.ours.engine_id[:8]):
        with pytest.raises(ValueError, match="address"):
            await pair.theirs.quiesce(no_id)
    assert pair.session.alive
    assert await pair.write() == 4096


async def test_a_session_that_ends_is_fenced_by_the_target(pair: Pair) -> None:
    assert pair.theirs.stats().responders == 1
    await pair.session.close()
    await until(lambda: not pair.theirs.stats().responders)


async def test_nothing_arrives_after_a_cancelled_write_is_quiet(pair: Pair) -> None:
    for _ in range(10):
        pair.src[:] = 1
        transfer = pair.submit_long()
        await until(lambda transfer=transfer: transfer.bytes_done)
        transfer.cancel()
        with pytest.raises(TransferCancelled) as caught:
            await transfer
        assert caught.value.remote_quiet
        pair.src[:] = 2
        pair.dst[:] = 3
        assert await pair.ours.read(pair.session, pair.local, pair.remote, 8) == 8
        assert (np.asarray(pair.dst) == 3).all()
