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
from ..errors import AioFlagcxError, EngineClosed
from ..handshake import format_address, parse_address
from ..notifications import Notification
from ..pieces import one_dimensional
from ..region import Region
from ..waiting import DEFAULT, Timeout, seconds
from .directory import DirectoryClient
from .handover import Handover, settled
from .layout import CacheGroup, CacheLayout, block_layout
from .messages import MAX_ROOM, Abort, Blocks, Failed, Hello, Message, Start, decode
from .receiver import KVReceiver
from .sender import KVSender
from .wire import NAME, Wire, Wires

__all__ = ["KVManager", "Role", "Room"]

_logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]

Room = str | int
"""What joins the two halves of a request: 7 and "7" are the same room."""

_MAX_OFFERS = 65_536
"""Rooms for which a decode has come before its sender; one more is refused, and tries again."""

_MAX_REMEMBERED = 65_536
"""Ends of rooms that are remembered for a decode that comes late."""


class _Offers:
    """What decode ranks have said about a room that has no sender yet."""

    def __init__(self) -> None:
        self.starts: dict[int, tuple[Start, Wire]] = {}
        self.aborted: tuple[int, str] | None = None
        """By which decode rank, and why."""
        self.expiry: asyncio.TimerHandle | None = None


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
        self._open = False
        self._receivers: dict[bytes, KVReceiver] = {}
        self._rooms: dict[str, Handover] = {}
        self._offers: dict[str, _Offers] = {}
        # By room, why its sender has failed: for decode ranks that have not come by then.
        self._failed: collections.OrderedDict[str, tuple[str, set[int]]] = collections.OrderedDict()
        # Receivers to whose blocks something may still be on its way.
        self._unquiet: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._layouts: dict[tuple[CacheLayout, int, range], BlockLayout | None] = {}

    # Life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register the pools and listen; starts the engine, if it is the manager's own.

        Raises :class:`~aioflagcx.errors.RegistrationError`, and what starting an engine raises.
        ValueError when the engine has a manager already.
        """
        if self._open:
            return
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
            self.engine._queue.route(NAME, self._heard)
            if self._directory is not None:
                self._directory.open()
            undo.pop_all()
        self._open = True

    async def close(self) -> None:
        """Abort all rooms, and return when nothing of them is left. Idempotent.

        A given engine stays open; its pools are deregistered as often as they were registered here.
        """
        if not self._open:
            return
        self._open = False
        halves = [*self._receivers.values(), *self._rooms.values()]
        for half in halves:
            half._fail("the server is closing")
        for half in halves:
            await settled(half._settling)
        self.engine._queue.unroute(NAME)
        for offers in self._offers.values():
            if offers.expiry is not None:
                offers.expiry.cancel()
        self._offers.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._directory is not None:
            await self._directory.close()
        with contextlib.suppress(EngineClosed):
            await self._deregister()
        if self._own_engine:
            await self.engine.close()

    async def _deregister(self) -> None:
        regions, self._regions = self._regions, []
        for region in regions:
            await self.engine.deregister(region)

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
        ValueError when that is no address, or this room has a receiver that has not ended.
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
        self._failed.pop(name, None)
        if self._directory is not None:
            layout = self.layout
            sender._announcing = self._spawn(
                self._directory.announce(
                    name, layout.rank, layout.ranks, self.session_id, _ANNOUNCED
                )
            )
        offers = self._offers.pop(name, None)
        if offers is not None:
            if offers.expiry is not None:
                offers.expiry.cancel()
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
        if len(name.encode()) > MAX_ROOM:
            raise ValueError(f"a room's name has at most {MAX_ROOM} bytes in UTF-8")
        if name in self._rooms:
            raise ValueError(f"room {name!r} is in use: {self._rooms[name]!r}")
        return name

    # What both halves use --------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
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
        failed = Failed(start.id, start.to_rank, reason, True)
        self._spawn(self._try_to_tell(wire, failed))

    def _forget_receiver(self, identity: bytes, receiver: KVReceiver) -> None:
        self._receivers.pop(identity, None)
        self._forget(receiver)

    def _forget_sender(self, sender: KVSender) -> None:
        self._forget(sender)

    def _forget(self, half: Handover) -> None:
        if self._rooms.get(half.room) is half:
            del self._rooms[half.room]

    def _remember(self, sender: KVSender, reason: str) -> None:
        """A sender has failed: decode ranks that have not come yet are told when they do."""
        self._failed[sender.room] = reason, set(sender._targets)
        while len(self._failed) > _MAX_REMEMBERED:
            self._failed.popitem(last=False)

    def _never_quiet(self, receiver: bytes) -> None:
        """Nobody knows whether something is still on its way to this receiver's blocks."""
        self._unquiet[receiver] = None
        while len(self._unquiet) > _MAX_REMEMBERED:
            self._unquiet.popitem(last=False)

    # What is heard ---------------------------------------------------------------------------

    def _heard(self, notification: Notification) -> str | None:
        """Why it is refused, or None."""
        try:
            message = decode(notification.payload)
        except ValueError as error:
            _logger.warning("%s sent no message of a hand-over: %s", notification.session_id, error)
            return f"no message of a hand-over: {error}"
        wire = self._wires.to(notification.session_id)
        if isinstance(message, Start | Abort):
            if self.role != "prefill":
                return f"this is a {self.role} server, not prefill"
            if isinstance(message, Start):
                return self._heard_start(message, wire)
            self._heard_abort(message, wire)
            return None
        if self.role != "decode":
            return f"this is a {self.role} server, not decode"
        receiver = self._receivers.get(message.id)
        if receiver is not None:
            return receiver.heard(message, notification)
        # Of a room that is over: nobody may write to its blocks, and nobody cares for the rest.
        return "decode is through with the room" if isinstance(message, Hello) else None

    def _heard_start(self, start: Start, wire: Wire) -> str | None:
        half = self._rooms.get(start.room)
        if isinstance(half, KVSender):
            half.offered(start, wire)
            return None
        if start.room in self._failed:
            reason, told = self._failed[start.room]
            if start.layout.rank not in told:
                told.add(start.layout.rank)
                if len(told) >= start.layout.ranks:
                    del self._failed[start.room]
                self._refuse(start, wire, reason)
                return None
        offers = self._offers.get(start.room)
        if offers is None:
            if len(self._offers) >= _MAX_OFFERS:
                return f"{_MAX_OFFERS} rooms wait for their senders"
            offers = self._offers[start.room] = _Offers()
            if self.bootstrap_timeout is not None:
                offers.expiry = asyncio.get_running_loop().call_later(
                    self.bootstrap_timeout, self._offers.pop, start.room, None
                )
        offers.starts[start.layout.rank] = start, wire
        offers.aborted = None
        return None

    def _heard_abort(self, abort: Abort, wire: Wire) -> None:
        half = self._rooms.get(abort.room)
        if isinstance(half, KVSender) and abort.id in half.receivers:
            half.aborted(abort.rank, abort.reason)  # and answers, when it has settled
            return
        offers = self._offers.get(abort.room)
        if offers is not None:
            known = offers.starts.get(abort.rank)
            if known is not None and known[0].id == abort.id:
                offers.aborted = abort.rank, abort.reason
        quiet = abort.id not in self._unquiet
        failed = Failed(abort.id, abort.to_rank, abort.reason, quiet)
        self._spawn(self._try_to_tell(wire, failed))


_ANNOUNCED = 30.0
"""Seconds after which the directory forgets a prefill that has died."""

_ENVELOPE = 64
"""Bytes around the ``aux`` of a message behind the data."""

_MAX_LAYOUTS = 4096
"""Layouts that are kept: for each kind of decode rank, group and range of layers."""
