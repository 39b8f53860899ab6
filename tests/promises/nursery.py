"""Helper processes that start within milliseconds: forks of one that has imported everything.

The program waits at a socket: each message with two descriptors, a pipe and a memory file, makes a
child that serves them as promises.child does, and is answered with its pid.
"""

from __future__ import annotations

import array
import contextlib
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).parents[1]


class ForkedProcess:
    """What a test needs of subprocess.Popen, for a process that is not its child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """None until it has ended; 0 then, whatever it was: only its parent is told."""
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """Never to another process, even when this one has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        select.select([self._pidfd], [], [])
        if self.returncode is None:
            self.returncode = 0
            os.close(self._pidfd)
        return self.returncode


class Nursery:
    """Forks helper processes until it is closed; those that it has made live on."""

    def __init__(self, guarded: bool = True) -> None:
        """``guarded``: whether a child's copies end where it is stopped, as they do on x86-64."""
        self.guarded = guarded and platform.machine() == "x86_64"
        tunables = {} if guarded else {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join((str(TESTS), *filter(None, sys.path)))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "promises.nursery", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **tunables, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
            )

    def fork(self, pipe: int, memory: int) -> ForkedProcess:
        socket.send_fds(self._socket, [b"fork"], [pipe, memory])
        return ForkedProcess(int(self._socket.recv(32)))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(orders: socket.socket) -> None:
    """Fork until the other side is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    size = array.array("i").itemsize
    while True:
        order, ancillary, _, _ = orders.recvmsg(32, socket.CMSG_SPACE(2 * size))
        if not order:
            return
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        pid = os.fork()
        if pid == 0:
            orders.close()
            os._exit(live(*descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def live(pipe: int, memory: int) -> int:
    """A child's whole life; its exit status."""
    try:
        with socket.socket(fileno=pipe) as calls:
            aioflagcx.run(child.serve(calls, memory))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    from promises import child

    import aioflagcx

    with socket.socket(fileno=int(sys.argv[1])) as orders:
        serve(orders)
