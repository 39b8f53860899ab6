"""Asyncio KV-cache transfer: one ``await`` writes scattered blocks into a peer's memory.

:class:`Engine` is where to start. Errors are in :mod:`aioflagcx.errors`.
"""

from __future__ import annotations

from . import errors
from .blocks import BlockLayout, BlockSpan
from .config import Config
from .engine import Engine
from .errors import AioFlagcxError
from .notifications import Notification
from .region import Region, RemoteRegion
from .runner import run
from .session import Session
from .stats import Stats
from .transfer import Transfer
from .waiting import DEFAULT

__all__ = [
    "DEFAULT",
    "AioFlagcxError",
    "BlockLayout",
    "BlockSpan",
    "Config",
    "Engine",
    "Notification",
    "Region",
    "RemoteRegion",
    "Session",
    "Stats",
    "Transfer",
    "errors",
    "run",
]
