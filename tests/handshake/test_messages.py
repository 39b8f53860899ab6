from __future__ import annotations

import dataclasses
from typing import Any

import message_strategies as strategies
import pytest
from hypothesis import given

from aioflagcx.handshake import messages
from aioflagcx.handshake.fields import MAX_REASON, clip, printable
from aioflagcx.handshake.messages import (
    Connect,
    ConnectReply,
    Goodbye,
    Hello,
    HelloReply,
    Message,
    MetadataUpdate,
    Notify,
    NotifyReply,
    Request,
)

HELLO: dict[str, Any] = {
    "versions": [1],
    "engine_id": bytes(16),
    "session_id": "a:1",
    "nonce": bytes(32),
}
CONNECT: dict[str, Any] = {
    "attempt": 1,
    "rails": [{"qpn": 7, "gid": b"g", "name": "soft0", "paths": ["tcp"]}],
    "since": 0,
    "keepalive_interval": 1.0,
    "keepalive_timeout": 5.0,
}
CONNECT_REPLY: dict[str, Any] = {
    "attempt": 1,
    "rails": [],
    "path": "tcp",
    "table": b"",
    "generation": 1,
    "keepalive_port": 9,
    "keepalive_token": bytes(16),
    "notification_max_payload": 10,
}
UPDATE: dict[str, Any] = {
    "full": False,
    "base": 1,
    "generation": 2,
    "table": b"",
    "removed": bytes(8),
}
NOTIFY: dict[str, Any] = {"name": "n", "payload": b"", "imm": 0, "imm_count": 0}


@given(strategies.addressed)
def test_a_message_is_its_body(addressed: tuple[Message, int, bool]) -> None:
    message = addressed[0]
    assert type(message).from_body(message.body()) == message


@given(strategies.addressed)
def test_unknown_fields_are_ignored(addressed: tuple[Message, int, bool]) -> None:
    message = addressed[0]
    body = {**message.body(), "added_in_version_9": [1, {"x": b""}]}
    assert type(message).from_body(body) == message


@given(strategies.addressed)
def test_a_missing_field_is_named(addressed: tuple[Message, int, bool]) -> None:
    message = addressed[0]
    for name in message.body():
        body = message.body()
        del body[name]
        with pytest.raises(ValueError, match=rf"{message.KIND}\.{name}: missing"):
            type(message).from_body(body)


@pytest.mark.parametrize(
    ("kind", "good", "field", "bad"),
    [
        (Hello, HELLO, "versions", []),
        (Hello, HELLO, "versions", [0]),
        (Hello, HELLO, "versions", [True]),
        (Hello, HELLO, "versions", [65_536]),
        (Hello, HELLO, "versions", list(range(1, 66))),
        (Hello, HELLO, "versions", {1: 1}),
        (Hello, HELLO, "engine_id", bytes(15)),
        (Hello, HELLO, "engine_id", "x" * 16),
        (Hello, HELLO, "engine_id", None),
        (Hello, HELLO, "session_id", ""),
        (Hello, HELLO, "session_id", "a b:1"),
        (Hello, HELLO, "session_id", "a\n:1"),
        (Hello, HELLO, "session_id", "a" * 321),
        (Hello, HELLO, "nonce", bytes(33)),
        (Connect, CONNECT, "attempt", -1),
        (Connect, CONNECT, "attempt", 2**64),
        (Connect, CONNECT, "attempt", 1.0),
        (Connect, CONNECT, "attempt", True),
        (Connect, CONNECT, "rails", {}),
        (Connect, CONNECT, "rails", [1]),
        (Connect, CONNECT, "rails", [{1: 1}]),
        (Connect, CONNECT, "rails", [{"a": None}]),
        (Connect, CONNECT, "rails", [{"a": 1.5}]),
        (Connect, CONNECT, "rails", [{"a": True}]),
        (Connect, CONNECT, "rails", [{"a": [1]}]),
        (Connect, CONNECT, "rails", [{"a": {"b": 1}}]),
        (Connect, CONNECT, "rails", [{"a": 2**64}]),
        (Connect, CONNECT, "rails", [{"a": bytes(4097)}]),
        (Connect, CONNECT, "rails", [{"a": "x" * 4097}]),
        (Connect, CONNECT, "rails", [{"a": ["x"] * 65}]),
        (Connect, CONNECT, "rails", [{"k" * 65: 1}]),
        (Connect, CONNECT, "rails", [{str(n): 1 for n in range(65)}]),
        (Connect, CONNECT, "rails", [{}] * 1025),
        (Connect, CONNECT, "keepalive_interval", 0),
        (Connect, CONNECT, "keepalive_interval", float("nan")),
        (Connect, CONNECT, "keepalive_timeout", float("inf")),
        (Connect, CONNECT, "keepalive_timeout", 86_401),
        (Connect, CONNECT, "keepalive_timeout", True),
        (ConnectReply, CONNECT_REPLY, "path", "x" * 65),
        (ConnectReply, CONNECT_REPLY, "path", b"tcp"),
        (ConnectReply, CONNECT_REPLY, "table", "x"),
        (ConnectReply, CONNECT_REPLY, "keepalive_port", 65_536),
        (ConnectReply, CONNECT_REPLY, "keepalive_token", bytes(8)),
        (MetadataUpdate, UPDATE, "full", 1),
        (MetadataUpdate, UPDATE, "removed", bytes(7)),
        (Notify, NOTIFY, "name", "x" * (2**20 + 1)),
        (Notify, NOTIFY, "name", "\ud800"),
        (Notify, NOTIFY, "payload", bytearray()),
        (Notify, NOTIFY, "imm", 2**32),
        (NotifyReply, {"accepted": True, "reason": ""}, "accepted", "yes"),
        (Goodbye, {"reason": "", "fenced": False}, "reason", "ä" * 513),
    ],
)
def test_a_field_out_of_type_or_bounds_is_named(
    kind: type[Message], good: dict[str, Any], field: str, bad: object
) -> None:
    kind.from_body(good)
    with pytest.raises(ValueError, match=rf"^{kind.KIND}\.{field}: "):
        kind.from_body({**good, field: bad})


def test_whole_numbers_are_accepted_as_seconds() -> None:
    message = Connect(**{**CONNECT, "keepalive_timeout": 5})
    assert type(message.keepalive_timeout) is float


def test_rails_are_the_messages_own() -> None:
    rails = [{"qpn": 7, "paths": ["tcp"]}]
    message = Connect(**{**CONNECT, "rails": rails})
    rails[0]["qpn"] = 8
    assert message.rails == ({"qpn": 7, "paths": ["tcp"]},)


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Goodbye(reason="x", fenced=False).reason = "y"  # type: ignore[misc]


def test_proofs_and_content_are_not_shown() -> None:
    reply = HelloReply(
        version=1, engine_id=bytes(16), session_id="a:1", nonce=bytes(32), mac=b"proof"
    )
    assert "proof" not in repr(reply)
    assert "content" not in repr(Notify(**{**NOTIFY, "payload": b"content"}))
    assert "\\x00" not in repr(ConnectReply(**CONNECT_REPLY))


def test_every_request_has_a_reply_of_its_kind() -> None:
    for kind, request in messages.REQUESTS.items():
        assert issubclass(request, Request)
        assert kind == request.KIND
        assert kind == request.REPLY.KIND
        assert messages.REPLIES[kind] is request.REPLY


def test_clip_fits_any_text_into_a_reason() -> None:
    assert clip("short") == "short"
    for text in ("x" * 5000, "ä" * 5000, "x" + "ä" * 5000, "\ud800" * 5000):
        Goodbye(reason=clip(text), fenced=False)
        assert MAX_REASON - 1 <= len(clip(text).encode()) <= MAX_REASON


def test_printable_keeps_a_text_on_one_line() -> None:
    assert printable("a: 'b'") == "a: 'b'"
    assert printable("a\nb\x1b[0m") == r"a\nb\x1b[0m"
