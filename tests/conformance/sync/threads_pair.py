"""Two blocking engines with a session between them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aioflagcx import Region, RemoteRegion
from aioflagcx.sync import Engine, Session, Transfer

Bytes = npt.NDArray[np.uint8]

MiB = 1 << 20


def until(condition: Callable[[], object]) -> None:
    """Wait for what gives no event to wait for."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not come about within 20 s"
        time.sleep(0.001)


@dataclasses.dataclass
class Pair:
    """`ours` has a session with `theirs`."""

    ours: Engine
    theirs: Engine
    src: Bytes
    dst: Bytes
    local: Region
    remote: RemoteRegion
    session: Session

    def write(self, length: int = 4096, **options: Any) -> int:
        """Write from the beginning of `src` to the beginning of `dst`."""
        return self.ours.write(self.session, self.local, self.remote, length, **options)

    def long_pieces(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Of a write that takes many seconds if it is not stopped, with little memory."""
        pieces = np.zeros(200_000, np.int64)
        return pieces + self.local.addr, pieces + self.remote.addr, self.local.size

    def write_long(self, **options: Any) -> int:
        return self.ours.write(self.session, *self.long_pieces(), **options)

    def submit_long(self, **options: Any) -> Transfer:
        return self.ours.submit_write(self.session, *self.long_pieces(), **options)


class InThread:
    """A call on a thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._outcome: list[Any] = []
        self._failure: list[BaseException] = []
        self.begun = threading.Event()

        def call() -> None:
            self.begun.set()
            try:
                self._outcome.append(function(*args, **kwargs))
            except BaseException as error:
                self._failure.append(error)

        self._thread = threading.Thread(target=call)
        self._thread.start()
        assert self.begun.wait(20)

    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """What it returned or raised, which it has to do within 20 s."""
        self._thread.join(20)
        assert not self._thread.is_alive(), "still running after 20 s"
        if self._failure:
            raise self._failure[0]
        return self._outcome[0]


def together(count: int, function: Callable[[int], Any]) -> list[Any]:
    """`function(0)` to `function(count - 1)` on a thread each, begun at the same time."""
    start = threading.Barrier(count)

    def call(index: int) -> Any:
        start.wait(20)
        return function(index)

    threads = [InThread(call, index) for index in range(count)]
    return [thread.result() for thread in threads]


@contextlib.contextmanager
def blocked_loop(*engines: Engine) -> Iterator[None]:
    """While this lasts, the event loops of these engines run a callback that does not return."""
    go_on = threading.Event()
    for engine in engines:
        blocking = threading.Event()

        def block(blocking: threading.Event = blocking) -> None:
            blocking.set()
            go_on.wait()

        assert engine._loop is not None
        engine._loop.post(block)
        assert blocking.wait(20)
    try:
        yield
    finally:
        go_on.set()
