"""From a host to the addresses that sockets take."""

from __future__ import annotations

import asyncio
import socket

__all__ = ["resolve"]


async def resolve(host: str, port: int, *, flags: int = 0) -> list[tuple[int, str]]:
    """(address family, numeric address) of a host's TCP addresses, the best first.

    Raises OSError and UnicodeError as :func:`socket.getaddrinfo` does. A numeric host is answered
    here and needs no thread: the threads that uvloop asks are missed by a forked child when it
    exits, which crashes it.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=flags | socket.AI_NUMERICHOST
        )
    except OSError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(int(family), str(address[0])) for family, _, _, _, address in found]
