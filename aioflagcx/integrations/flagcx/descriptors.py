"""What FlagCX's engines tell each other about a piece of memory: 64 bytes, FlagcxP2pRdmaDesc."""

from __future__ import annotations

import operator
import struct
from typing import NamedTuple

__all__ = ["MAX_SIZE", "SIZE", "Descriptor", "check_range"]

_FORMAT = struct.Struct("<QII48x")

SIZE = _FORMAT.size
"""Bytes of one: address, size, rkey, zeros; little-endian."""

MAX_SIZE = 2**32 - 1
"""The largest size there is room for."""


class Descriptor(NamedTuple):
    """A piece of a peer's memory. Its address decides; the key tells no more than it was there."""

    addr: int
    size: int
    rkey: int

    @classmethod
    def unpack(cls, data: bytes) -> Descriptor:
        """From its bytes; TypeError and ValueError for what is none."""
        view = memoryview(data).cast("B")
        if len(view) != SIZE:
            raise ValueError(f"a descriptor has {SIZE} bytes, not {len(view)}")
        return cls(*_FORMAT.unpack(view))

    def pack(self) -> bytes:
        """Its bytes."""
        return _FORMAT.pack(*self)


def check_range(addr: int, size: int) -> tuple[int, int]:
    """Both as integers; ValueError for what no descriptor can hold."""
    addr, size = operator.index(addr), operator.index(size)
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"size {size}: a descriptor holds 0 to 2**32 - 1 bytes")
    if not 0 <= addr <= 2**64 - size:
        raise ValueError(f"address {addr:#x} with {size} bytes is not in 64 bits")
    return addr, size
