"""The handles that FlagCX's calls pass around: engines and connections."""

from __future__ import annotations

import ipaddress
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from ...config import Config
from ...hosts import primary_address
from ...region import Region
from ...sync import Engine, Session
from ..limits import call_timeout
from ..submitted import Submitted
from .devices import devices

__all__ = ["P2pConn", "P2pEngine", "engines"]

_engines: weakref.WeakValueDictionary[int, P2pEngine] = weakref.WeakValueDictionary()
"""Those that were made, by their number."""

_numbers = itertools.count()


class P2pEngine:
    """An engine that is open until :meth:`destroy`, or until nobody holds it or a connection of it.

    All methods can be called on any thread.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._config = Config.from_env()
        self._engine = Engine(_everywhere(), devices=devices(self._config), config=self._config)
        self._engine.start()
        self._lock = threading.Lock()
        """Guards `_regions` and `_connections`; not held while anything is waited for."""
        self._regions: dict[int, Region] = {}
        self._connections: dict[str, P2pConn] = {}
        self.submitted = Submitted("transfer")
        _engines[next(_numbers)] = self

    @property
    def sync(self) -> Engine:
        """The blocking engine that this one is."""
        return self._engine

    def destroy(self) -> None:
        """Close it. Idempotent."""
        self._engine.close()
        with self._lock:
            self._regions.clear()
            self._connections.clear()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine._abandon()

    # Memory ----------------------------------------------------------------------------------

    def register(self, addr: int, size: int) -> int:
        """Register host or CUDA memory for peers and our own transfers; its MR's number.

        The same range again has the same number.
        """
        region = self._engine.register((operator.index(addr), operator.index(size)))
        with self._lock:
            self._regions[region._id] = region
        return region._id

    def region(self, mr: int) -> Region:
        """By the number of its MR; LookupError for none."""
        with self._lock:
            region = self._regions.get(operator.index(mr))
        if region is None:
            raise LookupError(f"MR {mr} is not registered with this engine")
        return region

    def rkey(self, region: Region, addr: int) -> int:
        """By which the first rail reaches that byte of it."""
        _, assembly = self._engine._started()
        key = assembly.runtime.native.rkey(region._id, addr)
        if key is None:
            raise LookupError(f"{addr:#x} does not lie in {region!r}")
        return key

    # Connections -----------------------------------------------------------------------------

    def connection(self, session_id: str) -> P2pConn:
        """The one with "host:port", connected if there is none that lives."""
        with self._lock:
            connection = self._connections.get(session_id)
        if connection is not None and connection.session.alive:
            return connection
        session = self._engine.connect(session_id)
        with self._lock:
            connection = self._connections.get(session_id)
            if connection is None or connection.session != session:
                connection = self._connections[session_id] = P2pConn(self, session)
            return connection

    # Transfers -------------------------------------------------------------------------------

    def write(
        self, connection: P2pConn, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Returns when all is in the peer's memory; raises as ``Engine.write`` does."""
        timeout = call_timeout(self._config, sizes)
        self._engine.write(connection.session, local, remote, sizes, timeout=timeout)

    def submit(
        self,
        connection: P2pConn,
        reading: bool,
        local: Sequence[int],
        remote: Sequence[int],
        sizes: Sequence[int],
    ) -> int:
        """Begin a transfer; its id for :attr:`submitted`."""
        submit = self._engine.submit_read if reading else self._engine.submit_write
        timeout = call_timeout(self._config, sizes)
        transfer = submit(connection.session, local, remote, sizes, timeout=timeout)
        return self.submitted.add(transfer)


def _everywhere() -> str:
    """All of the host's addresses: FlagCX listens there, and its sessions name any of them.

    Those of IPv6 on a host that others can reach by IPv6 alone.
    """
    reachable = {
        version: not ipaddress.ip_address(primary_address(version)).is_loopback
        for version in (4, 6)
    }
    return "::" if reachable[6] and not reachable[4] else "0.0.0.0"


class P2pConn:
    """A connection to one peer."""

    def __init__(self, engine: P2pEngine, session: Session) -> None:
        self.engine = engine
        self.session = session
        """If the peer is lost, calls connect to it anew, and fail if another engine answers."""

    def rkey(self, addr: int, size: int) -> int:
        """Of the first rail, for memory of the peer; RemoteAddressError for what is none."""
        session = self._living()
        key = session._link.native.rkey(addr, size)
        if key is None:
            session.refresh()
            session.find(addr, size)
            key = session._link.native.rkey(addr, size)
        assert key is not None  # it was found
        return key

    def _living(self) -> Session:
        """The session, connected anew if it is dead; PeerRestarted if it is another engine's."""
        if not self.session.alive:
            loop, assembly = self.engine.sync._started()
            dead, peers = self.session, assembly.peers
            found = loop.run(lambda: peers.reach(dead, peers.connect_timeout))
            self.session = Session(found, loop)
        return self.session


def engines() -> list[P2pEngine]:
    """All that were made in this process and that somebody holds, the first one first."""
    here = os.getpid()
    return [engine for _, engine in sorted(_engines.items()) if engine.pid == here]


def checked(kind: type[Any], handle: Any) -> Any:
    """``handle``; TypeError when it is no such handle."""
    if not isinstance(handle, kind):
        raise TypeError(f"expected a {kind.__name__}, not {handle!r:.80}")
    return handle
