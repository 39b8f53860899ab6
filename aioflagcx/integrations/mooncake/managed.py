"""Memory that the engine hands out by address: ``allocate_managed_buffer``."""

from __future__ import annotations

import threading
from typing import NamedTuple

from ...errors import RegistrationError
from ...region import Region
from ...sync import Engine

__all__ = ["ManagedBuffers"]

_SMALLEST = 4096
"""Bytes of the smallest buffer: a page, so that no two share one."""

_LARGEST_POOLED = 1 << 20
"""Bytes of the largest buffer that is cut out of a pool; larger ones are regions of their own."""

_POOL = 16 << 20
"""Bytes of a pool. A region each for thousands of buffers would be a descriptor each."""


class _Buffer(NamedTuple):
    length: int  # asked for
    region: Region
    view: memoryview  # of the whole region

    def part(self, start: int, address: int, length: int) -> memoryview | None:
        """Bytes of this buffer, which begins at ``start``; None if they are not all in it."""
        if not (start <= address and address + length <= start + self.length):
            return None
        offset = address - self.region.addr
        return self.view[offset : offset + length]


class ManagedBuffers:
    """Buffers in powers of two, cut out of pools, which grow as needed and go with the engine.

    All methods can be called on any thread; they take `_lock`, which guards everything here.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}  # by size, addresses
        self._used: dict[int, _Buffer] = {}  # by address
        self._pools: dict[int, tuple[Region, memoryview]] = {}  # by address

    def allocate(self, length: int) -> int:
        """The address of a buffer, which peers can reach.

        Raises RegistrationError when there is no memory, ValueError for lengths below 1.
        """
        if length < 1:
            raise ValueError(f"a buffer has 1 byte or more, not {length}")
        if length > _LARGEST_POOLED:
            region = self._engine.alloc(length)
            buffer = _Buffer(length, region, region.view())
            with self._lock:
                self._used[region.addr] = buffer
            return region.addr
        size = _rounded(length)
        with self._lock:
            free = self._free.setdefault(size, [])
            if not free:
                self._add_pool(size)
            address = free.pop()
            region, view = self._pool(address)
            self._used[address] = _Buffer(length, region, view)
            return address

    def free(self, address: int, length: int) -> None:
        """Take a buffer back; RegistrationError for what is none, ValueError for another length.

        Raises DeregisterTimeout when a peer does not let go of a large one: its memory is kept
        until it does.
        """
        with self._lock:
            buffer = self._used.get(address)
            if buffer is None:
                raise RegistrationError(f"{address:#x} is no managed buffer in use")
            if buffer.length != length:
                raise ValueError(
                    f"the buffer at {address:#x} has {buffer.length} bytes, not {length}"
                )
            del self._used[address]
            if length <= _LARGEST_POOLED:
                self._free[_rounded(length)].append(address)
                return
        self._engine.deregister(buffer.region)

    def find(self, address: int, length: int) -> memoryview | None:
        """Those bytes, which keep the memory, if they lie in one buffer in use."""
        with self._lock:
            if address in self._used:
                return self._used[address].part(address, address, length)
            for start, buffer in self._used.items():
                part = buffer.part(start, address, length)
                if part is not None:
                    return part
        return None

    def _add_pool(self, size: int) -> None:
        region = self._engine.alloc(_POOL)
        self._pools[region.addr] = region, region.view()
        self._free[size].extend(range(region.addr, region.addr + _POOL, size))

    def _pool(self, address: int) -> tuple[Region, memoryview]:
        return next(pool for start, pool in self._pools.items() if start <= address < start + _POOL)


def _rounded(length: int) -> int:
    return max(_SMALLEST, 1 << (length - 1).bit_length())
