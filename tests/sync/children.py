"""Python programs run as children of a test, which talk to it by lines."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator

PREAMBLE = """
import gc, os, signal, sys, threading, time
import numpy as np
from aioflagcx import Config
from aioflagcx.errors import *
from aioflagcx.sync import Engine

path, *arguments = sys.argv[1:]
config = Config(soft_paths=(path,), drain_timeout=1.0)

def say(*words):
    print(*words, flush=True)

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            os._exit(99)
        time.sleep(0.001)

def in_thread(function, daemon=False):
    thread = threading.Thread(target=function, daemon=daemon)
    thread.start()
    return thread

def main_thread_waits_in(name):
    "Whether the main thread is in this function of the library, and stays there for a moment."
    def is_there():
        frame = sys._current_frames()[threading.main_thread().ident]
        code = frame.f_code
        return code.co_name == name and "/aioflagcx/" in code.co_filename
    if not is_there():
        return False
    time.sleep(0.01)
    return is_there()

class Pair:
    def __init__(self):
        self.theirs, self.ours = Engine(config=config), Engine(config=config)
        self.theirs.start()  # first, and so the last to be closed at exit
        self.ours.start()
        self.src = np.full(1 << 20, 0x11, np.uint8)
        self.dst = np.full(1 << 20, 0x11, np.uint8)
        self.local = self.ours.register(self.src)
        self.theirs.register(self.dst, name="dst")
        self.session = self.ours.connect(self.theirs.session_id)
        self.remote = self.session.regions["dst"]
        pieces = np.zeros(200_000, np.int64)
        # takes many seconds if it is not stopped
        self.long = self.session, pieces + self.local.addr, pieces + self.remote.addr, 1 << 20

    def write(self, size=4096, **options):
        return self.ours.write(self.session, self.local, self.remote, size, **options)

    def is_quiet(self):
        stats = self.ours.stats()
        return not (stats.transfers_inflight or stats.transfers_pending or stats.bytes_inflight)

    def close(self):
        self.ours.close()
        self.theirs.close()
"""


class Child:
    """A running program."""

    def __init__(self, program: str, path: str, *arguments: str) -> None:
        text = PREAMBLE + textwrap.dedent(program)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-X", "faulthandler", "-c", text, path, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """The next line it says; "" when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, expected: int = 0) -> str:
        """Wait for its end, with the expected exit code; what it said on stderr."""
        try:
            output, errors = self.process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, errors = self.process.communicate()
            raise AssertionError(f"hangs: {errors}") from None
        assert self.process.returncode == expected, (self.process.returncode, output, errors)
        return str(errors)


@contextlib.contextmanager
def running(program: str, path: str, *arguments: str) -> Iterator[Child]:
    child = Child(program, path, *arguments)
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


def run(program: str, path: str, *arguments: str, expected: int = 0) -> str:
    """Run a program to its end; what it said on stderr."""
    with running(program, path, *arguments) as child:
        return child.end(expected)
