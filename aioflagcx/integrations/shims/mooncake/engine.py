"""``from mooncake.engine import TransferEngine`` gives ours."""

from __future__ import annotations

from aioflagcx.integrations.mooncake import (
    Read,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    Write,
)

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write"]
