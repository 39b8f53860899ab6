"""Where blocking native calls run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .waiting import outlast

__all__ = ["NativeThreads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_THREADS = 8
"""Blocking native calls at once: they wait for the kernel or a peer, so more than there are
cores, and a bound, so that a hundred peers connecting do not become a hundred threads."""


class NativeThreads:
    """An executor whose calls are never left behind.

    At the end of the interpreter, when executors take nothing any more, calls block the event loop
    instead: an engine that is still open must be able to close.

    Cancelling :meth:`run` takes effect when the call has returned, since native objects must
    not be freed under it; calls are bounded in time by their own arguments.
    """

    def __init__(self, name: str) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(_MAX_THREADS, name)
        self._closed = False

    async def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call it on a thread; a call that no thread has begun yet can be cancelled."""
        try:
            call_future = self._executor.submit(call, *args, **kwargs)
        except RuntimeError:
            if self._closed:
                raise
            await asyncio.sleep(0)  # callers in a loop must leave the others their turns
            return call(*args, **kwargs)
        waiter = asyncio.wrap_future(call_future)
        try:
            await asyncio.wait((waiter,))
        except asyncio.CancelledError:
            if call_future.cancel():
                raise  # no thread has begun it
            with contextlib.suppress(Exception):
                await outlast(waiter)
            raise
        return waiter.result()

    def submit(self, call: Callable[[], object]) -> None:
        """Call it on a thread, with nobody waiting; works without a loop."""
        try:
            self._executor.submit(call)
        except RuntimeError:
            if self._closed:
                raise
            call()

    def close(self) -> None:
        """No new calls; the threads end once those under way have returned. Does not block."""
        self._closed = True
        self._executor.shutdown(wait=False)
