"""Two hosts, as far as the network goes, made of namespaces; needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.78.0.1", "10.78.0.2")


class TwoHosts:
    """Two network namespaces with a cable between them, which can be pulled."""

    def __init__(self, ip: str) -> None:
        self._ip = ip
        self._names = [f"promises-{os.getpid()}-{end}" for end in "ab"]

    def configure(self, *words: str) -> None:
        subprocess.run([self._ip, *words], check=True)

    @contextlib.contextmanager
    def up(self) -> Iterator[TwoHosts]:
        with contextlib.ExitStack() as stack:
            for name in self._names:
                self.configure("netns", "add", name)
                stack.callback(self.configure, "netns", "del", name)
            peer = ["peer", "name", "eth0", "netns", self._names[1]]
            self.configure("link", "add", "eth0", "netns", self._names[0], "type", "veth", *peer)
            for name, address in zip(self._names, ADDRESSES, strict=True):
                self.configure("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                self.configure("-n", name, "link", "set", "eth0", "up")
            yield self

    def placement(self, index: int) -> dict[str, object]:
        """For Lab.peer: run it on the one host or the other."""
        command = (self._ip, "netns", "exec", self._names[index])
        return {"host": ADDRESSES[index], "command": command}

    def cut(self) -> None:
        """No packet passes any more, and nobody is told."""
        self.configure("-n", self._names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        self.configure("-n", self._names[1], "link", "set", "eth0", "up")
