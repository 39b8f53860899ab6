"""The sessions of one engine: at most one with each peer, connected by the first who needs it."""

from __future__ import annotations

import asyncio

from .errors import ConnectTimeout, EngineClosed, PeerRestarted
from .handshake import format_address, parse_address
from .link import Link
from .runtime import Runtime
from .session import AnySession, Session

__all__ = ["Peers"]

_NO_LIMIT = 86_400.0
"""Seconds that stand for a connect without a limit of time."""


_GRACE = 0.1
"""Seconds in which a connect whose time is over may still say so itself."""


class _Connecting:
    """A connect under way and how many callers wait for it."""

    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[Session]) -> None:
        self.task = task
        self.waiters = 0


class Peers:
    """Finds, connects and forgets sessions."""

    def __init__(self, runtime: Runtime) -> None:
        self.connect_timeout = runtime.config.connect_timeout
        """Seconds for a connect that a transfer needs."""
        self._runtime = runtime
        self._connecting: dict[str, _Connecting] = {}
        self._ending: set[Link] = set()
        self._closed = False
        self.live: dict[str, Session] = {}
        """Sessions that can be used, by their ids."""

    def find(self, target: AnySession | str) -> AnySession | None:
        """The session to use for ``target`` without waiting, or None when one has to connect.

        On any thread: it looks things up, each in one step, and changes nothing. TypeError and
        ValueError for what is no session of this engine and no session id.
        """
        if isinstance(target, AnySession):
            if target._link.alive:
                if target._runtime is not self._runtime:
                    raise ValueError(f"{target!r} belongs to another engine")
                return target
            return None
        if not isinstance(target, str):
            raise TypeError(f"expected a Session or its id, not {type(target).__name__}")
        return self.live.get(target) or self.live.get(format_address(*parse_address(target)))

    async def reach(self, target: AnySession | str, timeout: float | None) -> Session:
        """The session with ``target``, connecting within ``timeout`` seconds if there is none.

        Callers share a connect; one that gives up leaves it to the others. Raises a
        :class:`~aioflagcx.errors.ConnectError`, ValueError for an id that is none, and for a
        Session :class:`~aioflagcx.errors.PeerRestarted` when another engine answers now.
        """
        if isinstance(target, AnySession):
            session = await self._connected(target.id, timeout)
            if session.peer_engine_id != target.peer_engine_id:
                raise PeerRestarted(
                    f"the engine at {target.id} is not the one this session was with "
                    f"({session.peer_engine_id} instead of {target.peer_engine_id}): its memory "
                    "is elsewhere",
                    peer=target.id,
                    remote_quiet=True,
                )
            return session
        if not isinstance(target, str):
            raise TypeError(f"expected a session id, not {type(target).__name__}")
        return await self._connected(format_address(*parse_address(target)), timeout)

    async def _connected(self, key: str, timeout: float | None) -> Session:
        loop = self._runtime.loop
        limit = _NO_LIMIT if timeout is None else timeout
        deadline = loop.time() + limit
        left = limit
        while True:
            if self._closed:
                raise EngineClosed("the engine is closed", peer=key)
            session = self.live.get(key)
            if session is not None:
                return session
            connecting = self._connecting.get(key)
            mine = connecting is None
            if connecting is None:
                connecting = self._connecting[key] = _Connecting(
                    loop.create_task(self._connect(key, left))
                )
            connecting.waiters += 1
            try:
                # Our own connect ends by itself, with words that say how far it came.
                await asyncio.wait((connecting.task,), timeout=left + (_GRACE if mine else 0.0))
            finally:
                connecting.waiters -= 1
                if not connecting.waiters and not connecting.task.done():
                    connecting.task.cancel()  # the last one who wanted it has given up
                    self._connecting.pop(key, None)
            task = connecting.task
            left = deadline - loop.time()
            if not task.done():
                raise ConnectTimeout(f"no session with {key} within {limit:g} s", peer=key)
            if task.cancelled():
                raise EngineClosed("the engine was closed while connecting", peer=key)
            if left > 0 and not mine and isinstance(task.exception(), ConnectTimeout):
                continue  # its caller had less time than we have left
            return task.result()

    async def _connect(self, key: str, timeout: float) -> Session:
        me = asyncio.current_task()
        try:
            link = await Link.open(self._runtime, key, timeout, self._ended)
        finally:
            connecting = self._connecting.get(key)
            if connecting is not None and connecting.task is me:
                del self._connecting[key]
        session = Session(link, self._runtime)
        if link.alive:
            self.live[key] = session
        return session

    def _ended(self, link: Link, gone: bool) -> None:
        """No new call may use this link; when ``gone`` it has also given everything back."""
        (self._ending.discard if gone else self._ending.add)(link)
        session = self.live.get(link.id)
        if session is not None and session._link is link:
            del self.live[link.id]

    async def close(self) -> None:
        """Say goodbye to all peers and give everything back."""
        self._closed = True
        connecting = [entry.task for entry in self._connecting.values()]
        for task in connecting:
            task.cancel()
        if connecting:
            await asyncio.wait(connecting)
        links = {session._link for session in self.live.values()} | self._ending
        await asyncio.gather(*(link.close("engine closed") for link in links))
