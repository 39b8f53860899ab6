"""Decode ranks that prefill has no sender for: those that come before it, and those after.

What they say is kept until the sender is made, or until they have given up by themselves: a decode
may wait for longer than prefill does, and says so when it does not wait any more. Who has died does
not, and is looked for now and then. All of it belongs to the manager's event loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import math

from .messages import Abort, Start
from .wire import Wire

__all__ = ["Lobby", "Offers"]

MAX_ROOMS = 65_536
"""Rooms for which a decode has come before its sender; one more is refused, and tries again."""

MAX_BYTES = 256 * 1024 * 1024
"""What all of them together may take; likewise."""

MAX_ENDS = 65_536
"""Ends of rooms that are remembered for a decode that comes late."""

_START = 4096
"""Bytes that a Start takes without its blocks, addresses and ``aux``, about."""

_ADDRESS = 64
"""Bytes that the address of a pool takes, about."""


class Offers:
    """What decode ranks have said about a room that has no sender yet."""

    def __init__(self) -> None:
        self.starts: dict[int, tuple[Start, Wire]] = {}
        """By rank, the last word of each."""
        self.engine_ids: dict[int, str] = {}
        """By rank, who has said it."""
        self.aborted: tuple[int, str] | None = None
        """By which decode rank, and why."""
        self.bytes = 0
        self.expiry: asyncio.TimerHandle | None = None

    def put(self, start: Start, wire: Wire, engine_id: str) -> None:
        """In place of what this rank has said before."""
        self.starts[start.layout.rank] = start, wire
        self.engine_ids[start.layout.rank] = engine_id
        self.aborted = None
        self.count()

    def count(self) -> None:
        """Its bytes anew."""
        self.bytes = sum(_bytes_of(start) for start, _ in self.starts.values())


@dataclasses.dataclass
class _End:
    """Why a sender has failed."""

    reason: str
    told: dict[int, bytes]
    """By decode rank, the receiver that knows."""
    forgotten_at: float
    """In the loop's time."""


class Lobby:
    """All such rooms of a manager."""

    def __init__(self, patience: float | None) -> None:
        """``patience``: seconds after which it is looked whether a decode is still there, and in
        which the end of a room is remembered; None: no such look, and for ever."""
        self._patience = patience
        self._offers: dict[str, Offers] = {}
        self._bytes = 0
        self._ends: collections.OrderedDict[str, _End] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def put(self, start: Start, wire: Wire, engine_id: str) -> str | None:
        """Keep what this engine says for the sender that comes; why not, or None."""
        offers = self._offers.get(start.room)
        full = offers is None and len(self._offers) >= MAX_ROOMS
        if full or self._bytes + _bytes_of(start) > MAX_BYTES:
            return f"{len(self._offers)} rooms wait for their senders"
        if offers is None:
            offers = self._offers[start.room] = Offers()
            self._wait(start.room, offers)
        self._bytes -= offers.bytes
        offers.put(start, wire, engine_id)
        self._bytes += offers.bytes
        return None

    def _wait(self, room: str, offers: Offers) -> None:
        if self._patience is not None:
            loop = asyncio.get_running_loop()
            offers.expiry = loop.call_later(self._patience, self._look, room, offers)

    def _look(self, room: str, offers: Offers) -> None:
        if offers.aborted is not None:
            self._drop(room)
            return
        for rank, (start, wire) in offers.starts.items():
            found = functools.partial(self._found, room, offers, start)
            wire.look(offers.engine_ids[rank], found)
        self._wait(room, offers)

    def _found(self, room: str, offers: Offers, start: Start, alive: bool) -> None:
        known = offers.starts.get(start.layout.rank)
        if alive or self._offers.get(room) is not offers or known is None or known[0] is not start:
            return
        self._bytes -= offers.bytes
        del offers.starts[start.layout.rank]
        offers.count()
        self._bytes += offers.bytes
        if not offers.starts:
            self._drop(room)

    def abort(self, abort: Abort) -> None:
        """A decode rank has given up before its sender came."""
        offers = self._offers.get(abort.room)
        known = None if offers is None else offers.starts.get(abort.rank)
        if offers is not None and known is not None and known[0].id == abort.id:
            offers.aborted = abort.rank, abort.reason

    def open(self, room: str) -> Offers:
        """Its sender is there: what has been said so far."""
        self._ends.pop(room, None)
        return self._drop(room)

    def _drop(self, room: str) -> Offers:
        offers = self._offers.pop(room, Offers())
        self._bytes -= offers.bytes
        if offers.expiry is not None:
            offers.expiry.cancel()
        return offers

    def ended(self, room: str, reason: str, told: dict[int, bytes]) -> None:
        """Its sender has failed; ``told``: by decode rank, the receivers that it will tell."""
        patience = math.inf if self._patience is None else self._patience
        now = asyncio.get_running_loop().time()
        self._ends.pop(room, None)
        self._ends[room] = _End(reason, told, now + patience)
        while len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)

    def reason(self, start: Start) -> str | None:
        """Why the sender that this decode rank looks for has failed, if it has.

        It counts as told then, and is told the same if it asks again. Another receiver of the same
        rank is another use of the room.
        """
        end = self._ends.get(start.room)
        if end is None:
            return None
        rank = start.layout.rank
        is_other = end.told.setdefault(rank, start.id) != start.id
        if is_other or asyncio.get_running_loop().time() >= end.forgotten_at:
            del self._ends[start.room]
            return None
        return end.reason

    def close(self) -> list[tuple[Start, Wire]]:
        """Forget everything; who has been waiting."""
        waiting = [one for room in tuple(self._offers) for one in self._drop(room).starts.values()]
        self._ends.clear()
        return waiting


def _bytes_of(start: Start) -> int:
    pools = sum(len(group.layers) * len(group.layers[0]) for group in start.layout.groups)
    return sum(ids.nbytes for ids in start.blocks) + len(start.aux) + _ADDRESS * pools + _START
