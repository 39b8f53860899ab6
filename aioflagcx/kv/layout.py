"""How a KV cache lies in memory, and which bytes one rank writes to another.

Pure. A cache is divided among tensor-parallel ranks by KV heads: with fewer ranks than heads each
has several, with more ranks than heads several have the same one. A cache without heads, such as
that of multi-head latent attention, is one head that every rank has.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

from ..blocks import BlockLayout, BlockSpan

__all__ = ["CacheGroup", "CacheLayout", "block_layout", "held", "senders", "share", "targets"]

MAX_FORMAT = 256
"""Characters of :attr:`CacheGroup.format`."""


@dataclasses.dataclass(frozen=True, init=False)
class CacheGroup:
    """Layers that share their block ids; hybrid models have several such groups.

    A block of a layer is, in this order, ``repeats`` times this rank's heads, each of them
    equally many bytes. For keys and values ``[blocks, 2, tokens, heads, width]`` that is
    ``2 * tokens`` times, for ``[blocks, 2, heads, tokens, width]`` it is 2 times; where keys and
    values are pools of their own, ``tokens`` times and once.
    """

    layers: tuple[tuple[int, ...], ...]
    """Of each layer, the addresses of block 0 of its pools: one, or two where keys and values are
    apart. When made, an address by itself stands for a layer of one pool."""

    blocks: int
    """Blocks of each pool."""

    block_bytes: int
    """Bytes of a block in one pool, on this rank."""

    stride: int = 0
    """Bytes from one block to the next; 0: ``block_bytes``."""

    heads: int = 1
    """KV heads of the model, on all ranks together; 1 for a cache that every rank has whole."""

    repeats: int = 1
    """How often the rank's heads come round in a block."""

    format: str = ""
    """What the numbers do not show and must be the same on both sides, such as "bfloat16, 16
    tokens": anything, at most 256 characters."""

    def __init__(
        self,
        layers: Sequence[int | Sequence[int]],
        blocks: int,
        block_bytes: int,
        stride: int = 0,
        heads: int = 1,
        repeats: int = 1,
        format: str = "",
    ) -> None:
        """Raises ValueError, naming the field, for what cannot be."""
        pools = tuple(
            tuple(map(operator.index, layer))
            if isinstance(layer, Sequence)
            else (operator.index(layer),)
            for layer in layers
        )
        object.__setattr__(self, "layers", pools)
        if not isinstance(format, str) or len(format) > MAX_FORMAT:
            raise ValueError(f"format = {format!r:.300} is no text of at most {MAX_FORMAT} letters")
        object.__setattr__(self, "format", format)
        counts = {"blocks": blocks, "block_bytes": block_bytes, "heads": heads, "repeats": repeats}
        for name, count in counts.items():
            value = operator.index(count)
            bits = 63 if name == "block_bytes" else 32
            if not 0 < value < 2**bits:
                raise ValueError(f"{name} = {value} is not in 1 to 2**{bits} - 1")
            object.__setattr__(self, name, value)
        stride = operator.index(stride) or self.block_bytes
        object.__setattr__(self, "stride", stride)
        if not self.block_bytes <= stride < 2**63:
            raise ValueError(f"stride = {stride} is less than block_bytes = {self.block_bytes}")
        if not pools or not all(pools):
            raise ValueError("a group has at least one layer, and a layer at least one pool")
        if len(set(map(len, pools))) > 1:
            raise ValueError("the layers of a group have equally many pools")
        for address in (address for layer in pools for address in layer):
            if not 0 < address < 2**63:
                raise ValueError(f"{address:#x} is no address of a pool")

    @property
    def pool_bytes(self) -> int:
        """From the beginning of a pool to the end of its last block."""
        return (self.blocks - 1) * self.stride + self.block_bytes


@dataclasses.dataclass(frozen=True, init=False)
class CacheLayout:
    """The whole cache of one rank."""

    groups: tuple[CacheGroup, ...]
    """Mostly one. A group by itself stands for a cache of one group."""

    rank: int = 0
    """This rank."""

    ranks: int = 1
    """Tensor-parallel ranks."""

    def __init__(
        self, groups: CacheGroup | Sequence[CacheGroup], rank: int = 0, ranks: int = 1
    ) -> None:
        """Raises ValueError for ranks and heads that do not fit each other."""
        object.__setattr__(
            self, "groups", (groups,) if isinstance(groups, CacheGroup) else tuple(groups)
        )
        object.__setattr__(self, "rank", operator.index(rank))
        object.__setattr__(self, "ranks", operator.index(ranks))
        if not self.groups:
            raise ValueError("a cache has at least one group")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks} ranks")
        for index, group in enumerate(self.groups):
            check_heads(group.heads, self.ranks)
            pieces = len(held(group.heads, self.rank, self.ranks)) * group.repeats
            if group.block_bytes % pieces:
                raise ValueError(
                    f"groups[{index}]: a block of {group.block_bytes} bytes is not {pieces} equal "
                    f"pieces ({group.repeats} repeats of {pieces // group.repeats} heads)"
                )


def check_heads(heads: int, ranks: int) -> None:
    """Raise ValueError unless so many ranks can have so many heads."""
    if heads % ranks and ranks % heads:
        raise ValueError(f"{heads} heads are not divided evenly among {ranks} ranks")


def held(heads: int, rank: int, ranks: int) -> range:
    """The heads that a rank has."""
    if heads >= ranks:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    head = rank * heads // ranks
    return range(head, head + 1)


def share(heads: int, src: int, src_ranks: int, dst: int, dst_ranks: int) -> range:
    """The heads that rank ``src`` of prefill writes to rank ``dst`` of decode.

    Each head of each decode rank comes from one prefill rank: of several that have it, they take
    turns by decode rank.
    """
    wanted = held(heads, dst, dst_ranks)
    ours = held(heads, src, src_ranks)
    both = range(max(wanted.start, ours.start), min(wanted.stop, ours.stop))
    if not both:
        return range(0)
    copies = max(src_ranks // heads, 1)
    return both if src % copies == dst % copies else range(0)


@functools.lru_cache(maxsize=65_536)
def targets(heads: frozenset[int], src: int, src_ranks: int, dst_ranks: int) -> tuple[int, ...]:
    """The decode ranks that prefill rank ``src`` has to do with, in a model of such groups.

    A rank that writes to nobody, since others have the same heads, still has one to tell it what
    becomes of the request.
    """
    found = tuple(
        dst
        for dst in range(dst_ranks)
        if any(share(count, src, src_ranks, dst, dst_ranks) for count in heads)
    )
    return found or (src % dst_ranks,)


def senders(heads: frozenset[int], dst: int, dst_ranks: int, src_ranks: int) -> tuple[int, ...]:
    """The prefill ranks that decode rank ``dst`` has to do with."""
    return tuple(
        src for src in range(src_ranks) if dst in targets(heads, src, src_ranks, dst_ranks)
    )


def heads_of(layout: CacheLayout) -> frozenset[int]:
    """For :func:`targets` and :func:`senders`."""
    return frozenset(group.heads for group in layout.groups)


def check_fit(src: CacheLayout, dst: CacheLayout) -> None:
    """Raise ValueError, naming what differs, unless blocks of ``src`` can be written to ``dst``."""
    if len(src.groups) != len(dst.groups):
        raise ValueError(f"prefill has {len(src.groups)} groups, decode {len(dst.groups)}")
    for index, (ours, theirs) in enumerate(zip(src.groups, dst.groups, strict=True)):
        pairs = {
            "layers": (len(ours.layers), len(theirs.layers)),
            "pools a layer": (len(ours.layers[0]), len(theirs.layers[0])),
            "heads": (ours.heads, theirs.heads),
            "repeats": (ours.repeats, theirs.repeats),
            "format": (ours.format, theirs.format),
            "bytes of a head": (_head_bytes(ours, src), _head_bytes(theirs, dst)),
        }
        for what, (one, other) in pairs.items():
            if one != other:
                raise ValueError(
                    f"groups[{index}]: {what}: {one!r} on prefill, {other!r} on decode; blocks "
                    "must hold the same tokens in the same order on both sides"
                )
        check_heads(ours.heads, src.ranks)
        check_heads(theirs.heads, dst.ranks)


def _head_bytes(group: CacheGroup, layout: CacheLayout) -> int:
    """Bytes of one head in one repeat."""
    return group.block_bytes // (len(held(group.heads, layout.rank, layout.ranks)) * group.repeats)


def block_layout(
    src: CacheLayout, dst: CacheLayout, group: int, layers: range | None = None
) -> BlockLayout | None:
    """What ``src`` writes to ``dst`` of each block of a group; None: nothing.

    ``layers``: those of the group that are meant, all by default. Raises ValueError as
    :func:`check_fit` does.
    """
    check_fit(src, dst)
    ours, theirs = src.groups[group], dst.groups[group]
    heads = share(ours.heads, src.rank, src.ranks, dst.rank, dst.ranks)
    if not heads:
        return None
    head = _head_bytes(ours, src)
    our_heads = held(ours.heads, src.rank, src.ranks)
    their_heads = held(theirs.heads, dst.rank, dst.ranks)
    our_offset = (heads.start - our_heads.start) * head
    their_offset = (heads.start - their_heads.start) * head
    chosen = range(len(ours.layers)) if layers is None else layers
    spans = [
        BlockSpan(
            src=from_pool + our_offset,
            dst=to_pool + their_offset,
            length=len(heads) * head,
            src_stride=ours.stride,
            dst_stride=theirs.stride,
            repeats=ours.repeats,
            src_step=len(our_heads) * head,
            dst_step=len(their_heads) * head,
        )
        for layer in chosen
        for from_pool, to_pool in zip(ours.layers[layer], theirs.layers[layer], strict=True)
    ]
    return BlockLayout(spans, src_blocks=ours.blocks, dst_blocks=theirs.blocks)
