"""Messages to frames and back, without any I/O.

A frame is a 4-byte big-endian length and that many bytes of msgpack:
``[kind: str, request_id: uint, flags: uint, body: map]``.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack

from ..errors import ProtocolError
from .messages import PUSHES, REPLIES, REQUESTS, Error, Message

__all__ = ["FLAG_REPLY", "LENGTH", "Frame", "FrameDecoder", "UnknownKind", "encode"]

LENGTH = struct.Struct(">I")
"""The length before each frame; it does not count itself."""

FLAG_REPLY = 1
"""The flag of a reply; all other flags are zero in version 1."""

MAX_KIND = 64
"""Bytes of the longest kind."""

MAX_FIELDS = 64
"""Fields in a body, unknown ones included."""

MAX_CONTAINER = 1024
"""Items in one array or map: what the largest field, ``rails``, needs."""

MAX_DEPTH = 3
"""Containers inside one another in a field: rails, rail, list of texts."""

MAX_ITEMS = 32_768
"""Values in one frame. Without it 16 MiB of empty arrays would become a gigabyte of lists."""


@dataclasses.dataclass(frozen=True)
class UnknownKind:
    """Stands for a message of a kind, such as a later version's, that is not known here."""

    kind: str


class Frame(NamedTuple):
    """One decoded frame."""

    request_id: int
    is_reply: bool
    message: Message | UnknownKind
    size: int
    """Bytes of the frame without its length."""


def encode(message: Message, request_id: int = 0) -> bytes:
    """The frame of ``message``, length included.

    ``request_id`` is a positive number for requests and their replies, 0 for pushes and for an
    :class:`~.messages.Error` about the whole connection. Raises :class:`ValueError` when they
    do not match.
    """
    kind = type(message)
    if not 0 <= request_id < 2**64:
        raise ValueError(f"request id {request_id} is out of range")
    if PUSHES.get(message.KIND) is kind and request_id == 0:
        flags = 0
    elif REPLIES.get(message.KIND) is kind and (request_id > 0 or kind is Error):
        flags = FLAG_REPLY
    elif REQUESTS.get(message.KIND) is kind and request_id > 0:
        flags = 0
    else:
        raise ValueError(f"{kind.__name__} cannot have request id {request_id}")
    packed = msgpack.packb([message.KIND, request_id, flags, message.body()])
    if len(packed) >= 2**32:
        raise ValueError(f"{kind.__name__} is too large for a frame")
    return b"".join((LENGTH.pack(len(packed)), packed))


class FrameDecoder:
    """Takes bytes as they come and gives whole frames.

    ``max_frame`` bounds a frame's bytes without its length; it can be changed at any time and
    holds for frames whose length has not been looked at yet. Buffers at most one frame and
    what was fed last. After a :class:`~aioflagcx.errors.ProtocolError` it only raises that.
    """

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()
        self._error: str | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes that arrived; :meth:`next` gives the frames they complete."""
        self._buffer += data

    def next(self) -> Frame | None:
        """The next whole frame, or None until more bytes are fed.

        Raises :class:`~aioflagcx.errors.ProtocolError` for bytes that are no frame of this
        protocol or exceed the limit.
        """
        if self._error is not None:
            raise ProtocolError(self._error)
        try:
            return self._next()
        except (ValueError, msgpack.UnpackException) as error:
            words = str(error) or type(error).__name__
            self._error = f"the peer sent a broken frame: {words}"
            self._buffer.clear()
            raise ProtocolError(self._error, cause=error) from error

    def __iter__(self) -> Iterator[Frame]:
        """All whole frames there are."""
        while (frame := self.next()) is not None:
            yield frame

    def end(self) -> None:
        """No more bytes will come; ProtocolError when that cuts a frame in two."""
        if self._error is None and self._buffer:
            self._error = "the peer closed the connection in the middle of a frame"
            raise ProtocolError(self._error)

    def _next(self) -> Frame | None:
        buffer = self._buffer
        if len(buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(buffer)
        if length > self.max_frame:
            raise ValueError(f"{length} bytes exceed the limit of {self.max_frame}")
        end = LENGTH.size + length
        if len(buffer) < end:
            return None
        with memoryview(buffer) as whole, whole[LENGTH.size : end] as content:
            frame = _decode(content)
        # A bytearray drops its front without moving the rest.
        del buffer[:end]
        return frame


def _decode(content: memoryview) -> Frame:
    """The frame in ``content``; ValueError or UnpackException when it is none."""
    reader = _Reader(content)
    if reader.array_length() != 4:
        raise ValueError("not an array of kind, request id, flags and body")
    kind, request_id, flags = reader.scalar(), reader.scalar(), reader.scalar()
    if type(kind) is not str or len(kind) > MAX_KIND:
        raise ValueError("the kind is not a short text")
    if type(request_id) is not int or request_id < 0:
        raise ValueError("the request id is not an unsigned integer")
    if type(flags) is not int or flags not in (0, FLAG_REPLY):
        raise ValueError("the flags are not 0 or 1")
    is_reply = flags == FLAG_REPLY
    expected = _message_type(kind, request_id, is_reply)
    body = reader.body(frozenset(expected.checks()) if expected else frozenset())
    reader.finish()
    message = expected.from_body(body) if expected else UnknownKind(kind)
    return Frame(request_id, is_reply, message, len(content))


def _message_type(kind: str, request_id: int, is_reply: bool) -> type[Message] | None:
    """The type of such a message, or None when the kind is not known at all."""
    if is_reply:
        found = REPLIES.get(kind)
        if request_id == 0 and found is not Error:
            found = None
    else:
        found = (REQUESTS if request_id else PUSHES).get(kind)
    if found is None and (kind in REQUESTS or kind in REPLIES or kind in PUSHES):
        raise ValueError(f"{kind} with request id {request_id} and reply flag {is_reply:d}")
    return found


class _Reader:
    """Reads msgpack with a bound on the number, size and depth of the objects it makes.

    The unpacker reads scalars; containers are entered by their headers, since it would
    build them whole before anyone can count what is in them.
    """

    def __init__(self, content: memoryview) -> None:
        self._content = content
        # At most the content's own length is allowed for each text and binary by this.
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=max(len(content), 1))
        self._unpacker.feed(content)
        self._items = 0

    def array_length(self) -> int:
        """Enter an array; its items follow."""
        return self._counted(self._unpacker.read_array_header(), 1)

    def map_length(self) -> int:
        """Enter a map; its keys and values follow in turn."""
        return self._counted(self._unpacker.read_map_header(), 2)

    def scalar(self) -> Any:
        """A value that holds no others."""
        if _is_array(first := self._first_byte()) or _is_map(first):
            raise ValueError("a container where a plain value belongs")
        # An extension type comes back as an object that no field accepts.
        return self._unpacker.unpack()

    def body(self, wanted: frozenset[str]) -> dict[str, Any]:
        """A map of fields, of which the wanted ones are kept and the others are skipped."""
        count = self.map_length()
        if count > MAX_FIELDS:
            raise ValueError(f"a body of over {MAX_FIELDS} fields")
        fields: dict[str, Any] = {}
        for _ in range(count):
            name = self.scalar()
            if type(name) is not str:
                raise ValueError("a field whose name is not text")
            if name not in wanted:
                self._unpacker.skip()
                continue
            if name in fields:
                raise ValueError(f"field {name} is there twice")
            fields[name] = self._value(MAX_DEPTH)
        return fields

    def finish(self) -> None:
        """Nothing may follow."""
        if self._unpacker.tell() != len(self._content):
            raise ValueError("bytes after the end of the message")

    def _value(self, depth: int) -> Any:
        first = self._first_byte()
        if not _is_array(first) and not _is_map(first):
            return self.scalar()
        if depth == 0:
            raise ValueError("containers nested too deeply")
        if _is_array(first):
            return [self._value(depth - 1) for _ in range(self.array_length())]
        entries: dict[str, Any] = {}
        for _ in range(self.map_length()):
            key = self.scalar()
            if type(key) is not str or key in entries:
                raise ValueError("a key that is not text or is there twice")
            entries[key] = self._value(depth - 1)
        return entries

    def _first_byte(self) -> int:
        position = self._unpacker.tell()
        if position >= len(self._content):
            raise ValueError("the message ends too early")
        return self._content[position]

    def _counted(self, length: int, values_each: int) -> int:
        self._items += length * values_each
        if length > MAX_CONTAINER or self._items > MAX_ITEMS:
            raise ValueError("too many values")
        return length


def _is_array(first: int) -> bool:
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _is_map(first: int) -> bool:
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
