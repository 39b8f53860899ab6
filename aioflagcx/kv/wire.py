"""What a manager has with one peer engine: how to tell it things, and who is told of its end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ..engine import Engine
from ..errors import AioFlagcxError
from ..session import Session
from .messages import Message, encode

__all__ = ["NAME", "Watcher", "Wire", "Wires"]

NAME = "aioflagcx.kv"
"""Of all notifications between managers."""

_RECONNECT = 0.5
"""Seconds in which a peer whose session has ended must let itself be connected again, or it is
dead: a session can end without its peer, as when someone fences it."""


class Watcher(Protocol):
    """A room's half that ends with its peer."""

    def lost(self, wire: Wire, reason: str) -> None:
        """The peer is dead, cut off, or another one now."""


Spawn = Callable[[Coroutine[Any, Any, object]], asyncio.Task[Any]]
"""Starts a task that ends with the manager."""


class Wire:
    """Our session with one peer, connected again as long as it is the same peer."""

    def __init__(self, engine: Engine, session_id: str, spawn: Spawn) -> None:
        self.id = session_id
        """The peer's."""
        self._engine = engine
        self._spawn = spawn
        self._session: Session | None = None
        self._watchers: set[Watcher] = set()

    async def session(self, timeout: float | None) -> Session:
        """The session with the peer; a :class:`~aioflagcx.errors.ConnectError` if there is none."""
        session = await self._engine.connect(self.id, timeout=timeout)
        known = self._session
        if session is not known:
            self._session = session
            if known is not None and known.peer_engine_id != session.peer_engine_id:
                self._end("another process answers at its address")
            session._link.watch(lambda reason: self._ended(session, reason))
        return session

    async def tell(self, message: Message, timeout: float | None) -> None:
        """Have the peer take a message, connecting within ``timeout`` if need be.

        Raises what connecting and :meth:`Session.notify` raise.
        """
        session = await self.session(timeout)
        await session.notify(NAME, encode(message))

    def watch(self, watcher: Watcher) -> None:
        """Tell it when the peer, which has been connected to, is lost."""
        self._watchers.add(watcher)
        if self._session is None or not self._session.alive:  # nobody was there to be told
            self._spawn(self._look_again("its session has ended"))

    def forget(self, watcher: Watcher) -> None:
        """It is over."""
        self._watchers.discard(watcher)

    def _ended(self, session: Session, reason: str) -> None:
        if session is self._session and self._watchers:
            self._spawn(self._look_again(reason))

    async def _look_again(self, reason: str) -> None:
        try:
            await self.session(_RECONNECT)
        except AioFlagcxError as error:
            self._session = None
            self._end(f"{reason}; then {error}")

    def _end(self, reason: str) -> None:
        watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            watcher.lost(self, f"{self.id} was lost: {reason}")


class Wires:
    """The wires of one manager, by the peers' session ids; each as long as it is in use."""

    def __init__(self, engine: Engine, spawn: Spawn) -> None:
        self._engine = engine
        self._spawn = spawn
        self._wires: weakref.WeakValueDictionary[str, Wire] = weakref.WeakValueDictionary()

    def to(self, session_id: str) -> Wire:
        """The wire to an engine; connects nothing."""
        wire = self._wires.get(session_id)
        if wire is None:
            wire = self._wires[session_id] = Wire(self._engine, session_id, self._spawn)
        return wire
