"""One run in processes of this machine, as its launcher sees it: start the roles, follow them, end them.

The launcher sees no gradient and no parameter. It hears what was done from the coordinator, what passed the
connections from the shards, and who has ended from the zygote.

    course      how the run stands: what was heard of it, and what was decided
    hearing     takes up what roles say, and how they end
    revival     starts roles again
    closing     stops the run, has it saved, and lets its roles leave
"""

from squall.cluster.closing import Closing
from squall.cluster.course import Course
from squall.cluster.hearing import Hearing
from squall.cluster.restarts import NEVER, Restarts
from squall.cluster.revival import Revival
from squall.cluster.roster import Roster
from squall.cluster.starting import Started, start_roles
from squall.cluster.tcp import TcpPlan
from squall.cluster.upsets import Upsets
from squall.cluster.zygote import Zygote
from squall.errors import SquallError
from squall.observe.events import AlsoFailed
from squall.training.execution import Ending, Execution
from squall.wire.control import EvaluateNow, TakeCheckpoint


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
        self._restarts = restarts
        self._roster = Roster(zygote, execution.directory.logs)

    def run(self) -> Ending:
        started = None
        try:
            started = start_roles(self._execution, self._roster, self._tcp)
            return _Followed(self._execution, self._roster, started, self._restarts).run()
        finally:
            self._roster.close()
            if started is not None:
                started.close()


class _Followed:
    """A run whose roles have been started."""

    def __init__(self, execution: Execution, roster: Roster, started: Started, rule: Restarts) -> None:
        job = execution.prepared.job
        self._execution = execution
        self._recorder = execution.recorder
        self._roster = roster
        self._course = Course(self._also_failed)
        self._upsets = Upsets(job.faults, job.seed, roster, execution.recorder)
        self._revival = Revival(execution, roster, started, self._course, self._upsets, rule)
        self._hearing = Hearing(execution, roster, started, self._course, self._upsets, self._revival)
        self._closing = Closing(execution, roster, self._course, self._revival, self._hearing)

    def run(self) -> Ending:
        self._revival.describe()
        self._follow()
        self._revival.spare()
        self._upsets.calm(self._execution.now())
        self._closing.save()
        return self._closing.end()

    def _follow(self) -> None:
        """Until the coordinator says that nothing more will be pushed, or the run cannot go on."""
        while self._course.why is None and not self._course.is_fatal:
            self._hearing.hear()
            self._revival.replace_if_silent()
            self._upsets.tick(self._execution.now(), self._execution.prepared.time_s)
            self._closing.fail_if_alone()
            self._closing.stop_if_asked()
            self._evaluate_if_due()
            self._checkpoint_if_due()
            now = self._execution.now()
            waits = self._course.silences.waits(now) + self._course.waits + self._revival.waits(now)
            self._recorder.tick(now, waits=waits, links=self._hearing.links)

    def _also_failed(self, error: SquallError) -> None:
        self._recorder.happened(AlsoFailed(time_s=self._execution.now(), error=str(error)))

    def _evaluate_if_due(self) -> None:
        course = self._course
        if not course.has_evaluator or course.is_evaluating:
            return
        if not self._recorder.is_evaluation_due() and not course.is_evaluation_lost:
            return
        course.is_evaluating, course.is_evaluation_lost = True, False
        message = EvaluateNow(epoch=self._recorder.epoch, minibatches=self._recorder.meter.minibatches)
        self._roster.send(self._roster.roles["evaluator"], message)

    def _checkpoint_if_due(self) -> None:
        if self._course.stopping is not None:
            return
        if (name := self._execution.checkpoints.due(self._recorder.meter.minibatches)) is not None:
            self._roster.send(self._roster.roles["coordinator"], TakeCheckpoint(name=name))
