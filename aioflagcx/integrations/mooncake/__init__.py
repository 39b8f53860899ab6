"""Mooncake's Python engine, ``mooncake.engine``, on this one.

Names, keyword names, order of arguments and codes are Mooncake's. What differs is written in
docs/integrations.md: mostly what is promised when something fails.
"""

from __future__ import annotations

from .engine import TransferEngine
from .types import Read, TransferNotify, TransferOpcode, Write

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]
