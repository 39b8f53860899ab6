"""What a test works with: engines and peers of one arrangement, all closed at its end."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from promises.host import Host
from promises.peers import ChildPeer, LoopPeer, Peer, ThreadPeer

from aioflagcx import Config, Engine, Session


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Where the peer is, and on which path data moves to it."""

    path: str
    peer: type[LoopPeer] | type[ThreadPeer] | type[ChildPeer]


ARRANGEMENTS = {
    "process": Arrangement("process", LoopPeer),
    "process-threads": Arrangement("process", ThreadPeer),
    "local": Arrangement("local", LoopPeer),
    "local-processes": Arrangement("local", ChildPeer),
    "tcp": Arrangement("tcp", LoopPeer),
    "tcp-processes": Arrangement("tcp", ChildPeer),
}

EVERYWHERE = ("process", "local-processes", "tcp-processes")
"""The arrangements of a test that asks for none."""


class Lab:
    """Starts engines on the test's loop, and peers as the arrangement has them."""

    def __init__(self, arrangement: Arrangement, stack: contextlib.AsyncExitStack) -> None:
        self.arrangement = arrangement
        self._stack = stack

    def config(self, path: str | None = None, **settings: Any) -> Config:
        """Settings that allow the arrangement's path alone, or `path` alone."""
        return Config(**{"soft_paths": (path or self.arrangement.path,), **settings})

    async def engine(self, config: Config | None = None, **settings: Any) -> Engine:
        """An engine on the test's own loop."""
        engine = Engine(config=config or self.config(**settings))
        await self._stack.enter_async_context(engine)
        return engine

    async def peer(
        self,
        memory: int = 1 << 20,
        *,
        register: bool = True,
        arrangement: Arrangement | None = None,
        port: int = 0,
        placement: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """A peer with `memory` bytes, registered as one region named "memory" unless told not
        to. A ChildPeer, say, where the arrangement has one; `placement` is for its start."""
        arrangement = arrangement or self.arrangement
        config = self.config(arrangement.path, **settings)
        peer: Peer = await arrangement.peer.start(config, memory, port, **(placement or {}))
        self._stack.push_async_callback(peer.close)
        if register:
            await peer.run(Host.register, "memory", 0, memory)
        return peer

    async def connect(self, engine: Engine, peer: Peer) -> Session:
        """A session, of which it is certain that it takes the arrangement's path."""
        session = await engine.connect(peer.session_id)
        assert session.path == self.arrangement.path
        assert session.peer_engine_id == peer.engine_id
        return session
