"""What one control connection, and all of a server's together, may cost."""

from __future__ import annotations

import dataclasses

from ..config import Config

__all__ = ["Limits"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the control plane; :meth:`from_config` takes those a user can set."""

    max_frame: int = Config.handshake_max_frame
    """Bytes of the largest frame, once authenticated."""

    max_frame_unauthenticated: int = Config.handshake_max_frame_unauthenticated
    """Bytes of the largest frame before that."""

    authentication_timeout: float = Config.connect_timeout
    """Seconds a server gives a connection to authenticate."""

    max_unauthenticated: int = 1024
    """Connections a server keeps that have not authenticated; beyond it the oldest goes, so
    that a flood of idle connections cannot lock engines out."""

    max_handlers: int = 256
    """Requests of one connection handled at once. At the bound its bytes stay unread, so that
    TCP slows the peer down."""

    max_turn: float = 0.001
    """Seconds for which one connection's frames are handled before the event loop gets its
    turn: a flood of small frames must not delay everything else."""

    close_grace: float = 1.0
    """Seconds in which a closed connection may still deliver what was written to it."""

    @property
    def max_unsent(self) -> int:
        """Bytes written to a connection but not taken by the peer, beyond which it is given up:
        two of the largest frames, so that one large push never does it."""
        return 2 * self.max_frame

    @property
    def max_handled_bytes(self) -> int:
        """Bytes of the requests of one connection handled at once, a bound like
        ``max_handlers``."""
        return 2 * self.max_frame

    @classmethod
    def from_config(cls, config: Config) -> Limits:
        """The limits that ``config`` asks for."""
        return cls(
            max_frame=config.handshake_max_frame,
            max_frame_unauthenticated=config.handshake_max_frame_unauthenticated,
            authentication_timeout=config.connect_timeout,
        )
