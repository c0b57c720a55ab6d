"""Starting the roles of a run: what each is sent, and which memory and connections it shares with whom."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from squall.cluster.crew import CrewMemory, edge_bytes
from squall.cluster.first import FirstValues, Taken
from squall.cluster.payload import Payload, pack
from squall.cluster.roster import RoleProcess, Roster
from squall.cluster.tcp import TcpAddresses, TcpPlan
from squall.coordinator.recovery import Inheritance
from squall.model.exchange import ExchangePlan
from squall.shard.events import EVERY_PARTITION
from squall.shard.records import first_incarnation
from squall.training.durability import mode_of
from squall.training.execution import Execution
from squall.training.prepare import Prepared, not_trained
from squall.training.recipe import module_name
from squall.wire.channel import Channel
from squall.wire.control import AttachReplica, AttachShard, AttachWorker, CoordinatorBack, ShardBack
from squall.wire.listener import Listener
from squall.wire.memory import SharedArena

BIG_BYTES = 256 << 20
"""Models below it start all roles at once, which is sooner; from here on memory counts for more."""
EVALUATOR = -1
"""Stands for a replica's number in the shards' books."""


@dataclass(eq=False)
class Started:
    """What was started, and what it takes to start one of the roles again.

    Attributes:
        buffer_arenas: for each replica the memory that it leaves its model's buffers in.
        payload, settings: what every replica was sent.
        durability: as shards are told; None: they do not come back.
        first: what shards make their states of; None: it comes otherwise, or is not needed any more.
        loads: what else each shard was sent, if it may come back.
        kept: where the coordinator listens; where shards do, and the memory that workers share with them, if they may
            come back.
        exchanges: by shard, each worker's ends of that.
        epoch: of the coordinator.
    """

    execution: Execution
    roster: Roster
    tcp: TcpAddresses | None
    buffer_arenas: list[SharedArena] = field(default_factory=list)
    payload: Payload | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    first: FirstValues | None = None
    loads: dict[int, Payload] = field(default_factory=dict)
    kept: list[SharedArena | Listener] = field(default_factory=list)
    exchanges: dict[int, dict[str, tuple[AttachWorker, SharedArena]]] = field(default_factory=dict)
    epoch: int = 0

    @property
    def durability(self) -> float | str | None:
        return mode_of(self.execution.prepared.job.durability)

    def start_shard(self, shard: int, incarnation: int) -> None:
        """Start another life of a shard that was killed, and connect it with all who are there.

        Raises:
            RunError: the zygote cannot.
        """
        starting = _Starting(self)
        try:
            starting.shard(shard, incarnation, is_back=True)
            starting.workers_of(shard)
            starting.connect()
        finally:
            starting.close()

    def start_replica(self, replica: int, incarnation: int) -> None:
        """Start another life of a replica; it joins those that are at work.

        Raises:
            RunError: the zygote cannot.
        """
        starting = _Starting(self)
        try:
            starting.replica(replica, incarnation)
            starting.connect()
        finally:
            starting.close()

    def start_evaluator(self, incarnation: int) -> None:
        """Start another life of the evaluator.

        Raises:
            RunError: the zygote cannot.
        """
        starting = _Starting(self)
        try:
            starting.evaluator(incarnation)
            starting.connect()
        finally:
            starting.close()

    def start_coordinator(self, inheritance: Inheritance) -> None:
        """Start a coordinator that follows one that was lost, and connect it with all who are there.

        Raises:
            RunError: the zygote cannot.
        """
        self.epoch = inheritance.epoch
        starting = _Starting(self)
        try:
            starting.coordinator(inheritance)
            starting.followers()
            starting.connect()
        finally:
            starting.close()

    def call_to_coordinator(self) -> None:
        """Over TCP, have all call the coordinator that is serving now."""
        if self.tcp is not None and self.epoch:
            for role in self.followers():
                self.roster.send(role, CoordinatorBack(epoch=self.epoch))

    def followers(self) -> list[RoleProcess]:
        """Who talks to the coordinator, and is there."""
        leads = [role for role in self.roster.of_kind("replica") if role.name.endswith(".0")]
        return [role for role in (*self.roster.of_kind("shard"), *leads) if not role.is_gone]

    def buffer_memories(self) -> list[Tensor]:
        """The arenas as `BufferSpace` reads them."""
        space = self.execution.prepared.buffers
        attached = (
            SharedArena.attach(os.dup(arena.fd), space.arena_bytes, writable=False)
            for arena in self.buffer_arenas
        )
        return [space.memory(arena) for arena in attached]

    def close(self) -> None:
        for made in (self.payload, self.first, *self.loads.values(), *self.buffer_arenas, *self.kept):
            if made is not None:
                made.close()


def start_roles(execution: Execution, roster: Roster, tcp: TcpPlan | None = None) -> Started:
    """Start every role and connect them.

    Args:
        tcp: how they are to connect; None: by shared memory.

    Returns:
        What the caller needs to start replicas again; to be closed by it.
    """
    started = Started(execution, roster, None if tcp is None else TcpAddresses(tcp))
    starting = _Starting(started)
    try:
        starting.listen()
        starting.shards()
        starting.coordinator()
        starting.replicas()
        starting.evaluator()
        starting.connect()
        return started
    except BaseException:
        started.close()
        raise
    finally:
        starting.close()


class _Starting:
    """Descriptors that are on their way to roles, and are closed here when all have theirs."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._execution = started.execution
        self._tcp = started.tcp
        self._prepared = started.execution.prepared
        self._roster = started.roster
        self._made: list[Channel | SharedArena | Payload | Listener | CrewMemory] = []
        self._taken: Taken | None = None
        self._attachments: list[tuple[str, Any, list[int]]] = []  # to be sent: to whom, what, descriptors

    def listen(self) -> None:
        if self._tcp is not None:
            self._started.kept.append(self._tcp.listen("coordinator"))
            for shard in range(self._prepared.layout.num_shards):
                self._keep(self._tcp.listen(f"shard{shard}"))

    def _keep(self, made: SharedArena | Listener) -> None:
        """Have it closed when all roles have their own; with shards that may come back, at the end of the run."""
        (self._made if self._started.durability is None else self._started.kept).append(made)

    def close(self) -> None:
        for made in self._made:
            made.close()
        if self._taken is not None:
            self._taken.close()

    def connect(self) -> None:
        """Hand shards, coordinator and workers their ends of all connections."""
        for name, message, fds in self._attachments:
            self._roster.send(self._roster.roles[name], message, fds)

    def shards(self) -> None:
        """Start all shards; those of a big model make their slices before anything else that takes memory is made."""
        started, first, layout = self._started, self._prepared.first, self._prepared.layout
        if first.values is not None:
            started.first = FirstValues(first.values)
        shards = range(layout.num_shards)
        for shard in shards:
            started.loads[shard] = self._shard_load(shard)
        first.let_go()
        is_big = layout.space.num_bytes >= BIG_BYTES
        taken = self._taken = Taken() if is_big else None
        for shard in shards:
            self.shard(shard, first_incarnation(self._execution.directory.ledger, shard), is_back=False)
        if taken is not None:
            taken.wait()
            taken.close()
            self._taken = None
        if started.durability is None:
            self._drop_first()

    def _drop_first(self) -> None:
        """The shards started with it, and none of them comes back."""
        started = self._started
        for given in (started.first, *started.loads.values()):
            if given is not None:
                given.close()
        started.first, started.loads = None, {}

    def _shard_load(self, shard: int) -> Payload:
        prepared = self._prepared
        numbers = [spec.slice for spec in prepared.layout.slices_of(shard)]
        load = {
            "layout": prepared.layout,
            "rule": prepared.rule,
            **self._states_load(shard),
            "books": tuple(prepared.books[number] for number in numbers),
        }
        return pack(load, by_value_modules=_user_modules(prepared))

    def shard(self, shard: int, incarnation: int, *, is_back: bool) -> None:
        prepared, directory = self._prepared, self._execution.directory
        settings = {
            "shard": shard,
            "incarnation": incarnation,
            "directory": str(directory.path),
            "began": self._execution.clock.began,
            "record": prepared.job.record,
            "durability": self._started.durability,
            "is_back": is_back,
        }
        fds = []
        if (first := self._started.first) is not None:
            settings |= first.settings
            fds.append(first.fd)
        if self._taken is not None:
            settings["tells_taken"] = True
            fds.append(self._taken.fd)
        fds += self._line_to_coordinator(f"shard{shard}", AttachShard(shard=shard))
        load = self._started.loads[shard]
        self._spawn("shard", f"shard{shard}", load, settings, fds, incarnation=incarnation)

    def _states_load(self, shard: int) -> dict[str, Any]:
        """A shard's states, if the run goes on; of a deferred model that starts afresh, what makes it."""
        if self._prepared.first.states is not None:
            return {"states": self._prepared.states_of(shard)}
        if self._prepared.first.values is not None:
            return {}
        return {"recipe_for_states": {"function": self._prepared.job.model, "seed": self._prepared.job.seed}}

    def workers_of(self, shard: int) -> None:
        """Connect a shard that has come back with the workers that share memory with it."""
        for name, (attach, arena) in self._started.exchanges.get(shard, {}).items():
            if self._roster.roles[name].is_gone:
                continue
            near, far = self._pair()
            self._attachments.append((f"shard{shard}", attach, [far, arena.fd]))
            self._attachments.append((name, ShardBack(shard=shard), [near]))

    def coordinator(self, inheritance: Inheritance | None = None) -> None:
        prepared = self._prepared
        settings = {
            "began": self._execution.clock.began,
            "num_replicas": prepared.job.replicas,
            "num_shards": prepared.layout.num_shards,
            "max_staleness": prepared.job.strategy.max_staleness,
        }
        load = {"plan": prepared.plan, "settled": prepared.settled, "rhythm": prepared.rhythm}
        load["inheritance"] = inheritance
        payload = self._pack(load)
        self._spawn("coordinator", "coordinator", payload, settings, [], incarnation=self._started.epoch)

    def followers(self) -> None:
        """Over shared memory, connect a coordinator that follows one that was lost with all who are there."""
        for role in self._started.followers() if self._tcp is None else ():
            number = self._roster.number_of(role)
            attach = (
                AttachShard(shard=number)
                if role.kind == "shard"
                else AttachReplica(replica=number, incarnation=role.incarnation)
            )
            fds = self._line_to_coordinator(role.name, attach)
            self._attachments.append((role.name, CoordinatorBack(epoch=self._started.epoch), fds))

    def replicas(self) -> None:
        prepared, started = self._prepared, self._started
        model = _model_load(prepared)
        if prepared.cut is not None:
            edge_bytes(prepared)  # compiles what all workers are sent
        task = replace(prepared.task(model.pop("model", None)), value=None)
        load = {"task": task, "loop": prepared.loop, "buffers": prepared.buffers, **model}
        started.payload = pack(load, by_value_modules=_user_modules(prepared), hollow=prepared.hollow)
        replicas = range(prepared.job.replicas)
        started.settings = {
            "threads": prepared.threads,
            "num_replicas": len(replicas),
            "shards_come_back": started.durability is not None,
        }
        started.buffer_arenas += [SharedArena.create(prepared.buffers.arena_bytes) for _ in replicas]
        for replica in replicas:
            self.replica(replica, incarnation=0)

    def replica(self, replica: int, incarnation: int) -> None:
        """Start all workers of a replica."""
        crew = None if self._prepared.cut is None else CrewMemory(self._prepared)
        if crew is not None:
            self._made.append(crew)
        for partition in range(self._prepared.job.num_partitions):
            self._worker(replica, partition, incarnation, crew)

    def _worker(self, replica: int, partition: int, incarnation: int, crew: CrewMemory | None) -> None:
        started = self._started
        assert started.payload is not None
        name = f"replica{replica}.{partition}"
        serving = list(self._prepared.layout.shards_of(partition))
        settings = started.settings | {"replica": replica, "incarnation": incarnation, "shards": serving}
        fds: list[int] = []
        if crew is not None:
            settings |= {"partition": partition, "colleagues": crew.num_bytes_of(partition)}
            fds += crew.fds_of(partition)
        if not partition:
            left = [arena.fd for arena in started.buffer_arenas]
            attach = AttachReplica(replica=replica, incarnation=incarnation)
            fds += [left[replica], *left, *self._line_to_coordinator(name, attach)]
        fds += self._exchange(
            replica,
            name,
            partition=partition,
            num_gradients=self._prepared.loop.num_gradients,
            incarnation=incarnation,
        )
        self._spawn("replica", name, started.payload, settings, fds, incarnation=incarnation)

    def evaluator(self, incarnation: int = 0) -> None:
        prepared = self._prepared
        if prepared.evaluation is None:
            return
        load = {"evaluation": prepared.evaluation, "buffers": prepared.buffers, "best": self._execution.best}
        payload = self._pack({**load, **_model_load(prepared)})
        settings = {
            "shards": list(prepared.layout.shards_of()),
            "num_replicas": prepared.job.replicas,
            "replica": EVALUATOR,
            "incarnation": incarnation,
            "shards_come_back": self._started.durability is not None,
        }
        arenas = [arena.fd for arena in self._started.buffer_arenas]
        fds = self._exchange(
            EVALUATOR,
            "evaluator",
            partition=EVERY_PARTITION,
            num_gradients=0,
            incarnation=incarnation,
        )
        self._spawn("evaluator", "evaluator", payload, settings, [*arenas, *fds], incarnation=incarnation)

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
        settings = settings | {"epoch": self._started.epoch}
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

    def _exchange(
        self, replica: int, name: str, *, partition: int, num_gradients: int, incarnation: int = 0
    ) -> list[int]:
        """Make a connection and shared memory between a worker and each of its shards; return the worker's ends."""
        fds: list[int] = []
        if self._tcp is not None:
            return fds
        layout, own = self._prepared.layout, None if partition == EVERY_PARTITION else partition
        for shard in layout.shards_of(own):
            plan = ExchangePlan(layout.slices_of(shard, own), num_gradients)
            near, far = self._pair()
            arena = self._arena(shard, name, plan)
            message = AttachWorker(
                replica=replica,
                partition=partition,
                incarnation=incarnation,
                name=name,
                num_gradients=num_gradients,
            )
            self._attachments.append((f"shard{shard}", message, [far, arena.fd]))
            if self._started.durability is not None:
                self._started.exchanges.setdefault(shard, {})[name] = (message, arena)
            fds += [near, arena.fd]
        return fds

    def _arena(self, shard: int, name: str, plan: ExchangePlan) -> SharedArena:
        """Memory for a worker and a shard; that of an earlier life of the worker is not needed any more."""
        if (before := self._started.exchanges.get(shard, {}).get(name)) is not None:
            self._started.kept.remove(before[1])
            before[1].close()
        arena = SharedArena.create(plan.num_bytes)
        self._keep(arena)
        return arena

    def _pair(self) -> tuple[int, int]:
        near, far = Channel.pair()
        self._made += [near, far]
        return near.fileno(), far.fileno()

    def _pack(self, load: dict[str, Any]) -> Payload:
        payload = pack(load, by_value_modules=_user_modules(self._prepared), hollow=self._prepared.hollow)
        self._made.append(payload)
        return payload


def _model_load(prepared: Prepared) -> dict[str, Any]:
    """The model itself, without values of what is trained, or the function that makes it and the values of what is not trained."""
    job = prepared.job
    if isinstance(job.model, nn.Module):
        return {"model": prepared.model}
    fixed = {name: value.detach() for name, value in not_trained(prepared.model).items()}
    return {"recipe_for_model": {"function": job.model, "seed": job.seed, "fixed": fixed}}


def _user_modules(prepared: Prepared) -> Sequence[Any]:
    """Modules whose code travels by value: the recipe's own, which a role could not import."""
    recipe = prepared.job.recipe
    return [] if recipe is None else [sys.modules[module_name(recipe)]]
