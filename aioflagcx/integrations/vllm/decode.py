"""A decode worker's half: it has prefill workers write a request's blocks, or gives them up.

Belongs to the worker's event loop. A load is reported once, when nothing can change its blocks any
more: prefill has said so, was never granted anything, or has been fenced off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import zmq

from ...engine import Engine
from ...errors import AioFlagcxError, EngineClosed
from ...kv import CacheLayout
from ...kv import messages as kv_messages
from ...kv.layout import check_heads, heads_of, senders
from ...kv.wire import Wire, Wires
from .channel import Clients, Reply
from .messages import Accepted, Ask, Check, Done, Failed, Fetch, Grant, Message, Release, Stop
from .options import Options
from .results import Results
from .scheduler import Load, Source
from .scheduler import Release as Unwanted

__all__ = ["DecodeHalf"]

_logger = logging.getLogger(__name__)

_CHECK = 5.0
"""Seconds after which prefill is asked whether something it said was lost, again and again."""


class _Part:
    """What one prefill worker writes of a load."""

    def __init__(self, rank: int, address: str) -> None:
        self.id = os.urandom(kv_messages.ID_SIZE)
        self.rank = rank
        """Prefill's."""
        self.address = address
        """Of its side channel."""
        self.over: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None: everything has landed; else why not."""
        self.granted: str | None = None
        """The engine that may write to our blocks."""
        self.quiet = False
        """It has said that it does not write any more."""
        self.watching: asyncio.Task[Any] | None = None
        self.wire: Wire | None = None
        self.timer: asyncio.TimerHandle | None = None

    def end(self, reason: str | None) -> None:
        """The first word counts."""
        if not self.over.done():
            self.over.set_result(reason and f"prefill at {self.address}: {reason}")

    def lost(self, wire: Wire, reason: str) -> None:
        """See :class:`~aioflagcx.kv.wire.Watcher`."""
        self.end(reason)


class _Loading:
    """A load under way."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.parts: list[_Part] = []
        self.given_up = False
        self.aborted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why vLLM does not want it any more."""
        self.begun = time.monotonic()


class DecodeHalf:
    """All the requests that this worker waits for."""

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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clients = Clients(self.hear)
        self._wires = Wires(engine, self._spawn)
        self._loads: dict[str, _Loading] = {}
        self._parts: dict[bytes, tuple[_Loading, _Part]] = {}

    # What the scheduler says -----------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Have it written. It is reported once, whatever becomes of it."""
        loading = _Loading(load)
        self._loads[load.request_id] = loading
        self._spawn(self._run(loading))

    def abort(self, request_id: str, reason: str) -> None:
        """Give it up; does nothing when it is over."""
        loading = self._loads.get(request_id)
        if loading is not None and not loading.aborted.done():
            loading.aborted.set_result(reason)

    def release(self, unwanted: Unwanted) -> None:
        """Tell prefill that its blocks are not needed."""
        rank, ranks = self._layout.rank, self._layout.ranks
        message = Release(unwanted.source.transfer, unwanted.request_id, rank, ranks)
        try:
            places = self._places(unwanted.source)
        except ValueError as error:
            _logger.warning("request %s: not released: %s", unwanted.request_id, error)
            return
        for _, address in places:
            self._try_to_send(address, message, unwanted.request_id)

    def _try_to_send(self, address: str, message: Message, request_id: str) -> None:
        try:
            self._clients.send(address, message)
        except (zmq.ZMQError, ValueError) as error:
            _logger.warning(
                "request %s: no %s can be sent to prefill at %s: %s",
                request_id, type(message).__name__, address, error,
            )  # fmt: skip

    def _places(self, source: Source) -> list[tuple[int, str]]:
        """Rank and side channel of the prefill workers that we have to do with.

        ValueError when there cannot be so many.
        """
        layout = self._layout
        for group in layout.groups:
            check_heads(group.heads, source.ranks)
        ranks = senders(heads_of(layout), layout.rank, layout.ranks, source.ranks)
        return [(rank, f"{source.host}:{source.port + rank}") for rank in ranks]

    # What prefill says -----------------------------------------------------------------------

    def hear(self, message: Message, reply: Reply) -> None:
        """A message of the side channel."""
        if not isinstance(message, Accepted | Ask | Done | Failed):
            return
        if message.id not in self._parts:
            if isinstance(message, Accepted | Ask):
                reply(Stop(message.id, "it was given up"))
            return
        loading, part = self._parts[message.id]
        if isinstance(message, Accepted):
            if part.timer is not None:
                part.timer.cancel()
                part.timer = None
            if part.watching is None:
                part.watching = self._spawn(self._watch(part, message))
        elif isinstance(message, Ask):
            if loading.given_up:
                reply(Stop(message.id, "it was given up"))
            else:
                part.granted = message.engine_id
                reply(Grant(message.id, message.number))
        elif isinstance(message, Done):
            part.quiet = True
            part.end(None)
        else:
            part.quiet = part.quiet or message.quiet
            part.end(message.reason)

    async def _watch(self, part: _Part, engine: Accepted) -> None:
        """Learn of it when prefill's worker dies."""
        try:
            wire = self._wires.to(engine.session_id)
            session = await wire.session(self._options.answer_timeout)
        except (AioFlagcxError, ValueError) as error:
            part.end(f"its engine cannot be reached: {error}")
        else:
            if session.peer_engine_id != engine.engine_id:
                part.end(f"another engine answers at {engine.session_id}")
                return
            if part.id in self._parts:
                part.wire = wire
                wire.watch(part)

    # A load's life ---------------------------------------------------------------------------

    async def _run(self, loading: _Loading) -> None:
        load = loading.load
        checking = self._spawn(self._check(loading))
        try:
            loading.parts = [_Part(*place) for place in self._places(load.source)]
            reason = await self._received(loading)
        except (AioFlagcxError, ValueError, zmq.ZMQError) as error:
            reason = f"it could not be asked for: {error}"
        if reason is not None:
            await self._settle(loading, reason)
        checking.cancel()
        for part in loading.parts:
            if self._parts.pop(part.id, None) is not None:
                self._clients.leave(part.address)
            if part.timer is not None:
                part.timer.cancel()
            if part.wire is not None:
                part.wire.forget(part)
        del self._loads[load.request_id]
        if reason is None:
            took = time.monotonic() - loading.begun
            self._results.count(received_requests=1, received_seconds=took)
            self._results.received(load.request_id)
        else:
            aborted = loading.aborted.done()
            self._results.received(load.request_id, () if aborted else load.blocks)

    async def _received(self, loading: _Loading) -> str | None:
        """None when everything has landed, else why not."""
        loop = asyncio.get_running_loop()
        limit = self._options.answer_timeout
        for part in loading.parts:
            self._parts[part.id] = loading, part
            self._clients.use(part.address)
            self._clients.send(part.address, self._fetch(loading.load, part))
            if limit is not None:
                part.timer = loop.call_later(
                    limit, part.end, f"its side channel has not answered within {limit:g} s"
                )
        limit = self._options.abort_timeout
        deadline = None if limit is None else loop.time() + limit
        pending = {part.over for part in loading.parts}
        while pending:
            waited: set[asyncio.Future[Any]] = {loading.aborted, *pending}
            done, _ = await asyncio.wait(
                waited,
                timeout=None if deadline is None else max(deadline - loop.time(), 0),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if loading.aborted in done:
                return loading.aborted.result()
            if not done:
                return f"not everything had come within {limit:g} s"
            for over in pending & done:
                if (reason := over.result()) is not None:
                    return reason
            pending -= done
        return None

    def _fetch(self, load: Load, part: _Part) -> Fetch:
        blocks = tuple(np.array(ids, np.int64) for ids in load.blocks)
        source, layout = load.source, self._layout
        start = kv_messages.Start(
            part.id, source.transfer, part.rank, source.ranks, layout, blocks, b""
        )
        engine = self._engine
        return Fetch(
            start, engine.session_id, engine.engine_id, load.request_id, self._layers, load.tokens
        )

    async def _check(self, loading: _Loading) -> None:
        """What prefill said while its connection ended and began again is said again."""
        while True:
            await asyncio.sleep(_CHECK)
            for part in loading.parts:
                if part.quiet or part.id not in self._parts:
                    continue
                messages: list[Message] = [Check(part.id)]
                if loading.given_up:
                    messages.insert(0, Stop(part.id, "it was given up"))
                elif part.watching is None:
                    messages = [self._fetch(loading.load, part)]
                for message in messages:
                    self._try_to_send(part.address, message, loading.load.request_id)

    async def _settle(self, loading: _Loading, reason: str) -> None:
        """Until nothing can change its blocks."""
        loading.given_up = True
        load = loading.load
        level = logging.INFO if loading.aborted.done() else logging.WARNING
        _logger.log(
            level, "request %s, transfer %r from %s:%d: not loaded: %s",
            load.request_id, load.source.transfer, load.source.host, load.source.port, reason,
        )  # fmt: skip
        peer = f"{load.source.host}:{load.source.port}"
        self._results.failure("failed_loads", load.request_id, peer, reason)
        for part in loading.parts:
            if part.id in self._parts and not part.over.done():
                self._try_to_send(part.address, Stop(part.id, reason), load.request_id)
        busy = [part for part in loading.parts if part.granted is not None and not part.quiet]
        overs = [part.over for part in busy if not part.over.done()]
        if overs:
            await asyncio.wait(overs, timeout=self._options.fence_timeout)
        for part in busy:
            if not part.quiet:
                assert part.granted is not None
                _logger.warning(
                    "request %s: prefill at %s is fenced off", load.request_id, part.address
                )
                try:
                    await self._engine.quiesce(part.granted, timeout=None)
                except EngineClosed:
                    return  # and with it everything that peers could do

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Give everything up; nothing can change our blocks when this returns."""
        for request_id in list(self._loads):
            self.abort(request_id, "decode's worker is closing")
        while self._loads and self._tasks:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._clients.close()
