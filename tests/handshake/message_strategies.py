"""Hypothesis strategies for the messages of the handshake."""

from __future__ import annotations

from hypothesis import strategies as st

from aioflagcx.handshake.messages import (
    Auth,
    AuthReply,
    Connect,
    ConnectReply,
    Devices,
    DevicesReply,
    Error,
    Fence,
    FenceReply,
    Goodbye,
    Hello,
    HelloReply,
    Message,
    Metadata,
    MetadataUpdate,
    Notify,
    NotifyReply,
)

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0.001, 86_400.0)
engine_ids = st.binary(min_size=16, max_size=16)
nonces = st.binary(min_size=32, max_size=32)
macs = st.binary(max_size=64)
blobs = st.binary(max_size=200)
short_text = st.text(max_size=16)
session_ids = st.from_regex(r"[a-z0-9.]{1,30}:[0-9]{1,5}", fullmatch=True)
rail_values = st.one_of(
    st.integers(-(2**63), 2**64 - 1), short_text, blobs, st.lists(short_text, max_size=4)
)
rails = st.lists(st.dictionaries(short_text, rail_values, max_size=5), max_size=4)

requests: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        versions=st.lists(st.integers(1, 65_535), min_size=1, max_size=64),
        engine_id=engine_ids,
        session_id=session_ids,
        nonce=nonces,
    ),
    st.builds(Auth, mac=macs),
    st.just(Devices()),
    st.builds(
        Connect,
        attempt=u64,
        rails=rails,
        since=u64,
        keepalive_interval=seconds,
        keepalive_timeout=seconds,
    ),
    st.builds(Metadata, since=u64),
    st.builds(Notify, name=short_text, payload=blobs, imm=u32, imm_count=u32),
    st.builds(Fence, attempt=u64, rail=u32),
)
updates = st.builds(
    MetadataUpdate,
    full=st.booleans(),
    base=u64,
    generation=u64,
    table=blobs,
    removed=st.lists(st.binary(min_size=8, max_size=8), max_size=4).map(b"".join),
)
errors = st.builds(Error, code=short_text, message=short_text)
replies: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        HelloReply,
        version=st.integers(1, 65_535),
        engine_id=engine_ids,
        session_id=session_ids,
        nonce=nonces,
        mac=macs,
    ),
    st.just(AuthReply()),
    st.builds(DevicesReply, devices=rails),
    st.builds(
        ConnectReply,
        attempt=u64,
        rails=rails,
        path=short_text,
        table=blobs,
        generation=u64,
        keepalive_port=u16,
        keepalive_token=engine_ids,
        notification_max_payload=u32,
    ),
    updates,
    st.builds(NotifyReply, accepted=st.booleans(), reason=short_text),
    st.builds(FenceReply, attempt=u64, rail=u32),
    errors,
)
pushes: st.SearchStrategy[Message] = st.one_of(
    updates, st.builds(Goodbye, reason=short_text, fenced=st.booleans())
)

positive_ids = st.integers(1, 2**64 - 1)
addressed = st.one_of(
    st.tuples(requests, positive_ids, st.just(False)),
    st.tuples(replies, positive_ids, st.just(True)),
    st.tuples(errors, st.just(0), st.just(True)),
    st.tuples(pushes, st.just(0), st.just(False)),
)
"""A message, a request id that goes with it, and whether that makes it a reply."""
