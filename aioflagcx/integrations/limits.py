"""How long calls may take that blocking servers make."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..config import Config

__all__ = ["SETTLE", "call_timeout", "total_bytes"]

_BYTES_PER_SECOND = 1 << 30
"""Each call gets a second more for so many bytes, as in Mooncake."""

SETTLE = 0.5
"""Seconds that a call may take beyond its timeout and ``drain_timeout``; see ``Engine.write``."""


def call_timeout(config: Config, lengths: Any) -> float:
    """The timeout to give the engine, so that all is over within ``transfer_timeout`` and a second
    for each GiB."""
    if config.transfer_timeout is None:
        return math.inf
    limit = config.transfer_timeout + total_bytes(lengths) / _BYTES_PER_SECOND
    return max(limit - config.drain_timeout - SETTLE, limit / 2)


def total_bytes(lengths: Any) -> int:
    """Of an integer or a sequence of them; 0 for what the engine refuses."""
    if isinstance(lengths, int):
        return max(lengths, 0)
    array = np.asarray(lengths)
    return max(int(array.sum()), 0) if array.dtype.kind in "iu" else 0
