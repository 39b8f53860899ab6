"""From the tensors of vLLM's KV cache to where their blocks lie.

A tensor is anything with ``data_ptr()``, ``element_size()``, ``shape`` and ``stride()``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from ...kv import CacheGroup, CacheLayout
from ...kv.layout import held

__all__ = ["GroupSpec", "Tensor", "cache_layout"]


class Tensor(Protocol):
    """What is used of a ``torch.Tensor``."""

    @property
    def shape(self) -> Sequence[int]: ...

    def data_ptr(self) -> int: ...

    def element_size(self) -> int: ...

    def stride(self) -> Sequence[int]: ...


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """One of vLLM's KV cache groups: layers that share their block ids."""

    layers: tuple[str, ...]
    """Names, in the order of both sides."""

    blocks: int
    """Blocks that the scheduler counts. Tensors may divide each of them into several."""

    heads: int
    """KV heads of the model, on all ranks together; 1 for a cache that every rank has whole."""


def cache_layout(
    tensors: Mapping[str, Tensor], specs: Sequence[GroupSpec], rank: int, ranks: int
) -> CacheLayout:
    """The cache of one tensor-parallel rank. ValueError, naming the layer, if it is of a kind that
    cannot be handed over: see :func:`_group`."""
    return CacheLayout([_group(tensors, spec, rank, ranks) for spec in specs], rank, ranks)


def _group(tensors: Mapping[str, Tensor], spec: GroupSpec, rank: int, ranks: int) -> CacheGroup:
    """``[blocks, heads, tokens, width]``, with heads and tokens either way round in memory, or
    ``[blocks, tokens, width]`` for one head; blocks may have gaps between them."""
    groups = []
    for name in spec.layers:
        if name not in tensors:
            raise ValueError(f"layer {name} has no KV cache")
        try:
            groups.append(_layer(tensors[name], spec, rank, ranks))
        except ValueError as error:
            tensor = tensors[name]
            raise ValueError(
                f"KV cache of layer {name}, shape {tuple(tensor.shape)}, strides "
                f"{tuple(tensor.stride())}: {error}"
            ) from None
    for name, group in zip(spec.layers, groups, strict=True):
        if dataclasses.replace(group, layers=groups[0].layers) != groups[0]:
            raise ValueError(
                f"layers {spec.layers[0]} and {name} share block ids, but their blocks differ"
            )
    return dataclasses.replace(groups[0], layers=tuple(group.layers[0] for group in groups))


def _layer(tensor: Tensor, spec: GroupSpec, rank: int, ranks: int) -> CacheGroup:
    shape, strides, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    if len(shape) == 3:
        shape, strides = (
            (shape[0], 1, *shape[1:]),
            (strides[0], shape[1] * strides[1], *strides[1:]),
        )
    if len(shape) != 4:
        raise ValueError("expected [blocks, heads, tokens, width] or [blocks, tokens, width]")
    blocks, heads, tokens, width = shape
    if heads != len(held(spec.heads, rank, ranks)):
        raise ValueError(
            f"{heads} heads, expected {len(held(spec.heads, rank, ranks))}, which rank {rank} of "
            f"{ranks} has of {spec.heads}"
        )
    if strides[1:] == (tokens * width, width, 1) or (heads == 1 and strides[2:] == (width, 1)):
        repeats = 1
    elif strides[1:] == (width, heads * width, 1):
        repeats = tokens
    else:
        raise ValueError("a block is not contiguous")
    size = heads * tokens * width * item
    stride = strides[0] * item
    parts, rest = divmod(blocks, spec.blocks)
    if rest or not parts:
        raise ValueError(f"the first dimension is no multiple of the {spec.blocks} blocks")
    if parts > 1:
        if stride != size:
            raise ValueError(f"the {parts} parts of a block are not contiguous")
        size, stride, repeats = parts * size, parts * stride, parts * repeats
    return CacheGroup([tensor.data_ptr()], spec.blocks, size, stride, spec.heads, repeats)
