from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from aioflagcx.handshake.resolving import resolve


async def test_numeric_hosts_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the loop")

    monkeypatch.setattr(loop, "getaddrinfo", fail)
    assert await resolve("127.0.0.1", 5) == [(socket.AF_INET, "127.0.0.1")]
    assert await resolve("0:0::1", 5) == [(socket.AF_INET6, "::1")]
    wildcard = await resolve("0.0.0.0", 0, flags=socket.AI_PASSIVE)
    assert wildcard == [(socket.AF_INET, "0.0.0.0")]


async def test_names_are_looked_up() -> None:
    assert {address for _, address in await resolve("localhost", 5)} <= {"127.0.0.1", "::1"}
    for host in ("no-such-host.invalid", "a" * 300):
        with pytest.raises((OSError, UnicodeError)):
            await resolve(host, 5)
