"""A loop's connections: with the door, which knows where the shards are and when all is over, and with each shard."""

import json
import threading
from collections.abc import Mapping
from typing import Any

from squall.errors import MISFITS, ConfigError, CorruptError, LostError, ModelError, RemoteProtocolError
from squall.model.exchange import ExchangePlan
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace, TensorSpec
from squall.replica.exchange import TcpExchange, introduction
from squall.wire.connection import CODEC
from squall.wire.joining import Farewell, JoinLoop, Served
from squall.wire.tcp import WELCOME_S, Caller

TOLD_S = 1.0
"""How long after a refusal the door's reason may take."""


class DoorLine:
    """The connection with the door of `squall.serve`.

    Args:
        address, token: of the servers.
        patience_s: how long to wait for a door that does not answer [seconds].

    Attributes:
        served: what the door says is served.
        layout: of that.

    Raises:
        ConfigError: the door refuses us: another token or version.
        LostError: nobody answered in time.
    """

    def __init__(self, address: str, token: str, patience_s: float) -> None:
        self.address, self._token, self._patience_s = address, token, patience_s
        self._lock = threading.Lock()  # the threads of all exchanges look whether all is over
        self._farewell: Farewell | None = None
        self._call(JoinLoop(life=0, session=0))

    def _call(self, me: JoinLoop) -> None:
        caller = Caller(
            me="the loop",
            peer="the servers",
            address=self.address,
            token=self._token,
            patience_s=self._patience_s,
        )
        self._channel, _ = caller.call(me)
        received = self._channel.receive_within(WELCOME_S)
        told: Any = None if received is None else CODEC.decode(received[0])
        if not isinstance(told, Served):
            raise LostError(reason=f"the servers at {self.address} let the loop in and then said nothing")
        self.served = told
        self.layout = _layout(told)

    def call_again(self) -> bool:
        """Come back after everything broke; return whether these are the servers that we knew.

        Raises:
            ConfigError, LostError: as of the constructor.
        """
        before = self.served
        self._channel.close()
        self._call(JoinLoop(life=before.life, session=before.session))
        return self.served.life == before.life

    def connect(self, *, incarnation: int, num_gradients: int, lost_after_s: float) -> dict[int, TcpExchange]:
        """Connect with every shard that holds something.

        Raises:
            LostError: one does not answer.
        """
        exchanges: dict[int, TcpExchange] = {}
        session = self.served.session
        name = f"replica{session}.0"
        try:
            for shard in range(self.layout.num_shards):
                if not (specs := self.layout.slices_of(shard)):
                    continue
                me = introduction(name, self.layout, shard, replica=session, incarnation=incarnation)
                caller = Caller(
                    me=name,
                    peer=f"shard{shard}",
                    address=self.served.shards[shard],
                    token=self._token,
                    patience_s=lost_after_s,
                    given_up=self.why_over,
                )
                plan = ExchangePlan(specs, num_gradients)
                exchanges[shard] = TcpExchange(f"shard{shard}", caller, me, plan, lost_after_s=lost_after_s)
        except BaseException:
            for exchange in exchanges.values():
                exchange.close()
            raise
        return exchanges

    def why_over(self) -> str | None:
        """Why the servers are not to be reached any more, if the door has said so, or is gone itself."""
        farewell = self.farewell()
        if farewell is not None:
            return farewell.why
        return f"the door at {self.address} is gone" if self._channel.is_ended else None

    def farewell(self, timeout_s: float = 0.0) -> Farewell | None:
        """What the door has said at the end; None while all goes well."""
        with self._lock:
            if self._farewell is None and not self._channel.is_ended:
                received = self._channel.receive_within(timeout_s)
                if received is not None:
                    told = CODEC.decode(received[0])
                    if not isinstance(told, Farewell):
                        raise RemoteProtocolError(reason=f"the door sent a {type(told).__name__} to a loop")
                    self._farewell = told
            return self._farewell

    def close(self) -> None:
        self._channel.close()


def rule_of(served: Served) -> Mapping[str, Any]:
    """How the shards update, as `Rule.describe` said it."""
    try:
        rule = json.loads(served.rule)
    except (ValueError, RecursionError):
        rule = None
    if not isinstance(rule, dict):
        raise RemoteProtocolError(reason=f"expected a description of the rule, but got {served.rule:.100}")
    return rule


def refuse_other_model(mine: ParameterSpace, served: ParameterSpace) -> None:
    """Raise a ModelError that names the first tensor which is not as the servers have it, if there is one."""
    theirs = {spec.name: spec for spec in served.tensors}
    ours = {spec.name: spec for spec in mine.tensors}
    for name in sorted(theirs.keys() | ours.keys()):
        wanted, got = _form(theirs.get(name)), _form(ours.get(name))
        if wanted != got:
            raise ModelError(
                subject=f"parameter {name!r}",
                expected=f"{wanted}, as the servers have it",
                got=got,
                remedy="Build the model that squall.serve was given, with the same parameters frozen.",
            )


def _form(spec: TensorSpec | None) -> str:
    return "no trainable tensor" if spec is None else f"shape {spec.shape} and dtype {spec.dtype}"


def _layout(told: Served) -> Layout:
    """Rebuild the layout.

    Raises:
        RemoteProtocolError: what was told is none.
    """
    try:
        space = ParameterSpace(
            tensors=tuple(
                TensorSpec(name=row.name, aliases=row.aliases, shape=row.shape, dtype=row.dtype)
                for row in told.tensors
            )
        )
        rows = [
            {"slice": number, "shard": row.shard, "partition": 0, "dtype": row.dtype}
            | {"start": row.start, "stop": row.stop}
            for number, row in enumerate(told.slices)
        ]
        return Layout.from_json({"space": space.to_json(), "num_shards": len(told.shards), "slices": rows})
    except (ConfigError, CorruptError, *MISFITS) as error:
        raise RemoteProtocolError(reason=f"the door told a layout that is none: {error}") from error
