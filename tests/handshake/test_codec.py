from __future__ import annotations

import contextlib
import time
from typing import Any

import message_strategies as strategies
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflagcx.errors import ProtocolError
from aioflagcx.handshake.codec import LENGTH, Frame, FrameDecoder, UnknownKind, encode
from aioflagcx.handshake.messages import (
    Connect,
    ConnectReply,
    Error,
    Fence,
    FenceReply,
    Goodbye,
    Hello,
    Message,
    MetadataUpdate,
    Notify,
)

LIMIT = 1 << 20
Addressed = tuple[Message, int, bool]


def framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def packed(*items: Any) -> bytes:
    return framed(msgpack.packb(list(items)))


def decode_all(data: bytes, limit: int = LIMIT) -> list[Frame]:
    decoder = FrameDecoder(limit)
    decoder.feed(data)
    frames = list(decoder)
    decoder.end()
    return frames


@given(strategies.addressed)
def test_what_was_encoded_is_decoded(addressed: Addressed) -> None:
    message, request_id, is_reply = addressed
    data = encode(message, request_id)
    assert decode_all(data) == [Frame(request_id, is_reply, message, len(data) - 4)]


@given(st.lists(strategies.addressed, max_size=5), st.data())
def test_frames_may_arrive_in_any_pieces(frames: list[Addressed], data: st.DataObject) -> None:
    stream = b"".join(encode(message, request_id) for message, request_id, _ in frames)
    decoder = FrameDecoder(LIMIT)
    decoded: list[Frame] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        decoder.feed(stream[:cut])
        decoded += decoder
        stream = stream[cut:]
    decoder.end()
    assert [(f.message, f.request_id, f.is_reply) for f in decoded] == frames


@given(strategies.addressed)
def test_a_frame_cut_anywhere_is_incomplete_and_then_an_error(addressed: Addressed) -> None:
    data = encode(addressed[0], addressed[1])
    for cut in range(1, len(data)):
        decoder = FrameDecoder(LIMIT)
        decoder.feed(data[:cut])
        assert decoder.next() is None
        with pytest.raises(ProtocolError, match="middle of a frame"):
            decoder.end()


@given(strategies.addressed)
def test_a_message_cut_anywhere_inside_its_frame_is_an_error(addressed: Addressed) -> None:
    content = encode(addressed[0], addressed[1])[4:]
    for cut in range(len(content)):
        with pytest.raises(ProtocolError):
            decode_all(framed(content[:cut]))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_protocol_errors(content: bytes) -> None:
    for data in (content, framed(content)):
        with contextlib.suppress(ProtocolError):
            decode_all(data)


@given(strategies.addressed, st.data())
def test_one_changed_byte_raises_nothing_but_protocol_errors(
    addressed: Addressed, data: st.DataObject
) -> None:
    frame = bytearray(encode(addressed[0], addressed[1]))
    frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode_all(bytes(frame))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(
    st.sampled_from(["hello", "auth", "connect", "metadata", "notify", "fence", "error", "x"]),
    st.integers(0, 3),
    st.integers(0, 1),
    json_like | st.dictionaries(st.sampled_from(["attempt", "rails", "code"]), json_like),
)
def test_well_formed_nonsense_raises_nothing_but_protocol_errors(
    kind: str, request_id: int, flags: int, body: Any
) -> None:
    with contextlib.suppress(ProtocolError):
        decode_all(packed(kind, request_id, flags, body))


@given(strategies.addressed, st.dictionaries(st.text(min_size=17, max_size=20), json_like))
def test_unknown_fields_are_ignored_whatever_they_hold(
    addressed: Addressed, extra: dict[str, Any]
) -> None:
    message, request_id, is_reply = addressed
    extra = dict(list(extra.items())[:8])
    known = set(message.body())
    assert not known & set(extra) or known >= set(extra)
    data = packed(message.KIND, request_id, int(is_reply), {**extra, **message.body()})
    assert decode_all(data)[0].message == message


def test_an_unknown_field_may_be_deep_and_large() -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    data = packed("fence", 1, 0, {"new": deep, "attempt": 1, "rail": 0, "newer": [[]] * 50_000})
    assert decode_all(data)[0].message == Fence(attempt=1, rail=0)


@given(st.sampled_from(["sing", "", "ä"]), st.integers(0, 2**64 - 1), st.booleans(), json_like)
def test_unknown_kinds_are_told_apart_from_broken_bytes(
    kind: str, request_id: int, is_reply: bool, value: Any
) -> None:
    (frame,) = decode_all(packed(kind, request_id, int(is_reply), {"field": value}))
    assert frame[:3] == (request_id, is_reply, UnknownKind(kind))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgpack.packb("fence"),
        msgpack.packb({"kind": "fence"}),
        msgpack.packb(["fence", 1, 0]),
        msgpack.packb(["fence", 1, 0, {"attempt": 1}, 0]),
        msgpack.packb(["fence", 1, 0, {"attempt": 1}]) + b"\0",
        msgpack.packb(["fence", 1, 0, ["attempt", 1]]),
        msgpack.packb(["fence", 1, 0, None]),
        msgpack.packb([b"fence", 1, 0, {"attempt": 1}]),
        msgpack.packb([["fence"], 1, 0, {"attempt": 1}]),
        msgpack.packb(["f" * 65, 1, 0, {}]),
        msgpack.packb(["fence", -1, 0, {"attempt": 1}]),
        msgpack.packb(["fence", True, 0, {"attempt": 1}]),
        msgpack.packb(["fence", "1", 0, {"attempt": 1}]),
        msgpack.packb(["fence", 1, 2, {"attempt": 1}]),
        msgpack.packb(["fence", 1, False, {"attempt": 1}]),
        msgpack.packb(["fence", 0, 0, {"attempt": 1}]),
        msgpack.packb(["fence", 0, 1, {"attempt": 1}]),
        msgpack.packb(["goodbye", 1, 0, {"reason": "", "fenced": False}]),
        msgpack.packb(["goodbye", 0, 1, {"reason": "", "fenced": False}]),
        msgpack.packb(["error", 1, 0, {"code": "", "message": ""}]),
        msgpack.packb(["fence", 1, 0, {}]),
        msgpack.packb(["fence", 1, 0, {1: 1, "attempt": 1}]),
        msgpack.packb(["fence", 1, 0, {"attempt": [1]}]),
        msgpack.packb(["fence", 1, 0, {"attempt": msgpack.ExtType(1, b"x")}]),
        msgpack.packb(["fence", 1, 0, {"attempt": msgpack.Timestamp(1)}]),
        b"\x94\xa5fence\x01\x00\x82\xa7attempt\x01\xa7attempt\x02",
        b"\x94\xa5fence\x01\x00\x81\xa7attemp\xff\x01",
    ],
)
def test_a_frame_that_is_none_is_an_error_and_stays_one(content: bytes) -> None:
    decoder = FrameDecoder(LIMIT)
    decoder.feed(framed(content))
    for _ in range(2):
        with pytest.raises(ProtocolError):
            decoder.next()
        decoder.feed(encode(Fence(attempt=1, rail=0), 1))


def test_deep_nesting_is_refused_before_it_exhausts_the_stack() -> None:
    body = b"\x81\xa5rails" + b"\x91" * 20_000 + b"\x90"
    with pytest.raises(ProtocolError, match="too deeply"):
        decode_all(framed(b"\x94\xa7connect\x01\x00" + body))


@pytest.mark.parametrize(
    "rails",
    [
        [[]] * 1025,
        [{"a": [[]]}],
        [{"a": [["x"]]}],
        [{str(n): ["x"] * 40 for n in range(60)}] * 20,
        [{"a": 1, "b": {"c": {"d": {}}}}],
    ],
)
def test_values_are_counted_before_they_are_made(rails: Any) -> None:
    body = {"attempt": 1, "keepalive_interval": 1, "keepalive_timeout": 5, "rails": rails}
    with pytest.raises(ProtocolError, match=r"too many values|too deeply|rail"):
        decode_all(packed("connect", 1, 0, body))


def test_a_header_that_promises_more_than_there_is_costs_nothing() -> None:
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode_all(framed(b"\x94\xa5fence\x01\x00\x81\xa7attempt" + header))


def test_the_limit_counts_the_frame_and_holds_before_the_frame_is_there() -> None:
    data = encode(Goodbye(reason="x" * 100, fenced=True))
    size = len(data) - 4
    assert len(decode_all(data, size)) == 1
    decoder = FrameDecoder(size - 1)
    decoder.feed(data[:4])
    with pytest.raises(ProtocolError, match=f"{size} bytes exceed the limit of {size - 1}"):
        decoder.next()


def test_the_limit_can_be_raised_between_two_frames_that_came_together() -> None:
    small, large = (
        encode(Fence(attempt=1, rail=0), 1),
        encode(Goodbye(reason="x" * 1000, fenced=False)),
    )
    decoder = FrameDecoder(len(small))
    decoder.feed(small + large)
    assert decoder.next() is not None
    decoder.max_frame = len(large)
    frame = decoder.next()
    assert frame is not None
    assert isinstance(frame.message, Goodbye)


def test_the_largest_number_of_rails_passes() -> None:
    rail = {f"key{n}": n for n in range(14)}
    message = Connect(
        attempt=1, rails=[rail] * 1024, since=0, keepalive_interval=1.0, keepalive_timeout=5.0
    )
    assert decode_all(encode(message, 1))[0].message == message


@pytest.mark.parametrize("size", [2**16, 2**24 - 1000])
def test_a_large_table_in_small_pieces_takes_linear_time(size: int) -> None:
    table = bytes(size)
    message = MetadataUpdate(full=True, base=0, generation=1, table=table, removed=b"")
    data = encode(message, 1)
    decoder = FrameDecoder(2**24)
    started = time.process_time()
    for start in range(0, len(data), 4096):
        decoder.feed(data[start : start + 4096])
        frame = decoder.next()
    # Quadratic copying would move 32 GiB for the larger one, which takes seconds.
    assert time.process_time() - started < 1.0
    assert frame is not None
    assert frame.message == message


@pytest.mark.parametrize(
    ("message", "request_id"),
    [
        (Fence(attempt=1, rail=0), 0),
        (FenceReply(attempt=1, rail=0), 0),
        (Goodbye(reason="", fenced=False), 1),
        (Fence(attempt=1, rail=0), -1),
        (Fence(attempt=1, rail=0), 2**64),
    ],
)
def test_a_request_id_that_does_not_go_with_the_message_is_refused(
    message: Message, request_id: int
) -> None:
    with pytest.raises(ValueError, match="request id"):
        encode(message, request_id)


def test_an_error_may_be_about_the_whole_connection() -> None:
    error = Error(code="protocol", message="no")
    assert decode_all(encode(error))[0][:3] == (0, True, error)


def test_types_survive() -> None:
    rails = [{"int": -1, "text": "t", "bytes": b"b", "list": ["a", "b"]}]
    message = ConnectReply(
        attempt=2**64 - 1,
        rails=rails,
        path="tcp",
        table=b"t",
        generation=0,
        keepalive_port=1,
        keepalive_token=bytes(16),
        notification_max_payload=0,
    )
    decoded = decode_all(encode(message, 1))[0].message
    assert isinstance(decoded, ConnectReply)
    assert decoded.rails == (
        {"int": -1, "text": "t", "bytes": b"b", "list": ["a", "b"]},
    )  # fmt: skip
    hello = Hello(versions=[1, 2], engine_id=bytes(16), session_id="a:1", nonce=bytes(32))
    again = decode_all(encode(hello, 1))[0].message
    assert isinstance(again, Hello)
    assert again.versions == (1, 2)


def test_a_notification_of_the_largest_size_fits_the_default_frame() -> None:
    message = Notify(name="n" * 2**20, payload=bytes(2**20), imm=0, imm_count=0)
    assert decode_all(encode(message, 1), 16 * 2**20)[0].message == message
