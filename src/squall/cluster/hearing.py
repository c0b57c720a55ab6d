"""Listens to the roles of one run, and to how they end: writes down what they say, and answers."""

import math
from typing import Any

from torch import Tensor

from squall.blocks import BlockSet
from squall.cluster.course import Course
from squall.cluster.exits import is_death
from squall.cluster.revival import Revival
from squall.cluster.roster import RoleProcess, Roster
from squall.cluster.starting import Started
from squall.cluster.told import Rates, error_of, evaluated_of, event_of, traffic_of
from squall.cluster.upsets import Upsets
from squall.cluster.zygote import Exit
from squall.coordinator.events import PROCESS_GONE
from squall.errors import DivergedError, LostError, RemoteProtocolError
from squall.observe.events import Event, Joined, Left, Link, Unkept
from squall.training.execution import Execution
from squall.wire.control import (
    Awaits,
    BuffersCopied,
    Closings,
    Counted,
    CutReached,
    DivergedRun,
    Durability,
    EndedRun,
    Failed,
    FoundClosed,
    Happened,
    Measured,
    Ready,
    Saved,
    SaveSlices,
    Unheard,
    Waiting,
)

POLL_S = 0.05


class Hearing:
    """Takes up all that the roles of one `Roster` say.

    Args:
        roster: whose roles.
        started: tells replicas of a coordinator that is ready.
        course: written.
        upsets: are told of the minibatches that were done.
        revival: starts again who has ended.
    """

    def __init__(
        self,
        execution: Execution,
        roster: Roster,
        started: Started,
        course: Course,
        upsets: Upsets,
        revival: Revival,
    ) -> None:
        self._execution = execution
        self._recorder, self._checkpoints = execution.recorder, execution.checkpoints
        self._roster = roster
        self._started = started
        self._course = course
        self._upsets = upsets
        self._revival = revival
        self._rates = Rates()
        self._first_lives = {shard.name: shard.incarnation for shard in roster.of_kind("shard")}
        self._first_lives["evaluator"] = 0
        self._buffer_memories = started.buffer_memories()
        self._lost: set[tuple[str, int]] = set()  # roles, with the incarnation, that were told to be gone
        self._joined: dict[str, int] = {}  # by replica, the newest incarnation that has joined

    @property
    def links(self) -> tuple[Link, ...]:
        """What goes over each link just now."""
        return self._rates.links

    def buffers_at(self, settled: BlockSet) -> dict[str, Tensor]:
        """The models' buffers that belong to a checkpoint with these positions."""
        return self._execution.prepared.buffers_at(self._buffer_memories, settled)

    def hear(self) -> None:
        """Start who is due, and take up what has been said since, or is said within a moment."""
        self._revival.start_due()
        try:
            for role, said in self._roster.hear(POLL_S):
                if isinstance(said, Exit):
                    self._on_exit(role, said)
                else:
                    self._on_message(role, said)
        except RemoteProtocolError as error:
            self._course.fail(
                LostError(reason=f"a role said something that is no message: {error}"), is_fatal=True
            )

    def _on_message(self, role: RoleProcess, message: Any) -> None:
        course, now = self._course, self._execution.now()
        if role.kind == "coordinator":
            self._revival.heard_coordinator()
        match message:
            case Closings(blocks=blocks):
                self._revival.worked(role.name)
                self._revival.closed(block.block for block in blocks)
                for shard in self._roster.of_kind("shard"):
                    self._revival.worked(shard.name)
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
                self._revival.closed(found)
                for one in found:
                    self._recorder.found(time_s, block=one)
            case Happened():
                self._revival.happened(event_of(message))
                self._tell_once(event_of(message))
                if message.kind == "Recovered":
                    self._checkpoints.lost(message.role)
            case Waiting(waits=waits):
                course.waits = waits
            case Awaits(role=awaited, seconds=seconds):
                if (silent := course.silences.told(role.name, awaited, seconds, now)) is not None:
                    self._recorder.happened(silent)
            case Counted(links=links, refused=refused):
                course.counts[role.name] = links
                course.refused[role.name] = refused
                self._recorder.connections_refused = sum(course.refused.values())
                self._rates.update(now, traffic_of(course.counts))
            case Measured():
                course.is_evaluating = False
                self._revival.worked(role.name)
                self._recorder.happened(evaluated_of(message, now))
            case DivergedRun():
                course.fail(self._diverged(message), is_fatal=True)
            case EndedRun(why=why, settled=settled):
                course.why, course.settled = why, BlockSet.union(settled)
            case CutReached(request=request, name=name, settled=settled):
                buffers = self.buffers_at(BlockSet.union(settled))
                self._checkpoints.reached(name, settled, buffers, now)
                self._roster.send(role, BuffersCopied(request=request))
            case Saved(name=name):
                self._checkpoints.saved(name, role.name)
                self._execution.seal()
            case Durability(lost=lost):
                self._recorder.happened(Unkept(time_s=now, role=role.name, why=lost))
            case Failed(kind="raised", error=error):
                course.raised[role.name] = error
            case Failed():
                course.fail(error_of(message))
            case Ready():
                course.raised.pop(role.name, None)  # of its life before
                if role.kind == "evaluator":
                    course.has_evaluator = True
                if role.incarnation > self._first_lives.get(role.name, math.inf):
                    back = Joined(time_s=now, role=role.name, incarnation=role.incarnation)
                    self._recorder.happened(back)
                if role.kind != "replica":
                    self._recorder.serving(role.name)
                if role.kind == "coordinator":
                    self._started.call_to_coordinator()
                if role.name in self._checkpoints.missing and course.last:
                    self._roster.send(role, SaveSlices(name=course.last))  # it was killed when it was to

    def _tell_once(self, event: Event) -> None:
        """The launcher and the coordinator both see a replica go: the launcher knows better how, if its process ended."""
        if isinstance(event, Joined):
            if self._joined.get(event.role) == event.incarnation:
                return  # a coordinator that follows another tells it, too
            self._joined[event.role] = event.incarnation
        if isinstance(event, Left):
            role = self._roster.roles[event.role]
            if event.why == PROCESS_GONE and not role.is_gone and role.incarnation == event.incarnation:
                self._roster.send(role, Unheard())  # if it lives: its line broke
                return  # how it ended is heard at once
            if (event.role, event.incarnation) in self._lost:
                return
            self._lost.add((event.role, event.incarnation))
        self._recorder.happened(event)

    def _worked(self, name: str) -> None:
        """A replica has finished a block; one that its life before had finished, and is told late, does not count."""
        if self._joined.get(name) == self._roster.roles[name].incarnation:
            self._revival.worked(name)

    def _diverged(self, message: DivergedRun) -> DivergedError:
        tensors = self._execution.prepared.layout.space.tensors
        tensor = tensors[message.number].name if message.number >= 0 else message.tensor
        return DivergedError(tensor=tensor, step=str(message.block), what=message.what)

    def _on_exit(self, role: RoleProcess, ended: Exit) -> None:
        self._course.silences.ended(role.name)
        if role.kind == "shard" and self._revival.comes_back(role, ended):
            return
        if self._course.why is not None:
            return
        how = self._revival.how(role, ended)
        logs = self._execution.directory.logs
        left = Left(time_s=self._execution.now(), role=role.name, why=how, incarnation=role.incarnation)
        match role.kind:
            case "replica":
                self._course.ends[role.name] = f"{role.name} {how}"
                if ended.returncode != 0:
                    self._tell_once(left)
                self._revival.start_again(role, ended)
            case "coordinator" if is_death(ended.returncode):
                self._revival.director_lost(role, how)
            case "evaluator":
                self._revival.evaluator_lost(role, ended, left)
            case _:
                self._recorder.happened(left)
                told = f"{role.name} {how}, and the run cannot go on without it. Its log is in {logs}."
                self._course.fail(LostError(reason=told), is_fatal=True)
