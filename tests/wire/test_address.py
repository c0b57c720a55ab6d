"""Addresses as people write them, and what they stand for.

Faults planted by hand, each seen to fail a test here: brackets are kept · an IPv6 number without brackets is taken · only
the first address of a name is checked · port 65536 is taken.
"""

import socket
from typing import Any

import pytest

from squall.errors import ConfigError
from squall.wire.address import Address


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:65535", "localhost:4000", "a.b-c.example:1"])
def test_an_address_is_written_as_it_was_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "localhost", ":80", "::1:80", "[::1]", "host:", "host:-1", "host:65536", "host:٣", "[host]:1"],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r'expected "host:port", such as'):
        Address.parse(text)


def test_loopback_is_resolved_in_all_its_families() -> None:
    assert Address.parse("127.0.0.1:80").resolve_loopback() == [(socket.AF_INET, ("127.0.0.1", 80))]
    assert Address.parse("[::1]:80").resolve_loopback()[0][0] == socket.AF_INET6
    assert Address.parse("127.3.2.1:80").resolve_loopback()


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:0", "192.0.2.1:80", "[2001:db8::1]:80"])
def test_what_others_can_reach_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a loopback address"):
        Address.parse(text).resolve_loopback()


def test_a_name_with_one_address_that_others_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, 1, 6, "", (host, 80)) for host in ("127.0.0.1", "192.0.2.1")]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with pytest.raises(ConfigError, match=r"but got 192\.0\.2\.1"):
        Address.parse("both:80").resolve_loopback()


def test_a_name_that_nobody_knows_is_told() -> None:
    with pytest.raises(ConfigError, match="a host that this machine knows"):
        Address.parse("no-such-host.invalid:1").resolve()
