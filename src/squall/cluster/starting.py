"""Starting the roles of a run: what each is sent, and which memory and connections it shares with whom."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from squall.cluster.payload import Payload, pack
from squall.cluster.roster import Roster
from squall.cluster.tcp import TcpAddresses, TcpPlan
from squall.model.exchange import ExchangePlan
from squall.training.durability import mode_of
from squall.training.execution import Execution
from squall.training.prepare import Prepared, not_trained
from squall.training.recipe import module_name
from squall.wire.channel import Channel
from squall.wire.control import AttachReplica, AttachShard, AttachWorker, ShardBack
from squall.wire.listener import Listener
from squall.wire.memory import SharedArena

EVALUATOR = -1
"""Stands for a replica's number in the shards' books."""


def start_roles(execution: Execution, roster: Roster, tcp: TcpPlan | None = None) -> "Started":
    """Start every role and connect them.

    Args:
        tcp: how they are to connect; None: by shared memory.
    """
    starting = Started(execution, roster, tcp)
    try:
        starting.shards()
        starting.coordinator()
        starting.replicas()
        starting.evaluator()
        starting.connect()
    except BaseException:
        starting.close()
        raise
    return starting


class Started:
    """The roles of a run, started and connected; and what it takes to start one of them again.

    Descriptors that are on their way to roles are closed here when all have theirs.

    Attributes:
        buffer_arenas: for each replica the memory that it leaves its model's buffers in.
    """

    def __init__(self, execution: Execution, roster: Roster, tcp: TcpPlan | None) -> None:
        self._execution = execution
        self._tcp = None if tcp is None else TcpAddresses(tcp)
        self._prepared = execution.prepared
        self._roster = roster
        layout = self._prepared.layout
        self._serving = [shard for shard in range(layout.num_shards) if layout.slices_of(shard)]
        self._made: list[Channel | SharedArena | Payload | Listener] = []
        # For shards that are started again: where they listen, and the memory that workers share with them.
        self._durability = mode_of(self._prepared.job.durability)
        self._may_return = self._durability is not None
        self._kept: list[SharedArena | Listener] = []
        self._exchanges: dict[int, list[tuple[AttachWorker, SharedArena]]] = {}
        if self._tcp is not None:
            for name in ("coordinator", *(f"shard{shard}" for shard in range(layout.num_shards))):
                self._keep(self._tcp.listen(name))
        self._attachments: list[tuple[str, Any, list[int]]] = []  # to be sent: to whom, what, descriptors
        self.buffer_arenas: list[SharedArena] = []

    def close(self) -> None:
        """The run is over, or could not be started."""
        self._hand_over()
        for kept in (*self._kept, *self.buffer_arenas):
            kept.close()

    def _keep(self, made: SharedArena | Listener) -> None:
        (self._kept if self._may_return else self._made).append(made)

    def connect(self) -> None:
        """Hand shards, coordinator and workers their ends of all connections."""
        for name, message, fds in self._attachments:
            self._roster.send(self._roster.roles[name], message, fds)
        self._attachments.clear()
        self._hand_over()

    def _hand_over(self) -> None:
        for made in self._made:
            made.close()
        self._made.clear()

    def shards(self) -> None:
        for shard in range(self._prepared.layout.num_shards):
            self._shard(shard, first_incarnation(self._execution.directory.ledger, shard), is_back=False)

    def _shard(self, shard: int, incarnation: int, *, is_back: bool) -> None:
        prepared, directory = self._prepared, self._execution.directory
        numbers = [spec.slice for spec in prepared.layout.slices_of(shard)]
        load = {
            "layout": prepared.layout,
            "rule": prepared.rule,
            "states": [prepared.states[number] for number in numbers],
            "books": tuple(prepared.books[number] for number in numbers),
        }
        settings = {
            "shard": shard,
            "incarnation": incarnation,
            "directory": str(directory.path),
            "began": self._execution.clock.began,
            "record": prepared.job.record,
            "durability": self._durability,
            "is_back": is_back,
        }
        fds = self._line_to_coordinator(f"shard{shard}", AttachShard(shard=shard))
        self._spawn("shard", f"shard{shard}", self._pack(load), settings, fds, incarnation=incarnation)

    def shard_again(self, shard: int, incarnation: int) -> None:
        """Start a shard that was killed once more, and connect it with all who are there.

        Raises:
            RunError: no process can be started.
        """
        self._shard(shard, incarnation, is_back=True)
        for attach, arena in self._exchanges.get(shard, ()):
            if self._roster.roles[attach.name].is_gone:
                continue
            near, far = self._pair()
            self._attachments.append((f"shard{shard}", attach, [far, arena.fd]))
            self._attachments.append((attach.name, ShardBack(shard=shard), [near]))
        self.connect()

    def coordinator(self) -> None:
        prepared = self._prepared
        settings = {
            "began": self._execution.clock.began,
            "num_replicas": prepared.job.replicas,
            "num_shards": prepared.layout.num_shards,
            "max_staleness": prepared.job.strategy.max_staleness,
        }
        load = {"plan": prepared.plan, "settled": prepared.settled, "rhythm": prepared.rhythm}
        self._spawn("coordinator", "coordinator", self._pack(load), settings, [])

    def replicas(self) -> None:
        prepared = self._prepared
        model = _model_load(prepared)
        task = prepared.task(model.pop("model", None))
        payload = self._pack({"task": task, "loop": prepared.loop, "buffers": prepared.buffers, **model})
        replicas = range(prepared.job.replicas)
        settings = {
            "threads": prepared.threads,
            "shards": self._serving,
            "num_replicas": len(replicas),
            "shards_come_back": self._may_return,
        }
        self.buffer_arenas += [SharedArena.create(prepared.buffers.arena_bytes) for _ in replicas]
        left = [arena.fd for arena in self.buffer_arenas]
        for replica in replicas:
            name = f"replica{replica}.0"
            attach = AttachReplica(replica=replica, incarnation=0)
            fds = self._line_to_coordinator(name, attach)
            fds += self._exchange(replica, name, num_gradients=prepared.loop.num_gradients)
            own = settings | {"replica": replica}
            self._spawn("replica", name, payload, own, [left[replica], *left, *fds])

    def evaluator(self) -> None:
        prepared = self._prepared
        if prepared.evaluation is None:
            return
        load = {"evaluation": prepared.evaluation, "buffers": prepared.buffers, "best": self._execution.best}
        payload = self._pack({**load, **_model_load(prepared)})
        settings = {
            "shards": self._serving,
            "num_replicas": len(self.buffer_arenas),
            "replica": EVALUATOR,
            "shards_come_back": self._may_return,
        }
        arenas = [arena.fd for arena in self.buffer_arenas]
        fds = self._exchange(EVALUATOR, "evaluator", num_gradients=0)
        self._spawn("evaluator", "evaluator", payload, settings, [*arenas, *fds])

    def _spawn(
        self,
        kind: str,
        name: str,
        payload: Payload,
        settings: dict[str, Any],
        fds: list[int],
        *,
        incarnation: int = 0,
    ) -> None:
        ports: list[int] = []
        if self._tcp is not None:
            settings = settings | {"tcp": self._tcp.settings_of(name)}
            fds = fds + self._tcp.fds_of(name)
            ports = self._tcp.ports_of(name)
        self._roster.spawn(kind, name, payload, settings, fds, incarnation=incarnation, ports=ports)

    def _line_to_coordinator(self, name: str, attach: AttachReplica | AttachShard) -> list[int]:
        """Make a connection with the coordinator; return this end, unless the role connects by itself."""
        if self._tcp is not None:
            return []
        near, far = self._pair()
        self._attachments.append(("coordinator", attach, [far]))
        return [near]

    def _exchange(self, replica: int, name: str, *, num_gradients: int) -> list[int]:
        """Make a connection and shared memory between a worker and each shard; return the worker's ends."""
        fds: list[int] = []
        if self._tcp is not None:
            return fds
        for shard in self._serving:
            plan = ExchangePlan(self._prepared.layout.slices_of(shard), num_gradients)
            near, far = self._pair()
            arena = SharedArena.create(plan.num_bytes)
            self._keep(arena)
            message = AttachWorker(
                replica=replica, partition=0, incarnation=0, name=name, num_gradients=num_gradients
            )
            self._attachments.append((f"shard{shard}", message, [far, arena.fd]))
            self._exchanges.setdefault(shard, []).append((message, arena))
            fds += [near, arena.fd]
        return fds

    def _pair(self) -> tuple[int, int]:
        near, far = Channel.pair()
        self._made += [near, far]
        return near.fileno(), far.fileno()

    def _pack(self, load: dict[str, Any]) -> Payload:
        payload = pack(load, by_value_modules=_user_modules(self._prepared))
        self._made.append(payload)
        return payload


def first_incarnation(ledger: Path, shard: int) -> int:
    """The number of a shard's first start in this start of the run: above all that it ever had.

    >>> first_incarnation(Path("no such directory"), 0)
    0
    """
    prefix = f"shard{shard}-"
    numbers = (path.stem.removeprefix(prefix) for path in ledger.glob(f"{prefix}*.ledger"))
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)


def _model_load(prepared: Prepared) -> dict[str, Any]:
    """The model itself, or the function that makes it and the values of what is not trained."""
    job = prepared.job
    if isinstance(job.model, nn.Module):
        return {"model": prepared.model}
    fixed = {name: value.detach() for name, value in not_trained(prepared.model).items()}
    return {"recipe_for_model": {"function": job.model, "seed": job.seed, "fixed": fixed}}


def _user_modules(prepared: Prepared) -> Sequence[Any]:
    """Modules whose code travels by value: the recipe's own, which a role could not import."""
    recipe = prepared.job.recipe
    return [] if recipe is None else [sys.modules[module_name(recipe)]]
