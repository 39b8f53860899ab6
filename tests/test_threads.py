from __future__ import annotations

import asyncio
import concurrent.futures.thread
import threading

import pytest

from aioflagcx.threads import NativeThreads


async def test_runs_on_named_threads() -> None:
    threads = NativeThreads("test")
    assert (await threads.run(lambda: threading.current_thread().name)).startswith("test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()


async def test_a_call_that_has_begun_is_not_left_behind() -> None:
    threads = NativeThreads("test")
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    def call() -> None:
        begun.set()
        go_on.wait()
        ended.append(True)

    task = asyncio.create_task(threads.run(call))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
    threads.close()


async def test_a_call_that_has_not_begun_can_be_cancelled() -> None:
    threads = NativeThreads("test")
    go_on = threading.Event()
    busy = [asyncio.create_task(threads.run(go_on.wait)) for _ in range(8)]
    called = []
    waiting = asyncio.create_task(threads.run(called.append, True))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    await asyncio.gather(*busy)
    threads.close()
    assert not called


async def test_closing_does_not_wait() -> None:
    threads = NativeThreads("test")
    go_on = threading.Event()
    task = asyncio.create_task(threads.run(go_on.wait))
    await asyncio.sleep(0)
    threads.close()
    go_on.set()
    assert await task


@pytest.fixture
def ended_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the interpreter."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)


async def test_at_the_end_of_the_interpreter_calls_run_on_the_loop(ended_executors: None) -> None:
    threads = NativeThreads("test")
    assert await threads.run(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    called: list[int] = []
    threads.submit(lambda: called.append(threading.get_ident()))
    assert called == [threading.get_ident()]


async def test_at_the_end_of_the_interpreter_others_get_their_turns(ended_executors: None) -> None:
    threads = NativeThreads("test")
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    while not await threads.run(turn.is_set):
        pass


async def test_a_closed_one_takes_no_calls() -> None:
    threads = NativeThreads("test")
    threads.close()
    with pytest.raises(RuntimeError):
        await threads.run(lambda: None)
    with pytest.raises(RuntimeError):
        threads.submit(lambda: None)
