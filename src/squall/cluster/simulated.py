"""A cluster in virtual time: many replicas of stated speeds and links on one core.

The protocol is the one that real processes run; only time is made up. So staleness, loss against steps and the
ledger are those of such a cluster; seconds are as true as the speeds and links that were stated. Gradients are real,
or, for replicas by the ten thousand, left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from squall.cluster.chaos import expect_modelled
from squall.cluster.links import Link, Links
from squall.cluster.one_thread import OneThread, threads_set
from squall.cluster.world import Pace
from squall.errors import ConfigError
from squall.faults import Fault, faults_of
from squall.keywords import named
from squall.model.randomness import random_state_kept
from squall.training.execution import Ending, Execution
from squall.training.job import Job


@named
@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Run every role in the calling thread, in virtual time.

    Args:
        seed: of everything that chance decides here; the training's own randomness is the job's.
        speeds: minibatches per virtual second of each replica; the last one holds for all further ones.
        jitter: how much a minibatch's time varies: sigma of a lognormal.
        links: one `Link` for all, or by two name patterns, as in
            ``{("replica2.0", "shard*"): Link(latency_s=0.1, bytes_per_s=1e6), ("*", "*"): Link()}``.
        faults: in the fault language of `squall.faults`, as text or parsed; beside those of `Job(chaos=)`.
        apply_s: seconds that a shard takes for one update.
        compute: "real": every gradient is computed. "modelled": none is, and no replica has a tensor; minibatches take
            their time, so the run has its ledger, staleness and virtual seconds, but no losses and no trained model.

    >>> Simulated(seed=1, speeds=(10.0, 1.0)).speeds
    (10.0, 1.0)
    """

    seed: int = 0
    speeds: Sequence[float] = (10.0,)
    jitter: float = 0.2
    links: Link | Mapping[tuple[str, str], Link] = field(default_factory=Link)
    faults: str | Sequence[Fault] = ()
    apply_s: float = 0.0
    compute: str = "real"

    def __post_init__(self) -> None:
        speeds = (self.speeds,) if isinstance(self.speeds, int | float) else tuple(self.speeds)
        if not speeds or not all(speed > 0 for speed in speeds):
            raise ConfigError(
                subject="Simulated(speeds=)",
                expected="minibatches per second above 0, at least one",
                got=repr(self.speeds),
            )
        if self.jitter < 0 or self.apply_s < 0:
            raise ConfigError(
                subject="Simulated(jitter=, apply_s=)",
                expected="numbers of at least 0",
                got=f"{self.jitter}, {self.apply_s}",
            )
        if self.compute not in ("real", "modelled"):
            raise ConfigError(
                subject="Simulated(compute=)", expected="'real' or 'modelled'", got=repr(self.compute)
            )
        object.__setattr__(self, "speeds", speeds)
        object.__setattr__(self, "faults", faults_of(self.faults, "Simulated(faults=)"))
        self._expect(self.faults)

    @property
    def is_modelled(self) -> bool:
        return self.compute == "modelled"

    @staticmethod
    def _expect(faults: str | Sequence[Fault]) -> None:
        assert not isinstance(faults, str)
        expect_modelled(faults, "squall.Simulated")

    def expect(self, job: Job) -> None:
        """See `squall.training.execution.Cluster`."""
        self._expect(job.faults)
        job.expect_roles(faults_of(self.faults, "Simulated(faults=)"), "Simulated(faults=)")

    def run(self, execution: Execution) -> Ending:
        chaos = execution.prepared.job.faults
        assert not isinstance(self.faults, str)
        pace = Pace(
            speeds=tuple(self.speeds),
            jitter=self.jitter,
            links=Links(self.links) if isinstance(self.links, Link) else Links(special=dict(self.links)),
            apply_s=self.apply_s,
        )
        with random_state_kept(), threads_set(execution.prepared.threads):
            run = OneThread(
                execution,
                pace=pace,
                faults=(*self.faults, *chaos),
                seed=self.seed,
                is_modelled=self.is_modelled,
            )
            execution.clock.follow(run.virtual_now)
            return run.run()
