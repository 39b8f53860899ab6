"""Fields of messages: what each kind of field accepts, and the bounds it keeps.

Each function makes a dataclass field whose metadata holds a check: it takes a value of
whatever type, gives it in the field's own, or raises :class:`ValueError` saying what is
expected. Checks are exact, since what a peer sends is not to be trusted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = [
    "ENGINE_ID_SIZE",
    "MAX_CODE",
    "MAX_MAC_SIZE",
    "MAX_NAME",
    "MAX_REASON",
    "NONCE_SIZE",
    "TOKEN_SIZE",
    "Check",
    "Rail",
    "RailValue",
    "binary",
    "boolean",
    "clip",
    "printable",
    "rails",
    "seconds",
    "session_id",
    "text",
    "uint",
    "versions",
]

ENGINE_ID_SIZE = 16
"""Bytes of an engine id."""

NONCE_SIZE = 32
"""Bytes of a nonce: as long as the HMAC's output, so that it never repeats by chance."""

TOKEN_SIZE = 16
"""Bytes of a keepalive token."""

MAX_MAC_SIZE = 64
"""Bytes of the longest authentication code; version 1 uses 32 or none."""

MAX_VERSIONS = 64
"""Versions one hello may offer."""

MAX_SESSION_ID = 320
"""Bytes of a session id: the longest host name, brackets, a zone, colon and port."""

MAX_RAILS = 1024
"""Rails in one connect: 32 local by 32 remote devices."""

MAX_RAIL_FIELDS = 64
"""Attributes of one rail."""

MAX_RAIL_KEY = 64
"""Bytes of a rail attribute's name."""

MAX_RAIL_BYTES = 4096
"""Bytes of a rail attribute's text or binary value."""

MAX_RAIL_LIST = 64
"""Texts in a rail attribute that is a list."""

MAX_NAME = 1024 * 1024
"""Bytes of a notification's name."""

MAX_REASON = 1024
"""Bytes of a text meant for a human."""

MAX_CODE = 64
"""Bytes of an error code, a path or another short identifier."""

MAX_SECONDS = 86_400.0
"""Longest duration in a message: a day."""

RailValue: TypeAlias = "int | str | bytes | list[str]"
"""What an attribute of a rail may be; its meaning belongs to the provider."""

Rail: TypeAlias = Mapping[str, RailValue]
"""The attributes of one rail, opaque here."""

Check: TypeAlias = Callable[[Any], Any]


def uint(bits: int, minimum: int = 0) -> Any:
    """A field for an unsigned integer of at most ``bits`` bits."""
    maximum = 2**bits - 1

    def check(value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"expected an integer, not {type(value).__name__}")
        if not minimum <= value <= maximum:
            raise ValueError(f"expected {minimum} to {maximum}, not {value}")
        return value

    return dataclasses.field(metadata={"check": check})


def _check_text(value: Any, maximum: int) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, not {type(value).__name__}")
    size = len(value.encode())  # UnicodeEncodeError, a ValueError, for lone surrogates
    if size > maximum:
        raise ValueError(f"expected at most {maximum} bytes of UTF-8, not {size}")
    return value


def text(maximum: int) -> Any:
    """A field for text of at most ``maximum`` bytes in UTF-8."""
    return dataclasses.field(metadata={"check": lambda value: _check_text(value, maximum)})


def session_id() -> Any:
    """A field for a session id: safe to print, so that a peer cannot forge log lines."""

    def check(value: Any) -> str:
        text = _check_text(value, MAX_SESSION_ID)
        if not text or not text.isprintable() or " " in text:
            raise ValueError("expected printable text without spaces")
        return text

    return dataclasses.field(metadata={"check": check})


def binary(
    exact: int | None = None, *, maximum: int | None = None, multiple: int = 1, show: bool = True
) -> Any:
    """A field for bytes; the frame's limit bounds what has no bound of its own."""

    def check(value: Any) -> bytes:
        if type(value) is not bytes:
            raise ValueError(f"expected bytes, not {type(value).__name__}")
        size = len(value)
        if exact is not None and size != exact:
            raise ValueError(f"expected {exact} bytes, not {size}")
        if maximum is not None and size > maximum:
            raise ValueError(f"expected at most {maximum} bytes, not {size}")
        if size % multiple:
            raise ValueError(f"expected a multiple of {multiple} bytes, not {size}")
        return value

    return dataclasses.field(repr=show, metadata={"check": check})


def boolean() -> Any:
    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError(f"expected a boolean, not {type(value).__name__}")
        return value

    return dataclasses.field(metadata={"check": check})


def seconds() -> Any:
    """A field for a positive duration; an integer will do, some languages write 1.0 as 1."""

    def check(value: Any) -> float:
        if type(value) not in (int, float):
            raise ValueError(f"expected seconds, not {type(value).__name__}")
        if not 0 < value <= MAX_SECONDS or not math.isfinite(value):
            raise ValueError(f"expected over 0 to {MAX_SECONDS} seconds, not {value}")
        return float(value)

    return dataclasses.field(metadata={"check": check})


def versions() -> Any:
    def check(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_VERSIONS:
            raise ValueError(f"expected a list of 1 to {MAX_VERSIONS} versions")
        for version in value:
            if type(version) is not int or not 1 <= version <= 65_535:
                raise ValueError("expected versions from 1 to 65535")
        return tuple(value)

    return dataclasses.field(metadata={"check": check})


def _check_rail_value(value: Any) -> RailValue:
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise ValueError("a rail's integer has over 64 bits")
        return value
    if type(value) is str:
        return _check_text(value, MAX_RAIL_BYTES)
    if type(value) is bytes:
        if len(value) > MAX_RAIL_BYTES:
            raise ValueError(f"a rail's value has over {MAX_RAIL_BYTES} bytes")
        return value
    if isinstance(value, list | tuple):
        if len(value) > MAX_RAIL_LIST:
            raise ValueError(f"a rail's list has over {MAX_RAIL_LIST} texts")
        return [_check_text(item, MAX_RAIL_BYTES) for item in value]
    raise ValueError(f"a rail's value is {type(value).__name__}: expected int, text, bytes, list")


def rails() -> Any:
    def check(value: Any) -> tuple[Rail, ...]:
        if not isinstance(value, list | tuple) or len(value) > MAX_RAILS:
            raise ValueError(f"expected a list of at most {MAX_RAILS} maps")
        rails = []
        for rail in value:
            if not isinstance(rail, Mapping) or len(rail) > MAX_RAIL_FIELDS:
                raise ValueError(f"expected maps of at most {MAX_RAIL_FIELDS} attributes")
            rails.append(
                {_check_text(k, MAX_RAIL_KEY): _check_rail_value(v) for k, v in rail.items()}
            )
        return tuple(rails)

    return dataclasses.field(metadata={"check": check})


def clip(text: str) -> str:
    """``text`` as it fits into a ``reason`` or an error's ``message``."""
    return text.encode(errors="replace")[:MAX_REASON].decode(errors="ignore")


def printable(text: str) -> str:
    """A peer's words as they may stand in a log: on one line, without control characters."""
    return text if text.isprintable() else repr(text)[1:-1]
