"""What the two sides of a hand-over tell each other, as payloads of notifications.

Pure. A message is msgpack: ``[version, kind, field, ...]``, the fields in the order of the class.
Everything that a peer says is checked; what is no message raises ValueError.

    decode  -- Start  --> prefill     where the blocks are that it may write to
    decode  <-- Hello --  prefill     on the session that will carry the data: may I write to them?
    decode  <-- Begin --  prefill     the first write is on its way
    decode  <-- Done  --  prefill     behind the data: all of it has landed
    decode  <-- Failed -- prefill     it has stopped, and whether anything may still be on its way
    decode  -- Abort  --> prefill     stop; the answer is Failed

``id`` is one receiver's own, so that what is late and of an earlier use of a room meets nobody.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from .codec import Codec, boolean, identity
from .layout import CacheGroup, CacheLayout

__all__ = [
    "ID_SIZE",
    "MAX_ROOM",
    "Abort",
    "Begin",
    "Blocks",
    "Done",
    "Failed",
    "Hello",
    "Message",
    "Start",
    "decode",
    "encode",
]

VERSION = 1

ID_SIZE = 16
"""Bytes of a receiver's id: random, so that no two are alike."""

MAX_ROOM = 1024
"""Bytes of a room's name in UTF-8."""

MAX_RANKS = 4096
"""Ranks of one side."""

MAX_REASON = 4096
"""Characters of a reason."""

MAX_POOLS = 65_536
"""Pools of a group."""

MAX_GROUPS = 1024
"""Groups of a cache."""

Blocks: TypeAlias = npt.NDArray[np.int64]
"""Block ids of one group."""

_WIRE_ID = np.dtype("<u4")
_WIRE_ADDRESS = np.dtype("<u8")


@dataclasses.dataclass(frozen=True)
class Start:
    """Decode rank ``layout.rank`` lets a prefill rank write to these blocks."""

    KIND: ClassVar[int] = 1
    id: bytes
    room: str
    to_rank: int
    """The prefill rank that is meant."""
    to_ranks: int
    """How many prefill ranks decode counts on."""
    layout: CacheLayout
    blocks: tuple[Blocks, ...]
    """Of each group."""
    aux: bytes


@dataclasses.dataclass(frozen=True)
class Abort:
    """Decode has given the room up."""

    KIND: ClassVar[int] = 2
    id: bytes
    room: str
    rank: int
    """Decode's."""
    to_rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Hello:
    """Prefill asks whether it may write, on the session that brings this."""

    KIND: ClassVar[int] = 3
    id: bytes
    rank: int
    """Prefill's, as decode calls it; in this and the messages below."""


@dataclasses.dataclass(frozen=True)
class Begin:
    """The first write is on its way."""

    KIND: ClassVar[int] = 4
    id: bytes
    rank: int


@dataclasses.dataclass(frozen=True)
class Done:
    """All that this rank had to write has landed."""

    KIND: ClassVar[int] = 5
    id: bytes
    rank: int
    aux: bytes


@dataclasses.dataclass(frozen=True)
class Failed:
    """This rank has stopped."""

    KIND: ClassVar[int] = 6
    id: bytes
    rank: int
    reason: str
    quiet: bool
    """Nothing of it can change decode's blocks any more."""


Message: TypeAlias = Start | Abort | Hello | Begin | Done | Failed


def encode(message: Message) -> bytes:
    """A notification's payload."""
    return _CODEC.encode(message)


def _plain(value: Any) -> Any:
    if isinstance(value, CacheLayout):
        return [value.rank, value.ranks, [_plain_group(group) for group in value.groups]]
    if isinstance(value, tuple):  # blocks
        return [ids.astype(_WIRE_ID).tobytes() for ids in value]
    return value


def _plain_group(group: CacheGroup) -> list[Any]:
    addresses = np.array(group.layers, _WIRE_ADDRESS)
    return [
        addresses.shape[1],
        addresses.tobytes(),
        group.blocks,
        group.block_bytes,
        group.stride,
        group.heads,
        group.repeats,
        group.format,
    ]


def decode(payload: bytes) -> Message:
    """The message in a payload, or ValueError."""
    message = _CODEC.decode(payload)
    if isinstance(message, Start):
        _check_start(message)
    return message


def _check_start(start: Start) -> None:
    if start.to_rank >= start.to_ranks:
        raise ValueError(f"prefill rank {start.to_rank} of {start.to_ranks}")
    if len(start.blocks) != len(start.layout.groups):
        raise ValueError(f"{len(start.blocks)} lists of blocks, {len(start.layout.groups)} groups")
    for ids, group in zip(start.blocks, start.layout.groups, strict=True):
        if ids.size and int(ids.max()) >= group.blocks:
            raise ValueError(f"block {ids.max()} of {group.blocks}")


def _room(value: Any) -> str:
    if not isinstance(value, str) or len(value.encode()) > MAX_ROOM:
        raise ValueError(f"a room is a text of at most {MAX_ROOM} bytes")
    return value


def _rank(value: Any) -> int:
    return _uint(value, MAX_RANKS)


def _uint(value: Any, limit: int = 2**63) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"{value!r} is no integer below {limit}")
    return value


def _binary(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes, not {type(value).__name__}")
    return value


def _reason(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a reason is a text")
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
    return printable[:MAX_REASON]


def _list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"expected a list of at most {limit}")
    return value


def _blocks(value: Any) -> tuple[Blocks, ...]:
    return tuple(_numbers(ids, _WIRE_ID).astype(np.int64) for ids in _list(value, MAX_GROUPS))


def _numbers(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    data = _binary(value)
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no numbers of {dtype.itemsize} bytes")
    return np.frombuffer(data, dtype)


def _layout(value: Any) -> CacheLayout:
    rank, ranks, groups = _exactly(value, 3)
    return CacheLayout(
        tuple(_group(group) for group in _list(groups, MAX_GROUPS)), _rank(rank), _rank(ranks)
    )


def _group(value: Any) -> CacheGroup:
    pools, addresses, *numbers, words = _exactly(value, 8)
    each = _numbers(addresses, _WIRE_ADDRESS)
    if not 0 < _uint(pools, MAX_POOLS) <= each.size <= MAX_POOLS or each.size % pools:
        raise ValueError(f"{each.size} addresses for layers of {pools!r} pools")
    layers = tuple(tuple(layer) for layer in each.reshape(-1, pools).tolist())
    blocks, block_bytes, stride, heads, repeats = map(_uint, numbers)
    return CacheGroup(layers, blocks, block_bytes, stride, heads, repeats, words)


def _exactly(value: Any, count: int) -> list[Any]:
    items = _list(value, count)
    if len(items) != count:
        raise ValueError(f"expected {count} items, not {len(items)}")
    return items


_CHECKS: dict[str, Any] = {
    "id": identity(ID_SIZE),
    "room": _room,
    "to_rank": _rank,
    "to_ranks": _rank,
    "rank": _rank,
    "layout": _layout,
    "blocks": _blocks,
    "aux": _binary,
    "reason": _reason,
    "quiet": boolean,
}

_CODEC: Codec[Message] = Codec(VERSION, (Start, Abort, Hello, Begin, Done, Failed), _plain, _CHECKS)
