"""Which addresses an engine binds, and which it tells its peers."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from .errors import ConfigError

__all__ = ["is_wildcard", "numeric", "primary_address"]

# Reserved for documentation (RFC 5737, RFC 3849): never reached, as connecting a UDP socket
# sends nothing, but routed like any address far away.
_FAR_V4 = "192.0.2.1"
_FAR_V6 = "2001:db8::1"


def is_wildcard(address: str) -> bool:
    """Whether ``address``, which is numeric, stands for all of the host's."""
    return ipaddress.ip_address(address).is_unspecified


async def numeric(host: str) -> str:
    """The first IP address of ``host``, a name or an address with or without brackets.

    Raises :class:`~aioflagcx.errors.ConfigError` when it does not resolve.
    """
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} does not resolve to an address", cause=error) from error
    return str(found[0][4][0])


def primary_address(version: int) -> str:
    """The IP address of this host, of IP version 4 or 6, that others most likely reach it at.

    The one from which the default route leaves; without such a route the loopback address.
    """
    family, far, loopback = (
        (socket.AF_INET6, _FAR_V6, "::1")
        if version == 6
        else (socket.AF_INET, _FAR_V4, "127.0.0.1")
    )
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return loopback
