"""Ways of waiting that asyncio does not have."""

from __future__ import annotations

import asyncio
import enum
import math
import numbers
from typing import TypeVar

__all__ = ["DEFAULT", "Default", "Timeout", "check_loop", "outlast", "seconds"]

_T = TypeVar("_T")


class Default(enum.Enum):
    """The type of :data:`DEFAULT`."""

    DEFAULT = "DEFAULT"

    def __repr__(self) -> str:
        return self.value


DEFAULT = Default.DEFAULT
"""A timeout left to :class:`~aioflagcx.Config`."""

Timeout = float | None | Default


def seconds(timeout: Timeout, default: float | None) -> float | None:
    """``timeout`` with the default filled in; None is no limit.

    Raises ValueError for 0, less, or no number, and TypeError for what is not even that.
    """
    if timeout is DEFAULT:
        return default
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, not {timeout}")
    return None if timeout == math.inf else float(timeout)


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RuntimeError anywhere but on the thread and in the time of ``loop``."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        raise RuntimeError("an engine is used on the event loop it was started on, only")


async def outlast(future: asyncio.Future[_T]) -> _T:
    """Wait for ``future`` to its end; a cancellation meanwhile is raised only then.

    For what must not be left half done and ends soon by itself.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved: the cancellation is what gets reported
        raise cancelled
    return future.result()
