"""A prefill worker's half: it writes what it has computed to whoever fetches it.

Belongs to the worker's event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time

import numpy as np

from ...blocks import BlockLayout
from ...engine import Engine
from ...errors import AioFlagcxError, HandoverError, HandoverTimeout, PeerLost
from ...kv import CacheLayout
from ...kv.layout import block_layout, check_fit, heads_of, targets
from ...kv.wire import connected
from ...waiting import DEFAULT
from .channel import Reply
from .messages import Accepted, Ask, Check, Done, Failed, Fetch, Grant, Message, Release, Stop
from .options import Options
from .results import Results
from .scheduler import Offer

__all__ = ["PrefillHalf"]

_logger = logging.getLogger(__name__)

_TRIES = 3
"""Sessions that are tried for one fetch: decode may fence one for another request's sake."""

_MAX_GONE = 65_536
"""Transfers that are over and remembered, for decode workers that come late."""

_MAX_ROOMS = 65_536
"""Requests of which decode may speak before they have been computed."""

_MAX_SAID = 16_384
"""Fetches that are over whose end is remembered, for a decode that has not heard of it."""

_MAX_LAYOUTS = 4096
"""Pairs of a decode worker and a group whose layout is kept."""


class _Writer:
    """One decode worker's fetch."""

    def __init__(self, fetch: Fetch, reply: Reply) -> None:
        self.fetch = fetch
        self.reply = reply
        self.granted: asyncio.Future[None] | None = None
        self.asked = 0
        """How often: the number of the last question."""
        self.task: asyncio.Task[int] | None = None
        self.stopped: str | None = None
        self.quiet = True
        """Nothing of it is on its way to decode."""
        self.begun = time.monotonic()


class _Room:
    """One request's cache, and who wants it."""

    def __init__(self, transfer: str) -> None:
        self.transfer = transfer
        self.offer: asyncio.Future[Offer | str] = asyncio.get_running_loop().create_future()
        """What it is, or why it will never be."""
        self.writers: dict[bytes, _Writer] = {}
        self.ended: set[int] = set()
        """Decode ranks with which it is over, in whatever way."""
        self.ranks = 0
        """Decode's ranks; 0: nobody has come."""
        self.timer: asyncio.TimerHandle | None = None


class PrefillHalf:
    """All the requests that this worker has to send."""

    def __init__(
        self,
        engine: Engine,
        layout: CacheLayout,
        layers: tuple[tuple[str, ...], ...],
        options: Options,
        results: Results,
    ) -> None:
        """``layers``: names of each group's layers."""
        self._engine = engine
        self._layout = layout
        self._layers = layers
        self._options = options
        self._results = results
        self._rooms: dict[str, _Room] = {}
        self._writers: dict[bytes, tuple[_Room, _Writer]] = {}
        self._gone: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._said: collections.OrderedDict[bytes, Done | Failed] = collections.OrderedDict()
        self._layouts: dict[tuple[CacheLayout, int], BlockLayout | None] = {}

    # What the scheduler says -----------------------------------------------------------------

    def offer(self, offer: Offer) -> None:
        """The request has been computed. It is reported as sent when its blocks are free."""
        self._gone.pop(offer.transfer, None)
        room = self._room(offer.transfer)
        if room.offer.done():
            _logger.error(
                "request %s: transfer %r is that of another request already; nobody can fetch it",
                offer.request_id, offer.transfer,
            )  # fmt: skip
            self._results.sent(offer.request_id)
            return
        room.offer.set_result(offer)
        self._limit(room, "nobody has fetched all of it")
        self._close_if_over(room)

    def drop(self, transfer: str, reason: str) -> None:
        """It will not be offered."""
        room = self._rooms.get(transfer)
        if room is not None and not room.offer.done():
            self._end(room, reason)
        elif room is None:
            self._remember(transfer, reason)

    # What decode says ------------------------------------------------------------------------

    def hear(self, message: Message, reply: Reply) -> None:
        """A message of the side channel."""
        if isinstance(message, Fetch):
            self._fetch(message, reply)
        elif isinstance(message, Release):
            self._release(message)
        elif isinstance(message, Check):
            self._check_on(message.id, reply)
        elif isinstance(message, Grant | Stop) and message.id in self._writers:
            _, writer = self._writers[message.id]
            if isinstance(message, Stop):
                self._stop(writer, f"decode has given it up: {message.reason}")
            elif (
                writer.granted is not None
                and not writer.granted.done()
                and message.number == writer.asked
            ):
                writer.granted.set_result(None)

    def _check_on(self, id: bytes, reply: Reply) -> None:
        """Say again what decode may have missed."""
        if id in self._writers:
            _, writer = self._writers[id]
            writer.reply = reply  # the way to decode may be another one now
            self._accept(writer)
            if writer.granted is not None and not writer.granted.done():
                self._put_question(writer)
        elif id in self._said:
            reply(self._said[id])
        else:
            # It may have been another process, of which we do not know whether it has stopped.
            reply(Failed(id, "prefill does not know of this fetch", False))

    def _accept(self, writer: _Writer) -> None:
        engine = self._engine
        writer.reply(Accepted(writer.fetch.start.id, engine.session_id, engine.engine_id))

    def _put_question(self, writer: _Writer) -> None:
        writer.reply(Ask(writer.fetch.start.id, self._engine.engine_id, writer.asked))

    def _end_with(self, end: Done | Failed, reply: Reply) -> None:
        self._said[end.id] = end
        while len(self._said) > _MAX_SAID:
            self._said.popitem(last=False)
        reply(end)

    def _fetch(self, fetch: Fetch, reply: Reply) -> None:
        start = fetch.start
        if start.id in self._writers or start.id in self._said:
            self._check_on(start.id, reply)
            return
        writer = _Writer(fetch, reply)
        self._accept(writer)
        room = None
        reason = self._gone.get(start.room)
        if reason is None and self._crowded(start.room):
            reason = f"there are {_MAX_ROOMS} requests that are not computed"
        if reason is None:
            room = self._room(start.room)
            try:
                self._check(room, fetch)
            except ValueError as error:
                reason = f"it does not fit: {error}"
        if reason is not None or room is None:
            reason = reason or "it is over"
            self._failure(fetch, reason)
            self._end_with(Failed(start.id, reason, True), reply)
            if room is not None:
                self._ended_with(room, start.layout.rank, start.layout.ranks)
            return
        room.ranks = start.layout.ranks
        room.writers[start.id] = writer
        self._writers[start.id] = room, writer
        writer.task = asyncio.ensure_future(self._write(room, writer))
        writer.task.add_done_callback(lambda task: self._written(room, writer, task))

    def _check(self, room: _Room, fetch: Fetch) -> None:
        layout, start = self._layout, fetch.start
        theirs = start.layout
        if (start.to_rank, start.to_ranks) != (layout.rank, layout.ranks):
            raise ValueError(
                f"decode takes this for rank {start.to_rank} of {start.to_ranks}, which is rank "
                f"{layout.rank} of {layout.ranks}; look at remote_port and remote_tp_size"
            )
        expected = targets(heads_of(layout), layout.rank, layout.ranks, theirs.ranks)
        if theirs.rank not in expected:
            raise ValueError(f"decode rank {theirs.rank} has nothing to do with it")
        if room.ranks not in (0, theirs.ranks):
            raise ValueError(f"decode has {theirs.ranks} ranks, another one said {room.ranks}")
        if fetch.layers != self._layers:
            raise ValueError("prefill and decode have different layers: different models?")
        check_fit(layout, theirs)

    def _release(self, message: Release) -> None:
        if message.transfer not in self._gone and not self._crowded(message.transfer):
            self._ended_with(self._room(message.transfer), message.rank, message.ranks)

    # Writing ---------------------------------------------------------------------------------

    async def _write(self, room: _Room, writer: _Writer) -> int:
        """Bytes that were written."""
        fetch, engine = writer.fetch, self._engine
        offer = await asyncio.shield(room.offer)
        if isinstance(offer, str):
            raise HandoverError(offer)
        writer.begun = time.monotonic()
        layouts, src, dst = self._pieces(offer, fetch)
        if not layouts:
            return 0
        for tries_left in range(_TRIES - 1, -1, -1):
            session = await connected(engine, fetch.session_id, DEFAULT)
            if session.peer_engine_id != fetch.engine_id:
                raise HandoverError("another engine answers at decode's address")
            await self._ask(writer)
            # On the session on which we asked, or not at all.
            transfer = engine._submit_blocks(
                session, layouts, src, dst, None, DEFAULT, reconnect=False
            )
            try:
                return await transfer
            except PeerLost as error:
                if not tries_left or not error.remote_quiet:
                    raise
            finally:
                writer.quiet = writer.quiet and transfer.remote_quiet
        raise AssertionError("the last try has returned or raised")

    async def _ask(self, writer: _Writer) -> None:
        writer.granted = asyncio.get_running_loop().create_future()
        writer.asked += 1
        self._put_question(writer)
        limit = self._options.answer_timeout
        done, _ = await asyncio.wait([writer.granted], timeout=limit)
        if not done:
            raise HandoverTimeout(
                f"decode at {writer.fetch.session_id} did not answer within {limit:g} s "
                "(answer_timeout) whether its blocks may be written to"
            )

    def _pieces(
        self, offer: Offer, fetch: Fetch
    ) -> tuple[list[BlockLayout], list[object], list[object]]:
        if offer.tokens != fetch.tokens:
            raise HandoverError(
                f"prefill has computed a prompt of {offer.tokens} tokens, decode's has "
                f"{fetch.tokens}: send the same prompt to both"
            )
        layouts: list[BlockLayout] = []
        src: list[object] = []
        dst: list[object] = []
        for index, theirs in enumerate(fetch.start.blocks):
            ours = offer.blocks[index] if index < len(offer.blocks) else ()
            if len(ours) < len(theirs):
                raise HandoverError(
                    f"prefill has {len(ours)} blocks of groups[{index}], decode wants "
                    f"{len(theirs)}: was it the same prompt?"
                )
            layout = self._block_layout(fetch.start.layout, index)
            if layout is not None and len(theirs):
                layouts.append(layout)
                src.append(np.array(ours[-len(theirs) :], np.int64))
                dst.append(theirs)
        return layouts, src, dst

    def _block_layout(self, theirs: CacheLayout, group: int) -> BlockLayout | None:
        key = theirs, group
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = block_layout(self._layout, theirs, group)
        return self._layouts[key]

    def _stop(self, writer: _Writer, reason: str) -> None:
        assert writer.task is not None
        if writer.stopped is None:
            writer.stopped = reason
            writer.task.cancel()

    def _written(self, room: _Room, writer: _Writer, task: asyncio.Task[int]) -> None:
        """Our blocks are quiet, as far as this decode worker goes."""
        fetch = writer.fetch
        start = fetch.start
        reason = None
        if task.cancelled():
            reason = writer.stopped or "prefill's worker is closing"
        elif (error := task.exception()) is not None:
            if not isinstance(error, AioFlagcxError):
                _logger.error("request %s", fetch.request_id, exc_info=error)
            reason = str(error) or type(error).__name__
        if reason is None:
            self._results.count(
                sent_requests=1,
                sent_bytes=task.result(),
                sent_seconds=time.monotonic() - writer.begun,
            )
            self._end_with(Done(start.id), writer.reply)
        else:
            self._failure(fetch, reason)
            self._end_with(Failed(start.id, reason, writer.quiet), writer.reply)
        del self._writers[start.id], room.writers[start.id]
        self._ended_with(room, start.layout.rank, start.layout.ranks)

    def _failure(self, fetch: Fetch, reason: str) -> None:
        _logger.warning(
            "request %s, transfer %r: not sent to %s: %s",
            fetch.request_id, fetch.start.room, fetch.session_id, reason,
        )  # fmt: skip
        self._results.failure("failed_sends", fetch.request_id, fetch.session_id, reason)

    # Rooms -----------------------------------------------------------------------------------

    def _room(self, transfer: str) -> _Room:
        room = self._rooms.get(transfer)
        if room is None:
            room = self._rooms[transfer] = _Room(transfer)
            self._limit(room, "prefill has not computed it")
        return room

    def _crowded(self, transfer: str) -> bool:
        return transfer not in self._rooms and len(self._rooms) >= _MAX_ROOMS

    def _limit(self, room: _Room, words: str) -> None:
        if room.timer is not None:
            room.timer.cancel()
        limit = self._options.abort_timeout
        if limit is not None:
            loop = asyncio.get_running_loop()
            room.timer = loop.call_later(limit, self._end, room, f"{words} within {limit:g} s")

    def _ended_with(self, room: _Room, rank: int, ranks: int) -> None:
        """It is over with this decode rank."""
        room.ranks = room.ranks or ranks
        room.ended.add(rank)
        self._close_if_over(room)

    def _close_if_over(self, room: _Room) -> None:
        if room.writers or not room.offer.done():
            return
        layout = self._layout
        wanted = isinstance(room.offer.result(), Offer)
        if wanted and room.transfer not in self._gone:
            if not room.ranks:
                return
            expected = targets(heads_of(layout), layout.rank, layout.ranks, room.ranks)
            if not room.ended.issuperset(expected):
                return
        self._close(room)

    def _close(self, room: _Room) -> None:
        if self._rooms.get(room.transfer) is not room:
            return
        del self._rooms[room.transfer]
        if room.timer is not None:
            room.timer.cancel()
        self._remember(room.transfer, "it has been fetched already")
        offer = room.offer.result()
        if isinstance(offer, Offer):
            self._results.sent(offer.request_id)

    def _end(self, room: _Room, reason: str) -> None:
        """Give it up. Its blocks are reported when no writer is left."""
        self._remember(room.transfer, reason)
        if not room.offer.done():
            room.offer.set_result(reason)
        else:
            _logger.warning("transfer %r is given up: %s", room.transfer, reason)
        for writer in room.writers.values():
            self._stop(writer, reason)
        self._close_if_over(room)

    def _remember(self, transfer: str, reason: str) -> None:
        self._gone.setdefault(transfer, reason)
        while len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    async def close(self) -> None:
        """Give everything up; nothing is being read from our blocks when this returns."""
        for room in list(self._rooms.values()):
            self._end(room, "prefill's worker is closing")
        while tasks := [writer.task for _, writer in self._writers.values() if writer.task]:
            await asyncio.wait(tasks)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)  # their callbacks
