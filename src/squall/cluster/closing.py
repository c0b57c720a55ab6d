"""What ends a run in processes: why it is stopped, its last checkpoint, and its roles' leaving."""

import time

from squall.cluster.course import Course
from squall.cluster.hearing import Hearing
from squall.cluster.revival import Revival
from squall.cluster.roster import Roster
from squall.cluster.told import traffic_of
from squall.errors import LostError, NoReplicaError
from squall.training.execution import Ending, Execution
from squall.wire.control import Finish, SaveSlices, StopRun
from squall.wire.tcp import WAITS_TOLD_AFTER_S

LEAVE_S = 5.0
ALONE_S = 1.0
SAVE_S = 600.0


class Closing:
    """Brings one run to its end.

    Args:
        roster: whose roles.
        course: written.
        revival: starts neither replicas nor the evaluator any more once the run is to stop.
        hearing: what roles say until they are gone.
    """

    def __init__(
        self, execution: Execution, roster: Roster, course: Course, revival: Revival, hearing: Hearing
    ) -> None:
        self._execution = execution
        self._checkpoints = execution.checkpoints
        self._roster = roster
        self._course = course
        self._revival = revival
        self._hearing = hearing
        self._alone_since: float | None = None

    def stop_if_asked(self) -> None:
        if self._course.stopping is not None or (why := self._reason_to_stop()) is None:
            return
        self._course.stopping = why
        self._revival.spare()
        self._roster.send(self._roster.roles["coordinator"], StopRun(why=why))

    def _reason_to_stop(self) -> str | None:
        prepared = self._execution.prepared
        if self._course.error is not None:
            return "failed"
        if (why := self._execution.may_go_on()) is not None:
            return why
        limit = prepared.job.time_s
        return "time" if limit is not None and self._execution.now() - prepared.time_s >= limit else None

    def fail_if_alone(self) -> None:
        """With every replica gone, the end is told by the coordinator at once, or nothing more will happen."""
        replicas = self._roster.of_kind("replica")
        roles = (*replicas, self._roster.roles["coordinator"])
        if any(map(self._revival.is_awaited, (role.name for role in roles))) or any(
            not role.is_gone for role in replicas
        ):
            self._alone_since = None
            return
        self._alone_since = self._alone_since or time.monotonic()
        if time.monotonic() - self._alone_since > ALONE_S:
            logs = self._execution.directory.logs
            told = f"no replica is left: {', '.join(self._course.ends.values())}. Their logs are in {logs}."
            self._course.fail(NoReplicaError(reason=told))

    def save(self) -> None:
        """Have every shard write its slices."""
        if self._course.is_fatal:
            return
        self._course.last = self._checkpoints.new_name()
        for role in self._roster.of_kind("shard"):
            self._roster.send(role, SaveSlices(name=self._course.last))
        began = time.monotonic()
        while missing := sorted(self._checkpoints.missing):
            waited_s = time.monotonic() - began
            if any(map(self._is_lost, missing)) or waited_s > SAVE_S:
                names = ", ".join(f"{name}{self._course.raised_by(name)}" for name in missing)
                told = f"{names} did not write its slices to the checkpoint"
                self._course.fail(LostError(reason=told), is_fatal=True)
                return
            if waited_s > WAITS_TOLD_AFTER_S:
                told = f"the last checkpoint waits for {', '.join(missing)}, since {waited_s:.0f} s"
                self._execution.recorder.tick(self._execution.now(), waits=(told,))
            self._hearing.hear()

    def _is_lost(self, name: str) -> bool:
        return self._roster.roles[name].is_gone and not self._revival.is_awaited(name)

    def end(self) -> Ending:
        """Let every role finish; those that do not within a grace are killed by `run`."""
        self._course.is_ending = True
        for role in self._roster.roles.values():
            if role.kind != "replica":
                self._roster.send(role, Finish())
        until = time.monotonic() + (0.0 if self._course.is_fatal else LEAVE_S)
        while time.monotonic() < until and any(not role.is_gone for role in self._roster.roles.values()):
            self._hearing.hear()
        course = self._course
        if course.is_fatal:
            assert course.error is not None
            raise course.error
        assert course.why is not None
        buffers = self._hearing.buffers_at(course.settled)
        self._checkpoints.reached(self._course.last, course.settled.blocks(), buffers, self._execution.now())
        return Ending(
            why=course.why,
            checkpoint=self._course.last,
            buffers=buffers,
            traffic=traffic_of(course.counts),
            minibatches=course.settled.num_minibatches,
            error=course.error,
        )
