"""Where a role listens and where others reach it: ``host:port``, ``[::1]:port`` or ``name:port``."""

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, TypeAlias

from squall.errors import ConfigError

SocketAddress: TypeAlias = tuple[socket.AddressFamily, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as people write them.

    Attributes:
        host: a name, or a number without brackets.
        port: 0 means any that is free, where one listens.

    >>> Address.parse("[::1]:0"), str(Address.parse("localhost:4000"))
    (Address(host='::1', port=0), 'localhost:4000')
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read an address.

        Raises:
            ConfigError: it is none.
        """
        host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        is_number = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if is_number else host
        good = colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 0xFFFF
        if not good or (":" in host) != is_number:
            raise ConfigError(
                subject="address",
                expected='"host:port", such as "127.0.0.1:0", "[::1]:0" or "localhost:4000"',
                got=repr(text),
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def resolve(self) -> list[SocketAddress]:
        """Every family and socket address that the host has, in the system's order.

        Raises:
            ConfigError: the name is not known.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                subject=f"address {self}", expected="a host that this machine knows", got=str(error)
            ) from error
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))

    def resolve_loopback(self) -> list[SocketAddress]:
        """As `resolve`, of a host that only this machine reaches.

        Raises:
            ConfigError: it is another, or unknown.
        """
        found = self.resolve()
        for _, (host, *_) in found:
            if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
                raise ConfigError(
                    subject=f"address {self}",
                    expected="a loopback address, for what goes over the wire is not encrypted",
                    got=str(host),
                    remedy='Bind to "127.0.0.1:0" or "[::1]:0"; reach it from elsewhere through an SSH tunnel.',
                )
        return found
