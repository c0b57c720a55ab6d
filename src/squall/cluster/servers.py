"""`squall.serve`: shards and a door for training loops of users' own."""

import secrets
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from squall.closes import Closes
from squall.cluster.exits import in_words
from squall.cluster.first import FirstValues
from squall.cluster.payload import pack
from squall.cluster.roster import RoleProcess, Roster
from squall.cluster.zygote import Exit, Zygote
from squall.errors import ConfigError, LostError, RunError, RunExistsError
from squall.keywords import named
from squall.loop.client import in_order
from squall.model.install import assemble
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.observe.ledger import SUFFIX, Ledger, read_ledger
from squall.replica.exchange import connect_shards, wait_for_reply
from squall.rules.adagrad import Adagrad
from squall.rules.patterns import Rules, rule_per_tensor
from squall.rules.rule import Rule
from squall.shard.store import write_tensors
from squall.training.first import trained
from squall.training.prepare import first_books
from squall.wire.address import Address
from squall.wire.control import Failed, Finish, Ready
from squall.wire.hello import check_token, new_token
from squall.wire.listener import Listener
from squall.wire.messages import Fetch

START_S = 120.0
LEAVE_S = 5.0
POLL_S = 0.1
LIFE_BITS = 62
READER = -1
"""Stands for a session's number where nobody pushes."""


@named
def serve(
    model: nn.Module,
    *,
    shards: int = 1,
    rule: Rule | Rules | None = None,
    bind: str = "127.0.0.1:0",
    advertise: str | None = None,
    token: str | None = None,
    out: str | Path | None = None,
) -> "Servers":
    """Start shards that hold a model's parameters, and a door at one address, for `squall.DownpourOptimizer`.

    Args:
        model: its trainable parameters are where training begins. It is not changed.
        shards: how many processes hold them.
        rule: how a push changes them; None: ``squall.Adagrad(learning_rate=0.05)``. Its schedules run here, by the
            minibatches that all loops together have pushed.
        bind: where the door listens: "host:port" of a loopback address; port 0 for any that is free. Each shard
            listens at a port of its own of the same host.
        advertise: what loops are told instead of `bind`'s host.
        token: proves that a loop belongs here, and the servers to the loop; None: a new one.
        out: a directory that the ledger and the processes' logs are kept in; None: they go with the servers.

    Returns:
        The servers, which have begun to serve. Close them, or use them as a context manager.
    Raises:
        ConfigError: a setting is wrong; the port is taken; others than this machine could reach the address.
        ModelError: the model cannot be trained as it is.
        RunExistsError: there is a ledger in `out`.
        RunError: a process could not be started.

    >>> import squall
    >>> with squall.serve(nn.Linear(3, 2), shards=2) as servers:
    ...     list(servers.state_dict())
    ['weight', 'bias']
    """
    return Servers(
        model,
        shards=shards,
        rule=Adagrad(learning_rate=0.05) if rule is None else rule,
        bind=bind,
        advertise=advertise,
        token=token,
        out=out,
    )


class Servers(Closes):
    """What `serve` has started.

    Attributes:
        address: of the door: what loops are to be given.
        token: likewise.
        addresses: of the shards, by number; the door tells them to loops.
        path: where ledger and logs are.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        shards: int,
        rule: Rule | Rules,
        bind: str,
        advertise: str | None,
        token: str | None,
        out: str | Path | None,
        zygote: Zygote | None = None,
    ) -> None:
        _expect(model, shards, rule)
        self.token = new_token() if token is None else token
        check_token(self.token)
        self._layout = Layout.balanced(ParameterSpace.of(model), num_shards=shards)
        self._kept = {name: _copied(value) for name, value in model.state_dict().items()}
        load = {"layout": self._layout, "rule": rule_per_tensor(rule, self._layout.space)}
        self._lock = threading.Lock()
        self._error: RunError | None = None
        self._is_closed = False
        self._is_ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._own_zygote: Zygote | None = None
        self._listeners: list[Listener] = []
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._listen(bind, advertise, shards)
            self.path = self._directory(out)
            if zygote is None:
                zygote = self._own_zygote = Zygote.start(modules=["squall.cluster.role"])
            self._roster = Roster(zygote, self.path / "logs")
            try:
                self._start(model, load, rule)
            except BaseException:
                self._roster.close()
                raise
        except BaseException:
            self._clean()
            raise
        finally:
            for listener in self._listeners:
                listener.close()
        self._thread = threading.Thread(target=self._follow, name="squall-servers", daemon=True)
        self._thread.start()

    # Starting -------------------------------------------------------------------------------------------

    def _listen(self, bind: str, advertise: str | None, shards: int) -> None:
        self._listeners.append(Listener.open(bind, advertise))
        self.address = self._listeners[0].address
        told = None if advertise is None else str(Address(Address.parse(advertise).host, 0))
        where = str(Address(Address.parse(bind).host, 0))
        for _ in range(shards):
            self._listeners.append(Listener.open(where, told))
        self.addresses = tuple(listener.address for listener in self._listeners[1:])

    def _directory(self, out: str | Path | None) -> Path:
        if out is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="squall-serve-")
            path = Path(self._temporary.name)
        else:
            path = Path(out)
            if any((path / "ledger").glob(f"*{SUFFIX}")):
                raise RunExistsError(
                    subject=f"serve(out={str(out)!r})",
                    expected="a directory without a ledger",
                    got="one of servers that were there before",
                    remedy="Choose another.",
                )
        for name in ("ledger", "logs"):
            (path / name).mkdir(parents=True, exist_ok=True)
        return path

    def _start(self, model: nn.Module, load: Mapping[str, Any], rule: Rule | Rules) -> None:
        door, *listeners = self._listeners
        settings = {"shards": self.addresses, "life": secrets.randbits(LIFE_BITS) + 1}
        self._spawn("door", "door", {"layout": self._layout, "rule": rule.describe()}, settings, door, {})
        began = time.monotonic()
        books = first_books(self._layout)
        first = FirstValues(trained(model))
        try:
            for shard, listener in enumerate(listeners):
                own = tuple(books[spec.slice] for spec in self._layout.slices_of(shard))
                settings = {
                    "shard": shard,
                    "incarnation": 0,
                    "directory": str(self.path),
                    "began": began,
                    "record": False,
                    **first.settings,
                }
                told = {"coordinator": door.address}
                fds = [first.fd]
                self._spawn("shard", f"shard{shard}", {**load, "books": own}, settings, listener, told, fds)
        finally:
            first.close()
        self._wait_ready()

    def _spawn(
        self,
        kind: str,
        name: str,
        load: Mapping[str, Any],
        settings: dict[str, Any],
        listener: Listener,
        addresses: Mapping[str, str],
        fds: Sequence[int] = (),
    ) -> None:
        tcp = {"token": self.token, "address": listener.address, "addresses": addresses}
        payload = pack(load)
        try:
            passed = [*fds, *listener.fds]
            self._roster.spawn(kind, name, payload, settings | {"tcp": tcp}, passed, ports=[listener.port])
        finally:
            payload.close()

    def _wait_ready(self) -> None:
        missing = set(self._roster.roles)
        until = time.monotonic() + START_S
        while missing:
            for role, said in self._roster.hear(POLL_S):
                self._heard(role, said)
                if isinstance(said, Ready):
                    missing.discard(role.name)
            if self._error is not None:
                raise self._error
            if time.monotonic() > until:
                raise RunError(reason=f"{', '.join(sorted(missing))} did not start within {START_S:g} s")

    # While they serve -----------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Take what the processes say, or they would wait for ever to be heard."""
        while not self._is_ending.is_set():
            for role, said in self._roster.hear(POLL_S):
                self._heard(role, said)

    def _heard(self, role: RoleProcess, said: Any) -> None:
        if self._error is not None:
            return
        if isinstance(said, Failed):
            self._error = RunError(reason=f"{said.role}: {said.error}")
        elif isinstance(said, Exit):
            logs = "" if self._temporary else f" Its log is in {self.path / 'logs'}."
            self._error = LostError(reason=f"{role.name} {in_words(said.returncode)}.{logs}")

    def state_dict(self) -> dict[str, Any]:
        """The current parameters, each slice as of one version; all else as in the model that was given.

        Raises:
            LostError: a shard is gone.
        """
        with self._lock:
            if self._is_closed:
                raise LostError(reason="the servers are closed")
            if self._error is not None:
                raise self._error
            trained = self._fetched()
        return {name: trained.get(name, value) for name, value in self._kept.items()}

    def _fetched(self) -> dict[str, Tensor]:
        layout = self._layout
        addresses = {f"shard{number}": address for number, address in enumerate(self.addresses)}
        settings = {
            "name": "servers",
            "replica": READER,
            "shards": [shard for shard in range(layout.num_shards) if layout.slices_of(shard)],
            "tcp": {"token": self.token, "addresses": addresses},
        }
        exchanges = connect_shards(settings, layout, [], num_gradients=0, is_reader=True)
        try:
            for exchange in exchanges.values():
                exchange.send(Fetch(request=1, into=0))
            for exchange in exchanges.values():
                wait_for_reply(exchange)
            return assemble(layout, in_order(layout, (e.views.buffers[0] for e in exchanges.values())))
        finally:
            for exchange in exchanges.values():
                exchange.close()

    def save(self, path: str | Path) -> None:
        """Write the current parameters as safetensors; the file is the old one or the new one, never a part."""
        tensors = {name: value for name, value in self.state_dict().items() if isinstance(value, Tensor)}
        write_tensors(Path(path), tensors)

    def ledger(self) -> Ledger:
        """The ledger so far, but for the last half second: one row for each push and slice."""
        return read_ledger(self.path / "ledger")

    # Ending ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes. Loops are told, and their next `step` raises a LostError. Twice does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            assert self._thread is not None
            self._is_ending.set()
            self._thread.join()
            try:
                self._finish("door")  # which tells loops why, before they miss the shards
                self._finish("shard")
            finally:
                self._roster.close()
                self._clean()

    def _finish(self, kind: str) -> None:
        roles = self._roster.of_kind(kind)
        for role in roles:
            self._roster.send(role, Finish())
        until = time.monotonic() + LEAVE_S
        while any(not role.is_gone for role in roles) and time.monotonic() < until:
            for _ in self._roster.hear(POLL_S):
                pass

    def _clean(self) -> None:
        if self._own_zygote is not None:
            self._own_zygote.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _expect(model: nn.Module, shards: int, rule: Rule | Rules) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(subject="serve(model)", expected="an nn.Module", got=type(model).__name__)
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise ConfigError(subject="serve(shards=)", expected="a whole number above 0", got=repr(shards))
    if not isinstance(rule, Rule | Rules):
        raise ConfigError(
            subject="serve(rule=)",
            expected="an update rule",
            got=repr(rule),
            remedy="Give it one, as in rule=squall.Adagrad(learning_rate=0.05).",
        )
