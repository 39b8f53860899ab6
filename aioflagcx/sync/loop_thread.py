"""The event loop of a blocking engine, on a thread of its own, and how others get work done there.

Whoever waits does so in :meth:`_native.Waiter.wait`: without the GIL, and returning to Python when
a signal has come, so that Ctrl-C raises KeyboardInterrupt there.
"""

from __future__ import annotations

import asyncio
import logging
import numbers
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Generic, TypeVar

import uvloop

from .. import _native
from ..errors import EngineClosed

__all__ = ["Call", "LoopThread", "patience", "settle"]

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def patience(timeout: float | None) -> float | None:
    """A limit of waiting: seconds, 0 to only look, or None.

    Raises TypeError and ValueError for what is none.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 seconds or more, not {timeout}")
    return float(timeout)


def settle(loop: LoopThread, stop: Callable[[], object], waiter: _native.Waiter) -> None:
    """Have the loop call ``stop``, which brings about that ``waiter`` opens, and wait for that.

    No signal handler runs while this waits.
    """
    try:
        loop.post(stop)
    except EngineClosed:
        return  # all that there was has ended with the loop
    waiter.wait(signals=False)


class LoopThread:
    """Runs an event loop until :meth:`stop`.

    Does not hold the engine, which can therefore be collected; see :meth:`abandon`. The thread is
    a daemon: at the end of the interpreter it is there for as long as an engine needs to close.
    """

    _abandoned: ClassVar[set[LoopThread]] = set()
    """Those that were left to end by themselves, until they have."""

    def __init__(self) -> None:
        self._ended = _native.Waiter()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        """The loop; its clock, as asyncio's own, is that of :func:`time.monotonic`."""
        self._pid = os.getpid()
        # Guards `_stopping`: what is posted before it is set is run before the loop ends.
        # Reentrant, as a collection can call `abandon` at any point.
        self._lock = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="aioflagcx-loop", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, which has no thread."""
        return os.getpid() != self._pid

    def check_caller(self) -> None:
        """Raise RuntimeError where waiting for the loop would never end."""
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a blocking call on the engine's own event loop thread would wait for itself"
            )
        if self.forked:
            raise RuntimeError(
                "this engine is a copy from before the fork, without its threads: make a new one "
                "in a child started with the spawn method"
            )

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Have ``callback`` called on the loop, without waiting; EngineClosed if it has ended."""
        with self._lock:
            if self._stopping:
                raise EngineClosed("the engine is closed")
            self.loop.call_soon_threadsafe(callback, *args)

    def run(
        self,
        function: Callable[[], Coroutine[Any, Any, _T]],
        undo: Callable[[_T], object] | None = None,
    ) -> _T:
        """Run a coroutine on the loop and wait for its result.

        When waiting is interrupted by what a signal handler raises, the coroutine is cancelled and
        has ended before that is raised. If it had a result by then, ``undo`` is called with it, on
        the loop.
        """
        self.check_caller()
        call = Call(self, function)
        try:
            try:
                call.begin()
                call.waiter.wait()
                return call.result()
            except BaseException:
                call.stop()
                raise
        except BaseException:
            call.abandon(undo)  # stops it, too: another signal may have come on the way
            raise
        finally:
            del call  # the traceback would tie a knot

    def stop(self) -> None:
        """End the loop, and return when it has ended. Tasks that are left are cancelled."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                self.loop.call_soon_threadsafe(self.loop.stop)
        self._ended.wait()
        self._thread.join()

    def abandon(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``close``, then end the loop, with nobody waiting; from any thread."""
        with self._lock:
            if not self._stopping:
                self._abandoned.add(self)
                self.loop.call_soon_threadsafe(self._close_and_stop, close)

    @classmethod
    def join_abandoned(cls) -> None:
        """Wait until those that were abandoned have ended, at the end of the interpreter."""
        for abandoned in list(cls._abandoned):
            if not abandoned.forked:
                abandoned._ended.wait()
                abandoned._thread.join()

    def _close_and_stop(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            with self._lock:
                self._stopping = True
            self.loop.stop()
            if not task.cancelled() and task.exception() is not None:
                _logger.error("an engine could not be closed", exc_info=task.exception())

        self._closing = self.loop.create_task(close())
        self._closing.add_done_callback(ended)

    def _run(self) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            while not self._stopping:
                try:
                    loop.run_forever()
                except BaseException:  # SystemExit and the like pass through run_forever()
                    _logger.exception("raised by a callback on an engine's event loop")
            loop.run_until_complete(self._end())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            self._abandoned.discard(self)
            self._ended.open()

    async def _end(self) -> None:
        await asyncio.sleep(0)  # callbacks posted at the last moment
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()


class Call(Generic[_T]):
    """A coroutine that a thread has the loop run.

    The calling thread owns it, except for `_task`, which the loop sets, and which others look at
    once ``waiter`` is open.
    """

    __slots__ = ("_begun", "_function", "_loop", "_task", "waiter")

    def __init__(self, loop: LoopThread, function: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._loop = loop
        self._function = function
        self._begun = False
        self._task: asyncio.Task[_T] | None = None
        self.waiter = _native.Waiter()
        """Open when the coroutine has ended."""

    def begin(self) -> None:
        """Have it started; EngineClosed when the loop has ended."""
        self._begun = True  # before it is: we may be interrupted in between
        self._loop.post(self._start)

    def _start(self) -> None:
        self._task = self._loop.loop.create_task(self._main())
        self._task.add_done_callback(lambda _: self.waiter.open())

    async def _main(self) -> _T:
        return await self._function()

    def stop(self) -> None:
        """Cancel it and wait for its end; no signal handler runs while this waits."""
        if self._begun and not self.waiter.is_open:
            settle(self._loop, self._cancel, self.waiter)

    def abandon(self, undo: Callable[[_T], object] | None) -> None:
        """:meth:`stop`. If it had a result by then, ``undo`` is called with it, on the loop."""
        try:
            self.stop()
        finally:
            if undo is not None and self.has_result():
                try:
                    self._loop.post(undo, self.result())
                except EngineClosed:
                    undo(self.result())  # the loop has ended, and nobody else is there

    def _cancel(self) -> None:
        if self._task is None:
            self.waiter.open()  # it was not started, and will not be
        else:
            # After its first step, which may find that there is nothing to wait for.
            self._loop.loop.call_soon(self._task.cancel)

    def has_result(self) -> bool:
        """Whether it has ended, and not by an exception."""
        task = self._task
        return task is not None and task.done() and not task.cancelled() and not task.exception()

    def result(self) -> _T:
        """What it has returned or raised; EngineClosed when the loop ended under it."""
        task = self._task
        assert task is not None
        try:
            return task.result()
        except asyncio.CancelledError:
            raise EngineClosed("the engine was closed while the call was waiting") from None
        finally:
            del self, task
