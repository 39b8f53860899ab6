"""The program of a helper process: one Host, driven by calls that come over a socket.

It ends when the socket is closed, so it never outlives the test that started it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from promises.host import Host
from promises.pipe import read_message, write_message

import aioflagcx


async def serve(pipe: socket.socket, memory_fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=pipe)
    size = os.fstat(memory_fd).st_size
    memory = np.frombuffer(mmap.mmap(memory_fd, size), np.uint8)
    config, host_name, port, prepare = await read_message(reader)
    prepare()
    async with aioflagcx.Engine(host_name, port, config=config) as engine:
        host = Host(engine, memory)
        write_message(writer, host.describe())
        calls = set()
        try:
            while True:
                number, function, args = await read_message(reader)
                call = asyncio.create_task(answer(writer, number, function, (host, *args)))
                calls.add(call)
                call.add_done_callback(calls.discard)
        except EOFError:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    writer.close()


async def answer(
    writer: asyncio.StreamWriter,
    number: int,
    function: Callable[..., Coroutine[Any, Any, Any]],
    args: tuple[Any, ...],
) -> None:
    result: tuple[bool, Any]
    try:
        result = True, await function(*args)
    except Exception as error:
        result = False, error
    try:
        pickle.dumps(result)
    except Exception:
        result = False, RuntimeError(f"cannot be pickled: {result[1]!r}")
    write_message(writer, (number, *result))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as pipe:
        aioflagcx.run(serve(pipe, int(sys.argv[2])))
