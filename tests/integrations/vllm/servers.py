"""Prefill and decode workers with a cache, driven as vLLM drives them; here or in a process.

As a program (descriptor of a memory file, its size, pickled arguments of Server as hex): answers
pickled calls of a Server's methods on standard input, one by one, until that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from integrations.processes import TESTS, until
from integrations.vllm.tensors import as_tensor

from aioflagcx import Config
from aioflagcx.integrations.vllm.caches import GroupSpec
from aioflagcx.integrations.vllm.options import Options
from aioflagcx.integrations.vllm.scheduler import Load, Offer, Source, Step
from aioflagcx.integrations.vllm.worker import Worker
from aioflagcx.kv import CacheLayout

Bytes = npt.NDArray[np.uint8]

TOKENS, WIDTH = 4, 32


@dataclasses.dataclass(frozen=True)
class Group:
    layers: int = 3
    blocks: int = 32
    heads: int = 4

    def shape(self, ranks: int) -> tuple[int, ...]:
        return self.layers, self.blocks, max(self.heads // ranks, 1), TOKENS, WIDTH

    def names(self, index: int) -> tuple[str, ...]:
        return tuple(f"model.layers.{index}.{layer}" for layer in range(self.layers))


class Server:
    """One worker; it is asked with steps, and polled for results, like vLLM's."""

    def __init__(
        self,
        role: str,
        port: int = 1,
        memory: Bytes | None = None,
        groups: Sequence[Group] = (Group(),),
        rank: int = 0,
        ranks: int = 1,
        path: str = "tcp",
        **options: Any,
    ) -> None:
        shapes = [group.shape(ranks) for group in groups]
        sizes = [int(np.prod(shape)) for shape in shapes]
        if memory is None:
            memory = np.zeros(sum(sizes), np.uint8)
        parts = np.split(memory, np.cumsum(sizes))
        self.caches = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]
        """Of each group: [layer, block, head, token, byte]."""
        self.worker = Worker(
            [
                GroupSpec(group.names(index), group.blocks, group.heads)
                for index, group in enumerate(groups)
            ],
            Options.of({"host": "127.0.0.1", "port": port, **options}),
            rank=rank,
            ranks=ranks,
            prefill=role == "prefill",
            decode=role == "decode",
            config=Config(devices="soft", soft_paths=("process", path)),
        )
        tensors = {
            name: as_tensor(layer)
            for index, (group, cache) in enumerate(zip(groups, self.caches, strict=True))
            for name, layer in zip(group.names(index), cache, strict=True)
        }
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: set[str] = set()
        self.invalid: set[int] = set()
        self.stats: dict[str, Any] = {}
        try:
            self.worker.register(tensors)
        except BaseException:
            self.worker.close()
            raise

    def step(self, step: Step) -> None:
        self.worker.step(step)

    def offer(
        self, request: str, *blocks: Sequence[int], transfer: str = "", tokens: int = 1
    ) -> None:
        offer = Offer(request, transfer or request, tuple(map(tuple, blocks)), tokens)
        self.step(Step(offers=[offer]))

    def load(self, request: str, source: Source, *blocks: Sequence[int], tokens: int = 1) -> None:
        self.step(Step(loads=[Load(request, source, tuple(map(tuple, blocks)), tokens)]))

    def look(self) -> None:
        """What vLLM does after each step, in its order."""
        sent, received, failed = self.worker.take()
        self.sent += sent
        self.received += received
        self.failed |= failed
        self.invalid |= self.worker.take_invalid()
        for name, value in self.worker.take_stats().items():
            self.stats[name] = self.stats[name] + value if name in self.stats else value

    def wait_sent(self, *requests: str) -> None:
        """Until these, and no others, have been reported as sent."""
        until(lambda: self.look() or set(requests) <= set(self.sent))
        assert sorted(self.sent) == sorted(requests)

    def wait_received(self, *requests: str) -> None:
        """Until these, and no others, have been reported as received or failed."""
        until(lambda: self.look() or set(requests) <= set(self.received))
        assert sorted(self.received) == sorted(requests)

    def wait_for(self, *requests: str) -> None:
        """Until these, among others, have been reported as either."""
        until(lambda: self.look() or set(requests) <= {*self.sent, *self.received})

    def reasons(self) -> list[tuple[str, str, str]]:
        """Failures that were counted."""
        self.look()
        return [tuple(failure) for failure in self.stats.get("failures", [])]

    def hold_loop(self) -> None:
        """The worker's event loop stands still from now on, its native threads do not."""
        self.held = threading.Event()
        assert self.worker._thread is not None
        self.worker._thread.post(self.held.wait)

    def release_loop(self, after: float = 0.0) -> None:
        """After so many seconds, which make up the case: nobody waits for anything in them."""
        time.sleep(after)
        self.held.set()

    def identity(self) -> tuple[str, str, CacheLayout]:
        """Session and engine id, and layout, of a decode."""
        half = self.worker._decode
        assert half is not None
        return half._engine.session_id, half._engine.engine_id, half._layout

    def close(self) -> None:
        self.worker.close()


class Child:
    """A Server in a process of its own; methods of it are called by :meth:`ask`."""

    def __init__(self, size: int, *arguments: Any, **options: Any) -> None:
        descriptor = os.memfd_create("cache")
        try:
            os.ftruncate(descriptor, size)
            self.memory: Bytes = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
            packed = pickle.dumps((arguments, options)).hex()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "integrations.vllm.servers", str(descriptor), str(size),
                 packed],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )  # fmt: skip
        finally:
            os.close(descriptor)
        self._answer()

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert self.process.stdin is not None
        pickle.dump((method, arguments, options), self.process.stdin)
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(
            lambda: all(
                (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for task in tasks.iterdir()
            )
        )

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        self.process.wait()


def free_ports(count: int = 1) -> int:
    """The first of so many ports that nobody listens at, nor gets from the system unasked."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


@contextlib.contextmanager
def child(size: int, *arguments: Any, **options: Any) -> Iterator[Child]:
    process = Child(size, *arguments, **options)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.resume()
            process.process.communicate(timeout=40)
            assert process.process.returncode == 0
        else:
            process.process.communicate()


def main() -> None:
    descriptor, size = int(sys.argv[1]), int(sys.argv[2])
    arguments, options = pickle.loads(bytes.fromhex(sys.argv[3]))
    memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    server = Server(*arguments, memory=memory, **options)
    answers, sys.stdout = sys.stdout.buffer, sys.stderr

    def say(answer: Any) -> None:
        pickle.dump(answer, answers)
        answers.flush()

    say(None)
    with contextlib.suppress(EOFError):
        while True:
            method, arguments, options = pickle.load(sys.stdin.buffer)
            say(getattr(server, method)(*arguments, **options))
    server.close()


if __name__ == "__main__":
    main()
