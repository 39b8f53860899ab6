"""A session as its users see it, and the peer's regions in it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, overload

from . import _native
from .errors import RemoteAddressError
from .notifications import Outgoing
from .region import RemoteRegion
from .waiting import DEFAULT, Timeout, seconds

if TYPE_CHECKING:
    from .link import Link
    from .runtime import Runtime

__all__ = ["AnySession", "Session"]


class AnySession:
    """What the sessions of both engines, asyncio's and the blocking one, have in common.

    Nothing here waits, and all of it can be used on any thread.
    """

    __slots__ = ("__weakref__", "_link", "_runtime")

    def __init__(self, link: Link, runtime: Runtime) -> None:
        self._link = link
        self._runtime = runtime

    @property
    def id(self) -> str:
        """The peer's "host:port" or "[v6]:port", as it was connected to."""
        return self._link.id

    @property
    def peer_engine_id(self) -> str:
        """The peer's engine id: random, new at every start of the peer."""
        return self._link.peer_engine_id

    @property
    def path(self) -> str:
        """How data moves: "process", "local", "tcp" or "ibverbs"."""
        return self._link.path

    @property
    def alive(self) -> bool:
        """Whether the peer was alive when last heard of, and the session is open."""
        return self._link.alive

    @property
    def regions(self) -> Mapping[str, RemoteRegion]:
        """The peer's named regions by name: a live view, made as it is looked at."""
        return _RegionsByName(self._link.native, self._link.id)

    @property
    def all_regions(self) -> Sequence[RemoteRegion]:
        """All regions of the peer in order of address: a live view, made as it is looked at."""
        return _AllRegions(self._link.native, self._link.id)

    def find(self, addr: int, size: int) -> RemoteRegion:
        """The smallest of the peer's regions that holds ``size`` bytes from ``addr``.

        Raises :class:`~aioflagcx.errors.RemoteAddressError` when there is none in the table as
        it is known here; see :meth:`refresh`.
        """
        addr, size = operator.index(addr), operator.index(size)
        inside = 0 <= addr < 2**64 and 0 < size < 2**64
        record = self._link.native.find(addr, size) if inside else None
        if record is None:
            raise RemoteAddressError(
                f"{self.id} has no region that holds {addr:#x}+{size}",
                address=addr,
                length=size,
                peer=self.id,
            )
        return RemoteRegion(record, self.id)

    def __repr__(self) -> str:
        state = self._link.path if self._link.alive else "dead"
        return f"<Session {self.id} {state} with engine {self.peer_engine_id[:8]}>"


class Session(AnySession):
    """The connection to one peer engine; made by :meth:`Engine.connect`, which caches it.

    When the peer is lost the session is dead. Calls of the engine that are given a dead session
    connect to its id again; if another engine answers there, they raise
    :class:`~aioflagcx.errors.PeerRestarted`.
    """

    __slots__ = ()

    async def notify(self, name: str, payload: bytes) -> None:
        """Send a message to the peer's :meth:`Engine.notifications`, within transfer_timeout.

        ``name`` has at most 1 MiB in UTF-8, ``payload`` at most
        ``Config.notification_max_payload``; TypeError and ValueError say otherwise. Returns when
        the peer has queued it. Raises :class:`~aioflagcx.errors.NotifyRefused` when it did not,
        and another :class:`~aioflagcx.errors.TransferError`, with ``notify_delivered`` None,
        when it did not say.
        """
        config = self._runtime.config
        outgoing = Outgoing.checked(name, payload, config)
        await self._link.notify(outgoing, config.transfer_timeout)

    async def refresh(self, *, timeout: Timeout = DEFAULT) -> None:
        """Bring the table of the peer's regions up to date, within ``timeout`` seconds.

        By default transfer_timeout; None: no limit. Seldom needed: peers push changes, and a
        transfer that misses an address asks by itself.
        Raises :class:`~aioflagcx.errors.TransferTimeout`, :class:`~aioflagcx.errors.PeerLost`.
        """
        await self._link.table.refresh(seconds(timeout, self._runtime.config.transfer_timeout))

    async def close(self) -> None:
        """Cancel the session's transfers, wait until they are quiet, and say goodbye.

        Nothing happens when it is dead. The next call that needs the peer connects again.
        """
        if self._link.alive:
            self._link.retire()
            await self._runtime.flights.cancel_on(self._link)
        await self._link.close("session closed")


class _RegionsByName(Mapping[str, RemoteRegion]):
    """Looks each name up natively; 30,000 regions cost nothing until they are asked for."""

    __slots__ = ("_native", "_peer")

    def __init__(self, native: _native.Session, peer: str) -> None:
        self._native = native
        self._peer = peer

    def __getitem__(self, name: str) -> RemoteRegion:
        record = self._native.find_name(name) if isinstance(name, str) else None
        if record is None:
            raise KeyError(name)
        return RemoteRegion(record, self._peer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())

    def __repr__(self) -> str:
        return f"<{len(self)} named regions of {self._peer}>"


class _AllRegions(Sequence[RemoteRegion]):
    __slots__ = ("_native", "_peer")

    def __init__(self, native: _native.Session, peer: str) -> None:
        self._native = native
        self._peer = peer

    def __len__(self) -> int:
        return self._native.region_count

    @overload
    def __getitem__(self, index: int) -> RemoteRegion: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RemoteRegion]: ...
    def __getitem__(self, index: int | slice) -> RemoteRegion | Sequence[RemoteRegion]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        count = len(self)
        position = index + count if index < 0 else index
        if not 0 <= position < count:
            raise IndexError(f"region {index} of {count}")
        return RemoteRegion(self._native.region_at(position), self._peer)

    def __repr__(self) -> str:
        return f"<{len(self)} regions of {self._peer}>"
