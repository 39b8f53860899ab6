"""``from mooncake.engine import TransferEngine`` gives ours; other names are the original's."""

from __future__ import annotations

from typing import Any

from aioflagcx.integrations import originals
from aioflagcx.integrations.mooncake import (
    Read,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    Write,
)

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]


def __getattr__(name: str) -> Any:
    return originals.attribute(__name__, name)
