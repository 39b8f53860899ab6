"""The public entry: one engine, bound to one event loop."""

from __future__ import annotations

import asyncio
import operator
import warnings
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType

from . import _native
from .assembly import Assembly, check_devices
from .blocks import BlockIds, BlockLayout
from .config import Config
from .errors import ConfigError, EngineClosed
from .notifications import Notification, NotificationQueue, Outgoing
from .pieces import Addresses, Pieces
from .posting import launch, make_block_request, make_request
from .region import Region
from .session import Session
from .stats import Stats
from .transfer import Transfer
from .waiting import DEFAULT, Timeout, check_loop, outlast, seconds

__all__ = ["Engine"]

_MAX_PORT = 65_535


class Engine:
    """Moves memory between this process and others; see :meth:`write` and :meth:`read`.

    Used as ``async with Engine(...) as engine:``, or by :meth:`start` and :meth:`close`. An
    engine belongs to the event loop it is started on: its methods are called from that loop's
    thread. Any number of engines can live in one process.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise: str | None = None,
        devices: str | Sequence[str] = "auto",
        config: Config | None = None,
    ) -> None:
        """Nothing is opened yet.

        ``host``: the name or address to listen at, and what peers use to reach this engine.
        With "0.0.0.0" or "::" that is ``advertise`` or, without it, the host's primary address.
        ``port``: of the handshake server; 0 takes a free one. ``devices``: "auto", or names as
        in ``Config.devices``, which they override. ``config``: None is ``Config.from_env()``.

        Raises :class:`~aioflagcx.errors.ConfigError`.
        """
        self._config = Config.from_env() if config is None else config
        self._devices = check_devices(devices, self._config)
        self._port = operator.index(port)
        if not 0 <= self._port <= _MAX_PORT:
            raise ConfigError(f"port={port}: accepted is 0 to {_MAX_PORT}")
        self._advertise = advertise
        self._transfer_timeout = self._config.transfer_timeout
        self._pieces = Pieces()
        self._queue = NotificationQueue(self._config)
        self._changing = asyncio.Lock()  # starting and closing take turns
        self._open: Assembly | None = None  # None also as soon as closing has begun
        self._engine_id = ""
        self._session_id = ""
        self.host = host
        """The host this engine listens at, as given."""
        self.rpc_port = port
        """TCP port of the handshake server; known once started."""

    # Life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the devices and listen. Nothing happens when that is done already.

        Raises :class:`~aioflagcx.errors.ConfigError` when an address cannot be bound or a
        device cannot be opened; then nothing is left open.
        """
        async with self._changing:
            if self._open is not None:
                self._assembly()  # the same loop?
                return
            if self._queue.closed:
                self._queue = NotificationQueue(self._config)
            assembly = await Assembly.open(
                self.host, self._port, self._advertise, self._devices, self._config, self._queue
            )
            identity = assembly.runtime.identity
            self._engine_id = identity.engine_id.hex()
            self._session_id = identity.session_id
            self.rpc_port = assembly.server.port
            self._open = assembly

    async def close(self) -> None:
        """Stop everything, and return when nothing of it is left. Idempotent.

        New calls are refused at once. Transfers are cancelled, as by a timeout, and their
        awaiters get :class:`~aioflagcx.errors.EngineClosed`; sessions are closed, peers fenced,
        regions deregistered, iterations over notifications ended. When the caller is cancelled
        meanwhile, the cancellation is raised after the end. In a forked child this does nothing.
        """
        async with self._changing:
            if self._open is None:
                return
            if self._open.forked:
                self._open = None  # all of it is the parent's
                return
            assembly = self._assembly()
            self._open = None
            await outlast(assembly.runtime.loop.create_task(assembly.close()))

    async def _at_rest(self) -> None:
        """Until a start or a close that is under way is over."""
        async with self._changing:
            pass

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        assembly = getattr(self, "_open", None)
        if assembly is not None and not assembly.forked:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            assembly.abandon()

    def __repr__(self) -> str:
        state = "closed" if self._open is None else f"engine_id={self._engine_id[:8]}"
        return f"<Engine {self._session_id or self.host} {state}>"

    @property
    def session_id(self) -> str:
        """ "host:rpc_port", by which peers connect to this engine; EngineClosed before start."""
        if not self._session_id:
            raise EngineClosed("the engine has not been started: it has no session id yet")
        return self._session_id

    @property
    def engine_id(self) -> str:
        """Random, new at every start, in hexadecimal; EngineClosed before start."""
        if not self._engine_id:
            raise EngineClosed("the engine has not been started: it has no engine id yet")
        return self._engine_id

    def _assembly(self) -> Assembly:
        """What a call works with; EngineClosed, or RuntimeError on another loop or thread."""
        assembly = self._open
        if assembly is None:
            raise EngineClosed("the engine is not started, or closed")
        check_loop(assembly.runtime.loop)
        return assembly

    # Memory ----------------------------------------------------------------------------------

    async def register(
        self,
        memory: object,
        *,
        name: str | None = None,
        access: str = "read_write",
        location: str | None = None,
    ) -> Region:
        """Make memory usable for transfers, and peers able to reach it.

        ``memory``: an object with the buffer protocol, ``__dlpack__``,
        ``__cuda_array_interface__`` or ``__array_interface__``, contiguous, or ``(addr, size)`` in
        bytes. The object is kept alive until the region is deregistered. Memory of a GPU needs RDMA
        devices. ``name``: how peers find it, unique in this engine. ``access``: what peers may do,
        "read", "write" or "read_write"; our own transfers can use it either way.

        ``location``: what the memory is next to, "cpu:N" for NUMA node N, "cuda:N" for GPU N, "*"
        for anything; by default what the object says. Transfers from and to it take the RDMA
        devices nearest to that, as long as one of them is up (``aioflagcx topology`` shows which).

        The same range with the same access, name and location gives the same region again, and is
        deregistered as often as it was registered. Ranges may overlap.

        Raises :class:`~aioflagcx.errors.RegistrationError`.
        """
        [region] = await self._assembly().registry.register([memory], [name], access, location)
        return region

    async def register_many(
        self,
        memories: Iterable[object],
        *,
        names: Iterable[str | None] | None = None,
        location: str | None = None,
    ) -> list[Region]:
        """:meth:`register` for many, with access "read_write": all of them or none.

        ``names``: as many as memories, None for one without. ``location``: of all of them.
        """
        all_names = None if names is None else list(names)
        registry = self._assembly().registry
        return await registry.register(list(memories), all_names, "read_write", location)

    async def alloc(
        self,
        size: int,
        *,
        name: str | None = None,
        access: str = "read_write",
        huge_pages: bool = False,
    ) -> Region:
        """A region of ``size`` bytes of memory that the engine owns, zero-filled.

        Its pages are there when this returns: touching them later cannot fail. Peers on the same
        host may map the memory, so it is shared memory, in whole pages of its own. Use it by
        :meth:`Region.view`, :meth:`Region.numpy` or DLPack; it goes when the region is deregistered
        and the last view is gone, and is never used for anything else. In a forked child it is the
        parent's memory, not a copy.

        ``name`` and ``access`` as for :meth:`register`. ``huge_pages``: take huge pages of the
        default size from the pool that the administrator has reserved (``vm.nr_hugepages``).

        Raises :class:`~aioflagcx.errors.RegistrationError` when there is not so much memory, or
        not so many huge pages; TypeError when ``size`` is no integer.
        """
        registry = self._assembly().registry
        return await registry.alloc(size, name, access, bool(huge_pages))

    async def deregister(self, region: Region, *, timeout: float | None = 5.0) -> None:
        """Take one registration back. With the last one, nobody can reach the memory afterwards.

        The region is revoked at once: new transfers do not find it, here and at the peers. Then
        transfers of ours that use it are waited for, and peers that are touching it.

        Raises :class:`~aioflagcx.errors.DeregisterTimeout` when that takes more than ``timeout``
        seconds (None: no limit): the memory must not be freed or reused yet, and the
        deregistration goes on in the background. Calling again, then or after a cancellation,
        waits for it again, and returns at once if it has ended meanwhile. Raises
        :class:`~aioflagcx.errors.RegistrationError` for a region that is not registered.
        """
        if not isinstance(region, Region):
            raise TypeError(f"expected a Region, not {type(region).__name__}")
        limit = seconds(timeout, None)
        await self._assembly().registry.deregister(region, limit)

    # Peers -----------------------------------------------------------------------------------

    async def connect(self, session_id: str, *, timeout: Timeout = DEFAULT) -> Session:
        """The session with the engine at "host:port" or "[v6]:port", connected if need be.

        There is one session with each peer; concurrent calls share one attempt. ``timeout`` in
        seconds, by default ``Config.connect_timeout``; None: no limit.

        Raises a :class:`~aioflagcx.errors.ConnectError` that names the reason, and ValueError
        for text that is no session id.
        """
        limit = seconds(timeout, self._config.connect_timeout)
        return await self._assembly().peers.reach(session_id, limit)

    async def quiesce(self, peer: str, *, timeout: float | None = 5.0) -> None:
        """Fence everything with which ``peer``, a session id or engine id, can reach our memory.

        When it returns, nothing of the sessions that the peer had opened to this engine can read
        or write here any more; the peer's pending transfers to us fail. The peer's next call
        opens a new session. Nothing happens when no such peer is connected; TypeError and
        ValueError tell what is neither kind of id.

        Raises :class:`~aioflagcx.errors.QuiesceTimeout` when a process of this host, which copies
        into our memory by itself, is stopped in the middle of a copy and has not finished it
        within ``timeout`` seconds (None: no limit).
        """
        await self._assembly().serving.quiesce(peer, seconds(timeout, None))

    def notifications(self) -> AsyncIterator[Notification]:
        """What peers' applications send: by ``notify`` of a write, or :meth:`Session.notify`.

        Each notification goes to one of the iterators. Unread ones are kept up to
        ``notification_queue_length`` and ``notification_queue_bytes``; beyond that senders are
        refused. Iteration ends when the engine is closed and what was queued has been taken.
        """
        return self._queue.iterate()

    def stats(self) -> Stats:
        """Counters and gauges of this moment."""
        return Stats.collect(self._assembly().runtime, self._queue)

    # Transfers -------------------------------------------------------------------------------

    async def write(
        self,
        session: Session | str,
        src: Addresses,
        dst: Addresses,
        lens: Addresses,
        *,
        notify: tuple[str, bytes] | None = None,
        timeout: Timeout = DEFAULT,
    ) -> int:
        """Copy from our memory into the peer's; the number of bytes, when all have arrived.

        ``session``: a :class:`Session`, or a session id, which is connected to if need be.
        ``src``: local addresses, ``dst``: the peer's addresses, ``lens``: bytes. Each an int, or
        equally long sequences of ints or one-dimensional integer arrays, which are copied before
        this call first suspends; an int ``lens`` beside sequences holds for every piece. A
        :class:`Region` or :class:`RemoteRegion` stands for its address or, in ``lens``, its
        size. Pieces of length 0 are skipped, no pieces at all are a success.

        ``notify``: ``(name, payload)``, delivered to the peer's :meth:`notifications` once, after
        the data has landed, or not at all when the write fails. ``timeout``: seconds from the
        call on for everything, by default ``Config.transfer_timeout``; None: no limit. The call
        returns at the latest ``drain_timeout`` + 0.5 s after that.

        However it ends, when it returns nothing of it is posted any more: ``src`` may be reused.

        Raises, before a byte moves, ValueError naming the index of a piece that cannot be,
        :class:`~aioflagcx.errors.LocalAddressError` and
        :class:`~aioflagcx.errors.RemoteAddressError` for pieces outside every region, and
        :class:`~aioflagcx.errors.ConnectError`; after that, a
        :class:`~aioflagcx.errors.TransferError`.
        """
        transfer = self._submit(_native.OP_WRITE, session, src, dst, lens, notify, timeout)
        return await transfer

    async def read(
        self,
        session: Session | str,
        local: Addresses,
        remote: Addresses,
        lens: Addresses,
        *,
        timeout: Timeout = DEFAULT,
    ) -> int:
        """Copy from the peer's memory into ours; the number of bytes, when all are here.

        Arguments and errors are those of :meth:`write`, with ``local`` the destination.
        """
        transfer = self._submit(_native.OP_READ, session, local, remote, lens, None, timeout)
        return await transfer

    async def write_blocks(
        self,
        session: Session | str,
        layout: BlockLayout | Sequence[BlockLayout],
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        notify: tuple[str, bytes] | None = None,
        timeout: Timeout = DEFAULT,
    ) -> int:
        """:meth:`write` of blocks of a paged cache, by their ids.

        ``src_blocks[i]`` of ours goes to ``dst_blocks[i]`` of the peer's.

        ``layout``: where the pools and their blocks are; every pool lies in one region on either
        side. ``src_blocks`` and ``dst_blocks``: equally long sequences of block ids, or integer
        arrays. For several kinds of blocks in one transfer, all three are sequences of these.
        Blocks are expanded as they are sent, so that 61 layers of 4,096 blocks cost the caller no
        more than the ids do.

        Everything else is as for :meth:`write`. ValueError also tells of ids that are no block of
        the pool; the index of :class:`~aioflagcx.errors.LocalAddressError` and
        :class:`~aioflagcx.errors.RemoteAddressError` is that of the span.
        """
        return await self.submit_write_blocks(
            session, layout, src_blocks, dst_blocks, notify=notify, timeout=timeout
        )

    def submit_write(
        self,
        session: Session | str,
        src: Addresses,
        dst: Addresses,
        lens: Addresses,
        *,
        notify: tuple[str, bytes] | None = None,
        timeout: Timeout = DEFAULT,
    ) -> Transfer:
        """:meth:`write` that returns at once, with a :class:`Transfer` to await.

        Raises errors in the arguments and :class:`~aioflagcx.errors.LocalAddressError` itself,
        and RuntimeError when called off the engine's event loop; all others come by awaiting.
        """
        return self._submit(_native.OP_WRITE, session, src, dst, lens, notify, timeout)

    def submit_read(
        self,
        session: Session | str,
        local: Addresses,
        remote: Addresses,
        lens: Addresses,
        *,
        timeout: Timeout = DEFAULT,
    ) -> Transfer:
        """:meth:`read` that returns at once; see :meth:`submit_write`."""
        return self._submit(_native.OP_READ, session, local, remote, lens, None, timeout)

    def submit_write_blocks(
        self,
        session: Session | str,
        layout: BlockLayout | Sequence[BlockLayout],
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        notify: tuple[str, bytes] | None = None,
        timeout: Timeout = DEFAULT,
    ) -> Transfer:
        """:meth:`write_blocks` that returns at once; see :meth:`submit_write`."""
        return self._submit_blocks(session, layout, src_blocks, dst_blocks, notify, timeout)

    def _submit_blocks(
        self,
        session: Session | str,
        layout: BlockLayout | Sequence[BlockLayout],
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        notify: tuple[str, bytes] | None,
        timeout: Timeout,
        *,
        reconnect: bool = True,
    ) -> Transfer:
        """``reconnect`` False: by this connection with the peer or not at all."""
        assembly = self._assembly()
        request = make_block_request(assembly.runtime.native, layout, src_blocks, dst_blocks)
        return self._launch(assembly, request, session, notify, timeout, reconnect=reconnect)

    def _submit(
        self,
        op: int,
        target: Session | str,
        local: Addresses,
        remote: Addresses,
        lens: Addresses,
        notify: tuple[str, bytes] | None,
        timeout: Timeout,
    ) -> Transfer:
        assembly = self._assembly()
        request = make_request(assembly.runtime.native, self._pieces, op, local, remote, lens)
        return self._launch(assembly, request, target, notify, timeout)

    def _launch(
        self,
        assembly: Assembly,
        request: _native.Request,
        target: Session | str,
        notify: tuple[str, bytes] | None,
        timeout: Timeout,
        *,
        reconnect: bool = True,
    ) -> Transfer:
        runtime, peers = assembly.runtime, assembly.peers
        limit = self._transfer_timeout if timeout is DEFAULT else seconds(timeout, None)
        session = peers.find(target)
        outgoing = None if notify is None else Outgoing.from_pair(notify, self._config)
        total = request.bytes_total
        transfer = Transfer(self, runtime.flights, request, total, outgoing, limit)
        launch(peers, transfer, request, session, target, reconnect=reconnect)
        return transfer
