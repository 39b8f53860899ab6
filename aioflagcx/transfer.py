"""One transfer under way, as its caller sees it.

A transfer is local-quiet when it is done: none of its slices is posted, queued or being copied.
It gets there through these phases::

    REACHING  -> connecting, or refreshing the peer's table; nothing is posted
    POSTED    -> the native core has it
    NOTIFYING -> the data has landed, the peer is asked to deliver the notification
    FENCING   -> it failed or was stopped with slices of unknown outcome; the peer is asked to
                 confirm that they can no longer touch its memory
    DONE
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

from . import _native
from .errors import AioFlagcxError, TransferError, TransferTimeout
from .outcomes import Stop, failure, stopped
from .waiting import check_loop

if TYPE_CHECKING:
    from .flights import Flights
    from .link import Link
    from .notifications import Outgoing

__all__ = ["NOW_BYTES", "Status", "Transfer"]

_logger = logging.getLogger(__name__)

Status = Literal["pending", "done", "failed", "timed_out", "cancelled"]

NOW_BYTES = 16_384
"""Most bytes of a transfer that is tried to be carried out in the call: the native core's limit."""

_FENCE_SLACK = 0.25
"""Seconds beyond ``drain_timeout`` that the peer's confirmation is waited for; with the timer's
granularity it stays under the half second that the API promises."""


class _Phase(enum.Enum):
    REACHING = enum.auto()
    POSTED = enum.auto()
    NOTIFYING = enum.auto()
    FENCING = enum.auto()
    DONE = enum.auto()


# Bound once: attribute look-ups of enum members cost more than everything around them.
_REACHING, _POSTED, _DONE = _Phase.REACHING, _Phase.POSTED, _Phase.DONE


class Transfer:
    """A write or read under way; made by :meth:`Engine.submit_write` and ``submit_read``.

    ``await transfer`` gives the number of bytes moved or raises the transfer's error. It can be
    awaited any number of times, by several tasks. When an awaiter is cancelled the transfer is
    cancelled, and the awaiter's :class:`asyncio.CancelledError` is raised once nothing of the
    transfer is posted any more; ``asyncio.shield(transfer)`` keeps the transfer going instead.
    A task that is cancelled before it has come to its ``await`` is no awaiter yet: as with any
    awaitable, nothing tells the transfer.

    A transfer that nobody holds runs on; if it then fails, its error is logged.
    """

    __slots__ = (
        "__weakref__",
        "_bytes_done",
        "_deadline",
        "_engine",
        "_error",
        "_flights",
        "_helper",
        "_id",
        "_link",
        "_notify",
        "_observed",
        "_peer",
        "_phase",
        "_quiet_by",
        "_remote_quiet",
        "_request",
        "_status",
        "_stop",
        "_task",
        "_timeout",
        "_waiters",
        "bytes_total",
    )

    bytes_total: int
    """Bytes to move in all."""

    def __init__(
        self,
        engine: object | None,
        flights: Flights,
        request: _native.Request | None,
        bytes_total: int,
        notify: Outgoing | None,
        timeout: float | None,
        *,
        deadline: float | None = None,
        number: int | None = None,
    ) -> None:
        # `deadline` (in the loop's time) and `number`: None where the transfer begins with this.
        self._engine = engine  # alive as long as this runs
        self._flights = flights
        self._request = request
        self._notify = notify
        self._timeout = timeout
        self._link: Link | None = None
        self._peer: str | None = None
        self._task: _native.Task | None = None
        self._helper: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] | None = None
        self._stop: Stop | None = None
        self._error: AioFlagcxError | None = None
        self._observed = False
        self._status: Status = "pending"
        self._phase = _REACHING
        self._bytes_done = 0
        self._remote_quiet = False
        self.bytes_total = bytes_total
        if deadline is None:
            deadline = math.inf if timeout is None else flights.loop.time() + timeout
        self._deadline = deadline
        self._quiet_by = math.inf
        self._id = flights.add(self, deadline, number)

    # What callers use ------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the transfer has ended, in whatever way, and is local-quiet."""
        return self._phase is _DONE

    @property
    def status(self) -> Status:
        """ "pending", "done", "failed", "timed_out" or "cancelled"."""
        return self._status

    @property
    def bytes_done(self) -> int:
        """Bytes whose slices have completed so far."""
        task = self._task
        return self._bytes_done if task is None else task.bytes_done

    @property
    def remote_quiet(self) -> bool:
        """True once nothing of this transfer can touch the peer's memory any more.

        False while it is pending, and after it ended without the peer's confirmation.
        """
        return self._remote_quiet

    def cancel(self) -> bool:
        """Ask for the transfer to be stopped; False when it is done already.

        Returns at once. Whoever awaits the transfer gets
        :class:`~aioflagcx.errors.TransferCancelled` as soon as it is quiet. Raises RuntimeError
        off the engine's event loop.
        """
        check_loop(self._flights.loop)
        if self._phase is _DONE:
            return False
        self._halt(Stop.CANCEL)
        return True

    def exception(self) -> AioFlagcxError | None:
        """The error that awaiting raises, or None after success.

        Raises :class:`asyncio.InvalidStateError` while the transfer is pending.
        """
        if self._phase is not _DONE:
            raise asyncio.InvalidStateError("the transfer is still pending")
        self._observed = True
        return self._error

    def __await__(self) -> Generator[Any, None, int]:
        cancelled: asyncio.CancelledError | None = None
        while self._phase is not _DONE:
            waiter = self._flights.loop.create_future()
            if self._waiters is None:
                self._waiters = [waiter]
            else:
                self._waiters.append(waiter)
            try:
                yield from waiter
            except asyncio.CancelledError as error:
                # Later ones are absorbed: each awaiter is cancelled once, when all is quiet.
                if cancelled is None:
                    cancelled = error
                if self._phase is not _DONE:
                    self._halt(Stop.CANCEL)
        self._observed = True
        try:
            if cancelled is not None:
                raise cancelled
            if self._error is not None:
                raise self._error
            return self.bytes_total
        finally:
            del self, cancelled  # the traceback would tie a knot

    def __repr__(self) -> str:
        peer = "" if self._peer is None else f" with {self._peer}"
        return (
            f"<Transfer #{self._id}{peer} {self._status} "
            f"{self.bytes_done} of {self.bytes_total} bytes>"
        )

    def __del__(self) -> None:
        if self._status in ("failed", "timed_out") and not self._observed:
            kind = type(self._error).__name__
            _logger.error("nobody awaited %r, which ended in %s: %s", self, kind, self._error)

    # What the engine tells it ----------------------------------------------------------------

    def _reach(self, helper: asyncio.Task[None], peer: str) -> None:
        """``helper`` gets it to where it can be posted; it is cancelled if this is stopped."""
        self._helper = helper
        self._peer = peer

    def _post(self, link: Link) -> None:
        """Hand it to the native core. RemoteMiss, NativeError, NotifyRefused leave it as it was."""
        imm = 0
        if self._notify is not None:
            link.check_notify(self._notify)
            imm = self._notify.imm = link.next_imm()
        assert self._request is not None
        now = link.copies and not imm and self.bytes_total <= NOW_BYTES
        if now and self._flights.may_copy_now():
            task = link.native.submit(self._request, self._id, 0, True)
        else:
            task = link.native.submit(self._request, self._id, imm)
        self._posted(link, task)

    def _posted(self, link: Link, task: _native.Task | None) -> None:
        """The native core has it; None: and has carried it out."""
        self._request = None
        self._link = link
        self._peer = link.id
        self._helper = None
        if task is None:
            self._finish("done", None, True)
        else:
            self._task = task
            self._phase = _POSTED

    def _complete_empty(self) -> None:
        """There is nothing to move and nobody to tell."""
        if self._phase is not _DONE:
            self._release()
            self._finish("done", None, True)

    def _landed(self) -> None:
        """Every slice has completed."""
        if self._stop is not None:
            self._finish_stopped(True)
        elif self._notify is None:
            self._finish("done", None, True)
        else:
            self._phase = _Phase.NOTIFYING
            self._helper = self._flights.loop.create_task(self._deliver(self._notify))

    def _failed(self, event: _native.TransferEvent) -> None:
        """It is local-quiet, and did not succeed."""
        if event.unknown_epochs:
            self._phase = _Phase.FENCING
            self._deadline = math.inf  # has its own bound
            self._helper = self._flights.loop.create_task(self._fence(event))
        else:
            self._conclude(event, True)

    def _expired(self, now: float) -> None:
        """Its deadline has passed: stop it, or be done with waiting for its posted slices."""
        if self._stop is None:
            self._halt(Stop.TIMEOUT)
            return
        self._deadline = math.inf
        if self._phase is _POSTED and self._task is not None:
            self._task.abort()

    def _give_up(self, error: AioFlagcxError) -> None:
        """It could not be posted."""
        if self._phase is _REACHING:
            self._release()
            status: Status = "timed_out" if isinstance(error, TransferTimeout) else "failed"
            self._finish(status, error, True)

    async def _quiet(self) -> None:
        """Until it is done, whatever becomes of it; cancelling this leaves it alone."""
        while self._phase is not _DONE:
            waiter = self._flights.loop.create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            await waiter

    # How it ends -----------------------------------------------------------------------------

    def _halt(self, reason: Stop) -> None:
        """Stop it, once: drop what is not posted, and give the rest until `_quiet_by`."""
        if self._stop is not None or self._phase is _Phase.FENCING:
            return
        flights = self._flights
        now = flights.loop.time()
        self._stop = reason
        self._quiet_by = now + flights.drain_timeout
        if self._phase is _POSTED and self._task is not None:
            self._deadline = now + flights.drain_timeout / 2
            flights.arm(self._deadline)
            self._task.cancel()
            return
        if self._helper is not None:
            self._helper.cancel()
        self._release()
        self._finish_stopped(True)

    async def _deliver(self, notify: Outgoing) -> None:
        link, task = self._link, self._task
        assert link is not None and task is not None
        notify.imm_count = task.imm_count
        try:
            await link.notify(notify)
        except asyncio.CancelledError:
            self._abandoned()
            raise
        except AioFlagcxError as error:
            if isinstance(error, TransferError):
                error.remote_quiet = True  # the data has landed
            self._finish("failed", error, True)
        else:
            self._finish("done", None, True)

    async def _fence(self, event: _native.TransferEvent) -> None:
        flights = self._flights
        now = flights.loop.time()
        by = self._quiet_by if self._stop is not None else now + flights.drain_timeout
        assert self._link is not None
        quiet = False
        try:
            quiet = await self._link.fence(event.unknown_epochs, by + _FENCE_SLACK - now)
        finally:
            self._conclude(event, quiet)  # also when the loop is being shut down

    def _abandoned(self) -> None:
        """Its helper was cancelled, by us or by whoever shuts the loop down."""
        if self._phase is not _DONE:
            self._stop = Stop.CANCEL
            self._release()
            self._finish_stopped(True)

    def _conclude(self, event: _native.TransferEvent, quiet: bool) -> None:
        if self._stop is not None:
            self._finish_stopped(quiet, event.rail or None)
        elif event.status == _native.STATUS_LOST:
            assert self._link is not None
            self._finish("failed", self._link.loss(quiet, event.rail or None), quiet)
        else:
            assert self._link is not None
            self._finish("failed", failure(event, self._link.id, quiet), quiet)

    def _finish_stopped(self, quiet: bool, rail: str | None = None) -> None:
        assert self._stop is not None
        progress = f"{self.bytes_done} of {self.bytes_total} bytes had been moved"
        if self._link is None:
            progress += ", there was no session or no region table to start with yet"
        status, error = stopped(
            self._stop,
            peer=self._peer,
            timeout=self._timeout,
            progress=progress,
            rail=rail,
            quiet=quiet,
            notify_delivered=None if self._phase is _Phase.NOTIFYING else False,
        )
        self._finish(status, error, quiet)

    def _release(self) -> None:
        """Let go of the local regions of a request that was not posted."""
        if self._request is not None:
            self._request.release()
            self._request = None

    def _finish(self, status: Status, error: AioFlagcxError | None, quiet: bool) -> None:
        task, self._task = self._task, None
        if status == "done":
            self._bytes_done = self.bytes_total
        elif task is not None:
            self._bytes_done = task.bytes_done
        self._phase = _DONE
        self._status = status
        self._error = error
        self._remote_quiet = quiet
        self._helper = self._engine = None
        self._flights.remove(self._id)
        if self._waiters is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters = None
