"""What a manager has with one peer engine: how to tell it things, and who is told of its end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from ..engine import Engine
from ..errors import (
    AioFlagcxError,
    AuthenticationError,
    ConnectError,
    ConnectTimeout,
    HostUnreachable,
    PeerLost,
    ProtocolError,
)
from ..session import Session
from ..waiting import Timeout
from .messages import Message, encode

__all__ = ["NAME", "NO_MESSAGE", "Watcher", "Wire", "Wires", "connected"]

NAME = "aioflagcx.kv"
"""Of all notifications between managers."""

NO_MESSAGE = "no message of a hand-over"
"""The reason begins so with which a manager refuses what it will never understand."""

_RECONNECT = 0.5
"""Seconds in which a peer whose session has ended without a goodbye must let itself be connected
again, or it is dead: a session can end without its peer."""


_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.16)
"""Seconds between attempts to connect which the peer itself has ended; longer than fences that
follow each other."""


async def connected(engine: Engine, session_id: str, timeout: Timeout) -> Session:
    """A session with a peer, again if it ends it at once; raises as :meth:`Engine.connect` does."""
    pauses = iter(_PAUSES)
    while True:
        try:
            return await engine.connect(session_id, timeout=timeout)
        except (ConnectTimeout, HostUnreachable, AuthenticationError, ProtocolError):
            raise
        except ConnectError as error:
            # Somebody is there and ended it: as when it fences us, for other rooms, again.
            pause = next(pauses, None)
            if pause is None or isinstance(error.cause, ConnectionRefusedError):
                raise
        await asyncio.sleep(pause)


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
        self._watchers: dict[Watcher, Callable[[], object]] = {}

    async def session(self, timeout: float | None) -> Session:
        """The session with the peer; a :class:`~aioflagcx.errors.ConnectError` if there is none."""
        session = await connected(self._engine, self.id, timeout)
        known = self._session
        if session is not known:
            self._session = session
            if known is not None and known.peer_engine_id != session.peer_engine_id:
                self._end("another process answers at its address")
            session._link.watch(lambda reason: self._ended(session, reason))
        return session

    async def tell(self, message: Message, timeout: float | None) -> None:
        """Have the peer take a message, connecting within ``timeout`` if need be.

        At least once: when the session ends before the peer has said that it has it, it is told
        again on the next one. Raises what connecting and :meth:`Session.notify` raise.
        """
        payload = encode(message)
        for pause in (*_PAUSES, None):
            session = await self.session(timeout)
            try:
                await session.notify(NAME, payload)
            except PeerLost:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                return

    def look(self, engine_id: str, found: Callable[[bool], object]) -> None:
        """Tell whether the engine with this id still answers here."""

        async def looking() -> None:
            try:
                session = await self.session(self._engine._config.connect_timeout)
            except AioFlagcxError:
                found(False)
            else:
                found(session.peer_engine_id == engine_id)

        self._spawn(looking())

    def watch(self, watcher: Watcher, found_again: Callable[[], object] = lambda: None) -> None:
        """Tell it when the peer, which has been connected to, is lost.

        ``found_again`` is called when the session has ended and there is another one with the same
        peer: what one side wanted to say in between the other has not heard.
        """
        self._watchers[watcher] = found_again
        if self._session is None or not self._session.alive:  # nobody was there to be told
            self._spawn(self._look_again("its session has ended", _RECONNECT))

    def forget(self, watcher: Watcher) -> None:
        """It is over."""
        self._watchers.pop(watcher, None)

    def _ended(self, session: Session, reason: str) -> None:
        if session is self._session and self._watchers:
            # Who says goodbye lives, and may be busy.
            limit = self._engine._config.connect_timeout
            self._spawn(self._look_again(reason, limit if session._link.dismissed else _RECONNECT))

    async def _look_again(self, reason: str, limit: float) -> None:
        try:
            await self.session(limit)
        except AioFlagcxError as error:
            self._session = None
            self._end(f"{reason}; then {error}")
        else:
            for found_again in tuple(self._watchers.values()):
                found_again()

    def _end(self, reason: str) -> None:
        watchers, self._watchers = self._watchers, {}
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
