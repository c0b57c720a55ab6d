"""All roles in the calling thread: for debugging, notebooks, and machines without more.

The roles take turns, so one forward and backward runs at a time; whose turn it is is drawn with the run's seed,
so that a run can be repeated exactly. Nothing is faster than a plain loop here.
"""

from dataclasses import dataclass
from typing import ClassVar

from squall.cluster.one_thread import OneThread, threads_set
from squall.cluster.world import Pace
from squall.errors import ConfigError
from squall.keywords import named
from squall.model.randomness import random_state_kept
from squall.training.execution import Ending, Execution
from squall.training.job import Job

# Whose turn it is is all that virtual time decides here; nobody is late.
TURNS = Pace(jitter=0.5, tick_s=1e4, resend_s=1e9)


@named
@dataclass(frozen=True, kw_only=True)
class InProcess:
    """Run every role in the calling thread, taking turns.

    >>> InProcess()
    InProcess()
    """

    is_modelled: ClassVar[bool] = False

    def expect(self, job: Job) -> None:
        """See `squall.training.execution.Cluster`."""
        if job.faults:
            raise ConfigError(
                subject="Job(chaos=) under squall.InProcess",
                expected="roles that can be late or die",
                got="one thread in which they take turns",
                remedy="Use squall.Simulated(...), or squall.Local() for real processes.",
            )
        if job.durability != "none":
            raise ConfigError(
                subject="Job(durability=)",
                expected='"none", where shards live in the calling process and end with it',
                got=repr(job.durability),
                remedy="Use cluster=squall.Local(), or checkpoint_every=.",
            )

    def run(self, execution: Execution) -> Ending:
        with random_state_kept(), threads_set(execution.prepared.threads):
            return OneThread(execution, pace=TURNS, seed=execution.prepared.job.seed).run()
