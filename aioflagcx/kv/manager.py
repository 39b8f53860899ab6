"""The hand-over of requests between a prefill and a decode server."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np

from ..blocks import BlockLayout
from ..config import Config
from ..engine import Engine
from ..errors import AioFlagcxError, DeregisterTimeout, EngineClosed
from ..handshake import format_address, parse_address
from ..notifications import Notification, NotificationQueue
from ..pieces import one_dimensional
from ..region import Region
from ..waiting import DEFAULT, Timeout, outlast, seconds
from .directory import DirectoryClient
from .handover import Handover, settled
from .layout import CacheGroup, CacheLayout, block_layout
from .lobby import Lobby
from .messages import MAX_ROOM, Abort, Blocks, Done, Failed, Hello, Message, Start, decode
from .receiver import KVReceiver
from .sender import KVSender
from .wire import NAME, NO_MESSAGE, Wire, Wires

__all__ = ["KVManager", "Role", "Room"]

_logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]

Room = str | int
"""What joins the two halves of a request: 7 and "7" are the same room."""

_MAX_REMEMBERED = 65_536
"""Receivers that are over and remembered."""

_MAX_ANSWERS = 4096
"""Answers on their way to decodes that may not be there; with more, they get none."""


class KVManager:
    """One server's half of all its hand-overs; any number of them at a time.

    Used as ``async with KVManager(...) as manager:``, or by :meth:`start` and :meth:`close`, on the
    event loop of its engine.
    """

    def __init__(
        self,
        role: Role,
        layout: CacheLayout | CacheGroup,
        *,
        engine: Engine | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        config: Config | None = None,
        register: bool = True,
        directory: str | None = None,
        bootstrap_timeout: float | None = 300.0,
        waiting_timeout: float | None = 300.0,
        transfer_timeout: Timeout = DEFAULT,
        fence_timeout: float | None = 1.0,
    ) -> None:
        """Nothing is opened yet.

        ``role``: "prefill" sends, "decode" receives. ``layout``: where the KV pools are; their
        memory must stay until the manager is closed. ``engine``: an engine that is started already
        and whose other users are not disturbed; without one the manager has its own, made of
        ``host``, ``port`` and ``config``. ``register`` False: all pools are registered already.
        ``directory``: "host:port" or URL of a bootstrap directory (:mod:`aioflagcx.kv.bootstrap`),
        in which prefill announces its rooms and decode finds them; it needs aiohttp.

        In seconds, None for no limit: ``bootstrap_timeout``, in which the two halves of a room must
        find each other; ``waiting_timeout``, in which prefill must begin to send, and decode must
        have everything; ``transfer_timeout``, of each write, by default that of the engine.
        ``fence_timeout``: how long a prefill may take to say that it has stopped, before it is
        fenced off.
        """
        if role not in ("prefill", "decode"):
            raise ValueError(f'role must be "prefill" or "decode", not {role!r}')
        self.role: Role = role
        """ "prefill" or "decode"."""
        self.layout = CacheLayout(layout) if isinstance(layout, CacheGroup) else layout
        """Where the KV pools are."""
        self.bootstrap_timeout = seconds(bootstrap_timeout, None)
        """Seconds, or None."""
        self.waiting_timeout = seconds(waiting_timeout, None)
        """Seconds, or None."""
        seconds(transfer_timeout, None)
        self.transfer_timeout = transfer_timeout
        """Seconds, or None, or DEFAULT."""
        self.fence_timeout = seconds(fence_timeout, None)
        """Seconds; None: a prefill that does not answer is waited for as long as it lives."""
        self._own_engine = engine is None
        self.engine = Engine(host, port, config=config) if engine is None else engine
        """What moves the data."""
        self.connect_timeout = self.engine._config.connect_timeout
        """Seconds of one attempt to connect, as the engine's configuration says."""
        self._directory = None if directory is None else DirectoryClient(directory)
        self._register = register
        self._regions: list[Region] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wires = Wires(self.engine, self._spawn)
        self._queue: NotificationQueue | None = None  # whose route is ours
        self._changing = asyncio.Lock()  # starting and closing take turns
        self._open = False
        self._receivers: dict[bytes, KVReceiver] = {}
        self._rooms: dict[str, Handover] = {}
        self._lobby = Lobby(self.bootstrap_timeout)
        self._announcements: set[asyncio.Task[Any]] = set()
        self._answers: set[asyncio.Task[Any]] = set()
        # Receivers that have everything, for a prefill that does not know whether they know.
        self._handed_over: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        # Receivers to whose blocks something may still be on its way.
        self._unquiet: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._layouts: dict[tuple[CacheLayout, int, range], BlockLayout | None] = {}

    # Life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register the pools and listen; starts the engine, if it is the manager's own.

        Raises :class:`~aioflagcx.errors.RegistrationError`, and what starting an engine raises.
        ValueError when the engine has a manager already.
        """
        async with self._changing:
            if not self._open:
                await self._start()

    async def _start(self) -> None:
        async with contextlib.AsyncExitStack() as undo:
            if self._own_engine:
                await self.engine.start()
                undo.push_async_callback(self.engine.close)
            if self._register:
                pools = [
                    (address, group.pool_bytes)
                    for group in self.layout.groups
                    for layer in group.layers
                    for address in layer
                ]
                self._regions = await self.engine.register_many(pools)
                undo.push_async_callback(self._deregister)
            self._queue = self.engine._queue
            self._queue.route(NAME, self._heard)
            undo.callback(self._queue.unroute, NAME)
            if self._directory is not None:
                self._directory.open()
            undo.pop_all()
        self._open = True

    async def close(self) -> None:
        """Abort all rooms, and return when nothing of them is left. Idempotent.

        A given engine stays open; its pools are deregistered as often as they were registered here.
        When the caller is cancelled meanwhile, the cancellation is raised after the end: a prefill
        that is stopped in the middle of a copy is waited for, as long as it lives. Raises
        :class:`~aioflagcx.errors.DeregisterTimeout` as :meth:`Engine.deregister` does, after all
        else has been done.
        """
        await outlast(asyncio.get_running_loop().create_task(self._close()))

    async def _close(self) -> None:
        async with self._changing:
            if not self._open:
                return
            self._open = False
            async with contextlib.AsyncExitStack() as rest:
                # In reverse, and each whatever becomes of the others.
                if self._own_engine:
                    rest.push_async_callback(self.engine.close)
                rest.push_async_callback(self._deregister)
                if self._directory is not None:
                    rest.push_async_callback(self._directory.close)
                await self._end_rooms()

    async def _end_rooms(self) -> None:
        halves = [*self._receivers.values(), *self._rooms.values()]
        for half in halves:
            half._fail("the server is closing")
        for half in halves:
            await settled(half._settling)
        for start, wire in self._lobby.close():
            self._refuse(start, wire, "the server is closing")
        if self._answers:
            await asyncio.wait(self._answers, timeout=self.fence_timeout)
        assert self._queue is not None
        self._queue.unroute(NAME)
        await asyncio.gather(*self._announcements, return_exceptions=True)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _deregister(self) -> None:
        regions, self._regions = self._regions, []
        failure: DeregisterTimeout | None = None
        for region in regions:
            try:
                await self.engine.deregister(region)
            except DeregisterTimeout as error:
                failure = error
            except EngineClosed:
                return
        if failure is not None:
            raise failure

    async def __aenter__(self) -> KVManager:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def session_id(self) -> str:
        """ "host:port", by which the other side knows this server."""
        return self.engine.session_id

    def __repr__(self) -> str:
        rank = f"rank {self.layout.rank} of {self.layout.ranks}"
        return f"<KVManager of {self.role} {rank}, {len(self._rooms)} rooms, on {self.engine!r}>"

    # Rooms -----------------------------------------------------------------------------------

    def receiver(self, room: Room, prefill: str | Sequence[str] | None = None) -> KVReceiver:
        """Decode's half of a room; see :class:`KVReceiver`.

        ``prefill``: the session id of prefill's engine; of all its ranks, in order, when there are
        several. None: as the directory says, when somebody has announced the room there.
        Its time begins with :meth:`KVReceiver.start`; one that is not to be started is to be
        aborted. ValueError when that is no address, or this room has a receiver that has not ended.
        """
        name = self._room(room, "decode")
        addresses = (prefill,) if isinstance(prefill, str) else tuple(prefill or ())
        addresses = tuple(format_address(*parse_address(one)) for one in addresses)
        if prefill is None and self._directory is None:
            raise ValueError(f"room {name!r}: without a directory, prefill must be given")
        if prefill is not None and not addresses:
            raise ValueError(f"room {name!r}: there is no prefill rank")
        receiver = KVReceiver(self, name, addresses)
        self._rooms[name] = receiver
        return receiver

    def sender(self, room: Room) -> KVSender:
        """Prefill's half of a room; see :class:`KVSender`.

        Its ``bootstrap_timeout`` begins with this call. ValueError when this room has a sender that
        has not ended.
        """
        name = self._room(room, "prefill")
        sender = KVSender(self, name)
        self._rooms[name] = sender
        if self._directory is not None:
            layout = self.layout
            sender._announcing = self._spawn(
                self._directory.announce(
                    name, layout.rank, layout.ranks, self.session_id, _ANNOUNCED
                ),
                self._announcements,
            )
        offers = self._lobby.open(name)
        for start, wire in offers.starts.values():
            sender.offered(start, wire)
        if offers.aborted is not None:
            sender.aborted(*offers.aborted)
        return sender

    def _room(self, room: Room, role: Role) -> str:
        if isinstance(room, bool) or not isinstance(room, str | int):
            raise TypeError(f"a room is a str or an int, not {type(room).__name__}")
        if role != self.role:
            raise ValueError(f"this is the manager of a {self.role} server")
        if not self._open:
            raise EngineClosed("the KVManager is not started, or closed")
        name = str(room)
        if not 0 < len(name.encode()) <= MAX_ROOM:
            raise ValueError(f"a room's name has 1 to {MAX_ROOM} bytes in UTF-8")
        if name in self._rooms:
            raise ValueError(f"room {name!r} is in use: {self._rooms[name]!r}")
        return name

    # What both halves use --------------------------------------------------------------------

    def _spawn(
        self, work: Coroutine[Any, Any, object], kind: set[asyncio.Task[Any]] | None = None
    ) -> asyncio.Task[Any]:
        """What ends with the manager; ``kind``: what has an end of its own."""
        kind = self._tasks if kind is None else kind
        task = asyncio.get_running_loop().create_task(work)
        kind.add(task)
        task.add_done_callback(kind.discard)
        return task

    def _blocks(self, block_ids: Any) -> tuple[Blocks, ...]:
        """A caller's block ids, of each group; ValueError and TypeError for what cannot be."""
        groups = self.layout.groups
        if len(groups) == 1:
            lists = [block_ids]
            if not isinstance(block_ids, np.ndarray) and len(block_ids) == 1:
                [only] = block_ids
                lists = [only] if isinstance(only, Sequence | np.ndarray) else lists
        else:
            lists = list(block_ids)
        if len(lists) != len(groups):
            raise ValueError(f"{len(lists)} lists of blocks for {len(groups)} groups")
        found = []
        for index, (ids, group) in enumerate(zip(lists, groups, strict=True)):
            array = one_dimensional(ids, f"block_ids[{index}]")
            bad = np.flatnonzero((array < 0) | (array >= group.blocks))
            if bad.size:
                raise ValueError(
                    f"block_ids[{index}][{bad[0]}] = {array[bad[0]]} is not one of the "
                    f"{group.blocks} blocks of groups[{index}]"
                )
            found.append(array.astype(np.int64))
        return tuple(found)

    def _aux(self, aux: object) -> bytes:
        """What goes along with blocks; TypeError and ValueError for what cannot."""
        if not isinstance(aux, bytes | bytearray | memoryview):
            raise TypeError(f"aux must be bytes, not {type(aux).__name__}")
        aux = bytes(aux)
        limit = self.engine._config.notification_max_payload - _ENVELOPE
        if len(aux) > limit:
            raise ValueError(
                f"aux of {len(aux)} bytes: at most {limit}, which is notification_max_payload "
                f"less {_ENVELOPE}"
            )
        return aux

    def _layers(self, layers: range | None, count: int) -> range:
        """Those of a group with so many layers."""
        if layers is None:
            return range(count)
        if not isinstance(layers, range) or layers.step != 1:
            raise TypeError(f"layers must be a range of step 1, not {layers!r}")
        if not 0 <= layers.start <= layers.stop <= count:
            raise ValueError(f"layers {layers!r} are not in the group's {count}")
        return layers

    async def _find(self, room: str) -> tuple[str, ...]:
        """The prefill ranks of a room that the directory knows, or will know."""
        assert self._directory is not None
        return await self._directory.find(room)

    def _block_layout(self, theirs: CacheLayout, group: int, layers: range) -> BlockLayout | None:
        """What we write to a decode rank of each block; made once for each kind of rank."""
        key = theirs, group, layers
        if key not in self._layouts:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = block_layout(self.layout, theirs, group, layers)
        return self._layouts[key]

    async def _try_to_tell(self, wire: Wire, message: Message) -> None:
        """To a peer that may be dead, which then needs not know."""
        try:
            await wire.tell(message, self.connect_timeout)
        except AioFlagcxError as error:
            _logger.debug("%s was not told %s: %s", wire.id, type(message).__name__, error)

    def _refuse(self, start: Start, wire: Wire, reason: str) -> None:
        """Tell a receiver that nothing will come for it; nothing has been sent to it."""
        self._answer(wire, Failed(start.id, start.to_rank, reason, True))

    def _answer(self, wire: Wire, message: Message) -> str | None:
        """Tell it in the background; why not, or None. Whoever asks may not be where it says."""
        if len(self._answers) >= _MAX_ANSWERS:
            return f"{_MAX_ANSWERS} answers are on their way already"
        task = self._spawn(self._try_to_tell(wire, message))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        return None

    def _forget_receiver(self, identity: bytes, receiver: KVReceiver) -> None:
        self._receivers.pop(identity, None)
        self._forget(receiver)
        if receiver.error is None:
            _remember(self._handed_over, identity)

    def _forget_sender(self, sender: KVSender) -> None:
        self._forget(sender)

    def _forget(self, half: Handover) -> None:
        if self._rooms.get(half.room) is half:
            del self._rooms[half.room]

    def _remember(self, sender: KVSender, reason: str) -> None:
        """A sender has failed: decode ranks that have not come yet are told when they do."""
        told = {rank: target.start.id for rank, target in sender._targets.items()}
        self._lobby.ended(sender.room, reason, told)

    def _never_quiet(self, receiver: bytes) -> None:
        """Nobody knows whether something is still on its way to this receiver's blocks."""
        _remember(self._unquiet, receiver)

    # What is heard ---------------------------------------------------------------------------

    def _heard(self, notification: Notification) -> str | None:
        """Why it is refused, or None."""
        try:
            message = decode(notification.payload)
        except ValueError as error:
            _logger.warning("%s sent no message of a hand-over: %s", notification.session_id, error)
            return f"{NO_MESSAGE}: {error}"
        wire = self._wires.to(notification.session_id)
        if isinstance(message, Start | Abort):
            if self.role != "prefill":
                words = f"this is a {self.role} server, not prefill"
                if isinstance(message, Start):
                    self._refuse(message, wire, words)  # or it would try again
                return words
            if isinstance(message, Start):
                return self._heard_start(message, wire, notification.engine_id)
            return self._heard_abort(message, wire)
        if self.role != "decode":
            return f"this is a {self.role} server, not decode"
        receiver = self._receivers.get(message.id)
        if receiver is not None:
            return receiver.heard(message, notification)
        # Of a room that is over: nobody may write to its blocks, nor take it for handed over.
        wants = isinstance(message, Hello)
        wants = wants or (isinstance(message, Done) and message.id not in self._handed_over)
        return "decode is through with the room" if wants else None

    def _heard_start(self, start: Start, wire: Wire, engine_id: str) -> str | None:
        if not self._open:
            return "the server is closing"
        reason = self._lobby.reason(start)
        if reason is not None:
            self._refuse(start, wire, reason)
            return None
        half = self._rooms.get(start.room)
        if isinstance(half, KVSender) and half.error is None:
            half.offered(start, wire)
            return None
        return self._lobby.put(start, wire, engine_id)

    def _heard_abort(self, abort: Abort, wire: Wire) -> str | None:
        half = self._rooms.get(abort.room)
        if isinstance(half, KVSender) and abort.id in half.receivers:
            half.aborted(abort.rank, abort.reason)  # and answers, when it has settled
            return None
        self._lobby.abort(abort)
        quiet = abort.id not in self._unquiet
        return self._answer(wire, Failed(abort.id, abort.to_rank, abort.reason, quiet))


def _remember(receivers: collections.OrderedDict[bytes, None], identity: bytes) -> None:
    receivers[identity] = None
    while len(receivers) > _MAX_REMEMBERED:
        receivers.popitem(last=False)


_ANNOUNCED = 30.0
"""Seconds after which the directory forgets a prefill that has died."""

_ENVELOPE = 64
"""Bytes around the ``aux`` of a message behind the data."""

_MAX_LAYOUTS = 4096
"""Layouts that are kept: for each kind of decode rank, group and range of layers."""
