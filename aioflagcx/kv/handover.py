"""What the two halves of a room have in common."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ..errors import HandoverError, HandoverTimeout
from .poll import KVPoll
from .wire import Wire

if TYPE_CHECKING:
    from .manager import KVManager

__all__ = ["Handover", "settled"]


class Handover:
    """One half of a room: its state, its timer, and how it ends.

    Belongs to its manager's event loop, like everything here.
    """

    def __init__(self, manager: KVManager, room: str) -> None:
        self.room = room
        """What joins the two halves."""
        self.error: HandoverError | None = None
        """Why it failed."""
        self._manager = manager
        self._state = KVPoll.Bootstrapping
        self._timer: asyncio.TimerHandle | None = None
        self._settling: asyncio.Task[None] | None = None

    def poll(self) -> KVPoll:
        """How far it has come, without waiting."""
        return self._state

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of room {self.room!r}: {self._state.name}>"

    def lost(self, wire: Wire, reason: str) -> None:
        """A peer of this room is gone."""
        raise NotImplementedError

    async def abort(self, reason: str = "aborted") -> None:
        """Give the room up, and have the other side do so, with this reason.

        Returns when this side's blocks may be reused. Does nothing after Success. When it is
        cancelled the room goes on giving up: await this again to know when that is over.
        """
        if self._fail(reason) or self._state is KVPoll.Failed:
            await settled(self._settling)

    def _advance(self, state: KVPoll) -> None:
        """To a later state; Failed is final."""
        if self._state is not KVPoll.Failed and state > self._state:
            self._state = state

    def _limit(self, seconds: float | None, words: str) -> None:
        """Fail after so many seconds, unless another limit takes this one's place."""
        self._no_limit()
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._expired, f"{words} within {seconds:g} s")

    def _no_limit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self, words: str) -> None:
        self._fail(words, HandoverTimeout)

    def _fail(
        self,
        reason: str,
        kind: type[HandoverError] = HandoverError,
        cause: BaseException | None = None,
    ) -> bool:
        """Fail and begin to settle; False when it has ended before."""
        if self._state in (KVPoll.Failed, KVPoll.Success):
            return False
        self._state = KVPoll.Failed
        self.error = kind(f"room {self.room!r}: {reason}", cause=cause)
        self._no_limit()
        self._settling = self._manager._spawn(self._settle(reason))
        self._has_failed(reason)
        return True

    def _has_failed(self, reason: str) -> None:
        """What is to be done at once, before it settles."""

    async def _settle(self, reason: str) -> None:
        """Tell the others, and return when this side's blocks may be reused."""
        raise NotImplementedError

    async def _raise(self) -> None:
        """Raise the error of a failed room, once it has settled."""
        if self.error is not None:
            await settled(self._settling)
            raise self.error.with_traceback(None)


async def settled(task: asyncio.Task[None] | None) -> None:
    """Until a room has settled; cancelling this leaves that alone."""
    if task is not None:
        await asyncio.wait((task,))
