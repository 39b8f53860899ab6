"""The control plane: how engines find out how to reach each other and where memory is.

Length-prefixed msgpack over TCP. ``messages``, ``codec``, ``authentication`` and ``addresses``
are pure; ``connection``, ``client`` and ``server`` own the sockets. docs/handshake.md describes
the protocol for other implementations.
"""

from __future__ import annotations

from .addresses import format_address, parse_address
from .authentication import PROTOCOL_VERSIONS, Identity
from .client import open_connection
from .connection import ControlConnection
from .handler import CloseReason, Handler
from .limits import Limits
from .server import HandshakeServer

__all__ = [
    "PROTOCOL_VERSIONS",
    "CloseReason",
    "ControlConnection",
    "Handler",
    "HandshakeServer",
    "Identity",
    "Limits",
    "format_address",
    "open_connection",
    "parse_address",
]
