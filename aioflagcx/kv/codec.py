"""Messages as msgpack: ``[version, kind, field, ...]``, the fields in the order of the class.

Pure. Used by the messages of a hand-over and by those of the vLLM connector's side channel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgpack

__all__ = ["Codec", "boolean", "identity"]

MessageT = TypeVar("MessageT")


class Codec(Generic[MessageT]):
    """One version of some kinds of messages: dataclasses that have a number, ``KIND``."""

    def __init__(
        self,
        version: int,
        kinds: Sequence[type[MessageT]],
        plain: Callable[[Any], Any],
        checks: Mapping[str, Callable[[Any], Any]],
    ) -> None:
        """``plain`` makes of a field's value what msgpack knows; ``checks``, by the field's name,
        makes the value of that again, or raises ValueError."""
        self._version = version
        self._kinds: dict[int, Any] = {kind.KIND: kind for kind in kinds}  # type: ignore[attr-defined]
        self._plain = plain
        self._checks = checks

    def encode(self, message: Any) -> bytes:
        """The bytes of a message."""
        fields = [getattr(message, field.name) for field in dataclasses.fields(message)]
        packed: bytes = msgpack.packb([self._version, message.KIND, *map(self._plain, fields)])
        return packed

    def decode(self, data: bytes) -> MessageT:
        """The message in these bytes, each field checked, or ValueError."""
        try:
            items = msgpack.unpackb(data, strict_map_key=True)
        except Exception as error:  # msgpack's own errors have no common base
            raise ValueError(f"no msgpack: {error}") from None
        if not isinstance(items, list) or len(items) < 2:
            raise ValueError("not a list of version, kind and fields")
        version, number, *values = items
        if version != self._version:
            raise ValueError(f"version {version!r}, expected {self._version}")
        kind = self._kinds.get(number) if isinstance(number, int) else None
        if kind is None:
            raise ValueError(f"unknown kind {number!r}")
        fields = dataclasses.fields(kind)
        if len(fields) != len(values):
            raise ValueError(f"{kind.__name__} has {len(fields)} fields, not {len(values)}")
        message: MessageT = kind(
            **{
                field.name: self._checks[field.name](value)
                for field, value in zip(fields, values, strict=True)
            }
        )
        return message


def identity(size: int) -> Callable[[Any], bytes]:
    """The check of an id of so many bytes."""

    def check(value: Any) -> bytes:
        if not isinstance(value, bytes) or len(value) != size:
            raise ValueError(f"an id has {size} bytes")
        return value

    return check


def boolean(value: Any) -> bool:
    """The check of true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, not {value!r}")
    return value
