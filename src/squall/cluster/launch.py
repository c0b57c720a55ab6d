"""One run in processes of this machine, as its launcher sees it: start the roles, follow them, end them.

The launcher sees no gradient and no parameter. It hears what was done from the coordinator, what passed the
connections from the shards, and who has ended from the zygote.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from squall.blocks import BlockSet
from squall.cluster import director
from squall.cluster.director import DirectorBook
from squall.cluster.exits import in_words, is_death
from squall.cluster.restarts import NEVER, Again, RestartBook, Restarts
from squall.cluster.roster import RoleProcess, Roster
from squall.cluster.starting import Started, start_roles
from squall.cluster.tcp import TcpPlan
from squall.cluster.upsets import Upsets
from squall.cluster.zygote import Exit, Zygote
from squall.coordinator.events import PROCESS_GONE
from squall.errors import (
    DivergedError,
    LostError,
    NoReplicaError,
    RemoteProtocolError,
    RunError,
    SquallError,
    UserCodeError,
)
from squall.observe.events import Evaluated, Event, Joined, Left, Link, Recovered, Redone, Refused, Unkept
from squall.training.execution import Ending, Execution, TrafficCount
from squall.wire.control import (
    BuffersCopied,
    Closings,
    Counted,
    CutReached,
    DivergedRun,
    Durability,
    EndedRun,
    EvaluateNow,
    Failed,
    Finish,
    FoundClosed,
    Happened,
    LinkCount,
    Measured,
    Ready,
    Saved,
    SaveSlices,
    StopRun,
    TakeCheckpoint,
    Unheard,
    Waiting,
)

POLL_S = 0.05
LEAVE_S = 5.0
ALONE_S = 1.0
SAVE_S = 600.0


@dataclass(eq=False)
class Heard:
    """What the launcher has heard so far.

    Attributes:
        why, settled: how the coordinator says that it ended, and what is settled.
        error: the first cause of a failure; what follows from it is not told again.
        is_fatal: there is nothing left that could be saved.
        waits: who waits for whom, in words.
        is_evaluating: the evaluator is busy, or gone.
        ends: by replica, how it ended the last time, in words.
        lost: roles, with the incarnation, that were told to be gone.
        joined: by replica, the newest incarnation that has joined.
        counts: by role, what passed its connections.
        refused: by role, how many connections it refused.
    """

    why: str | None = None
    settled: BlockSet = field(default_factory=BlockSet)
    error: SquallError | None = None
    is_fatal: bool = False
    waits: tuple[str, ...] = ()
    is_evaluating: bool = False
    ends: dict[str, str] = field(default_factory=dict)
    lost: set[tuple[str, int]] = field(default_factory=set)
    joined: dict[str, int] = field(default_factory=dict)
    counts: dict[str, tuple[LinkCount, ...]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def fail(self, error: SquallError, *, is_fatal: bool = False) -> None:
        if self.error is None:
            self.error, self.is_fatal = error, is_fatal


class Launch:
    """Carries out one `Execution` with the roles of one `Roster`.

    Args:
        tcp: how roles connect; None: by shared memory.
        restarts: of replicas that die.
    """

    def __init__(
        self,
        execution: Execution,
        zygote: Zygote,
        tcp: TcpPlan | None = None,
        restarts: Restarts = NEVER,
    ) -> None:
        self._execution = execution
        self._tcp = tcp
        self._recorder = execution.recorder
        self._roster = Roster(zygote, execution.directory.logs)
        self._heard = Heard()
        self._rates = Rates()
        self._checkpoints = execution.checkpoints
        self._last = ""  # the name of the last checkpoint
        self._started: Started | None = None
        self._restarts = RestartBook(restarts)
        self._upsets = Upsets((), 0, self._roster, self._recorder)  # until the roles are there
        self._buffer_memories: list[Tensor] = []
        self._director = DirectorBook(time.monotonic())
        self._first_lives: dict[str, int] = {}  # of shards, in this start of the run
        self._stopped_because = ""
        self._is_stopping = self._is_ending = False
        self._alone_since: float | None = None

    def run(self) -> Ending:
        try:
            self._started = start_roles(self._execution, self._roster, self._tcp)
            self._buffer_memories = self._started.buffer_memories()
            self._describe()
            self._director.heard(time.monotonic())
            for shard in self._roster.of_kind("shard"):
                self._first_lives[shard.name] = shard.incarnation
                self._director.serves(self._roster.number_of(shard), shard.incarnation)
            self._upsets = self._new_upsets()
            self._follow()
            self._upsets.calm(self._execution.now())
            self._save()
            return self._end()
        finally:
            self._roster.close()
            if self._started is not None:
                self._started.close()

    def _new_upsets(self) -> Upsets:
        job = self._execution.prepared.job
        return Upsets(job.faults, job.seed, self._roster, self._recorder)

    def _describe(self) -> None:
        directory = self._execution.directory
        directory.write_json(directory.processes, self._roster.describe())

    def _follow(self) -> None:
        """Until the coordinator says that nothing more will be pushed, or the run cannot go on."""
        while self._heard.why is None and not self._heard.is_fatal:
            self._hear()
            self._replace_if_silent()
            self._upsets.tick(self._execution.now(), self._execution.prepared.time_s)
            self._fail_if_alone()
            self._stop_if_asked()
            self._evaluate_if_due()
            self._checkpoint_if_due()
            now = self._execution.now()
            waits = self._heard.waits + self._restarts.waits(now)
            self._recorder.tick(now, waits=waits, links=self._rates.links)

    def _stop_if_asked(self) -> None:
        if self._is_stopping or (why := self._reason_to_stop()) is None:
            return
        self._is_stopping, self._stopped_because = True, why
        self._restarts.forget([role.name for role in self._roster.of_kind("replica")])
        self._roster.send(self._roster.roles["coordinator"], StopRun(why=why))

    def _restart_if_due(self) -> None:
        for again in self._restarts.due(self._execution.now()):
            assert self._started is not None
            role = self._roster.roles[again.role]
            number = 0 if role.kind == "coordinator" else self._roster.number_of(role)
            try:
                if role.kind == "shard":
                    self._keep_counts(role)
                    self._started.start_shard(number, again.incarnation)
                elif role.kind == "coordinator":
                    self._coordinator_again(again.incarnation)
                else:
                    self._started.start_replica(number, again.incarnation)
            except RunError as error:  # the zygote is gone: nobody can be started any more
                told = f"could not be started again: {error}"
                if role.kind in ("shard", "coordinator"):
                    self._heard.fail(LostError(reason=f"{role.name} is gone and {told}"), is_fatal=True)
                self._heard.ends[role.name] = f"{self._heard.ends.get(role.name, role.name)}, and {told}"
                self._restarts.forget(list(self._roster.roles))
                return
            self._describe()

    def _coordinator_again(self, epoch: int) -> None:
        """Start one that follows it, with what it had told, and repeat what it was told."""
        assert self._started is not None
        self._keep_counts(self._roster.roles["coordinator"])
        alive = [role for role in self._roster.of_kind("replica") if not role.is_gone]
        expected = map(self._roster.number_of, alive)
        self._started.start_coordinator(self._director.inheritance(epoch, expected))
        self._director.heard(time.monotonic())
        self._alone_since = None
        coordinator = self._roster.roles["coordinator"]
        if (name := self._checkpoints.begun_anew()) is not None:
            self._roster.send(coordinator, TakeCheckpoint(name=name))
        if self._is_stopping:
            self._roster.send(coordinator, StopRun(why=self._stopped_because))

    def _replace_if_silent(self) -> None:
        """Have another coordinator started, if this one lives without a word: nobody listens to it any more."""
        role = self._roster.roles["coordinator"]
        if role.is_gone or self._restarts.is_awaited(role.name):
            return
        if self._director.is_silent(time.monotonic()):
            self._director_lost(role, f"has said nothing for {director.SILENT_S:g} s")

    def _director_lost(self, role: RoleProcess, how: str) -> None:
        left = Left(time_s=self._execution.now(), role=role.name, why=how, incarnation=role.incarnation)
        self._recorder.happened(left)
        self._checkpoints.give_up()
        if self._again(role) is None:
            logs = self._execution.directory.logs
            told = f"{role.name} {how}, and the run cannot go on without it. Its log is in {logs}."
            self._heard.error, self._heard.is_fatal = self._heard.error or LostError(reason=told), True

    def _keep_counts(self, role: RoleProcess) -> None:
        """What a role has counted stays counted; its next process begins at 0."""
        before = f"{role.name}, start {role.incarnation}"
        self._heard.counts[before] = self._heard.counts.pop(role.name, ())
        self._heard.refused[before] = self._heard.refused.pop(role.name, 0)

    def _fail_if_alone(self) -> None:
        """With every replica gone, the end is told by the coordinator at once, or nothing more will happen."""
        replicas = self._roster.of_kind("replica")
        roles = (*replicas, self._roster.roles["coordinator"])
        if any(map(self._restarts.is_awaited, (role.name for role in roles))) or any(
            not role.is_gone for role in replicas
        ):
            self._alone_since = None
            return
        self._alone_since = self._alone_since or time.monotonic()
        if time.monotonic() - self._alone_since > ALONE_S:
            logs = self._execution.directory.logs
            told = f"no replica is left: {', '.join(self._heard.ends.values())}. Their logs are in {logs}."
            self._heard.fail(NoReplicaError(reason=told))

    def _reason_to_stop(self) -> str | None:
        prepared = self._execution.prepared
        if self._heard.error is not None:
            return "failed"
        if (why := self._execution.may_go_on()) is not None:
            return why
        limit = prepared.job.time_s
        return "time" if limit is not None and self._execution.now() - prepared.time_s >= limit else None

    def _evaluate_if_due(self) -> None:
        evaluator = self._roster.roles.get("evaluator")
        if evaluator is None or self._heard.is_evaluating or not self._recorder.is_evaluation_due():
            return
        self._heard.is_evaluating = True
        message = EvaluateNow(epoch=self._recorder.epoch, minibatches=self._recorder.meter.minibatches)
        self._roster.send(evaluator, message)

    def _checkpoint_if_due(self) -> None:
        name = None if self._is_stopping else self._checkpoints.due(self._recorder.meter.minibatches)
        if name is not None:
            self._roster.send(self._roster.roles["coordinator"], TakeCheckpoint(name=name))

    def _save(self) -> None:
        """Have every shard write its slices."""
        if self._heard.is_fatal:
            return
        self._last = self._checkpoints.new_name()
        for role in self._roster.of_kind("shard"):
            self._roster.send(role, SaveSlices(name=self._last))
        until = time.monotonic() + SAVE_S
        while missing := sorted(self._checkpoints.missing):
            if any(map(self._is_lost, missing)) or time.monotonic() > until:
                names = ", ".join(missing)
                self._heard.error = LostError(reason=f"{names} did not write its slices to the checkpoint")
                self._heard.is_fatal = True
                return
            self._hear()

    def _is_lost(self, name: str) -> bool:
        return self._roster.roles[name].is_gone and not self._restarts.is_awaited(name)

    def _end(self) -> Ending:
        """Let every role finish; those that do not within a grace are killed by `run`."""
        self._is_ending = True
        for role in self._roster.roles.values():
            if role.kind != "replica":
                self._roster.send(role, Finish())
        until = time.monotonic() + (0.0 if self._heard.is_fatal else LEAVE_S)
        while time.monotonic() < until and any(not role.is_gone for role in self._roster.roles.values()):
            self._hear()
        heard = self._heard
        if heard.is_fatal:
            assert heard.error is not None
            raise heard.error
        assert heard.why is not None
        buffers = self._left_buffers(heard.settled)
        self._checkpoints.reached(self._last, heard.settled.blocks(), buffers, self._execution.now())
        return Ending(
            why=heard.why,
            checkpoint=self._last,
            buffers=buffers,
            traffic=_traffic(heard.counts),
            minibatches=heard.settled.num_minibatches,
            error=heard.error,
        )

    def _left_buffers(self, settled: BlockSet) -> dict[str, Tensor]:
        """The buffers that belong to a checkpoint with these positions."""
        return self._execution.prepared.buffers_at(self._buffer_memories, settled)

    # What is heard --------------------------------------------------------------------------------------

    def _hear(self) -> None:
        self._restart_if_due()
        try:
            for role, said in self._roster.hear(POLL_S):
                if isinstance(said, Exit):
                    self._on_exit(role, said)
                else:
                    self._on_message(role, said)
        except RemoteProtocolError as error:
            self._heard.fail(
                LostError(reason=f"a role said something that is no message: {error}"), is_fatal=True
            )

    def _on_message(self, role: RoleProcess, message: Any) -> None:
        heard, now = self._heard, self._execution.now()
        if role.kind == "coordinator":
            self._director.heard(time.monotonic())
        match message:
            case Closings(blocks=blocks):
                self._restarts.worked(role.name)
                self._director.closed(block.block for block in blocks)
                for shard in self._roster.of_kind("shard"):
                    self._restarts.worked(shard.name)
                for block in blocks:
                    name = f"replica{block.replica}.0"
                    self._worked(name)
                    self._upsets.finished(name, block.block.num_minibatches)
                    self._recorder.closed(
                        block.time_s,
                        role=name,
                        block=block.block,
                        examples=block.examples,
                        loss_sum=block.loss_sum,
                        staleness=block.staleness,
                    )
            case FoundClosed(time_s=time_s, blocks=found):
                self._director.closed(found)
                for one in found:
                    self._recorder.found(time_s, block=one)
            case Happened():
                self._director.happened(_event(message))
                self._tell_once(_event(message))
                if message.kind == "Recovered":
                    self._checkpoints.lost(message.role)
            case Waiting(waits=waits):
                heard.waits = waits
            case Counted(links=links, refused=refused):
                heard.counts[role.name] = links
                heard.refused[role.name] = refused
                self._recorder.connections_refused = sum(heard.refused.values())
                self._rates.update(now, _traffic(heard.counts))
            case Measured():
                heard.is_evaluating = False
                self._recorder.happened(_evaluated(message, now))
            case DivergedRun():
                heard.fail(self._diverged(message), is_fatal=True)
            case EndedRun(why=why, settled=settled):
                heard.why, heard.settled = why, BlockSet.union(settled)
            case CutReached(request=request, name=name, settled=settled):
                buffers = self._left_buffers(BlockSet.union(settled))
                self._checkpoints.reached(name, settled, buffers, now)
                self._roster.send(role, BuffersCopied(request=request))
            case Saved(name=name):
                self._checkpoints.saved(name, role.name)
                self._execution.seal()
            case Durability(lost=lost):
                self._recorder.happened(Unkept(time_s=now, role=role.name, why=lost))
            case Failed():
                heard.fail(_error(message))
            case Ready():
                if role.kind == "shard" and role.incarnation > self._first_lives[role.name]:
                    back = Joined(time_s=now, role=role.name, incarnation=role.incarnation)
                    self._recorder.happened(back)
                if role.kind != "replica":
                    self._recorder.serving(role.name)
                if role.kind == "coordinator" and self._started is not None:
                    self._started.call_to_coordinator()
                if role.name in self._checkpoints.missing and self._last:
                    self._roster.send(role, SaveSlices(name=self._last))  # it was killed when it was to

    def _tell_once(self, event: Event) -> None:
        """The launcher and the coordinator both see a replica go: the launcher knows better how, if its process ended."""
        if isinstance(event, Joined):
            if self._heard.joined.get(event.role) == event.incarnation:
                return  # a coordinator that follows another tells it, too
            self._heard.joined[event.role] = event.incarnation
        if isinstance(event, Left):
            role = self._roster.roles[event.role]
            if event.why == PROCESS_GONE and not role.is_gone and role.incarnation == event.incarnation:
                self._roster.send(role, Unheard())  # if it lives: its line broke
                return  # how it ended is heard at once
            if (event.role, event.incarnation) in self._heard.lost:
                return
            self._heard.lost.add((event.role, event.incarnation))
        self._recorder.happened(event)

    def _worked(self, name: str) -> None:
        """A replica has finished a block; one that its life before had finished, and is told late, does not count."""
        if self._heard.joined.get(name) == self._roster.roles[name].incarnation:
            self._restarts.worked(name)

    def _diverged(self, message: DivergedRun) -> DivergedError:
        tensors = self._execution.prepared.layout.space.tensors
        tensor = tensors[message.number].name if message.number >= 0 else message.tensor
        return DivergedError(tensor=tensor, step=str(message.block), what=message.what)

    def _on_exit(self, role: RoleProcess, ended: Exit) -> None:
        if role.kind == "shard" and self._comes_back(role, ended):
            return
        if self._heard.why is not None:
            return
        how = in_words(ended.returncode) + self._upsets.said_of(role.name)
        logs = self._execution.directory.logs
        left = Left(time_s=self._execution.now(), role=role.name, why=how, incarnation=role.incarnation)
        match role.kind:
            case "replica":
                self._heard.ends[role.name] = f"{role.name} {how}"
                if ended.returncode != 0:
                    self._tell_once(left)
                self._start_again(role, ended)
            case "coordinator" if is_death(ended.returncode):
                self._director_lost(role, how)
            case "evaluator":
                self._recorder.happened(left)
                self._heard.is_evaluating = True  # and stays so: nobody is left to ask
            case _:
                self._recorder.happened(left)
                told = f"{role.name} {how}, and the run cannot go on without it. Its log is in {logs}."
                self._heard.fail(LostError(reason=told), is_fatal=True)

    def _start_again(self, role: RoleProcess, ended: Exit) -> None:
        """If it died, and the run goes on. Without any of its workers a replica's lead ends, and all start with it."""
        if self._is_stopping or not is_death(ended.returncode) or not role.name.endswith(".0"):
            return
        if self._again(role) is None and (most := self._restarts.rule.most):
            told = f" {most + 1} times in a row without finishing a block, and is not started again"
            self._heard.ends[role.name] += told

    def _comes_back(self, role: RoleProcess, ended: Exit) -> bool:
        """Whether a shard that has ended is started again; when nobody is left to redo work, only if it lost none."""
        durability = self._execution.prepared.job.durability
        is_over = self._heard.why is not None
        if durability == "none" or self._is_ending or ended.returncode == 0 or self._heard.error is not None:
            return False
        if (is_over and durability != "ack") or self._again(role) is None:
            return False
        how = in_words(ended.returncode) + self._upsets.said_of(role.name)
        self._recorder.happened(
            Left(time_s=self._execution.now(), role=role.name, why=how, incarnation=role.incarnation)
        )
        return True

    def _again(self, role: RoleProcess) -> Again | None:
        """Have it started again when it is time; None if it is given up."""
        return self._restarts.died(
            role.name,
            incarnation=role.incarnation,
            now=self._execution.now(),
            after_s=self._upsets.restart_after(role.name),
        )


class Rates:
    """Bytes per second of each link, from totals that are told now and then."""

    def __init__(self) -> None:
        self.links: tuple[Link, ...] = ()
        self._at = 0.0
        self._before: dict[tuple[str, str], int] = {}

    def update(self, now: float, traffic: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        seconds = now - self._at
        if seconds < 1.0:
            return
        totals = {link: num_bytes for link, (num_bytes, _) in traffic.items()}
        self.links = tuple(
            Link(
                sender=sender,
                receiver=receiver,
                bytes_per_second=(total - self._before.get((sender, receiver), 0)) / seconds,
            )
            for (sender, receiver), total in totals.items()
        )
        self._at, self._before = now, totals


def _traffic(counts: Mapping[str, tuple[LinkCount, ...]]) -> dict[tuple[str, str], tuple[int, int]]:
    total = TrafficCount()
    for links in counts.values():
        for link in links:
            total.add(link.sender, link.receiver, link.num_bytes, link.messages)
    return total.total()


def _evaluated(told: Measured, now: float) -> Evaluated:
    return Evaluated(
        time_s=now,
        epoch=told.epoch,
        minibatches=told.minibatches,
        metrics=dict(zip(told.names, told.values, strict=True)),
        versions=told.versions,
    )


def _event(told: Happened) -> Event:
    """The event that a coordinator told of, as observers know it."""
    role, time_s, why = f"{told.role}.0", told.time_s, told.why
    if told.kind == "Recovered":
        return Recovered(time_s=time_s, role=told.role, incarnation=told.number, lost=told.lost)
    if told.kind == "Joined":
        return Joined(time_s=time_s, role=role, incarnation=told.number)
    if told.kind == "Left":
        return Left(time_s=time_s, role=role, why=why, incarnation=told.number)
    assert told.block is not None
    if told.kind == "Redone":
        return Redone(time_s=time_s, block=told.block, attempt=told.number, replica=int(told.role), why=why)
    return Refused(time_s=time_s, block=told.block, why=why)


def _error(told: Failed) -> SquallError:
    if told.kind == "user":
        return UserCodeError(
            role=told.role, step=told.step, line=told.line, error=told.error, traceback=told.traceback
        )
    return RunError(reason=f"{told.role}: {told.error}")
