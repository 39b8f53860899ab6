"""docs/handshake.md is what other implementations are written from, so it is checked."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import pytest

from aioflagcx.config import Config
from aioflagcx.handshake import codec, fields, messages
from aioflagcx.handshake.authentication import (
    INITIATOR_LABEL,
    RESPONDER_LABEL,
    Identity,
    Initiator,
    Responder,
)
from aioflagcx.handshake.codec import LENGTH, encode
from aioflagcx.handshake.messages import (
    Error,
    Goodbye,
    HelloReply,
    Message,
    MetadataUpdate,
)

TEXT = (Path(__file__).parent.parent.parent / "docs" / "handshake.md").read_text()

SECRET = "correct horse battery staple"
INITIATOR = Identity(bytes(range(0x10, 0x20)), "10.0.0.1:41235")
RESPONDER = Identity(bytes(range(0x20, 0x30)), "10.0.0.2:41236")


def example(name: str) -> bytes:
    """The bytes of the fenced block after the line that ends in "`name`:"."""
    match = re.search(rf"^.*`{name}`:\n\n```hex\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None, f"docs/handshake.md has no example {name}"
    return bytes.fromhex(re.sub(r"#.*", "", match[1]))


def test_the_example_of_an_authentication_is_what_we_send() -> None:
    initiator = Initiator(INITIATOR, SECRET, nonce=b"\x01" * 32)
    responder = Responder(RESPONDER, SECRET, nonce=b"\x02" * 32)
    hello = initiator.start()
    assert example("hello").hex(" ") == encode(hello, 1).hex(" ")
    reply = responder.receive(hello)
    assert example("hello reply").hex(" ") == encode(reply, 1).hex(" ")
    auth = initiator.receive(reply)
    assert auth is not None
    assert example("auth").hex(" ") == encode(auth, 2).hex(" ")
    accepted = responder.receive(auth)
    assert example("auth reply").hex(" ") == encode(accepted, 2).hex(" ")
    assert initiator.receive(accepted) is None
    assert initiator.done
    assert responder.done
    assert isinstance(reply, HelloReply)
    assert example("responder proof") == reply.mac
    assert example("initiator proof") == auth.mac


def test_the_example_of_a_push_and_an_error_are_what_we_send() -> None:
    assert example("goodbye").hex(" ") == encode(Goodbye(reason="engine closed", fenced=True)).hex(
        " "
    )
    error = Error(code="rejected", message="no rail in common")
    assert example("error").hex(" ") == encode(error, 3).hex(" ")


def test_the_example_of_a_table_is_the_documented_format() -> None:
    names = struct.pack("<H", 2) + b"kv"
    header = struct.pack("<IHHIIIIQ", 0x524D4641, 1, 1, 2, 3, len(names), 0, 7)
    first = struct.pack("<QQQQIIII", 1, 0x7F0000000000, 0x3000, 0x2000, 3, 0, 0, 0)
    second = struct.pack("<QQQQIIII", 2, 0x7F0000010000, 0x1000, 0x1000, 1, 0xFFFFFFFF, 2, 0)
    keys = struct.pack("<III", 0x11, 0x12, 0x13)
    assert (len(header), len(first)) == (32, 48)
    table = header + first + second + keys + names
    assert example("table").hex(" ") == table.hex(" ")
    message = MetadataUpdate(
        full=False, base=6, generation=7, table=table, removed=struct.pack("<Q", 9)
    )
    assert example("metadata push").hex(" ") == encode(message).hex(" ")


@pytest.mark.parametrize(
    "message",
    [*messages.REQUESTS.values(), *messages.REPLIES.values(), Goodbye],
    ids=lambda message: message.__name__,
)
def test_every_field_of_every_message_is_described(message: type[Message]) -> None:
    section = re.search(rf"^### {message.KIND}\n(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None, message.KIND
    for field in dataclasses.fields(message):
        assert f"| `{field.name}` |" in section[1], field.name


def test_labels_and_limits_are_the_ones_in_the_code() -> None:
    for label in (INITIATOR_LABEL, RESPONDER_LABEL):
        assert f"`{label[:-1].decode()}`" in TEXT
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([0-9,]+) \|$", TEXT, re.MULTILINE))
    assert {name: int(value.replace(",", "")) for name, value in rows.items()} == {
        "frame before authentication, bytes": Config.handshake_max_frame_unauthenticated,
        "frame after authentication, bytes": Config.handshake_max_frame,
        "`kind`, bytes": codec.MAX_KIND,
        "fields in a body": codec.MAX_FIELDS,
        "items in one array, entries in one map": codec.MAX_CONTAINER,
        "containers inside one another in a field": codec.MAX_DEPTH,
        "values in a frame, unknown fields not counted": codec.MAX_ITEMS,
        "`versions`, entries": fields.MAX_VERSIONS,
        "`session_id`, bytes": fields.MAX_SESSION_ID,
        "`mac`, bytes": fields.MAX_MAC_SIZE,
        "`rails`, entries": fields.MAX_RAILS,
        "rail, attributes": fields.MAX_RAIL_FIELDS,
        "rail attribute's name, bytes": fields.MAX_RAIL_KEY,
        "rail attribute's text or bin, bytes": fields.MAX_RAIL_BYTES,
        "rail attribute's list, texts": fields.MAX_RAIL_LIST,
        "`name`, bytes": fields.MAX_NAME,
        "`code` and `path`, bytes": fields.MAX_CODE,
        "`reason` and `message`, bytes": fields.MAX_REASON,
        "durations, seconds": int(fields.MAX_SECONDS),
    }
    assert LENGTH.size == 4
