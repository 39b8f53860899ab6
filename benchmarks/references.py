"""What figures are compared with: the least that the machine itself takes for the same."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import socket
import struct
import time

import numpy as np
import numpy.typing as npt

__all__ = ["BlockingStream", "memcpy_seconds", "python_loop_seconds"]

_SIZE = struct.Struct("<Q")


def memcpy_seconds(size: int, count: int) -> float:
    """Seconds that one thread takes to copy `size` bytes `count` times, in buffers it knows."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    np.copyto(target, source)
    started = time.perf_counter()
    for _ in range(count):
        np.copyto(target, source)
    return time.perf_counter() - started


def python_loop_seconds(arrays: list[npt.NDArray[np.int64]]) -> float:
    """Seconds of a Python loop over pieces that does nothing with them."""
    started = time.perf_counter()
    for _ in zip(*arrays, strict=True):
        pass
    return time.perf_counter() - started


class BlockingStream:
    """One TCP stream between two processes with blocking calls, and nothing around it.

    A message is its size, its bytes, and one byte back when all have been received.
    """

    def __init__(self, largest: int) -> None:
        context = multiprocessing.get_context("spawn")
        port, child_port = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(child_port, largest), daemon=True)
        self._process.start()
        self._socket = socket.create_connection(("127.0.0.1", port.recv()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._source = memoryview(np.ones(largest, np.uint8))
        self.seconds(largest, 1)

    def seconds(self, size: int, count: int) -> float:
        """Seconds that `count` messages of `size` bytes take, one after the other."""
        return sum(self.each(size, count))

    def each(self, size: int, count: int) -> list[float]:
        """Seconds that each of `count` messages takes."""
        header, data = _SIZE.pack(size), self._source[:size]
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._socket.sendall(header)
            self._socket.sendall(data)
            self._socket.recv(1)
            times.append(time.perf_counter() - started)
        return times

    def close(self) -> None:
        """End the other process."""
        self._socket.close()
        self._process.join()


def _serve(port: multiprocessing.connection.Connection, largest: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port.send(server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        target = memoryview(np.zeros(largest, np.uint8))
        while header := connection.recv(_SIZE.size, socket.MSG_WAITALL):
            (left,) = _SIZE.unpack(header)
            while left:
                left -= connection.recv_into(target[:left])
            connection.sendall(b"\0")
