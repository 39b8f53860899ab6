"""Who has which blocks of a KV cache."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Hands out blocks; who finds too few waits, first come first served."""

    def __init__(self, count: int) -> None:
        self.count = count
        # The last ones given back go out first: a write that comes too late would be seen.
        self._free = list(range(count))
        self._taken: set[int] = set()
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def free(self) -> int:
        """How many blocks nobody has."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """How many wait for blocks."""
        return sum(not granted.done() for _, granted in self._waiting)

    async def take(self, count: int) -> list[int]:
        """``count`` blocks, once there are as many; ValueError when there never are."""
        if count > self.count:
            raise ValueError(f"{count} blocks of {self.count}")
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._grant()  # those behind it may want fewer
            else:  # granted and cancelled in the same turn of the loop
                self.give_back(granted.result())
            raise

    def give_back(self, blocks: Iterable[int]) -> None:
        """Let others have ``blocks``; ValueError for one that is not taken."""
        for block in blocks:
            if block not in self._taken:
                raise ValueError(f"block {block} is not taken")
            self._taken.remove(block)
            self._free.append(block)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            count, granted = self._waiting[0]
            if not granted.cancelled():
                if count > len(self._free):
                    return
                blocks = [self._free.pop() for _ in range(count)]
                self._taken.update(blocks)
                granted.set_result(blocks)
            self._waiting.popleft()
