from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflagcx.memory import Memory
from aioflagcx.pieces import Pieces
from aioflagcx.region import Region

region = Region(Memory(0x1000, 64, True, None), "read", None)


def lists(*arguments: Any) -> list[list[int]]:
    arrays = Pieces().arrays(*arguments)
    for array in arrays:
        assert array.dtype in (np.int64, np.uint64)
        assert array.ndim == 1
        assert array.flags.c_contiguous
    return [array.tolist() for array in arrays]


def test_single_pieces() -> None:
    assert lists(1, 2, 3) == [[1], [2], [3]]
    assert lists(np.int64(1), np.uint8(2), np.array(3)) == [[1], [2], [3]]
    assert lists(2**63, 2**63, 0) == [[2**63], [2**63], [0]]


def test_regions_stand_for_their_address_or_size() -> None:
    assert lists(region, 5, region) == [[0x1000], [5], [64]]
    assert lists(7, region, 8) == [[7], [0x1000], [8]]


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, lambda v: np.array(v, np.int32), lambda v: np.array(v, np.uint64)],
)
def test_sequences_and_arrays(kind: Any) -> None:
    assert lists(kind([1, 2]), kind([3, 4]), kind([5, 6])) == [[1, 2], [3, 4], [5, 6]]
    assert lists(kind([1, 2]), kind([3, 4]), 9) == [[1, 2], [3, 4], [9]]
    assert lists(kind([1]), kind([2]), kind([3])) == [[1], [2], [3]]


def test_none_at_all() -> None:
    assert lists([], [], []) == [[], [], []]
    assert lists([], np.zeros(0), 4096) == [[], [], [4096]]


def test_strided_and_byteswapped_arrays() -> None:
    assert lists(np.arange(6)[::2], np.arange(3, dtype=">i4"), 1) == [[0, 2, 4], [0, 1, 2], [1]]


def test_integers_that_numpy_finds_no_common_type_for() -> None:
    assert lists([np.uint64(2**63), np.int64(1)], [1, 2], 1)[0] == [2**63, 1]


@given(st.lists(st.integers(0, 2**63), min_size=1))
def test_every_address_arrives_as_it_was(values: list[int]) -> None:
    assert lists(values, values, 1)[0] == values


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("bad", [-1, 2**64, -(2**64), 2**63 + 1])
def test_integers_outside_the_range_are_named_by_index(which: int, bad: int) -> None:
    arguments: list[Any] = [[2**63, 0, 1, 2], [2**63, 0, 1, 2], [2**63, 0, 1, 2]]
    arguments[which][2] = bad
    with pytest.raises(ValueError, match=r"\[2\]"):
        lists(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ([1, 2], [1], 1),
        ([1, 2], 1, 1),
        (1, [1, 2], 1),
        (1, 1, [1, 2]),
        ([1, 2], [1, 2], [1]),
        ([1, 2, 3], [1, 2, 3], [1, 2]),
        (1, [1], 1),
    ],
)
def test_unequal_lengths_are_named_by_index(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"from index \d"):
        lists(*arguments)


@pytest.mark.parametrize(
    "bad",
    [1.0, "1", b"1", None, True, [1.0], ["1"], [None], [[1], [2]], [[1], [2, 3]], np.zeros(2), {}],
    ids=repr,
)
def test_what_is_no_integer(bad: Any) -> None:
    for position in range(3):
        arguments: list[Any] = [[1, 2], [3, 4], [5, 6]]
        arguments[position] = bad
        with pytest.raises((TypeError, ValueError)):
            lists(*arguments)


def test_the_item_that_is_no_integer_is_named() -> None:
    with pytest.raises(TypeError, match=r"lens\[1\] is of type float"):
        lists([1, 2], [3, 4], [5, 6.5])
