"""Peers of a test, each an engine in a process of its own."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TESTS = Path(__file__).parent.parent

MiB = 1 << 20


class Target:
    """A process that runs integrations.target."""

    memory: npt.NDArray[np.uint8]
    """What it has registered, also while it is stopped or dead."""

    def __init__(self, size: int, port: int = 0, **environ: str) -> None:
        memory_fd = os.memfd_create("target")
        try:
            os.ftruncate(memory_fd, size)
            self.memory = np.frombuffer(mmap.mmap(memory_fd, size), np.uint8)
            host = f"127.0.0.1:{port}" if port else "127.0.0.1"
            self.process = subprocess.Popen(
                [sys.executable, "-m", "integrations.target", str(memory_fd), str(size), host],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(memory_fd,),
                text=True,
                env={**os.environ, "PYTHONPATH": str(TESTS), **environ},
            )
        finally:
            os.close(memory_fd)
        answer = self._answer()
        self.port: int = answer["port"]
        self.address: int = answer["address"]

    @property
    def session(self) -> str:
        """What peers call it."""
        return f"127.0.0.1:{self.port}"

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the target has ended"
        return json.loads(line)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(
            (task / "stat").read_text().rpartition(")")[2].split()[0] != "T"
            for task in tasks.iterdir()
        ):
            time.sleep(0)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Its input ends, and so does it, in good order."""
        self.process.communicate(timeout=40)
        assert self.process.returncode == 0


@contextlib.contextmanager
def running(size: int, port: int = 0, **environ: str) -> Iterator[Target]:
    target = Target(size, port, **environ)
    try:
        yield target
    finally:
        target.resume()
        if target.process.poll() is None:
            target.end()
        else:
            target.process.communicate()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Any, seconds: float = 30) -> None:
    """Wait for what gives no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come about within {seconds} s"
        time.sleep(0.001)
