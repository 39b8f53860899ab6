from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflagcx.handshake.addresses import format_address, parse_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.2:41235", ("10.0.0.2", 41235)),
        ("decode-7.cluster.local:1", ("decode-7.cluster.local", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_host_and_port_come_apart_and_together(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert format_address(*expected) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no port"),
        ("host", "has no port"),
        ("[::1]", "has no port"),
        ("::1:80", "too many colons"),
        (":80", "has no host"),
        ("[::1:80", 'no "]"'),
        ("[]:80", "no IPv6 address"),
        ("[10.0.0.1]:80", "no IPv6 address"),
        ("host:", "port ''"),
        ("host:0", "port '0'"),
        ("host:65536", "port '65536'"),
        ("host:-1", "port '-1'"),
        ("host:+80", r"port '\+80'"),
        ("host:٤", "port '٤'"),
        ("host:999999999999", "port '999999999999'"),
        ("a b:80", "character"),
        ("a\nb:80", "character"),
        ("a]:80", "character"),
        ("http://host:80", "colons|character"),
        ("h" * 254 + ":80", "over 253"),
    ],
)
def test_the_error_says_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_address(text)


@given(st.text(max_size=30))
def test_any_text_is_split_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert parse_address(format_address(host, port)) == (host, port)
