"""What `Transfer` promises its awaiters, above all when it is stopped."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.fixtures import Pairs
from conformance.pair import Pair, until

from aioflagcx import Transfer
from aioflagcx.errors import (
    EngineClosed,
    PeerLost,
    RemoteAddressError,
    TransferCancelled,
    TransferTimeout,
)


async def test_success(pair: Pair) -> None:
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, pair.local)
    assert transfer.status == "pending"
    assert not transfer.done()
    assert not transfer.remote_quiet
    with pytest.raises(asyncio.InvalidStateError):
        transfer.exception()
    assert await transfer == transfer.bytes_total == pair.local.size
    assert transfer.done()
    assert transfer.status == "done"
    assert transfer.bytes_done == pair.local.size
    assert transfer.remote_quiet
    assert transfer.exception() is None
    assert not transfer.cancel()
    assert await transfer == pair.local.size  # as often as one likes
    assert (pair.src == pair.dst).all()


async def test_progress_can_be_watched(pair: Pair) -> None:
    transfer = pair.submit_long()
    for _ in range(3):
        before = transfer.bytes_done
        await until(lambda before=before: transfer.bytes_done > before)
    assert transfer.bytes_done < transfer.bytes_total
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        await transfer


# Cancellation ------------------------------------------------------------------------------------


async def test_cancel_ends_it_for_its_awaiters(pair: Pair) -> None:
    transfer = pair.submit_long()
    awaiters = [asyncio.ensure_future(transfer) for _ in range(2)]
    await asyncio.sleep(0)
    assert transfer.cancel()
    assert transfer.status == "pending"  # until it is quiet
    for awaiter in awaiters:
        with pytest.raises(TransferCancelled) as caught:
            await awaiter
        assert caught.value.remote_quiet
        assert caught.value.peer == pair.session.id
    assert transfer.status == "cancelled"
    assert isinstance(transfer.exception(), TransferCancelled)
    assert not transfer.cancel()


async def test_cancel_twice_before_it_is_quiet(pair: Pair) -> None:
    transfer = pair.submit_long()
    assert transfer.cancel()
    assert transfer.cancel() or transfer.done()
    with pytest.raises(TransferCancelled):
        await transfer


async def test_a_cancelled_awaiter_cancels_and_waits_until_it_is_quiet(pair: Pair) -> None:
    transfer = pair.submit_long()
    awaiter = asyncio.ensure_future(transfer)
    await asyncio.sleep(0)
    awaiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await awaiter
    assert transfer.done()
    assert transfer.status == "cancelled"


async def test_further_cancellations_are_absorbed(pair: Pair) -> None:
    transfer = pair.submit_long()
    after: list[str] = []

    async def use() -> None:
        try:
            await transfer
        except asyncio.CancelledError:
            after.append(transfer.status)
            await asyncio.sleep(0)  # a second CancelledError would come here
            after.append("cleaned up")
            raise

    awaiter = asyncio.create_task(use())
    await asyncio.sleep(0)
    for _ in range(5):
        awaiter.cancel()
        await asyncio.sleep(0)
        if transfer.done():
            break
    with pytest.raises(asyncio.CancelledError):
        await awaiter
    if after == ["cancelled"]:  # the last cancel() came after the end, and meant the clean-up
        return
    assert after == ["cancelled", "cleaned up"]


async def test_two_cancels_in_one_turn_are_one(pair: Pair) -> None:
    transfer = pair.submit_long()
    after: list[str] = []

    async def use() -> None:
        try:
            await transfer
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            after.append(transfer.status)
            raise

    awaiter = asyncio.create_task(use())
    await asyncio.sleep(0)
    awaiter.cancel()
    awaiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await awaiter
    assert after == ["cancelled"]


async def test_one_awaiter_cancelled_the_other_gets_transfer_cancelled(pair: Pair) -> None:
    transfer = pair.submit_long()
    first, second = (asyncio.ensure_future(transfer) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(TransferCancelled):
        await second
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_both_awaiters_cancelled(pair: Pair) -> None:
    transfer = pair.submit_long()
    awaiters = [asyncio.ensure_future(transfer) for _ in range(2)]
    await asyncio.sleep(0)
    for awaiter in awaiters:
        awaiter.cancel()
    results = await asyncio.gather(*awaiters, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2


async def test_shield_protects_it(pair: Pair) -> None:
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, pair.local)

    async def use() -> None:
        await asyncio.shield(transfer)

    awaiter = asyncio.create_task(use())
    await asyncio.sleep(0)
    awaiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await awaiter
    assert await transfer == pair.local.size
    assert (pair.src == pair.dst).all()


async def test_wait_for(pair: Pair) -> None:
    transfer = pair.submit_long()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(transfer, 0.05)
    assert transfer.done()
    assert transfer.status == "cancelled"
    assert await asyncio.wait_for(pair.write(), 10) == 4096


if sys.version_info >= (3, 11):  # asyncio.timeout() and TaskGroup came with it

    async def test_asyncio_timeout(pair: Pair) -> None:
        transfer = pair.submit_long()
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await transfer
        assert transfer.status == "cancelled"
        assert task.cancelling() == 0  # the timeout took its cancellation back
        await pair.write()

    async def test_cancelled_within_asyncio_timeout_is_cancelled(pair: Pair) -> None:
        transfer = pair.submit_long()

        async def use() -> None:
            async with asyncio.timeout(0.05):
                await transfer

        task = asyncio.create_task(use())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def test_task_group_ends_its_transfers_before_it_raises(pair: Pair) -> None:
        transfers = [pair.submit_long() for _ in range(3)]

        async def use(transfer: Transfer) -> int:
            return await transfer

        async def fail() -> None:
            await asyncio.sleep(0)
            raise KeyError("other")

        with pytest.raises(ExceptionGroup) as caught:  # noqa: F821 - of Python 3.11
            async with asyncio.TaskGroup() as group:
                for transfer in transfers:
                    group.create_task(use(transfer))
                group.create_task(fail())
        assert [type(error) for error in caught.value.exceptions] == [KeyError]
        assert [transfer.status for transfer in transfers] == ["cancelled"] * 3


async def test_gather(pair: Pair) -> None:
    transfers = [pair.submit_long() for _ in range(3)]

    async def all_of_them() -> None:
        await asyncio.gather(*transfers)

    task = asyncio.create_task(all_of_them())
    for _ in range(3):  # the task, gather's tasks, the transfers
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for transfer in transfers:
        with pytest.raises(TransferCancelled):
            await transfer
    assert await asyncio.gather(*(pair.write() for _ in range(100))) == [4096] * 100


async def test_a_cancel_that_comes_too_late_leaves_the_result(pair: Pair) -> None:
    """The awaiter is cancelled when the transfer is done but the awaiter has not run yet."""
    transfer = pair.ours.submit_write(pair.session, pair.local, pair.remote, 64)
    awaiter = asyncio.ensure_future(transfer)
    await until(transfer.done)
    awaiter.cancel()
    result = (await asyncio.gather(awaiter, return_exceptions=True))[0]
    assert transfer.status == "done"
    assert result == 64 or isinstance(result, asyncio.CancelledError)


async def test_an_awaiter_on_another_loop_is_refused(pair: Pair) -> None:
    transfer = pair.submit_long()

    def elsewhere() -> None:
        async def use() -> None:
            await transfer

        asyncio.run(use())

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(elsewhere)
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        await transfer


async def test_other_transfers_of_the_session_go_on_when_one_is_cancelled(pair: Pair) -> None:
    long = pair.submit_long()
    writes = [asyncio.ensure_future(pair.write()) for _ in range(50)]
    await asyncio.sleep(0)
    long.cancel()
    assert await asyncio.gather(*writes) == [4096] * 50
    with pytest.raises(TransferCancelled):
        await long


# Timeouts ----------------------------------------------------------------------------------------


async def test_timeout(pair: Pair, devices: Devices) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    transfer = pair.submit_long(timeout=0.1)
    with pytest.raises(TransferTimeout, match=r"not done within 0\.1 s") as caught:
        await transfer
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.peer == pair.session.id
    assert caught.value.remote_quiet == transfer.remote_quiet
    assert transfer.status == "timed_out"
    assert 0.1 <= loop.time() - started <= 0.1 + 1.0 + 0.5 * devices.pace


async def test_timeouts_in_any_order(pair: Pair) -> None:
    """Those that come first are not kept waiting by those that come later."""
    timeouts = [40, 0.3, 60, 0.1, 50, 0.2]
    transfers = [pair.submit_long(timeout=timeout) for timeout in timeouts]
    for transfer, timeout in zip(transfers, timeouts, strict=True):
        if timeout < 1:
            with pytest.raises(TransferTimeout):
                await transfer
    for transfer, timeout in zip(transfers, timeouts, strict=True):
        assert transfer.done() == (timeout < 1)
        transfer.cancel()


async def test_the_default_timeout_is_that_of_the_configuration(
    pairs: Pairs,
) -> None:
    pair = await pairs(transfer_timeout=0.1)
    with pytest.raises(TransferTimeout):
        await pair.submit_long()
    endless = pair.submit_long(timeout=None)
    await asyncio.sleep(0.3)  # longer than the default: nothing else could be waited for
    assert not endless.done()
    endless.cancel()
    with pytest.raises(TransferCancelled):
        await endless


@pytest.mark.parametrize("timeout", [0, -1, 0.0, float("nan")])
async def test_a_timeout_that_is_none(pair: Pair, timeout: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        pair.ours.submit_write(pair.session, pair.local, pair.remote, 1, timeout=timeout)


@pytest.mark.parametrize("timeout", ["1", True, object()])
async def test_a_timeout_of_the_wrong_type(pair: Pair, timeout: Any) -> None:
    with pytest.raises(TypeError):
        await pair.write(timeout=timeout)


# Nobody waits ------------------------------------------------------------------------------------


async def test_a_dropped_transfer_runs_on(pair: Pair) -> None:
    pair.ours.submit_write(pair.session, pair.local, pair.remote, pair.local)
    gc.collect()
    await until(lambda: pair.ours.stats().transfers_done)
    assert (pair.src == pair.dst).all()


async def test_a_dropped_transfers_error_is_logged_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.ours.submit_write(pair.session, pair.local, 1, 1)
    await until(lambda: not pair.ours.stats().transfers_pending)
    gc.collect()
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].name.startswith("aioflagcx")
    assert "RemoteAddressError" in errors[0].getMessage()


async def test_an_error_that_was_seen_is_not_logged(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    first = pair.ours.submit_write(pair.session, pair.local, 1, 1)
    with pytest.raises(RemoteAddressError):
        await first
    second = pair.ours.submit_write(pair.session, pair.local, 1, 1)
    await until(second.done)
    assert isinstance(second.exception(), RemoteAddressError)
    third = pair.submit_long()
    third.cancel()
    await until(third.done)
    del first, second, third
    gc.collect()
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


# The end of engine, session and loop -------------------------------------------------------------


async def test_closing_the_engine_ends_it_with_engine_closed(pair: Pair) -> None:
    transfer = pair.submit_long()
    awaiter = asyncio.ensure_future(transfer)
    await asyncio.sleep(0)
    await pair.ours.close()
    assert transfer.done()
    assert transfer.status == "cancelled"
    with pytest.raises(EngineClosed):
        await awaiter


async def test_closing_the_session_cancels_it(pair: Pair) -> None:
    transfer = pair.submit_long()
    await pair.session.close()
    assert transfer.done()
    with pytest.raises(TransferCancelled):
        await transfer


async def test_a_closing_peer_fails_it_with_peer_lost(pair: Pair) -> None:
    transfer = pair.submit_long()
    await asyncio.sleep(0)
    await pair.theirs.close()
    with pytest.raises(PeerLost, match="engine closed"):
        await transfer
    assert transfer.status == "failed"


def test_shutting_the_loop_down_around_a_transfer(devices: Devices) -> None:
    """asyncio.run cancels every task there is, the library's own included, at its end."""
    transfers: list[Transfer] = []

    async def use(awaiting: asyncio.Event) -> None:
        async with devices.near.engine() as ours, devices.far.engine() as theirs:
            memory = np.zeros(1 << 20, np.uint8)
            local = await ours.register(memory)
            await theirs.register(memory)
            pieces = np.zeros(200_000, np.int64) + local.addr
            transfer = ours.submit_write(theirs.session_id, pieces, pieces, local)
            transfers.append(transfer)
            awaiting.set()
            await transfer

    async def main() -> None:
        awaiting = asyncio.Event()
        main.task = asyncio.create_task(use(awaiting))  # type: ignore[attr-defined]
        await awaiting.wait()
        await asyncio.sleep(0.05)  # somewhere in the middle of it

    asyncio.run(main())
    assert transfers[0].done()
    assert main.task.cancelled()  # type: ignore[attr-defined]


async def test_cancelling_on_another_thread_is_refused(pair: Pair) -> None:
    transfer = pair.submit_long()
    with pytest.raises(RuntimeError, match="event loop"):
        await asyncio.to_thread(transfer.cancel)
    assert not transfer.done()
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        await transfer
