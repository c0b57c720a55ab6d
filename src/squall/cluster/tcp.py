"""Who reaches whom at which address, in a run whose roles connect over TCP."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from squall.wire.hello import new_token
from squall.wire.listener import Listener

Relay: TypeAlias = Callable[[str, str, str], str]
"""(who connects, to whom, its address) to the address to connect to instead."""


@dataclass(frozen=True, kw_only=True)
class TcpPlan:
    """How the roles of a run connect.

    Attributes:
        bind: where shards and the coordinator listen.
        advertise: what others are told instead; None: where they listen.
        relay: changes addresses by pair of roles; None: as they are.
        token: of this run.
    """

    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    relay: Relay | None = None
    token: str = field(default_factory=new_token, repr=False)


class TcpAddresses:
    """The listening sockets of one run. They are made before the roles, so that nobody calls in vain."""

    def __init__(self, plan: TcpPlan) -> None:
        self._plan = plan
        self._listeners: dict[str, Listener] = {}  # by role
        self._relayed: dict[tuple[str, str], str] = {}  # a role that comes back calls the same addresses

    def listen(self, name: str) -> Listener:
        """Listen for a role, which is handed the sockets; the caller closes the listener.

        Raises:
            ConfigError: it is not possible there.
        """
        self._listeners[name] = listener = Listener.open(self._plan.bind, self._plan.advertise)
        return listener

    def settings_of(self, name: str) -> dict[str, Any]:
        """What a role is told: the token, where it listens itself, and where it reaches others."""
        own = self._listeners.get(name)
        return {
            "token": self._plan.token,
            "address": None if own is None else own.address,
            "addresses": {
                other: self._as_relayed(name, other, listener.address)
                for other, listener in self._listeners.items()
                if _calls(name, other)
            },
        }

    def fds_of(self, name: str) -> list[int]:
        own = self._listeners.get(name)
        return [] if own is None else own.fds

    def ports_of(self, name: str) -> list[int]:
        own = self._listeners.get(name)
        return [] if own is None else [own.port]

    def _as_relayed(self, caller: str, other: str, address: str) -> str:
        if self._plan.relay is None:
            return address
        if (caller, other) not in self._relayed:
            self._relayed[caller, other] = self._plan.relay(caller, other, address)
        return self._relayed[caller, other]


def _calls(caller: str, other: str) -> bool:
    """Replicas call shards and the coordinator, shards the coordinator, the evaluator shards."""
    if other == "coordinator":
        return caller.startswith(("replica", "shard"))
    return caller.startswith("replica") or caller == "evaluator"
