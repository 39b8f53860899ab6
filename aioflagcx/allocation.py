"""Memory that the engine owns, with pages that exist: allocated off the event loop, in steps."""

from __future__ import annotations

import contextlib
import errno
import operator
from collections.abc import Callable

from . import _native
from .errors import RegistrationError
from .free_memory import HugePages, available, huge_pages
from .threads import NativeThreads

__all__ = ["allocate", "check_size"]

_STEP = 256 << 20
"""Bytes whose pages are asked for at once, about 50 ms: what a cancelled caller waits for."""

_MAX_SIZE = 2**62
"""Bytes; far more than a process can address, and far from overflowing a file's size."""


def check_size(size: object) -> int:
    """The size as an int; TypeError for what is no integer, RegistrationError for 0 and less."""
    if isinstance(size, bool):
        raise TypeError("size must be an integer, the number of bytes, not bool")
    try:
        number = operator.index(size)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"size must be an integer, the number of bytes, not {type(size).__name__}"
        ) from None
    if not 0 < number <= _MAX_SIZE:
        raise RegistrationError(f"size={number}: accepted is 1 to {_MAX_SIZE} bytes")
    return number


async def allocate(
    threads: NativeThreads, size: int, huge: bool, check_open: Callable[[], None]
) -> _native.Allocation:
    """``size`` bytes, zero-filled, whose pages are there; ``huge`` ones from the system's pool.

    ``check_open`` is called between steps and may raise. When this does not return, for whatever
    reason, nothing is left. Raises :class:`~aioflagcx.errors.RegistrationError` when there is not
    so much memory.
    """
    work = _Work(size, huge)
    try:
        await threads.run(work.create)
        for offset in range(0, work.made.mapped, work.step):
            check_open()
            await threads.run(work.populate, offset)
        return work.made
    finally:
        # The frames that an exception's traceback holds have the work, not the memory.
        with contextlib.suppress(AttributeError):
            del work.made


class _Work:
    """An allocation while it comes about; its methods block."""

    made: _native.Allocation

    def __init__(self, size: int, huge: bool) -> None:
        self._size = size
        self._huge = huge

    @property
    def step(self) -> int:
        """Bytes for one :meth:`populate`."""
        return max(_STEP, self.made.page)

    def create(self) -> None:
        if not self._huge:
            _check_available(self._size, self._size)
        try:
            self.made = _native.Allocation(self._size, self._huge)
        except _native.NativeError as error:
            raise _failed(self._size, self._huge, error) from error

    def populate(self, offset: int) -> None:
        if not self._huge:  # others allocate too
            _check_available(self.made.mapped - offset, self._size)
        try:
            self.made.populate(offset, self.step)
        except _native.NativeError as error:
            raise _failed(self._size, self._huge, error) from error


def _check_available(needed: int, size: int) -> None:
    left = available()
    if needed > left:
        raise RegistrationError(
            f"{size} bytes cannot be allocated: {needed} are needed and {left} are left on this "
            "host, or within the limits of this process's control group; free some or ask for less"
        )


def _failed(size: int, huge: bool, error: _native.NativeError) -> RegistrationError:
    words = f"{size} bytes cannot be allocated"
    if error.errno == errno.EMFILE:
        words += (
            ": each allocation is an open file, and there are as many as RLIMIT_NOFILE allows "
            "(ulimit -n); register parts of one allocation instead, or raise the limit"
        )
    elif error.errno == errno.EFBIG:
        words += ": RLIMIT_FSIZE (ulimit -f) limits memory that is a file too; raise it"
    elif huge:
        words += " in huge pages: " + _about(huge_pages(), size)
    return RegistrationError(words, cause=error)


def _about(pool: HugePages, size: int) -> str:
    if not pool.size:
        return "this system has none; use huge_pages=False"
    needed = -(-size // pool.size)
    missing = needed - pool.free
    return (
        f"{needed} of {pool.size} bytes are needed and {pool.free} of {pool.total} are free; "
        f"reserve them (as root: sysctl -w vm.nr_hugepages={pool.total + max(missing, 0)}) or use "
        "huge_pages=False"
    )
