"""Which bytes one rank writes to another, against numpy caches assembled whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflagcx import BlockLayout
from aioflagcx.kv import CacheGroup, CacheLayout
from aioflagcx.kv.layout import block_layout, check_fit, heads_of, held, senders, share, targets

Cache = npt.NDArray[np.uint8]
RANKS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Model:
    """One group of a model: [layer, block, repeat, head, byte] when assembled whole."""

    layers: int
    blocks: int
    repeats: int
    heads: int
    head_bytes: int
    padding: int

    def group(self, pools: Cache, rank: int, ranks: int) -> CacheGroup:
        """Of a rank whose pools, [layer, block, byte], are these."""
        used = len(held(self.heads, rank, ranks)) * self.repeats * self.head_bytes
        return CacheGroup(
            tuple(pool.ctypes.data for pool in pools),  # type: ignore[misc]
            pools.shape[1],
            used,
            stride=pools.shape[2],
            heads=self.heads,
            repeats=self.repeats,
        )

    def pools(self, rank: int, ranks: int) -> Cache:
        """Empty ones of a rank."""
        used = len(held(self.heads, rank, ranks)) * self.repeats * self.head_bytes
        return np.zeros((self.layers, self.blocks, used + self.padding), np.uint8)

    def view(self, pools: Cache, rank: int, ranks: int) -> Cache:
        """A rank's pools as [layer, block, repeat, head, byte]."""
        count = len(held(self.heads, rank, ranks))
        used = pools[..., : count * self.repeats * self.head_bytes]
        return used.reshape(self.layers, self.blocks, self.repeats, count, self.head_bytes)


def copy(layout: BlockLayout, src: list[int], dst: list[int]) -> int:
    """What write_blocks does, byte by byte, in this process; how many pieces that took."""
    pieces = 0
    for span in layout.spans:
        for one, other in zip(src, dst, strict=True):
            assert 0 <= one < layout.src_blocks and 0 <= other < layout.dst_blocks
            for repeat in range(span.repeats):
                a = span.src + one * span.src_stride + repeat * span.src_step
                b = span.dst + other * span.dst_stride + repeat * span.dst_step
                memory(b, span.length)[:] += memory(a, span.length)  # twice is wrong
                pieces += 1
    return pieces


def memory(address: int, size: int) -> Cache:
    """Somebody's bytes."""
    interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
    return np.asarray(type("Memory", (), {"__array_interface__": interface})())


@st.composite
def models(draw: st.DrawFn) -> Model:
    return Model(
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 6)),
        repeats=draw(st.integers(1, 4)),
        heads=draw(st.sampled_from([1, 2, 4, 8, 16])),
        head_bytes=draw(st.integers(1, 5)),
        padding=draw(st.sampled_from([0, 0, 3])),
    )


@settings(max_examples=400, deadline=None)
@given(data=st.data(), models=st.lists(models(), min_size=1, max_size=2))
def test_every_pair_of_tensor_parallel_sizes_hands_the_whole_cache_over(
    data: st.DataObject, models: list[Model]
) -> None:
    src_ranks = data.draw(st.sampled_from(RANKS), "prefill ranks")
    dst_ranks = data.draw(st.sampled_from(RANKS), "decode ranks")
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    for model in models:  # each a group with its own blocks
        shape = (model.layers, model.blocks, model.repeats, model.heads, model.head_bytes)
        whole = generator.integers(1, 256, shape, np.uint8)
        count = data.draw(st.integers(0, model.blocks), "blocks")
        src = generator.permutation(model.blocks)[:count].tolist()
        dst = generator.permutation(model.blocks)[:count].tolist()
        prefill = [model.pools(rank, src_ranks) for rank in range(src_ranks)]
        for rank, pools in enumerate(prefill):
            heads = held(model.heads, rank, src_ranks)
            model.view(pools, rank, src_ranks)[:] = whole[..., heads.start : heads.stop, :]
        for rank in range(dst_ranks):
            pools = model.pools(rank, dst_ranks)
            theirs = CacheLayout(model.group(pools, rank, dst_ranks), rank, dst_ranks)
            writers = set()
            for other, ours in enumerate(prefill):
                layout = block_layout(
                    CacheLayout(model.group(ours, other, src_ranks), other, src_ranks),
                    theirs,
                    0,
                )
                if layout is not None:
                    writers.add(other)
                    copy(layout, src, dst)
            assert writers <= set(senders(heads_of(theirs), rank, dst_ranks, src_ranks))
            expected = np.zeros_like(model.view(pools, rank, dst_ranks))
            heads = held(model.heads, rank, dst_ranks)
            expected[:, dst] = whole[:, src][..., heads.start : heads.stop, :]
            np.testing.assert_array_equal(model.view(pools, rank, dst_ranks), expected)
            if model.padding:
                assert not pools[..., -model.padding :].any()


@pytest.mark.parametrize("dst_ranks", RANKS)
@pytest.mark.parametrize("src_ranks", RANKS)
@pytest.mark.parametrize("heads", [1, 2, 8, 32])
def test_each_head_comes_from_one_rank_and_all_ranks_take_part(
    heads: int, src_ranks: int, dst_ranks: int
) -> None:
    written = 0
    for dst in range(dst_ranks):
        coming = [
            head
            for src in range(src_ranks)
            for head in share(heads, src, src_ranks, dst, dst_ranks)
        ]
        assert coming == list(held(heads, dst, dst_ranks))
        written += len(coming)
    busy = [
        sum(len(share(heads, src, src_ranks, dst, dst_ranks)) for dst in range(dst_ranks))
        for src in range(src_ranks)
    ]
    assert sum(busy) == written
    if dst_ranks >= src_ranks:
        assert len(set(busy)) == 1  # nobody does more than another


@pytest.mark.parametrize("dst_ranks", RANKS)
@pytest.mark.parametrize("src_ranks", RANKS)
def test_every_prefill_rank_has_somebody_and_both_sides_agree_who(
    src_ranks: int, dst_ranks: int
) -> None:
    for heads in (frozenset({1}), frozenset({8}), frozenset({1, 4})):
        pairs = {
            (src, dst)
            for src in range(src_ranks)
            for dst in targets(heads, src, src_ranks, dst_ranks)
        }
        assert {src for src, _ in pairs} == set(range(src_ranks))
        assert pairs == {
            (src, dst)
            for dst in range(dst_ranks)
            for src in senders(heads, dst, dst_ranks, src_ranks)
        }


def test_a_replicated_cache_is_written_once() -> None:
    model = Model(layers=1, blocks=4, repeats=1, heads=1, head_bytes=64, padding=0)
    ours, theirs = model.pools(0, 8), model.pools(0, 2)
    layouts = [
        block_layout(
            CacheLayout((model.group(ours, src, 8),), src, 8),
            CacheLayout((model.group(theirs, dst, 2),), dst, 2),
            0,
        )
        for src in range(8)
        for dst in range(2)
    ]
    assert len([one for one in layouts if one is not None]) == 2


def test_equal_ranks_write_whole_blocks_in_one_piece() -> None:
    model = Model(layers=2, blocks=4, repeats=3, heads=4, head_bytes=8, padding=0)
    pools = model.pools(1, 2)
    layout = CacheLayout((model.group(pools, 1, 2),), 1, 2)
    made = block_layout(layout, layout, 0)
    assert made is not None and made.block_bytes == 2 * 3 * 2 * 8
    only = block_layout(layout, layout, 0, range(1, 2))
    assert only is not None and [span.src for span in only.spans] == [pools[1].ctypes.data]


GROUP = CacheGroup((4096, 8192), 4, 64, heads=4, repeats=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dataclasses.replace(GROUP, blocks=0), "blocks = 0"),
        (lambda: dataclasses.replace(GROUP, stride=63), "stride = 63 is less"),
        (lambda: dataclasses.replace(GROUP, layers=()), "at least one layer"),
        (lambda: dataclasses.replace(GROUP, layers=((1,), (2, 3))), "equally many pools"),
        (lambda: dataclasses.replace(GROUP, layers=(0,)), "no address"),
        (lambda: dataclasses.replace(GROUP, format="x" * 257), "at most 256"),
        (lambda: dataclasses.replace(GROUP, format=None), "format = None"),
        (lambda: CacheLayout(()), "at least one group"),
        (lambda: CacheLayout((GROUP,), 2, 2), "rank 2 of 2"),
        (lambda: CacheLayout((GROUP,), 0, 3), "4 heads are not divided evenly among 3 ranks"),
        (
            lambda: CacheLayout((dataclasses.replace(GROUP, block_bytes=60),)),
            "60 bytes is not 8 equal pieces",
        ),
    ],
)
def test_layouts_that_cannot_be_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": (4096,)}, "layers: 2 on prefill, 1 on decode"),
        ({"layers": ((4096, 1), (8192, 1))}, "pools a layer: 1 on prefill, 2 on decode"),
        ({"heads": 8}, "heads: 4 on prefill, 8 on decode"),
        ({"repeats": 4}, "repeats: 2 on prefill, 4 on decode"),
        ({"format": "fp8"}, "format: '' on prefill, 'fp8' on decode; blocks must hold the same"),
        ({"block_bytes": 128, "stride": 0}, "bytes of a head: 8 on prefill, 16 on decode"),
    ],
)
def test_caches_that_do_not_fit_say_what_differs(changes: dict[str, Any], words: str) -> None:
    other = CacheLayout((dataclasses.replace(GROUP, **changes),))
    with pytest.raises(ValueError, match=words):
        check_fit(CacheLayout((GROUP,)), other)
    with pytest.raises(ValueError, match="prefill has 1 groups, decode 2"):
        check_fit(CacheLayout((GROUP,)), CacheLayout((GROUP, GROUP)))
