"""Messages between managers: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflagcx.kv import CacheGroup, CacheLayout
from aioflagcx.kv.messages import (
    Abort,
    Begin,
    Done,
    Failed,
    Hello,
    Message,
    Start,
    decode,
    encode,
)

IDS = st.binary(min_size=16, max_size=16)
RANK = st.integers(0, 4095)
WORDS = st.text(st.characters(categories=["L", "N", "P"]), max_size=50)


@st.composite
def starts(draw: st.DrawFn) -> Start:
    groups, blocks = [], []
    for _ in range(draw(st.integers(1, 3))):
        pools = draw(st.integers(1, 2))
        layer = st.lists(st.integers(1, 2**62), min_size=pools, max_size=pools)
        count = draw(st.integers(1, 2**32 - 1))
        groups.append(
            CacheGroup(
                draw(st.lists(layer, min_size=1, max_size=4)),
                count,
                2 * draw(st.integers(1, 2**20)),
                stride=2**30,
                heads=draw(st.sampled_from([1, 2])),
                repeats=1,
                format=draw(WORDS),
            )
        )
        blocks.append(np.array(draw(st.lists(st.integers(0, count - 1), max_size=5)), np.int64))
    ranks = draw(st.integers(1, 2))
    layout = CacheLayout(groups, draw(st.integers(0, ranks - 1)), ranks)
    to_ranks = draw(st.integers(1, 4095))
    return Start(
        draw(IDS), draw(WORDS), draw(st.integers(0, to_ranks - 1)), to_ranks, layout,
        tuple(blocks), draw(st.binary(max_size=20)),
    )  # fmt: skip


MESSAGES = st.one_of(
    starts(),
    st.builds(Abort, IDS, WORDS, RANK, RANK, WORDS),
    st.builds(Hello, IDS, RANK),
    st.builds(Begin, IDS, RANK),
    st.builds(Done, IDS, RANK, st.binary(max_size=20)),
    st.builds(Failed, IDS, RANK, WORDS, st.booleans()),
)


def plain(message: Message) -> dict[str, Any]:
    fields = {one.name: getattr(message, one.name) for one in dataclasses.fields(message)}
    if isinstance(message, Start):
        fields["blocks"] = [ids.tolist() for ids in message.blocks]
    return fields


@given(message=MESSAGES)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    found = decode(encode(message))
    assert type(found) is type(message)
    assert plain(found) == plain(message)


@given(payload=st.binary(max_size=200))
def test_garbage_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):
        decode(payload)


@given(data=st.data(), message=MESSAGES)
def test_a_message_with_something_else_in_it_is_a_value_error_or_a_message(
    data: st.DataObject, message: Message
) -> None:
    items = msgpack.unpackb(encode(message))
    index = data.draw(st.integers(0, len(items) - 1))
    items[index] = data.draw(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=9)
        | st.lists(st.integers(0, 9) | st.binary(max_size=9) | st.lists(st.none()), max_size=8)
    )  # fmt: skip
    with contextlib.suppress(ValueError):
        decode(msgpack.packb(items))


GROUP = CacheGroup([4096], 4, 64)
START = Start(bytes(16), "r", 0, 1, CacheLayout(GROUP), (np.array([3]),), b"")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"to_rank": 1}, "prefill rank 1 of 1"),
        ({"blocks": (np.array([4]),)}, "block 4 of 4"),
        ({"blocks": ()}, "0 lists of blocks, 1 groups"),
        ({"id": b"short"}, "16 bytes"),
        ({"room": "r" * 1025}, "at most 1024 bytes"),
        ({"aux": "text"}, "expected bytes"),
        ({"to_ranks": 5000}, "below 4096"),
    ],
)
def test_a_start_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    assert decode(encode(START))
    with pytest.raises(ValueError, match=words):
        decode(encode(dataclasses.replace(START, **changes)))


def test_what_a_peer_gives_as_its_reason_is_fit_for_a_log() -> None:
    found = decode(encode(Failed(bytes(16), 0, "\x1b[31mred\n" + "x" * 10_000, True)))
    assert isinstance(found, Failed)
    assert found.reason.isprintable() and len(found.reason) == 4096
