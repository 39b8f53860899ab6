from __future__ import annotations

import ipaddress

import pytest

from aioflagcx.errors import ConfigError
from aioflagcx.hosts import is_wildcard, numeric, primary_address


async def test_numeric() -> None:
    assert await numeric("127.0.0.1") == "127.0.0.1"
    assert await numeric("::1") == "::1"
    assert await numeric("[::1]") == "::1"
    assert await numeric("0:0::1") == "::1"
    assert await numeric("localhost") in ("127.0.0.1", "::1")
    for host in ("no-such-host.invalid", "a" * 300, "", "\udcff"):
        with pytest.raises(ConfigError, match="does not resolve"):
            await numeric(host)


def test_wildcards() -> None:
    assert is_wildcard("0.0.0.0")
    assert is_wildcard("::")
    assert not is_wildcard("127.0.0.1")


@pytest.mark.parametrize("version", [4, 6])
def test_the_primary_address_is_one_of_this_host(version: int) -> None:
    address = ipaddress.ip_address(primary_address(version))
    assert address.version == version
    assert not address.is_unspecified
