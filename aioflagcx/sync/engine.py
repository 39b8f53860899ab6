"""The blocking engine: the asyncio engine on a thread of its own, and a way past its event loop.

What does not move data is run on that loop as it is. How transfers get past it is in
:mod:`aioflagcx.sync.transfer`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from .. import _native, engine
from ..blocks import BlockIds, BlockLayout
from ..config import Config
from ..errors import EngineClosed, LocalAddressError
from ..notifications import Outgoing
from ..pieces import Addresses, Pieces
from ..posting import make_block_request, make_request
from ..region import Region
from ..stats import Stats
from ..waiting import DEFAULT, Timeout, seconds
from .loop_thread import LoopThread
from .notifications import Notifications
from .session import Session
from .transfer import Transfer

if TYPE_CHECKING:
    from ..assembly import Assembly

__all__ = ["Engine"]

_logger = logging.getLogger(__name__)

_open: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
"""Engines that are started, to be closed at the end of the interpreter, the last one first."""


class _ThreadsPieces(threading.local):
    """Each thread's own :class:`Pieces`."""

    def __init__(self) -> None:
        self.pieces = Pieces()


class Engine:
    """Moves memory between this process and others; see :meth:`write` and :meth:`read`.

    Used as ``with Engine(...) as engine:``, or by :meth:`start` and :meth:`close`. Its methods can
    be called on any thread, by many at once; those that wait do so without the GIL. When a signal
    handler raises meanwhile, KeyboardInterrupt mostly, what was waited for is cancelled, and that
    is raised once it has ended. Any number of engines can live in one process; one that is open at
    the end of the interpreter is closed then.
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
        self._engine = engine.Engine(
            host, port, advertise=advertise, devices=devices, config=self._config
        )
        self._changing = threading.Lock()  # starting and closing take turns
        self._loop: LoopThread | None = None  # while it is started
        self._threads_pieces = _ThreadsPieces()

    # Life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the devices and listen. Nothing happens when that is done already.

        Raises :class:`~aioflagcx.errors.ConfigError` when an address cannot be bound or a
        device cannot be opened; then nothing is left open.
        """
        if self._loop is not None:
            self._loop.check_caller()
        with self._changing:
            if self._loop is not None:
                return
            loop = LoopThread()
            try:
                loop.run(self._engine.start)
            except BaseException:
                self._end(loop)
                raise
            self._loop = loop
            _open[id(self)] = self

    def close(self) -> None:
        """Stop everything, and return when nothing of it is left. Idempotent.

        New calls are refused at once. Transfers are cancelled, as by a timeout, and who waits for
        them gets :class:`~aioflagcx.errors.EngineClosed`; sessions are closed, peers fenced,
        regions deregistered, iterations over notifications ended. What a signal handler raises
        meanwhile is raised after the end. In a forked child this does nothing.
        """
        loop = self._loop
        if loop is None:
            return
        if loop.forked:
            self._loop = None  # all of it is the parent's
            return
        loop.check_caller()
        with self._changing:
            if self._loop is not loop:
                return
            try:
                self._end(loop)
            finally:
                self._loop = None
                _open.pop(id(self), None)

    def _end(self, loop: LoopThread) -> None:
        try:
            loop.run(self._engine.close)
        finally:
            loop.stop()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and not loop.forked:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=2, source=self)
            self._abandon()

    def _abandon(self) -> None:
        """Close in the background, for finalizers, which may run anywhere and must not wait."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.forked:
            loop.abandon(self._engine.close)

    def __repr__(self) -> str:
        return repr(self._engine)

    @property
    def host(self) -> str:
        """The host this engine listens at, as given."""
        return self._engine.host

    @property
    def rpc_port(self) -> int:
        """TCP port of the handshake server; known once started."""
        return self._engine.rpc_port

    @property
    def session_id(self) -> str:
        """ "host:rpc_port", by which peers connect to this engine; EngineClosed before start."""
        return self._engine.session_id

    @property
    def engine_id(self) -> str:
        """Random, new at every start, in hexadecimal; EngineClosed before start."""
        return self._engine.engine_id

    def _started(self) -> tuple[LoopThread, Assembly]:
        """What a call works with; EngineClosed, or RuntimeError where it could not wait."""
        loop, assembly = self._loop, self._engine._open
        if loop is None or assembly is None:
            raise EngineClosed("the engine is not started, or closed")
        loop.check_caller()
        return loop, assembly

    # Memory ----------------------------------------------------------------------------------

    def register(
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
        loop, assembly = self._started()
        return loop.run(
            lambda: self._engine.register(memory, name=name, access=access, location=location),
            lambda region: assembly.registry._unreserve([region]),
        )

    def register_many(
        self,
        memories: Iterable[object],
        *,
        names: Iterable[str | None] | None = None,
        location: str | None = None,
    ) -> list[Region]:
        """:meth:`register` for many, with access "read_write": all of them or none.

        ``names``: as many as memories, None for one without. ``location``: of all of them.
        """
        loop, assembly = self._started()
        all_memories = list(memories)
        all_names = None if names is None else list(names)
        return loop.run(
            lambda: self._engine.register_many(all_memories, names=all_names, location=location),
            assembly.registry._unreserve,
        )

    def alloc(
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
        loop, assembly = self._started()
        return loop.run(
            lambda: self._engine.alloc(size, name=name, access=access, huge_pages=huge_pages),
            lambda region: assembly.registry._unreserve([region]),
        )

    def deregister(self, region: Region, *, timeout: float | None = 5.0) -> None:
        """Take one registration back. With the last one, nobody can reach the memory afterwards.

        The region is revoked at once: new transfers do not find it, here and at the peers. Then
        transfers of ours that use it are waited for, and peers that are touching it.

        Raises :class:`~aioflagcx.errors.DeregisterTimeout` when that takes more than ``timeout``
        seconds (None: no limit): the memory must not be freed or reused yet, and the
        deregistration goes on in the background. Calling again waits for it again, and returns at
        once if it has ended meanwhile. Raises
        :class:`~aioflagcx.errors.RegistrationError` for a region that is not registered.
        """
        loop, _ = self._started()
        loop.run(lambda: self._engine.deregister(region, timeout=timeout))

    # Peers -----------------------------------------------------------------------------------

    def connect(self, session_id: str, *, timeout: Timeout = DEFAULT) -> Session:
        """The session with the engine at "host:port" or "[v6]:port", connected if need be.

        There is one session with each peer; concurrent calls share one attempt. ``timeout`` in
        seconds, by default ``Config.connect_timeout``; None: no limit.

        Raises a :class:`~aioflagcx.errors.ConnectError` that names the reason, and ValueError
        for text that is no session id.
        """
        loop, _ = self._started()
        return Session(loop.run(lambda: self._engine.connect(session_id, timeout=timeout)), loop)

    def quiesce(self, peer: str, *, timeout: float | None = 5.0) -> None:
        """Fence everything with which ``peer``, a session id or engine id, can reach our memory.

        When it returns, nothing of the sessions that the peer had opened to this engine can read
        or write here any more; the peer's pending transfers to us fail. The peer's next call
        opens a new session. Nothing happens when no such peer is connected; TypeError and
        ValueError tell what is neither kind of id.

        Raises :class:`~aioflagcx.errors.QuiesceTimeout` when a process of this host, which copies
        into our memory by itself, is stopped in the middle of a copy and has not finished it
        within ``timeout`` seconds (None: no limit).
        """
        loop, _ = self._started()
        loop.run(lambda: self._engine.quiesce(peer, timeout=timeout))

    def notifications(self) -> Notifications:
        """What peers' applications send: by ``notify`` of a write, or :meth:`Session.notify`.

        An iterator that waits for the next one; :meth:`Notifications.get` does so for a limited
        time. Each notification goes to one of the threads that wait. Unread ones are kept up to
        ``notification_queue_length`` and ``notification_queue_bytes``; beyond that senders are
        refused. Iteration ends when the engine is closed and what was queued has been taken.

        Raises :class:`~aioflagcx.errors.EngineClosed` before the engine was started.
        """
        queue, loop = self._engine._queue, self._loop
        if loop is None and not queue.closed:
            raise EngineClosed("the engine has not been started: nobody can notify it yet")
        return Notifications(queue, loop)

    def stats(self) -> Stats:
        """Counters and gauges of this moment."""
        _, assembly = self._started()
        return Stats.collect(assembly.runtime, self._engine._queue)

    # Transfers -------------------------------------------------------------------------------

    def write(
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
        equally long sequences of ints or one-dimensional integer arrays, which are copied at
        once; an int ``lens`` beside sequences holds for every piece. A :class:`Region` or
        :class:`RemoteRegion` stands for its address or, in ``lens``, its size. Pieces of length 0
        are skipped, no pieces at all are a success.

        ``notify``: ``(name, payload)``, delivered to the peer's :meth:`notifications` once, after
        the data has landed, or not at all when the write fails. ``timeout``: seconds from the
        call on for everything, by default ``Config.transfer_timeout``; None: no limit. The call
        returns at the latest ``drain_timeout`` + 0.5 s after that.

        However it ends, when it returns nothing of it is posted any more: ``src`` may be reused.

        On a connected session and without ``notify`` the event loop has no part in it.

        Raises, before a byte moves, ValueError naming the index of a piece that cannot be,
        :class:`~aioflagcx.errors.LocalAddressError` and
        :class:`~aioflagcx.errors.RemoteAddressError` for pieces outside every region, and
        :class:`~aioflagcx.errors.ConnectError`; after that, a
        :class:`~aioflagcx.errors.TransferError`.
        """
        make = self._maker(_native.OP_WRITE, src, dst, lens)
        return self._transfer(make, session, notify, timeout)

    def read(
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
        make = self._maker(_native.OP_READ, local, remote, lens)
        return self._transfer(make, session, None, timeout)

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
        """:meth:`write` that returns at once, with a :class:`Transfer` to wait for.

        Raises errors in the arguments and :class:`~aioflagcx.errors.LocalAddressError` itself;
        all others come by :meth:`Transfer.result`.
        """
        make = self._maker(_native.OP_WRITE, src, dst, lens)
        return self._submit(make, session, notify, timeout)

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
        make = self._maker(_native.OP_READ, local, remote, lens)
        return self._submit(make, session, None, timeout)

    def write_blocks(
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
        make = self._block_maker(layout, src_blocks, dst_blocks)
        return self._transfer(make, session, notify, timeout)

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
        make = self._block_maker(layout, src_blocks, dst_blocks)
        return self._submit(make, session, notify, timeout)

    def _maker(
        self, op: int, local: Addresses, remote: Addresses, lens: Addresses
    ) -> Callable[[Assembly], _native.Request]:
        return lambda assembly: make_request(
            assembly.runtime.native, self._threads_pieces.pieces, op, local, remote, lens
        )

    def _block_maker(
        self,
        layout: BlockLayout | Sequence[BlockLayout],
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
    ) -> Callable[[Assembly], _native.Request]:
        return lambda assembly: make_block_request(
            assembly.runtime.native, layout, src_blocks, dst_blocks
        )

    def _transfer(
        self,
        make: Callable[[Assembly], _native.Request],
        target: Session | str,
        notify: tuple[str, bytes] | None,
        timeout: Timeout,
    ) -> int:
        loop, assembly = self._started()
        transfer = Transfer(loop, assembly.runtime.flights)
        try:
            try:
                self._begin(assembly, transfer, make, target, notify, timeout)
                return transfer.result()
            except BaseException:
                transfer._settle()
                raise
        except BaseException:
            transfer._settle()  # another signal came on the way
            raise

    def _submit(
        self,
        make: Callable[[Assembly], _native.Request],
        target: Session | str,
        notify: tuple[str, bytes] | None,
        timeout: Timeout,
    ) -> Transfer:
        loop, assembly = self._started()
        transfer = Transfer(loop, assembly.runtime.flights)
        try:
            try:
                self._begin(assembly, transfer, make, target, notify, timeout)
            except BaseException:
                transfer._settle()
                raise
        except BaseException:
            transfer._settle()  # another signal came on the way
            raise
        return transfer

    def _begin(
        self,
        assembly: Assembly,
        transfer: Transfer,
        make: Callable[[Assembly], _native.Request],
        target: Session | str,
        notify: tuple[str, bytes] | None,
        timeout: Timeout,
    ) -> None:
        config = self._config
        limit = config.transfer_timeout if timeout is DEFAULT else seconds(timeout, None)
        session = assembly.peers.find(target)
        outgoing = None if notify is None else Outgoing.from_pair(notify, config)
        try:
            request = make(assembly)
        except (LocalAddressError, _native.NativeError):
            if self._engine._open is not assembly:  # which has taken the regions away
                raise EngineClosed("the engine is closed") from None
            raise
        transfer._submit(assembly.peers, request, outgoing, limit, session, target)


@atexit.register
def _close_open_engines() -> None:
    for open_engine in reversed(list(_open.values())):
        try:
            open_engine.close()
        except Exception:
            _logger.exception("%r could not be closed at the end of the interpreter", open_engine)
    LoopThread.join_abandoned()
