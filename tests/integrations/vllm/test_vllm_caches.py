"""Layouts of tensors, and the connector's settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from integrations.vllm.tensors import as_tensor

from aioflagcx.integrations.vllm.caches import GroupSpec, cache_layout
from aioflagcx.integrations.vllm.options import Options
from aioflagcx.kv import CacheGroup

BLOCKS, HEADS, TOKENS, WIDTH = 6, 4, 8, 16


def group_of(array: Any, *, blocks: int = BLOCKS, heads: int = HEADS) -> CacheGroup:
    layout = cache_layout({"a": as_tensor(array)}, [GroupSpec(("a",), blocks, heads)], 0, 1)
    return layout.groups[0]


def pieces(group: CacheGroup, memory: Any, block: int, head: int) -> bytes:
    """What a layout takes for a head of a block, in the order of memory."""
    data = memory.tobytes()
    size = group.block_bytes // (group.repeats * group.heads)
    begin = block * group.stride
    return b"".join(
        data[at : at + size]
        for at in range(begin + head * size, begin + group.block_bytes, size * group.heads)
    )


def test_heads_outside_of_tokens_are_one_piece_each() -> None:
    array = np.arange(BLOCKS * HEADS * TOKENS * WIDTH, dtype=np.int16).reshape(
        BLOCKS, HEADS, TOKENS, WIDTH
    )
    group = group_of(array)
    assert (group.blocks, group.heads, group.repeats) == (BLOCKS, HEADS, 1)
    assert pieces(group, array, 3, 2) == array[3, 2].tobytes()


def test_heads_within_tokens_are_a_piece_for_each_token() -> None:
    memory = np.arange(BLOCKS * HEADS * TOKENS * WIDTH, dtype=np.int16).reshape(
        BLOCKS, TOKENS, HEADS, WIDTH
    )
    array = memory.transpose(0, 2, 1, 3)
    group = group_of(array)
    assert group.repeats == TOKENS
    assert pieces(group, memory, 3, 2) == array[3, 2].tobytes()


def test_a_cache_that_every_rank_has_is_one_head() -> None:
    array = np.zeros((BLOCKS, TOKENS, WIDTH), np.int16)
    group = group_of(array, heads=1)
    assert (group.heads, group.repeats, group.block_bytes) == (1, 1, TOKENS * WIDTH * 2)
    assert group_of(array.reshape(BLOCKS, 1, TOKENS, WIDTH), heads=1) == group


def test_blocks_that_the_device_divides_are_put_together() -> None:
    array = np.arange(BLOCKS * HEADS * TOKENS * WIDTH, dtype=np.int16).reshape(
        BLOCKS, HEADS, TOKENS, WIDTH
    )
    group = group_of(array, blocks=BLOCKS // 2)
    assert (group.blocks, group.repeats) == (BLOCKS // 2, 2)
    assert pieces(group, array, 1, 3) == array[2, 3].tobytes() + array[3, 3].tobytes()


def test_layers_may_lie_within_each_other() -> None:
    rows = np.zeros((BLOCKS, 2, HEADS, TOKENS, WIDTH), np.int8)
    tensors = {"a": as_tensor(rows[:, 0]), "b": as_tensor(rows[:, 1])}
    [group] = cache_layout(tensors, [GroupSpec(("b", "a"), BLOCKS, HEADS)], 0, 1).groups
    assert group.stride == 2 * group.block_bytes
    assert group.layers == ((rows[:, 1].ctypes.data,), (rows.ctypes.data,))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((BLOCKS, HEADS, TOKENS, 2, WIDTH)), r"expected \[blocks, heads"),
        (np.zeros((BLOCKS, 2, TOKENS, WIDTH)), "2 heads, expected 4"),
        (np.zeros((BLOCKS, HEADS, TOKENS, 2 * WIDTH))[..., ::2], "not contiguous"),
        (np.zeros((BLOCKS + 1, HEADS, TOKENS, WIDTH)), "no multiple of the 6 blocks"),
        (np.zeros((4 * BLOCKS, HEADS, TOKENS, WIDTH))[::2], "parts of a block"),
    ],
)
def test_a_cache_of_another_kind_is_refused_by_layer_and_shape(array: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"layer a, shape .*{words}"):
        group_of(array)


def test_layers_of_a_group_are_there_and_alike() -> None:
    spec = [GroupSpec(("a", "b"), BLOCKS, HEADS)]
    one = as_tensor(np.zeros((BLOCKS, HEADS, TOKENS, WIDTH), np.int8))
    other = as_tensor(np.zeros((BLOCKS, HEADS, TOKENS, WIDTH), np.int16))
    with pytest.raises(ValueError, match="layer b has no KV cache"):
        cache_layout({"a": one}, spec, 0, 1)
    with pytest.raises(ValueError, match="layers a and b share block ids, but their blocks differ"):
        cache_layout({"a": one, "b": other}, spec, 0, 1)


def test_settings_are_checked() -> None:
    assert Options.of({"port": 5, "abort_timeout": None}).port == 5
    for extra, words in [
        ({"prot": 5}, "'prot'; there are abort_timeout, answer_timeout"),
        ({"port": 0}, "port 0 is not in"),
        ({"port": "5"}, "port '5' is not in"),
        ({"fence_timeout": 0}, "fence_timeout: "),
        ({"abort_timeout": "x"}, "abort_timeout: "),
    ]:
        with pytest.raises(ValueError, match=words):
            Options.of(extra)
