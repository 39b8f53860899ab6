"""Runs the examples as their users do."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def figures(script: str, *arguments: str | Path) -> dict[str, Any]:
    """What an example prints as JSON after having succeeded without a word on stderr."""
    ended = run(script, *arguments, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    result: dict[str, Any] = json.loads(ended.stdout)
    assert result["verified"] is True
    return result


@contextlib.contextmanager
def on_terminal(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An example with standard error on a terminal, and the terminal's other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        with subprocess.Popen(
            [sys.executable, EXAMPLES / script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=theirs,
            # A shell's background job ignores Ctrl-C, and what it starts inherits that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            try:
                yield process, ours
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, text: bytes) -> bytes:
    """What the terminal shows, up to ``text``."""
    shown = b""
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, f"{text!r} did not appear in {shown!r}"
        shown += os.read(terminal, 4096)
    return shown


@contextlib.contextmanager
def children_of(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Handles of a process's children."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    handles = [os.pidfd_open(int(pid)) for pid in listed.split()]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def ends_within(handle: int, seconds: float) -> bool:
    return bool(select.select([handle], [], [], seconds)[0])
