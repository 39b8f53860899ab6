"""Calls between a test and its helper processes: pickles behind their length, over a socket."""

from __future__ import annotations

import asyncio
import pickle
import struct
from typing import Any

LENGTH = struct.Struct("<Q")


def write_message(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(LENGTH.pack(len(data)) + data)


async def read_message(reader: asyncio.StreamReader) -> Any:
    """Raises EOFError when the other side is gone."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other side of the pipe is gone") from error
