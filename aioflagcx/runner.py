"""Running a program on uvloop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

__all__ = ["run"]

_T = TypeVar("_T")


def run(coro: Coroutine[Any, Any, _T], *, debug: bool | None = None) -> _T:
    """:func:`asyncio.run` on uvloop: run ``coro`` to its end and return its result.

    Raises RuntimeError when an event loop is running in this thread already.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError("aioflagcx.run() cannot be called from a running event loop")
    if sys.version_info >= (3, 11):
        with asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(coro)
    return _run_310(coro, debug)


def _run_310(coro: Coroutine[Any, Any, _T], debug: bool | None) -> _T:
    """asyncio.run as of Python 3.10, which has no loop factory."""
    previous = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        return asyncio.run(coro, debug=debug)
    finally:
        asyncio.set_event_loop_policy(previous)
