"""FlagCX's ``FLAGCXLibrary``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from .engine import P2pConn, P2pEngine, checked
from .failures import raises_runtime_errors
from .original import Missing, find_original

__all__ = ["FLAGCXLibrary"]


class FLAGCXLibrary:
    """The point-to-point engine on this one; everything else is the original's.

    That is looked for when it is needed: see :mod:`.original`. All methods can be called on any
    thread, and raise RuntimeError, which names the reason, when something fails.
    """

    def __init__(self, so_file: str | None = None) -> None:
        """``so_file``: the shared library for the original; not needed for the engine."""
        self._so_file = so_file
        self._lock = threading.Lock()
        self._original: Any = None

    @raises_runtime_errors
    def flagcxP2pEngineCreate(self) -> P2pEngine:
        """A new engine, which listens; devices are those of ``AIOFLAGCX_DEVICES``."""
        return P2pEngine()

    @raises_runtime_errors
    def flagcxP2pEngineDestroy(self, engine: P2pEngine) -> None:
        """Close the engine: its memory cannot be reached any more when this returns."""
        checked(P2pEngine, engine).destroy()

    @raises_runtime_errors
    def flagcxP2pGetRpcPort(self, engine: P2pEngine) -> int:
        """The port that peers connect to: their session is "host:port"."""
        engine = checked(P2pEngine, engine)
        engine.sync._started()
        return engine.sync.rpc_port

    @raises_runtime_errors
    def flagcxP2pStartRpcServer(self, engine: P2pEngine) -> None:
        """Nothing is left to do: the engine listens since it was created."""
        checked(P2pEngine, engine).sync._started()

    @raises_runtime_errors
    def flagcxP2pRegister(self, engine: P2pEngine, addr: int, size: int) -> int:
        """Let peers read and write memory of the host or a CUDA device; the MR's number."""
        number: int = checked(P2pEngine, engine).register(addr, size)
        return number

    @raises_runtime_errors
    def flagcxP2pRegisterHost(self, engine: P2pEngine, addr: int, size: int) -> int:
        """:meth:`flagcxP2pRegister` for memory of the host."""
        number: int = checked(P2pEngine, engine).register(addr, size)
        return number

    @raises_runtime_errors
    def flagcxP2pGetConn(self, engine: P2pEngine, session: str) -> P2pConn:
        """The connection with the engine at "host:port"; connects if none lives."""
        connection: P2pConn = checked(P2pEngine, engine).connection(session)
        return connection

    @raises_runtime_errors
    def flagcxP2pBatchWriteSync(
        self,
        conn: P2pConn,
        src_vas: Sequence[int],
        dst_vas: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Write pieces into the peer's memory, by address; returns when all are there.

        When it raises, nothing more of it is written.
        """
        checked(P2pConn, conn)
        if not len(src_vas) == len(dst_vas) == len(sizes):
            raise ValueError(
                f"{len(src_vas)} sources, {len(dst_vas)} destinations and {len(sizes)} sizes"
            )
        conn.engine.write(conn, src_vas, dst_vas, sizes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        original = find_original()
        if original is None:
            return Missing(name)
        with self._lock:
            if self._original is None:
                self._original = original.FLAGCXLibrary(self._so_file)
        return getattr(self._original, name)
