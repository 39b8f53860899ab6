"""Messages of the side channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from aioflagcx.integrations.vllm import channel
from aioflagcx.integrations.vllm.channel import Clients, Reply, Server
from aioflagcx.integrations.vllm.messages import (
    Accepted,
    Ask,
    Check,
    Done,
    Failed,
    Fetch,
    Grant,
    Message,
    Release,
    Stop,
    decode,
    encode,
)
from aioflagcx.kv import CacheGroup, CacheLayout
from aioflagcx.kv.messages import Start

ID = bytes(range(16))
ENGINE = "0123456789abcdef" * 2
LAYOUT = CacheLayout([CacheGroup([4096, 8192], 8, 64, heads=4, repeats=2)], 1, 2)


def start() -> Start:
    return Start(ID, "t", 0, 2, LAYOUT, (np.array([1, 7], np.int64),), b"")


MESSAGES = [
    Accepted(ID, "10.0.0.1:5", ENGINE),
    Ask(ID, ENGINE, 1),
    Grant(ID, 2),
    Stop(ID, "why"),
    Done(ID),
    Failed(ID, "why", False),
    Release("t", "r", 1, 2),
    Check(ID),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_back_as_they_were(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_fetch_comes_back_as_it_was() -> None:
    fetch = Fetch(start(), "10.0.0.1:5", ENGINE, "r", (("a", "b"),), 33)
    found = decode(encode(fetch))
    assert isinstance(found, Fetch)
    assert found.start.blocks[0].tolist() == [1, 7]
    assert (found.start.layout, found.start.room) == (LAYOUT, "t")
    assert (found.session_id, found.engine_id, found.request_id) == ("10.0.0.1:5", ENGINE, "r")
    assert (found.layers, found.tokens) == ((("a", "b"),), 33)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([1, 4, ID, 0], "version 1"),
        ([2, 99, ID], "unknown kind 99"),
        ([2, 4], "Grant has 2 fields, not 0"),
        ([2, 4, b"short", 0], "an id has 16 bytes"),
        ([2, 4, ID, -1], "is not a number"),
        ([2, 7, ID, "why", 1], "expected true or false"),
        ([2, 5, ID, 5], "expected a text"),
        ([2, 3, ID, "10.0.0.1:5", 0], "is no engine's id"),
        ([2, 3, ID, 5, 0], "expected a text"),
        ([2, 8, "t", "r", 2, 2], "decode rank 2 of 2"),
        ([2, 8, "t", "r", -1, 2], "is no rank"),
        ([2, 1, b"", "s", ENGINE, "r", [], 1], "no msgpack"),
        ([2, 1, b"\x01", "s", ENGINE, "r", [], 1], "not a list of version"),
        ([2, 1, None, "s", ENGINE, "r", [], 1], "a start is bytes"),
        ({}, "not a list"),
    ],
)
def test_what_is_no_message_is_refused(items: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(msgpack.packb(items))


def test_names_of_layers_are_as_many_as_layers() -> None:
    with pytest.raises(ValueError, match="as many as the layers"):
        decode(encode(Fetch(start(), "10.0.0.1:5", ENGINE, "r", (("a",),), 1)))


@given(st.binary(max_size=200))
def test_garbage_is_a_value_error_or_a_message(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert decode(encode(decode(data))) == decode(data)


@given(
    st.recursive(st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(), st.lists)
)
def test_garbage_in_msgpack_is_a_value_error(items: Any) -> None:
    for kind in range(1, 10):
        fields = items if isinstance(items, list) else [items]
        with contextlib.suppress(ValueError):
            decode(msgpack.packb([2, kind, *fields]))


async def test_a_peer_that_says_garbage_costs_nobody_else_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: asyncio.Queue[Message] = asyncio.Queue()

    def hear(message: Message, reply: Reply) -> None:
        if message == Done(ID):
            raise KeyError("a bug")
        heard.put_nowait(message)
        reply(Grant(ID, 0))

    answers: asyncio.Queue[Message] = asyncio.Queue()
    server = Server(hear)
    port = server.open("127.0.0.1", 0)
    clients = Clients(lambda message, reply: answers.put_nowait(message))
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as socket, caplog.at_level(logging.WARNING):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send(b"garbage")
        await socket.send_multipart([b"a", b"b"])
        await socket.send(encode(Done(ID)))
        await socket.send(encode(Grant(ID, 0)))
        assert decode(await socket.recv()) == Grant(ID, 0)
        clients.send(f"127.0.0.1:{port}", Stop(ID, "why"))
        assert await answers.get() == Grant(ID, 0)
    assert [heard.get_nowait(), heard.get_nowait()] == [Grant(ID, 0), Stop(ID, "why")]
    assert sum("no message" in record.getMessage() for record in caplog.records) == 2
    assert sum("a Done of" in record.getMessage() for record in caplog.records) == 1
    await clients.close()
    await server.close()
    context.term()


async def test_sockets_of_prefills_that_are_not_asked_any_more_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode meets more of them in its life than ZeroMQ has sockets."""
    monkeypatch.setattr(channel, "_MAX_IDLE", 2)
    monkeypatch.setattr(channel, "_LINGER", 60_000)
    heard: asyncio.Queue[str] = asyncio.Queue()
    servers = [
        Server(lambda message, _: heard.put_nowait(getattr(message, "reason", "")))
        for _ in range(6)
    ]
    addresses = [f"127.0.0.1:{server.open('127.0.0.1', 0)}" for server in servers]
    clients = Clients(lambda message, reply: None)
    clients.use(addresses[0])
    for address in addresses:
        clients.send(address, Stop(ID, address))
    # What was said on a socket that was closed right after it has been sent nevertheless.
    assert {await heard.get() for _ in addresses} == set(addresses)
    assert set(clients._sockets) == {addresses[0], addresses[-1]}
    clients.leave(addresses[0])
    clients.send(addresses[3], Stop(ID, "again"))
    assert await heard.get() == "again"
    assert set(clients._sockets) == {addresses[-1], addresses[3]}
    await clients.close()
    for server in servers:
        await server.close()
