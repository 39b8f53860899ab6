"""The engine for threads: the same calls as :class:`aioflagcx.Engine`, blocking.

:class:`Engine` is where to start. Everything else, errors included, is that of :mod:`aioflagcx`.
"""

from __future__ import annotations

from .engine import Engine
from .notifications import Notifications
from .session import Session
from .transfer import Transfer

__all__ = ["Engine", "Notifications", "Session", "Transfer"]
