"""What a decode worker and a prefill worker tell each other over the side channel.

Pure. A message is msgpack: ``[version, kind, field, ...]``, the fields in the order of the class.
Everything that a peer says is checked; what is no message raises ValueError.

    decode  -- Fetch    --> prefill   write this request's blocks to these of mine
    decode  <-- Accepted -- prefill   this is the engine that will write
    decode  <-- Ask     --  prefill   I have a session with your engine: may I write on it?
    decode  -- Grant    --> prefill   you may
    decode  -- Stop     --> prefill   do not write; the answer is Failed, unless it was over before
    decode  <-- Done    --  prefill   everything has landed
    decode  <-- Failed  --  prefill   it has stopped, and whether anything may still be on its way
    decode  -- Release  --> prefill   I want nothing of this request
    decode  -- Check    --> prefill   how is it going? Accepted, Ask, Done or Failed again

``id`` belongs to one decode worker's load from one prefill worker. Prefill writes only on sessions
on which it has asked. So decode knows whom to fence off when it has given a load up: nobody whom
it has not granted anything, and nobody can come later.

ZeroMQ connects again by itself, but what was on its way when a connection ended is lost, and
prefill cannot speak to decode before decode has spoken again. So decode checks now and then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from ...kv import messages as kv_messages
from ...kv.codec import Codec, boolean, identity
from ...serving import is_engine_id

__all__ = [
    "Accepted",
    "Ask",
    "Check",
    "Done",
    "Failed",
    "Fetch",
    "Grant",
    "Message",
    "Release",
    "Stop",
    "decode",
    "encode",
]

VERSION = 2

MAX_TEXT = 4096
"""Characters of any text."""

MAX_LAYERS = 65_536
"""Names of layers in a group."""


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Decode's agent metadata: its engine, its pools, and the blocks of one request."""

    KIND: ClassVar[int] = 1
    start: kv_messages.Start
    """Its ``room`` is the transfer's id, its ``aux`` is empty."""
    session_id: str
    engine_id: str
    request_id: str
    """Decode's."""
    layers: tuple[tuple[str, ...], ...]
    """Names of each group's layers, in the order of the layout."""
    tokens: int
    """Of the prompt."""


@dataclasses.dataclass(frozen=True)
class Accepted:
    """Prefill's worker will do it when the request has been computed."""

    KIND: ClassVar[int] = 2
    id: bytes
    session_id: str
    engine_id: str


@dataclasses.dataclass(frozen=True)
class Ask:
    """Prefill has a session with decode's engine and would write on it."""

    KIND: ClassVar[int] = 3
    id: bytes
    engine_id: str
    number: int
    """Of the question: it may come twice, and its answer too."""


@dataclasses.dataclass(frozen=True)
class Grant:
    """It may: the answer to the question of that number."""

    KIND: ClassVar[int] = 4
    id: bytes
    number: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """Decode does not want it, or not any more."""

    KIND: ClassVar[int] = 5
    id: bytes
    reason: str


@dataclasses.dataclass(frozen=True)
class Done:
    """All that this worker had to write has landed."""

    KIND: ClassVar[int] = 6
    id: bytes


@dataclasses.dataclass(frozen=True)
class Failed:
    """This worker has stopped."""

    KIND: ClassVar[int] = 7
    id: bytes
    reason: str
    quiet: bool
    """Nothing of it can change decode's blocks any more."""


@dataclasses.dataclass(frozen=True)
class Release:
    """Decode's ``rank`` of ``ranks`` wants nothing of this transfer."""

    KIND: ClassVar[int] = 8
    transfer: str
    request_id: str
    rank: int
    ranks: int


@dataclasses.dataclass(frozen=True)
class Check:
    """Decode waits; what has it missed?"""

    KIND: ClassVar[int] = 9
    id: bytes


Message: TypeAlias = Fetch | Accepted | Ask | Grant | Stop | Done | Failed | Release | Check


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return _CODEC.encode(message)


def _plain(value: Any) -> Any:
    return kv_messages.encode(value) if isinstance(value, kv_messages.Start) else value


def decode(frame: bytes) -> Message:
    """The message in a frame, or ValueError."""
    message = _CODEC.decode(frame)
    if isinstance(message, Release) and message.rank >= message.ranks:
        raise ValueError(f"decode rank {message.rank} of {message.ranks}")
    if isinstance(message, Fetch):
        counts = [len(group.layers) for group in message.start.layout.groups]
        if list(map(len, message.layers)) != counts:
            raise ValueError("the names of the layers are not as many as the layers")
    return message


def _start(value: Any) -> kv_messages.Start:
    if not isinstance(value, bytes):
        raise ValueError("a start is bytes")
    message = kv_messages.decode(value)
    if not isinstance(message, kv_messages.Start):
        raise ValueError(f"expected a Start, not a {type(message).__name__}")
    return message


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"expected a text of at most {MAX_TEXT} characters")
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)


def _reason(value: Any) -> str:
    return _text(value[:MAX_TEXT] if isinstance(value, str) else value)


def _engine_id(value: Any) -> str:
    if not is_engine_id(value):
        raise ValueError(f"{_text(value)!r:.80} is no engine's id")
    return str(value)


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number from 0 up")
    return value


def _rank(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= kv_messages.MAX_RANKS:
        raise ValueError(f"{value!r} is no rank, and no number of ranks")
    return value


def _layers(value: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or len(value) > kv_messages.MAX_GROUPS:
        raise ValueError("expected a list of groups")
    for group in value:
        if not isinstance(group, list) or len(group) > MAX_LAYERS:
            raise ValueError("expected a list of names of layers")
    return tuple(tuple(map(_text, group)) for group in value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "start": _start,
    "session_id": _text,
    "engine_id": _engine_id,
    "request_id": _text,
    "transfer": _text,
    "layers": _layers,
    "id": identity(kv_messages.ID_SIZE),
    "reason": _reason,
    "quiet": boolean,
    "rank": _rank,
    "ranks": _rank,
    "tokens": _number,
    "number": _number,
}

_CODEC: Codec[Message] = Codec(
    VERSION, (Fetch, Accepted, Ask, Grant, Stop, Done, Failed, Release, Check), _plain, _CHECKS
)
