"""One transfer under way, as threads see it.

On a connected session the calling thread hands it to the native core itself, and the native core
opens the transfer's :class:`_native.Waiter` when all has landed: the event loop has no part in it.
Everything else is the loop's work and runs the asyncio engine's own code, in a
:class:`~aioflagcx.transfer.Transfer` that opens the waiter at its end:

- it cannot be posted at once: no session yet, a piece outside the peer's table as it is known here,
  a notification to be delivered;
- it failed: the native core reports that to the loop and leaves the waiter shut;
- it is to be stopped, by its deadline, :meth:`Transfer.cancel`, a signal, or the end of its
  session or engine. Then the loop first takes it back from the native core
  (:meth:`_native.Session.take_back`), which settles whether it has landed before.

Who owns what: until the waiter is open the loop alone touches `_taken`, and the thread that submits
alone touches the rest. Who sees the waiter open may read everything, as nothing changes any more.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from .. import _native
from ..errors import AioFlagcxError, EngineClosed, TransferError
from ..outcomes import Stop
from ..posting import launch
from ..transfer import NOW_BYTES, Status
from ..transfer import Transfer as LoopTransfer
from .loop_thread import LoopThread, patience, settle

if TYPE_CHECKING:
    from ..flights import Flights
    from ..link import Link
    from ..notifications import Outgoing
    from ..peers import Peers
    from ..session import AnySession

__all__ = ["Transfer"]

_logger = logging.getLogger(__name__)


class _Taken(LoopTransfer):
    """The loop's side of a thread's transfer."""

    __slots__ = ("_waiter",)

    def __init__(
        self,
        waiter: _native.Waiter,
        flights: Flights,
        request: _native.Request | None,
        bytes_total: int,
        notify: Outgoing | None,
        timeout: float | None,
        *,
        deadline: float,
        number: int,
    ) -> None:
        self._waiter = waiter
        super().__init__(
            None,
            flights,
            request,
            bytes_total,
            notify,
            timeout,
            deadline=deadline,
            number=number,
        )

    def _finish(self, status: Status, error: AioFlagcxError | None, quiet: bool) -> None:
        super()._finish(status, error, quiet)
        self._waiter.open()


class Transfer:
    """A write or read under way; made by :meth:`Engine.submit_write` and ``submit_read``.

    All methods can be called on any thread, by several at once. A transfer that nobody holds runs
    on; if it then fails, its error is logged. It does not keep its engine: when that is closed, or
    dropped, its transfers end with :class:`~aioflagcx.errors.EngineClosed`.
    """

    __slots__ = (
        "__weakref__",
        "_begun",
        "_deadline",
        "_error",
        "_flights",
        "_link",
        "_loop",
        "_number",
        "_taken",
        "_task",
        "_timeout",
        "_waiter",
        "bytes_total",
    )

    bytes_total: int
    """Bytes to move in all."""

    def __init__(self, loop: LoopThread, flights: Flights) -> None:
        self._loop = loop
        self._flights = flights
        self._waiter = _native.Waiter()
        self._number = flights.next_id()
        self._begun = False
        self._timeout: float | None = None
        self._task: _native.Task | None = None
        self._taken: _Taken | None = None
        self._error: AioFlagcxError | None = None
        self.bytes_total = 0
        self._link: Link | None = None
        self._deadline = math.inf

    # What callers use ------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the transfer has ended, in whatever way, and is local-quiet."""
        return self._waiter.is_open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most ``timeout`` seconds (None: no limit); whether it is.

        Raises nothing of what the transfer ends with, and does not touch it, whatever a signal
        handler raises here.
        """
        limit = patience(timeout)
        if self._waiter.is_open:
            return True
        self._loop.check_caller()
        return self._waiter.wait(limit)

    def result(self, timeout: float | None = None) -> int:
        """Wait for the number of bytes moved, at most ``timeout`` seconds (None: no limit).

        Raises the transfer's error; TimeoutError itself, and not a subclass, when the transfer is
        not done by then, which leaves it alone. When a signal handler raises, KeyboardInterrupt
        mostly, the transfer is cancelled, and that is raised once nothing of it is posted any more.
        """
        self._await(timeout)
        if self._error is not None:
            raise self._error
        taken = self._taken
        if taken is not None:
            taken._observed = True
            if taken._error is not None:
                raise taken._error
        return self.bytes_total

    def exception(self, timeout: float | None = None) -> AioFlagcxError | None:
        """The error that :meth:`result` raises, or None after success; waits as that does."""
        self._await(timeout)
        taken = self._taken
        if taken is None:
            return self._error
        taken._observed = True
        return taken._error

    def cancel(self) -> bool:
        """Ask for the transfer to be stopped; False when it is done already.

        Returns at once. Whoever waits for its result gets
        :class:`~aioflagcx.errors.TransferCancelled` as soon as it is quiet.
        """
        if self._waiter.is_open:
            return False
        try:
            self._loop.post(self._halt)
        except EngineClosed:
            return False  # and with the engine all its transfers have ended
        return True

    @property
    def status(self) -> Status:
        """ "pending", "done", "failed", "timed_out" or "cancelled"."""
        if not self._waiter.is_open:
            return "pending"
        if self._taken is not None:
            return self._taken.status
        return "done" if self._error is None else "cancelled"

    @property
    def bytes_done(self) -> int:
        """Bytes whose slices have completed so far."""
        taken, task = self._taken, self._task
        if taken is not None:
            return taken.bytes_done
        if task is not None:
            return task.bytes_done
        return 0

    @property
    def remote_quiet(self) -> bool:
        """True once nothing of this transfer can touch the peer's memory any more.

        False while it is pending, and after it ended without the peer's confirmation.
        """
        return self._waiter.is_open and (self._taken is None or self._taken.remote_quiet)

    def __repr__(self) -> str:
        peer = "" if self._link is None else f" with {self._link.id}"
        return (
            f"<Transfer #{self._number}{peer} {self.status} "
            f"{self.bytes_done} of {self.bytes_total} bytes>"
        )

    # What the engine does with it, on the thread that submits --------------------------------

    def _submit(
        self,
        peers: Peers,
        request: _native.Request,
        notify: Outgoing | None,
        timeout: float | None,
        session: AnySession | None,
        target: AnySession | str,
    ) -> None:
        """Post it here if that can be, else have the loop do it; EngineClosed when it is closing.

        However this is interrupted, :meth:`_settle` puts it in order.
        """
        self.bytes_total = request.bytes_total
        self._timeout = timeout
        if timeout is not None:
            self._deadline = time.monotonic() + timeout
        if notify is None:
            if not request.pieces:
                self._waiter.open()
                return
            if session is not None and self._post(session._link, request):
                return
        self._begun = True
        self._loop.post(self._launch, peers, request, notify, target)

    def _post(self, link: Link, request: _native.Request) -> bool:
        """Hand it to the native core. False: it is as it was, and the loop finds out why."""
        flights = self._flights
        self._link = link
        self._begun = True
        flights.add_direct(self._number, self)
        if flights.closed:
            return False
        try:
            now = link.copies and self.bytes_total <= NOW_BYTES
            self._task = link.native.submit(request, self._number, 0, now, self._waiter)
        except (_native.RemoteMiss, _native.NativeError):
            return False
        if self._waiter.is_open:
            flights.direct.pop(self._number, None)
        elif self._deadline < flights.timer_at:
            self._loop.post(flights.arm, self._deadline)
        return True

    def _await(self, timeout: float | None) -> None:
        """Until it is done; TimeoutError when that takes longer."""
        limit = patience(timeout)
        if not self._waiter.is_open:
            self._loop.check_caller()
            try:
                try:
                    over = self._waiter.wait(limit)
                except BaseException:
                    self._settle()
                    raise
            except BaseException:
                self._settle()  # another signal came on the way
                raise
            if not over:
                raise TimeoutError(f"{self!r} is not done after {timeout} s")
        self._flights.direct.pop(self._number, None)

    def _settle(self) -> None:
        """Cancel it, if it has begun, and wait until it is quiet.

        For when a signal handler has raised; no other one runs while this waits.
        """
        try:
            if self._begun and not self._waiter.is_open:
                settle(self._loop, self._abandon, self._waiter)
        finally:
            if self._taken is not None:
                self._taken._observed = True  # what the handler has raised is told instead

    # What is done with it on the loop's thread -----------------------------------------------

    def _take_over(self) -> LoopTransfer | None:
        """See :class:`~aioflagcx.flights.Direct`."""
        self._flights.direct.pop(self._number, None)
        link = self._link
        task = None if link is None else link.native.take_back(self._waiter)
        if link is None or task is None:
            return None
        taken = self._take(None, None)
        taken._posted(link, task)
        return taken

    def _take(self, request: _native.Request | None, notify: Outgoing | None) -> _Taken:
        self._taken = _Taken(
            self._waiter,
            self._flights,
            request,
            self.bytes_total,
            notify,
            self._timeout,
            deadline=self._deadline,
            number=self._number,
        )
        return self._taken

    def _launch(
        self,
        peers: Peers,
        request: _native.Request,
        notify: Outgoing | None,
        target: AnySession | str,
    ) -> None:
        """Post it, or get it to where it can be posted."""
        self._flights.direct.pop(self._number, None)
        if self._flights.closed:
            request.release()
            self._error = EngineClosed("the engine is closed")
            self._waiter.open()
            return
        taken = self._take(request, notify)
        try:
            launch(peers, taken, request, peers.find(target), target)
        except Exception as error:
            _logger.exception("%r could not be posted", self)
            words = f"internal error: {type(error).__name__}: {error}"
            taken._give_up(TransferError(words, cause=error, remote_quiet=True))

    def _halt(self) -> None:
        taken = self._taken or self._take_over()
        if taken is not None:
            taken._halt(Stop.CANCEL)

    def _abandon(self) -> None:
        """:meth:`_halt`, when its thread is not about to submit it any more."""
        self._halt()
        if self._taken is None:
            self._waiter.open()  # it has landed, or was not submitted and is refused from now on
