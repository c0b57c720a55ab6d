"""One run in processes of this machine, as its launcher sees it: start the roles, watch them, end them.

The launcher makes all connections and all shared memory, and hands each role its ends when it starts it. It
sees no gradient and no parameter; it hears what happened from the coordinator, and who died from the zygote.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from squall.blocks import Block
from squall.cluster.payload import Payload, pack
from squall.cluster.zygote import Exit, Zygote
from squall.errors import ConfigError, DivergedError, LostError, RunError, SquallError, UserCodeError
from squall.model.buffers import merged
from squall.model.exchange import ExchangePlan
from squall.observe.events import Evaluated, Event, Joined, Left, Link, Redone, Refused
from squall.training.execution import Ending, Execution, TrafficCount
from squall.training.prepare import not_trained
from squall.wire.channel import Channel
from squall.wire.connection import Connection
from squall.wire.control import (
    AttachReplica,
    AttachShard,
    AttachWorker,
    Closings,
    Counted,
    DivergedRun,
    EndedRun,
    EvaluateNow,
    Failed,
    Finish,
    Happened,
    LinkCount,
    Measured,
    Ready,
    Saved,
    SaveSlices,
    StopRun,
    Waiting,
)
from squall.wire.memory import SharedArena

POLL_S = 0.05
LEAVE_S = 5.0
SAVE_S = 600.0
EVALUATOR = -1
"""Stands for a replica number in the shards' books."""


@dataclass(eq=False)
class RoleProcess:
    """A role that was started, and the connection to it."""

    name: str
    kind: str
    pid: int
    connection: Connection
    incarnation: int
    is_gone: bool = False


@dataclass(eq=False)
class _Watch:
    """What the launcher has heard so far."""

    why: str | None = None
    minibatches: int = 0
    error: SquallError | None = None
    is_fatal: bool = False
    """The error leaves nothing that could be saved."""
    waits: tuple[str, ...] = ()
    saved: set[str] = field(default_factory=set)
    is_evaluating: bool = False
    ends: list[str] = field(default_factory=list)
    """How replicas ended, in words."""


class Launch:
    """Carries out one `Execution`."""

    def __init__(self, execution: Execution, zygote: Zygote) -> None:
        self._execution = execution
        self._prepared = execution.prepared
        self._zygote = zygote
        self._roles: dict[str, RoleProcess] = {}
        self._watch = _Watch()
        self._epoll = select.epoll()
        self._by_fd: dict[int, RoleProcess] = {}
        self._counts: dict[str, tuple[LinkCount, ...]] = {}
        self._rates = _Rates()
        self._buffer_arenas: list[SharedArena] = []
        self._is_stopping = False
        layout = self._prepared.layout
        self._num_shards = layout.num_shards
        self._serving = [shard for shard in range(layout.num_shards) if layout.slices_of(shard)]

    def run(self) -> Ending:
        try:
            self._start()
            self._follow()
            if not self._watch.is_fatal:
                self._save()
            return self._end()
        finally:
            self._kill_rest()
            self._epoll.close()

    # Starting -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        job = self._prepared.job
        payloads = self._pack()
        try:
            self._epoll.register(self._zygote.fileno(), select.EPOLLIN)
            lines: dict[str, list[tuple[AttachShard | AttachReplica | AttachWorker, list[int]]]] = {}
            with _Descriptors() as made:
                for shard in range(self._num_shards):
                    near, far = made.pair()
                    self._spawn_shard(shard, payloads[f"shard{shard}"], near)
                    lines.setdefault("coordinator", []).append((AttachShard(shard=shard), [far]))
                self._spawn(
                    "coordinator", "coordinator", payloads["coordinator"], self._coordinator_settings(), []
                )
                for replica in range(job.replicas):
                    self._spawn_replica(replica, payloads["replica"], made, lines)
                if self._prepared.evaluation is not None:
                    self._spawn_evaluator(payloads["evaluator"], made, lines)
                for name, attachments in lines.items():
                    for message, fds in attachments:
                        self._send(self._roles[name], message, fds)
        finally:
            for payload in set(payloads.values()):
                payload.close()
        self._write_processes()

    def _pack(self) -> dict[str, Payload]:
        """Code, model and data, each packed once for all roles that need it."""
        prepared, job = self._prepared, self._prepared.job
        model = self._model_load()
        payloads = {
            "coordinator": pack({"plan": prepared.plan, "settled": prepared.settled}),
            "replica": _pack_user(
                {"task": prepared.task(model.pop("model", None)), "loop": prepared.loop, **model}, job
            ),
        }
        if prepared.evaluation is not None:
            payloads["evaluator"] = _pack_user({"evaluation": prepared.evaluation, **self._model_load()}, job)
        for shard in range(self._num_shards):
            numbers = [spec.slice for spec in prepared.layout.slices_of(shard)]
            load = {
                "layout": prepared.layout,
                "rule": prepared.rule,
                "states": [prepared.states[number] for number in numbers],
                "books": tuple(prepared.books[number] for number in numbers),
            }
            payloads[f"shard{shard}"] = _pack_user(load, job)
        return payloads

    def _model_load(self) -> dict[str, Any]:
        """The model itself, or the function that makes it and what is not trained."""
        job = self._prepared.job
        if isinstance(job.model, nn.Module):
            return {"model": self._prepared.model}
        fixed = {name: value.detach() for name, value in not_trained(self._prepared.model).items()}
        return {"recipe_for_model": {"function": job.model, "seed": job.seed, "fixed": fixed}}

    def _spawn_shard(self, shard: int, payload: Payload, coordinator: int) -> None:
        settings = {
            "shard": shard,
            "incarnation": self._prepared.starts,
            "directory": str(self._execution.directory.path),
            "began": self._execution.began,
            "record": self._prepared.job.record,
        }
        self._spawn(
            "shard", f"shard{shard}", payload, settings, [coordinator], incarnation=self._prepared.starts
        )

    def _coordinator_settings(self) -> dict[str, Any]:
        return {
            "began": self._execution.began,
            "num_replicas": self._prepared.job.replicas,
            "num_shards": self._num_shards,
        }

    def _spawn_replica(
        self, replica: int, payload: Payload, made: "_Descriptors", lines: dict[str, list[Any]]
    ) -> None:
        name = f"replica{replica}.0"
        near, far = made.pair()
        arena = SharedArena.create(self._prepared.buffers.arena_bytes)
        self._buffer_arenas.append(arena)
        attached, fds = self._exchange(replica, name, made, has_gradient=True)
        settings = {"threads": self._prepared.threads, "shards": self._serving}
        self._spawn("replica", name, payload, settings, [near, arena.fd, *fds])
        lines["coordinator"].append((AttachReplica(replica=replica, incarnation=0), [far]))
        for shard, attachment in attached.items():
            lines.setdefault(f"shard{shard}", []).append(attachment)

    def _spawn_evaluator(self, payload: Payload, made: "_Descriptors", lines: dict[str, list[Any]]) -> None:
        attached, fds = self._exchange(EVALUATOR, "evaluator", made, has_gradient=False)
        settings = {"shards": self._serving, "num_replicas": len(self._buffer_arenas)}
        arenas = [arena.fd for arena in self._buffer_arenas]
        self._spawn("evaluator", "evaluator", payload, settings, [*arenas, *fds])
        for shard, attachment in attached.items():
            lines.setdefault(f"shard{shard}", []).append(attachment)

    def _exchange(
        self, replica: int, name: str, made: "_Descriptors", *, has_gradient: bool
    ) -> tuple[dict[int, tuple[AttachWorker, list[int]]], list[int]]:
        """A connection and shared memory between a worker and each shard: the shards' ends, and the worker's."""
        attached: dict[int, tuple[AttachWorker, list[int]]] = {}
        fds: list[int] = []
        for shard in self._serving:
            plan = ExchangePlan(self._prepared.layout.slices_of(shard), has_gradient)
            near, far = made.pair()
            arena = made.arena(plan.num_bytes)
            fds += [near, arena]
            message = AttachWorker(
                replica=replica, partition=0, incarnation=0, name=name, has_gradient=has_gradient
            )
            attached[shard] = (message, [far, arena])
        return attached, fds

    def _spawn(
        self,
        kind: str,
        name: str,
        payload: Payload,
        settings: Mapping[str, Any],
        fds: Sequence[int],
        *,
        incarnation: int = 0,
    ) -> None:
        ours, theirs = Channel.pair()
        told = {"role": kind, "name": name, "header": payload.header.hex(), **settings}
        log = os.open(self._execution.directory.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            pid = self._zygote.spawn(
                name,
                "squall.cluster.role:main",
                json.dumps(told).encode(),
                [payload.fd, theirs.fileno(), *fds],
                log=log,
            )
        finally:
            os.close(log)
            theirs.close()
        role = RoleProcess(name, kind, pid, Connection(ours, name), incarnation)
        self._roles[name] = role
        self._by_fd[ours.fileno()] = role
        self._epoll.register(ours.fileno(), select.EPOLLIN)

    def _write_processes(self) -> None:
        host = socket.gethostname()
        rows = [
            {
                "role": role.kind,
                "name": role.name,
                "host": host,
                "pid": role.pid,
                "incarnation": role.incarnation,
                "ports": [],
            }
            for role in self._roles.values()
        ]
        zygote = {"role": "zygote", "name": "zygote", "host": host, "pid": self._zygote.pid, "incarnation": 0}
        self._execution.directory.write_json(
            self._execution.directory.processes, [*rows, {**zygote, "ports": []}]
        )

    # Following ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Until the coordinator says that nothing more will be pushed, or the run cannot go on."""
        recorder = self._execution.recorder
        while self._watch.why is None and not self._watch.is_fatal:
            self._hear(POLL_S)
            self._stop_if_asked()
            recorder.tick(self._execution.now(), waits=self._watch.waits, links=self._rates.links)
            if not self._watch.is_evaluating and "evaluator" in self._roles and recorder.is_evaluation_due():
                self._evaluate()

    def _stop_if_asked(self) -> None:
        if self._is_stopping:
            return
        limit = self._prepared.job.time_s
        why = self._execution.may_go_on()
        if why is None and limit is not None and self._execution.now() - self._prepared.time_s >= limit:
            why = "time"
        if why is None and self._watch.error is not None:
            why = "failed"
        if why is not None:
            self._is_stopping = True
            self._send(self._roles["coordinator"], StopRun(why=why))

    def _evaluate(self) -> None:
        recorder = self._execution.recorder
        self._watch.is_evaluating = True
        message = EvaluateNow(epoch=recorder.epoch, minibatches=recorder.meter.minibatches)
        self._send(self._roles["evaluator"], message)

    def _hear(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            if (role := self._by_fd.get(fd)) is not None:
                self._read(role)
        for ended in self._zygote.exits():
            self._on_exit(ended)

    def _read(self, role: RoleProcess) -> None:
        try:
            received = role.connection.receive()
        except SquallError as error:
            self._fail(
                LostError(reason=f"{role.name} said something that is no message: {error}"), is_fatal=True
            )
            received = None
        if received is None:
            self._epoll.unregister(role.connection.fileno())
            del self._by_fd[role.connection.fileno()]
            return
        self._on_message(role, received[0])

    def _on_message(self, role: RoleProcess, message: Any) -> None:
        recorder, watch = self._execution.recorder, self._watch
        match message:
            case Closings(blocks=blocks):
                for block in blocks:
                    recorder.closed(
                        block.time_s,
                        role=f"replica{block.replica}.0",
                        block=block.block,
                        examples=block.examples,
                        loss_sum=block.loss_sum,
                        staleness=block.staleness,
                    )
            case Happened():
                recorder.happened(_event(message))
            case Waiting(waits=waits):
                watch.waits = waits
            case Counted(links=links):
                self._counts[role.name] = links
                self._rates.update(self._execution.now(), self._counts)
            case Measured():
                watch.is_evaluating = False
                recorder.happened(self._evaluated(message))
            case DivergedRun(what=what, tensor=tensor, number=number, block=block):
                self._fail(self._diverged(what, tensor, number, block), is_fatal=True)
            case EndedRun(why=why, minibatches=minibatches):
                watch.why, watch.minibatches = why, minibatches
            case Saved():
                watch.saved.add(role.name)
            case Failed():
                self._fail(_error(message))
            case Ready():
                if role.kind != "replica":
                    recorder.serving(role.name)

    def _evaluated(self, message: Measured) -> Evaluated:
        return Evaluated(
            time_s=self._execution.now(),
            epoch=message.epoch,
            minibatches=message.minibatches,
            metrics=dict(zip(message.names, message.values, strict=True)),
            versions=message.versions,
        )

    def _diverged(self, what: str, tensor: str, number: int, block: Block) -> DivergedError:
        name = self._prepared.layout.space.tensors[number].name if number >= 0 else tensor
        return DivergedError(tensor=name, step=str(block), what=what)

    def _fail(self, error: SquallError, *, is_fatal: bool = False) -> None:
        """Remember the first cause; what follows from it is not told again."""
        if self._watch.error is None:
            self._watch.error = error
            self._watch.is_fatal = is_fatal

    def _on_exit(self, ended: Exit) -> None:
        role = self._roles.get(ended.name)
        if role is None or role.pid != ended.pid:
            return
        self._drain(role)
        role.is_gone = True
        how = _in_words(ended.returncode)
        if self._watch.why is not None:
            return
        now = self._execution.now()
        match role.kind:
            case "replica":
                self._watch.ends.append(f"{role.name} {how}")
                if ended.returncode != 0:
                    self._execution.recorder.happened(Left(time_s=now, role=role.name, why=how))
                if all(other.is_gone for other in self._roles.values() if other.kind == "replica"):
                    reason = f"no replica is left: {', '.join(self._watch.ends)}. Their logs are in {self._execution.directory.logs}."
                    self._fail(LostError(reason=reason))
            case "evaluator":
                self._execution.recorder.happened(Left(time_s=now, role=role.name, why=how))
                self._watch.is_evaluating = True  # and stays so: nobody is left to ask
            case _:
                reason = f"{role.name} {how}, and the run cannot go on without it. Its log is in {self._execution.directory.logs}."
                self._fail(LostError(reason=reason), is_fatal=True)

    def _drain(self, role: RoleProcess) -> None:
        """Hear what it said before it ended: a cause comes before its effect."""
        while role.connection.fileno() in self._by_fd:
            self._read(role)

    def _send(self, role: RoleProcess, message: Any, fds: Sequence[int] = ()) -> None:
        with contextlib.suppress(ConnectionError):  # its end is told by the zygote
            role.connection.send(message, fds)

    # Ending ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Have every shard write its slices."""
        shards = [role for role in self._roles.values() if role.kind == "shard"]
        for role in shards:
            self._send(role, SaveSlices(name=self._execution.checkpoint))
        until = time.monotonic() + SAVE_S
        while (
            missing := [role for role in shards if role.name not in self._watch.saved]
        ) and not self._watch.is_fatal:
            if any(role.is_gone for role in missing) or time.monotonic() > until:
                names = ", ".join(role.name for role in missing)
                self._fail(LostError(reason=f"{names} did not write its slices"), is_fatal=True)
            self._hear(POLL_S)

    def _end(self) -> Ending:
        """Let every role finish, and give up those that do not."""
        for role in self._roles.values():
            if role.kind != "replica":
                self._send(role, Finish())
        until = time.monotonic() + LEAVE_S
        while time.monotonic() < until and any(not role.is_gone for role in self._roles.values()):
            self._hear(POLL_S)
        if self._watch.is_fatal:
            assert self._watch.error is not None
            raise self._watch.error
        assert self._watch.why is not None
        return Ending(
            why=self._watch.why,
            buffers=self._left_buffers(),
            traffic=self._traffic(),
            minibatches=self._watch.minibatches,
            error=self._watch.error,
        )

    def _left_buffers(self) -> dict[str, Tensor]:
        space = self._prepared.buffers
        sets = [space.read(space.memory(arena)) for arena in self._buffer_arenas]
        return merged([values for values in sets if values])

    def _traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        total = TrafficCount()
        for links in self._counts.values():
            for link in links:
                total.add(link.sender, link.receiver, link.num_bytes, link.messages)
        return total.total()

    def _kill_rest(self) -> None:
        """Whatever happened, leave no process behind."""
        for process in self._zygote.roles():
            if any(role.pid == process.pid for role in self._roles.values()):
                process.kill(signal.SIGKILL)
        until = time.monotonic() + LEAVE_S
        while any(not role.is_gone for role in self._roles.values()) and time.monotonic() < until:
            self._gather_exits()
        for role in self._roles.values():
            role.connection.close()
        for arena in self._buffer_arenas:
            arena.close()

    def _gather_exits(self) -> None:
        select.select([self._zygote.fileno()], [], [], POLL_S)
        for ended in self._zygote.exits():
            for role in self._roles.values():
                role.is_gone |= role.pid == ended.pid


class _Descriptors:
    """Descriptors made for roles; our copies are closed when all roles have theirs."""

    def __init__(self) -> None:
        self._made: list[Channel | SharedArena] = []

    def pair(self) -> tuple[int, int]:
        near, far = Channel.pair()
        self._made += [near, far]
        return near.fileno(), far.fileno()

    def arena(self, num_bytes: int) -> int:
        arena = SharedArena.create(num_bytes)
        self._made.append(arena)
        return arena.fd

    def __enter__(self) -> "_Descriptors":
        return self

    def __exit__(self, *exc: object) -> None:
        for made in self._made:
            made.close()


class _Rates:
    """Bytes per second of each link, from counts that roles tell now and then."""

    def __init__(self) -> None:
        self.links: tuple[Link, ...] = ()
        self._at = 0.0
        self._before: dict[tuple[str, str], int] = {}

    def update(self, now: float, counts: Mapping[str, tuple[LinkCount, ...]]) -> None:
        if now - self._at < 1.0:
            return
        totals: dict[tuple[str, str], int] = {}
        for links in counts.values():
            for link in links:
                key = (link.sender, link.receiver)
                totals[key] = totals.get(key, 0) + link.num_bytes
        seconds = now - self._at
        self.links = tuple(
            Link(
                sender=key[0], receiver=key[1], bytes_per_second=(total - self._before.get(key, 0)) / seconds
            )
            for key, total in totals.items()
        )
        self._at, self._before = now, totals


def _pack_user(load: dict[str, Any], job: Any) -> Payload:
    """Pack what holds the user's own code; a recipe's module travels by value."""
    import sys

    modules = (
        [] if job.recipe is None else [sys.modules[name] for name in _modules_of(job) if name in sys.modules]
    )
    return pack(load, by_value_modules=modules)


def _modules_of(job: Any) -> list[str]:
    from squall.training.recipe import module_name

    return [module_name(job.recipe)]


def _event(told: Happened) -> Event:
    match told.kind:
        case "Joined":
            return Joined(time_s=told.time_s, role=f"{told.role}.0", incarnation=told.number)
        case "Left":
            return Left(time_s=told.time_s, role=f"{told.role}.0", why=told.why)
        case "Redone":
            assert told.block is not None
            return Redone(
                time_s=told.time_s,
                block=told.block,
                attempt=told.number,
                replica=int(told.role),
                why=told.why,
            )
        case "Refused":
            assert told.block is not None
            return Refused(time_s=told.time_s, block=told.block, why=told.why)
    raise RunError(reason=f"the coordinator told of a {told.kind}, which is unknown here")


def _error(told: Failed) -> SquallError:
    if told.kind == "user":
        return UserCodeError(
            role=told.role, step=told.step, line=told.line, error=told.error, traceback=told.traceback
        )
    return RunError(reason=f"{told.role}: {told.error}")


def _in_words(returncode: int | None) -> str:
    if returncode is None:
        return "is gone"
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else str(-returncode)
        return f"was killed by {name}"
    return f"exited with {returncode}"
