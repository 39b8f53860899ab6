"""The other process of an example: one more Python process that runs a script in another role.

Parent and child talk in JSON lines over the child's standard output: the example's application
channel, for which a real server would use HTTP, gRPC or a message queue.

A child ends when its standard input ends. The parent closes it when it is done, and the kernel
does when the parent is gone, so no child outlives its parent, not even a killed one. It also ends
at SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

__all__ = ["Child", "ChildFailed", "start", "tell", "until_terminated", "while_parent_lives"]

_T = TypeVar("_T")

_GRACE = 10.0
"""Seconds a child has to close its engine, before it is killed."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that a process gets when its parent ends."""

_MAX_LINE = 64 << 20
"""Bytes of the longest JSON line: hashes of every tensor of a large checkpoint fit."""


class ChildFailed(Exception):
    """A child ended early, or with an error, which it told on standard error."""


class Child:
    """The parent's end of a child; made by :func:`start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._killed = False

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def hear(self) -> Any:
        """The next message that the child tells.

        Raises :class:`ChildFailed` when it ended instead.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ChildFailed(f"the {self._name} process ended early")
        return json.loads(line)

    def kill(self) -> None:
        """End it at once, as a crash would; that is not an error of the child then."""
        self._killed = True
        self._process.kill()


@contextlib.asynccontextmanager
async def start(name: str, command: Sequence[str]) -> AsyncIterator[Child]:
    """Run ``command`` as a child for the time of the ``async with`` block.

    Raises :class:`ChildFailed` at the end of the block when the child's exit status is not 0.
    """
    # In a session of its own, so that Ctrl-C on the terminal reaches the parent alone, which then
    # ends its children in order.
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE,
        start_new_session=True,
    )
    child = Child(name, process)
    try:
        yield child
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
    if process.returncode != 0 and not child._killed:
        raise ChildFailed(f"the {name} process ended with status {process.returncode}")


def tell(message: object) -> None:
    """In a child: send ``message`` to the parent."""
    print(json.dumps(message), flush=True)


async def until_terminated(work: Coroutine[Any, Any, _T]) -> _T | None:
    """Run ``work`` to its end, or cancel it at SIGTERM.

    Gives what ``work`` returned, None when it was cancelled by the signal.
    """
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await task
    except asyncio.CancelledError:
        if not terminated:
            raise
        return None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def while_parent_lives(work: Coroutine[Any, Any, _T]) -> _T | None:
    """In a child: run ``work`` to its end, or cancel it when standard input ends or at SIGTERM.

    Gives what ``work`` returned, None when it was cancelled.
    """
    # A stopped child does not see the end of its input before it is continued.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    parent_gone = loop.create_task(reader.read())
    task = loop.create_task(until_terminated(work))
    try:
        await asyncio.wait({parent_gone, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        parent_gone.cancel()
        task.cancel()
        await asyncio.wait({parent_gone, task})
        transport.close()
    return None if task.cancelled() else task.result()
