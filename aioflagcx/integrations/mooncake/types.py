"""What calls of the engine take and give besides numbers."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Read", "TransferNotify", "TransferOpcode", "Write"]


class TransferOpcode(enum.IntEnum):
    """Which way a transfer goes, as seen from the caller."""

    Read = 0
    Write = 1
    READ = Read  # as Mooncake's manual spells them
    WRITE = Write


Read = TransferOpcode.Read
Write = TransferOpcode.Write


@dataclasses.dataclass(slots=True)
class TransferNotify:
    """A message from one application to another, delivered after the data it was sent with."""

    name: str = ""
    """What it is about."""

    msg: str = ""
    """Its content."""
