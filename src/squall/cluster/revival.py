"""Starts roles again that have died, or that nobody listens to any more.

A book says whether and when (`squall.cluster.restarts`); what the next coordinator must be told is kept in another
(`squall.cluster.director`).
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from squall.blocks import Block
from squall.cluster import director
from squall.cluster.course import Course
from squall.cluster.director import DirectorBook
from squall.cluster.exits import in_words, is_death
from squall.cluster.restarts import Again, RestartBook, Restarts
from squall.cluster.roster import RoleProcess, Roster
from squall.cluster.starting import Started
from squall.cluster.upsets import Upsets
from squall.cluster.zygote import Exit
from squall.errors import LostError, RunError
from squall.observe.events import Event, Left
from squall.training.execution import Execution
from squall.wire.control import StopRun, TakeCheckpoint
from squall.wire.tcp import WAITS_TOLD_AFTER_S


class Revival:
    """Who of one run is started again, and with what.

    Args:
        roster: whose roles; they have all been started.
        started: starts them.
        course: whether the run goes on; told of what cannot be started again.
        upsets: may have killed them.
        rule: how often, and how soon.
    """

    def __init__(
        self,
        execution: Execution,
        roster: Roster,
        started: Started,
        course: Course,
        upsets: Upsets,
        rule: Restarts,
    ) -> None:
        self._execution = execution
        self._roster = roster
        self._started = started
        self._course = course
        self._upsets = upsets
        self._restarts = RestartBook(rule)
        self._director = DirectorBook(time.monotonic())
        for shard in roster.of_kind("shard"):
            self._director.serves(roster.number_of(shard), shard.incarnation)

    def describe(self) -> None:
        """Write down which processes there are."""
        directory = self._execution.directory
        directory.write_json(directory.processes, self._roster.describe())

    def is_awaited(self, name: str) -> bool:
        """Whether this role is dead and will be started."""
        return self._restarts.is_awaited(name)

    def waits(self, now: float) -> tuple[str, ...]:
        """Who is to be started, and whether the coordinator stands still, in words."""
        silent_s, is_gone = (
            self._director.silent_s(time.monotonic()),
            self._roster.roles["coordinator"].is_gone,
        )
        if is_gone or silent_s < WAITS_TOLD_AFTER_S:
            return self._restarts.waits(now)
        told = f"the run waits for the coordinator, since {silent_s:.0f} s"
        return (told, *self._restarts.waits(now))

    # What counts for it ---------------------------------------------------------------------------------

    def heard_coordinator(self) -> None:
        """It has said something."""
        self._director.heard(time.monotonic())

    def closed(self, blocks: Iterable[Block]) -> None:
        """The coordinator has told that these are done."""
        self._director.closed(blocks)

    def happened(self, event: Event) -> None:
        """The coordinator has told of this."""
        self._director.happened(event)

    def worked(self, name: str) -> None:
        """A role has done something since its last start."""
        self._restarts.worked(name)

    def spare(self) -> None:
        """The run is to end: no replica is started any more, nor the evaluator."""
        spared = (*self._roster.of_kind("replica"), *self._roster.of_kind("evaluator"))
        self._restarts.forget([role.name for role in spared])

    # Who died -------------------------------------------------------------------------------------------

    def start_again(self, role: RoleProcess, ended: Exit) -> None:
        """If it died, and the run goes on. Without any of its workers a replica's lead ends, and all start with it."""
        if (
            self._course.stopping is not None
            or not is_death(ended.returncode)
            or not role.name.endswith(".0")
        ):
            return
        if self._again(role) is None and (most := self._restarts.rule.most):
            told = f" {most + 1} times in a row without finishing a block, and is not started again"
            self._course.ends[role.name] += told

    def comes_back(self, role: RoleProcess, ended: Exit) -> bool:
        """Whether a shard that has ended is started again; when nobody is left to redo work, only if it lost none."""
        durability = self._execution.prepared.job.durability
        is_over = self._course.why is not None
        if (
            durability == "none"
            or self._course.is_ending
            or ended.returncode == 0
            or self._course.error is not None
        ):
            return False
        if (is_over and durability != "ack") or self._again(role) is None:
            return False
        how = self.how(role, ended)
        self._execution.recorder.happened(
            Left(time_s=self._execution.now(), role=role.name, why=how, incarnation=role.incarnation)
        )
        return True

    def how(self, role: RoleProcess, ended: Exit) -> str:
        """How a role has ended, in words."""
        said = self._course.raised_by(role.name) + self._upsets.said_of(role.name)
        return in_words(ended.returncode) + said

    def _again(self, role: RoleProcess) -> Again | None:
        """Have it started again when it is time; None if it is given up."""
        return self._restarts.died(
            role.name,
            incarnation=role.incarnation,
            now=self._execution.now(),
            after_s=self._upsets.restart_after(role.name),
        )

    def evaluator_lost(self, role: RoleProcess, ended: Exit, left: Left) -> None:
        """The run goes on without; what was asked for is measured when another is there, if one will be."""
        course = self._course
        course.is_evaluation_lost |= course.is_evaluating
        course.has_evaluator = course.is_evaluating = False
        if course.stopping is None and (not is_death(ended.returncode) or self._again(role) is None):
            told = f"{left.why}; it is not started again, and the test set is measured at the end only"
            left = replace(left, why=told)
        self._execution.recorder.happened(left)

    def director_lost(self, role: RoleProcess, how: str) -> None:
        left = Left(time_s=self._execution.now(), role=role.name, why=how, incarnation=role.incarnation)
        self._execution.recorder.happened(left)
        self._execution.checkpoints.give_up()
        if self._again(role) is None:
            logs = self._execution.directory.logs
            told = f"{role.name} {how}, and the run cannot go on without it. Its log is in {logs}."
            self._course.fail(LostError(reason=told), is_fatal=True)

    # Who is started -------------------------------------------------------------------------------------

    def start_due(self) -> None:
        for again in self._restarts.due(self._execution.now()):
            role = self._roster.roles[again.role]
            try:
                match role.kind:
                    case "shard":
                        self._course.keep_counts(role)
                        self._started.start_shard(self._roster.number_of(role), again.incarnation)
                    case "coordinator":
                        self._coordinator_again(again.incarnation)
                    case "evaluator":
                        self._started.start_evaluator(again.incarnation)
                    case _:
                        self._started.start_replica(self._roster.number_of(role), again.incarnation)
            except RunError as error:  # the zygote is gone: nobody can be started any more
                told = f"could not be started again: {error}"
                if role.kind in ("shard", "coordinator"):
                    self._course.fail(LostError(reason=f"{role.name} is gone and {told}"), is_fatal=True)
                self._course.ends[role.name] = f"{self._course.ends.get(role.name, role.name)}, and {told}"
                self._restarts.forget(list(self._roster.roles))
                return
            self.describe()

    def _coordinator_again(self, epoch: int) -> None:
        """Start one that follows it, with what it had told, and repeat what it was told."""
        self._course.keep_counts(self._roster.roles["coordinator"])
        alive = [role for role in self._roster.of_kind("replica") if not role.is_gone]
        expected = map(self._roster.number_of, alive)
        self._started.start_coordinator(self._director.inheritance(epoch, expected))
        self._director.heard(time.monotonic())
        coordinator = self._roster.roles["coordinator"]
        if (name := self._execution.checkpoints.begun_anew()) is not None:
            self._roster.send(coordinator, TakeCheckpoint(name=name))
        if self._course.stopping is not None:
            self._roster.send(coordinator, StopRun(why=self._course.stopping))

    def replace_if_silent(self) -> None:
        """Have another coordinator started, if this one lives without a word: nobody listens to it any more."""
        role = self._roster.roles["coordinator"]
        if role.is_gone or self._restarts.is_awaited(role.name):
            return
        if self._director.is_silent(time.monotonic()):
            self.director_lost(role, f"has said nothing for {director.SILENT_S:g} s")
