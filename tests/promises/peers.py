"""The other side of a test: an engine in the same loop, in a thread, or in a real process.

Whichever it is, the test sees its memory at any time through `memory`: a helper process's is
shared with the test, so it can be watched while that process is stopped or dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from promises.host import Host
from promises.measures import Bytes, until
from promises.nursery import TESTS, ForkedProcess, Nursery
from promises.pipe import read_message, write_message

import aioflagcx
from aioflagcx import Config, Engine

P = ParamSpec("P")
T = TypeVar("T")

EXIT_TIMEOUT = 20.0
"""Seconds a helper process may take to close its engine and end."""


def as_it_is() -> None:
    """What most processes do to themselves."""


def run_child(command: Sequence[str], pipe: int, memory: int) -> subprocess.Popen[bytes]:
    """Start promises.child with these descriptors, by `command`."""
    path = os.pathsep.join((str(TESTS), *filter(None, sys.path)))
    return subprocess.Popen(
        [*command, sys.executable, "-m", "promises.child", str(pipe), str(memory)],
        pass_fds=(pipe, memory),
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
    )


def stands_still(pid: int) -> bool:
    """Whether no thread of the process runs, since it is stopped or has ended."""
    states = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states <= {"T", "Z", "X"}


class Peer:
    """A Host somewhere. The attributes are those that Host.describe() gives."""

    memory: Bytes
    pid: int
    base: int
    """Where `memory` is in the peer's address space."""
    session_id: str
    engine_id: str
    rpc_port: int

    def at(self, offset: int) -> int:
        """The peer's address of an offset in its memory."""
        return self.base + offset

    async def run(
        self,
        function: Callable[Concatenate[Host, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run `function(host, ...)`, a method of Host or a module's function, over there."""
        raise NotImplementedError

    async def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def _describe(self, description: dict[str, Any]) -> None:
        for name, value in description.items():
            setattr(self, name, value)


class LoopPeer(Peer):
    """An engine on the test's own event loop."""

    @classmethod
    async def start(cls, config: Config, memory_size: int, port: int = 0) -> LoopPeer:
        engine = Engine(port=port, config=config)
        await engine.start()
        peer = cls()
        peer.memory = np.zeros(memory_size, np.uint8)
        peer.host = Host(engine, peer.memory)
        peer._describe(peer.host.describe())
        return peer

    host: Host

    async def run(self, function: Any, *args: Any) -> Any:
        return await function(self.host, *args)

    async def close(self) -> None:
        await self.host.close()


class ThreadPeer(Peer):
    """An engine on an event loop of its own, in another thread of this process."""

    @classmethod
    async def start(cls, config: Config, memory_size: int, port: int = 0) -> ThreadPeer:
        peer = cls()
        peer.memory = np.zeros(memory_size, np.uint8)
        started: asyncio.Future[Host] = asyncio.get_running_loop().create_future()
        peer._thread = threading.Thread(
            target=aioflagcx.run,
            args=(peer._serve(config, port, asyncio.get_running_loop(), started),),
        )
        peer._thread.start()
        peer._host = await started
        peer._describe(peer._host.describe())
        return peer

    _thread: threading.Thread
    _host: Host
    _loop: asyncio.AbstractEventLoop
    _end: asyncio.Event

    async def _serve(
        self,
        config: Config,
        port: int,
        test_loop: asyncio.AbstractEventLoop,
        started: asyncio.Future[Host],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        try:
            async with Engine(port=port, config=config) as engine:
                host = Host(engine, self.memory)
                test_loop.call_soon_threadsafe(started.set_result, host)
                await self._end.wait()
        except BaseException as error:
            if not started.done():
                test_loop.call_soon_threadsafe(started.set_exception, error)
            raise

    async def run(self, function: Any, *args: Any) -> Any:
        call = asyncio.run_coroutine_threadsafe(function(self._host, *args), self._loop)
        return await asyncio.wrap_future(call)

    async def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        await asyncio.to_thread(self._thread.join)


class ChildPeer(Peer):
    """An engine in a process of its own, which can be stopped, continued and killed."""

    @classmethod
    async def start(
        cls,
        config: Config,
        memory_size: int,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        command: Sequence[str] = (),
        nursery: Nursery | None = None,
        prepare: Callable[[], None] = as_it_is,
    ) -> ChildPeer:
        """`host`: what its engine binds. `command`: what runs it, such as `ip netns exec x`.
        `nursery`: makes the process, instead of a new interpreter. `prepare`: a module's function
        that is called there before the engine is made."""
        peer = cls()
        ours, theirs = socket.socketpair()
        memory_fd = os.memfd_create("promises")
        try:
            os.ftruncate(memory_fd, memory_size)
            peer.memory = np.frombuffer(mmap.mmap(memory_fd, memory_size), np.uint8)
            if nursery is not None:
                peer.process = nursery.fork(theirs.fileno(), memory_fd)
            else:
                peer.process = run_child(command, theirs.fileno(), memory_fd)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(memory_fd)
            theirs.close()
        try:
            reader, peer._writer = await asyncio.open_connection(sock=ours)
            write_message(peer._writer, (config, host, port, prepare))
            peer._describe(await read_message(reader))
        except BaseException:
            await peer._end(kill=True)
            ours.close()
            raise
        peer._reader = asyncio.create_task(peer._read(reader))
        return peer

    process: subprocess.Popen[bytes] | ForkedProcess
    _writer: asyncio.StreamWriter
    _reader: asyncio.Task[None] | None = None

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._last_number = 0
        self._stopped = False
        self._killed = False

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, succeeded, result = await read_message(reader)
                call = self._calls.pop(number)
                if not call.done():
                    call.set_result(result) if succeeded else call.set_exception(result)
        except EOFError as error:
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(error)

    async def run(self, function: Any, *args: Any) -> Any:
        return await self.start_call(function, *args)

    def start_call(self, function: Any, *args: Any) -> asyncio.Future[Any]:
        """Send the call at once; its result comes by awaiting."""
        self._last_number += 1
        call = self._calls[self._last_number] = asyncio.get_running_loop().create_future()
        write_message(self._writer, (self._last_number, function, args))
        return call

    async def run_last(self, function: Any, *args: Any) -> None:
        """A call that is never answered: it makes the process another one."""
        before = self._program()
        self.start_call(function, *args).add_done_callback(lambda call: call.exception())
        await until(lambda: self._program() not in (before, b""))

    def _program(self) -> bytes:
        return Path(f"/proc/{self.process.pid}/cmdline").read_bytes()

    def stop(self) -> None:
        """SIGSTOP; returns when the process stands still."""
        self._stopped = True
        self.process.send_signal(signal.SIGSTOP)
        while not stands_still(self.process.pid):
            time.sleep(0)

    def resume(self) -> None:
        """SIGCONT."""
        self._stopped = False
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL; returns when the process is dead."""
        await self._end(kill=True)

    async def _end(self, *, kill: bool) -> None:
        """Wait for the process's end; a forced one is waited for as well."""
        if self.process.returncode is None:
            self._killed = self._killed or kill
            if kill:
                self.process.kill()
            try:
                await asyncio.wait_for(self._exited(), EXIT_TIMEOUT)
            except asyncio.TimeoutError:
                self.process.kill()
                await self._exited()
                raise AssertionError(
                    f"the helper process did not end within {EXIT_TIMEOUT} s"
                ) from None

    async def _exited(self) -> None:
        exited = asyncio.Event()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ProcessLookupError):  # gone, and waited for by its parent
            pidfd = os.pidfd_open(self.process.pid)
            loop.add_reader(pidfd, exited.set)
            try:
                await exited.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        self.process.wait()

    async def close(self) -> None:
        self._writer.close()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        await self._end(kill=self._stopped)
        if not self._killed:
            assert self.process.returncode == 0, "the helper process failed, see its stderr"
