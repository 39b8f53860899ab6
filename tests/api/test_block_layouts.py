"""Blocks of any layout move as numpy moves them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aioflagcx.sync
from aioflagcx import BlockLayout, BlockSpan, Config

POOL = 1 << 16
FIELDS = ("length", "repeats", "src_stride", "dst_stride", "src_step", "dst_step")


@st.composite
def moves(draw: st.DrawFn) -> dict[str, Any]:
    """A span within POOL bytes on either side, and ids of its blocks."""
    length = draw(st.integers(1, 300))
    repeats = draw(st.integers(1, 4))
    found: dict[str, Any] = {"length": length, "repeats": repeats}
    for side in ("src", "dst"):
        step = length + draw(st.sampled_from([0, 0, 1, 64])) if repeats > 1 else 0
        extent = (repeats - 1) * step + length
        stride = extent + draw(st.sampled_from([0, 0, 3, 128]))
        most = (POOL - extent) // stride + 1
        blocks = draw(st.integers(1, min(most, 40)))
        base = draw(st.integers(0, POOL - (blocks - 1) * stride - extent))
        found.update(
            {f"{side}_step": step, f"{side}_stride": stride, f"{side}_blocks": blocks, side: base}
        )
    # A block may be sent to several places, but two must not be sent to one.
    dst = draw(st.permutations(range(found["dst_blocks"])))
    count = draw(st.integers(0, len(dst)))
    first = draw(st.integers(0, found["src_blocks"] - 1))
    rising = [(first + i) % found["src_blocks"] for i in range(count)]
    ids = st.integers(0, found["src_blocks"] - 1)
    found["src_ids"] = draw(st.just(rising) | st.lists(ids, min_size=count, max_size=count))
    found["dst_ids"] = draw(st.sampled_from([dst[:count], sorted(dst[:count])]))
    return found


@pytest.fixture(scope="module")
def blocking() -> Iterator[Callable[[], Any]]:
    """Two blocking engines, and the memory of both."""
    config = Config(soft_paths=("process",))
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(aioflagcx.sync.Engine(config=config))
        theirs = stack.enter_context(aioflagcx.sync.Engine(config=config))
        src = np.random.default_rng(3).integers(0, 256, POOL, np.uint8)
        dst = np.zeros(POOL, np.uint8)
        ours.register(src)
        theirs.register(dst)
        session = ours.connect(theirs.session_id)
        yield lambda: (ours, session, src, dst)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=st.lists(moves(), min_size=1, max_size=3))
def test_any_layout_moves_what_numpy_moves(
    blocking: Callable[[], Any], moves: list[dict[str, Any]]
) -> None:
    ours, session, src, dst = blocking()
    for move in moves:
        layout = BlockLayout(
            [
                BlockSpan(
                    src=src.ctypes.data + move["src"],
                    dst=dst.ctypes.data + move["dst"],
                    **{name: move[name] for name in FIELDS},
                )
            ],
            src_blocks=move["src_blocks"],
            dst_blocks=move["dst_blocks"],
        )
        dst[:] = 0
        expected = dst.copy()
        for one, other in zip(move["src_ids"], move["dst_ids"], strict=True):
            for repeat in range(move["repeats"]):
                a = move["src"] + one * move["src_stride"] + repeat * move["src_step"]
                b = move["dst"] + other * move["dst_stride"] + repeat * move["dst_step"]
                expected[b : b + move["length"]] = src[a : a + move["length"]]
        sent = ours.write_blocks(session, layout, move["src_ids"], move["dst_ids"])
        assert sent == len(move["src_ids"]) * move["length"] * move["repeats"]
        assert sent == len(move["src_ids"]) * layout.block_bytes
        np.testing.assert_array_equal(dst, expected)
