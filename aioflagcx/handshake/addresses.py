"""Session ids and listening addresses as text: "host:port", and "[v6]:port" for IPv6."""

from __future__ import annotations

import ipaddress
import re

__all__ = ["MAX_HOST_LENGTH", "format_address", "parse_address"]

MAX_HOST_LENGTH = 253
"""Longest host name in characters, as in DNS (RFC 1035, section 2.3.4)."""

_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


def parse_address(text: str) -> tuple[str, int]:
    """Split ``text`` into host, without brackets, and port.

    Raises :class:`ValueError` that says what is wrong with it.
    """
    host, colon, port_text = text.rpartition(":")
    if not colon or text.endswith("]"):
        raise ValueError(f'address {text!r} has no port: expected "host:port" or "[v6]:port"')
    if host.startswith("["):
        if not host.endswith("]"):
            raise ValueError(f'address {text!r} has no "]" before the port')
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise ValueError(f"address {text!r} has no IPv6 address in brackets: {error}") from None
    elif ":" in host:
        raise ValueError(f'address {text!r} has too many colons: write IPv6 as "[v6]:port"')
    if not host:
        raise ValueError(f"address {text!r} has no host")
    if len(host) > MAX_HOST_LENGTH:
        raise ValueError(f"address {text[:64]!r}... has a host of over {MAX_HOST_LENGTH} letters")
    if not host.isprintable() or any(letter in " []/@" for letter in host):
        raise ValueError(f"address {text!r} has a character that no host has")
    if not _PORT.fullmatch(port_text) or not 1 <= int(port_text) <= 65_535:
        raise ValueError(f"address {text!r} has port {port_text!r}: expected 1 to 65535")
    return host, int(port_text)


def format_address(host: str, port: int) -> str:
    """The text that :func:`parse_address` splits into ``host`` and ``port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
