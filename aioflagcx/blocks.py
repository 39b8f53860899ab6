"""Blocks of equally large pieces in pools, as `Engine.write_blocks` moves them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from . import _native
from .pieces import Integers, one_dimensional

__all__ = ["BlockIds", "BlockLayout", "BlockSpan", "block_request"]

BlockIds = Any
"""Sequence[int] | one-dimensional integer array, see Engine.write_blocks."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSpan:
    """What one pool, such as the keys of one layer, has of each block, here and at the peer.

    Block ``i`` begins ``i`` strides behind the pool's address. Of each block ``repeats`` pieces of
    ``length`` bytes are moved, a step apart.
    """

    src: int
    """Address of our block 0."""

    dst: int
    """Address of the peer's block 0."""

    length: int
    """Bytes of a piece."""

    src_stride: int
    """Bytes from one block of ours to the next."""

    dst_stride: int
    """Bytes from one block of the peer's to the next."""

    repeats: int = 1
    """Pieces of a block."""

    src_step: int = 0
    """Bytes from one piece of our block to the next."""

    dst_step: int = 0
    """Bytes from one piece of the peer's block to the next."""


class BlockLayout:
    """Where the blocks are that :meth:`Engine.write_blocks` moves; made once, used many times."""

    __slots__ = ("_native", "dst_blocks", "spans", "src_blocks")

    def __init__(self, spans: Iterable[BlockSpan], *, src_blocks: int, dst_blocks: int) -> None:
        """``spans``: one for each pool. ``src_blocks`` and ``dst_blocks``: how many blocks each of
        the pools has, here and at the peer.

        Raises ValueError naming the index of a span that cannot be: nothing in it, blocks or
        pieces that overlap, addresses beyond 2**63.
        """
        self.spans = tuple(spans)
        """As they were given."""
        self.src_blocks = operator.index(src_blocks)
        """Blocks of each pool here."""
        self.dst_blocks = operator.index(dst_blocks)
        """Blocks of each pool at the peer."""
        fields = [[_unsigned(value, index) for value in dataclasses.astuple(span)]
                  for index, span in enumerate(self.spans)]  # fmt: skip
        for name in ("src_blocks", "dst_blocks"):
            if not 0 < getattr(self, name) < 2**63:
                raise ValueError(f"{name} = {getattr(self, name)} is not in 1 to 2**63 - 1")
        array = np.array(fields, np.uint64).reshape(-1, 8)
        self._native = _native.BlockLayout(array, self.src_blocks, self.dst_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes that are moved for one block."""
        return self._native.block_bytes

    def __repr__(self) -> str:
        return (
            f"<BlockLayout of {len(self.spans)} spans: {self.src_blocks} blocks to "
            f"{self.dst_blocks}, {self.block_bytes} bytes each>"
        )


def _unsigned(value: Any, index: int) -> int:
    number = operator.index(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"spans[{index}] has a value of {number}, accepted is 0 to 2**63 - 1")
    return number


def block_request(
    native: _native.TransferEngine,
    layout: BlockLayout | Sequence[BlockLayout],
    src_blocks: Any,
    dst_blocks: Any,
) -> _native.Request:
    """A write of blocks, checked and found in our memory; on any thread.

    Raises TypeError, ValueError and :class:`_native.LocalMiss`.
    """
    if isinstance(layout, BlockLayout):
        return _native.Request.blocks(
            native,
            [layout._native],
            [one_dimensional(src_blocks, "src_blocks")],
            [one_dimensional(dst_blocks, "dst_blocks")],
        )
    layouts = list(layout)
    return _native.Request.blocks(
        native,
        [_checked(one)._native for one in layouts],
        _lists(src_blocks, "src_blocks", len(layouts)),
        _lists(dst_blocks, "dst_blocks", len(layouts)),
    )


def _checked(layout: object) -> BlockLayout:
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"layout: expected a BlockLayout, not {type(layout).__name__}")
    return layout


def _lists(blocks: Any, what: str, count: int) -> list[Integers]:
    lists = list(blocks)
    if len(lists) != count:
        raise ValueError(f"{what} has {len(lists)} lists of blocks for {count} layouts")
    return [one_dimensional(ids, f"{what}[{index}]") for index, ids in enumerate(lists)]
