"""Writes of blocks by their ids: what moves, and what is refused before a byte does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance.pair import Pair

from aioflagcx import BlockLayout, BlockSpan
from aioflagcx.errors import LocalAddressError, RemoteAddressError


def span(pair: Pair, **changes: int) -> BlockSpan:
    """Blocks of 1,024 bytes, 4,096 apart at the peer."""
    fields = {"length": 1024, "src_stride": 1024, "dst_stride": 4096, **changes}
    return BlockSpan(src=pair.local.addr, dst=pair.remote.addr, **fields)


@pytest.fixture
def layout(pair: Pair) -> BlockLayout:
    """16 blocks of ours, 8 of the peer's."""
    return BlockLayout([span(pair)], src_blocks=16, dst_blocks=8)


async def test_blocks_go_where_their_ids_say(pair: Pair, layout: BlockLayout) -> None:
    sent = await pair.ours.write_blocks(pair.session, layout, [15, 3, 4], np.array([0, 5, 7]))
    assert sent == 3 * 1024
    expected = np.zeros_like(pair.dst)
    for src, dst in ((15, 0), (3, 5), (4, 7)):
        expected[dst * 4096 : dst * 4096 + 1024] = pair.src[src * 1024 : (src + 1) * 1024]
    np.testing.assert_array_equal(pair.dst, expected)


async def test_a_notification_comes_behind_the_blocks(pair: Pair, layout: BlockLayout) -> None:
    transfer = pair.ours.submit_write_blocks(
        pair.session, layout, [1], [2], notify=("blocks", b"here")
    )
    notification = await anext(aiter(pair.theirs.notifications()))
    assert notification.payload == b"here"
    assert pair.dst[8192:9216].tobytes() == pair.src[1024:2048].tobytes()
    assert await transfer == 1024


async def test_several_layouts_are_one_transfer(pair: Pair, layout: BlockLayout) -> None:
    other = BlockLayout(
        [span(pair, length=64, src_stride=64, dst_stride=64)], src_blocks=100, dst_blocks=100
    )
    transfer = pair.ours.submit_write_blocks(
        pair.session, [layout, other], [[0], [16, 17]], [[7], [0, 1]]
    )
    assert await transfer == 1024 + 128
    assert pair.dst[7 * 4096 : 7 * 4096 + 1024].tobytes() == pair.src[:1024].tobytes()
    assert pair.dst[:128].tobytes() == pair.src[1024:1152].tobytes()


async def test_no_blocks_are_a_success(pair: Pair, layout: BlockLayout) -> None:
    assert await pair.ours.write_blocks(pair.session, layout, [], []) == 0
    assert not pair.dst.any()


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        ([0, 16], [0, 1], r"src_blocks\[1\] = 16 is not below the pool's 16 blocks"),
        ([0, 1], [8, 0], r"dst_blocks\[0\] = 8 is not below the pool's 8 blocks"),
        ([0, -1], [0, 1], r"src_blocks\[1\] is negative: -1"),
        ([0, 1, 2], [0, 1], "src_blocks has 3 elements, dst_blocks 2"),
        ([2**64], [0], r"src_blocks\[0\]"),
    ],
)
async def test_ids_that_cannot_be_move_nothing(
    pair: Pair, layout: BlockLayout, src: list[int], dst: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        await pair.ours.write_blocks(pair.session, layout, src, dst)
    assert not pair.dst.any()


@pytest.mark.parametrize("ids", [3, [1.5], ["a"], [True], None])
async def test_ids_that_are_no_integers_are_refused(
    pair: Pair, layout: BlockLayout, ids: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match="src_blocks"):
        await pair.ours.write_blocks(pair.session, layout, ids, [0])


async def test_lists_of_the_wrong_number_are_refused(pair: Pair, layout: BlockLayout) -> None:
    with pytest.raises(ValueError, match="1 lists of blocks for 2 layouts"):
        await pair.ours.write_blocks(pair.session, [layout, layout], [[0]], [[0], [1]])
    with pytest.raises(TypeError, match="expected a BlockLayout"):
        await pair.ours.write_blocks(pair.session, [3], [[0]], [[0]])  # type: ignore[list-item]


async def test_a_pool_that_is_not_registered_is_named_by_its_span(pair: Pair) -> None:
    inside = span(pair)
    for side, error in (("src", LocalAddressError), ("dst", RemoteAddressError)):
        fields = {name: getattr(inside, name) for name in BlockSpan.__slots__}
        outside = BlockSpan(**{**fields, side: fields[side] + pair.local.size - 1024})
        layout = BlockLayout([inside, outside], src_blocks=16, dst_blocks=8)
        with pytest.raises(error) as caught:
            await pair.ours.write_blocks(pair.session, layout, [0], [0])
        assert caught.value.index == 1
        assert not pair.dst.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": 0}, r"spans\[0\] has a length of 0"),
        ({"repeats": 0}, r"spans\[0\] has 0 repeats"),
        ({"src_stride": 1023}, "src_stride of 1023 bytes for blocks of 1024"),
        ({"repeats": 2, "src_step": 1023, "dst_step": 2048}, "src_step of 1023 bytes for pieces"),
        ({"dst_stride": 2**62}, r"reaches over 2\*\*63: dst"),
        ({"length": 2**63}, r"spans\[0\] has a value of"),
        ({"src_stride": -1}, r"spans\[0\] has a value of -1"),
    ],
)
async def test_spans_that_cannot_be_are_refused(
    pair: Pair, changes: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        BlockLayout([span(pair, **changes)], src_blocks=16, dst_blocks=8)
