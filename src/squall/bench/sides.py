"""The sides of a comparison, each measured once by a call: Squall itself, a plain loop, DistributedDataParallel."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import squall
from squall.bench import loops
from squall.bench.nets import Net
from squall.bench.rounds import steady_rate
from squall.bench.workers import Function, Team, Workers


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all sides of a comparison do.

    Attributes:
        net: what is trained, and on what.
        batch_size: examples of a minibatch of one replica.
        steps: minibatches of a plain loop that count.
        warm: minibatches before, of each process.
    """

    net: Net
    batch_size: int
    steps: int
    warm: int

    def settings(self, *, threads: int = 1, **more: Any) -> dict[str, Any]:
        """For `squall.bench.loops`."""
        own = {"batch_size": self.batch_size, "steps": self.steps, "warm": self.warm, "threads": threads}
        return {"net": self.net.as_json(), **own, **more}

    def job(self, *, replicas: int, **strategy: Any) -> squall.Job:
        """The same for Squall: as many minibatches for each replica, one thread each."""
        rule = squall.Adagrad(learning_rate=loops.LEARNING_RATE)
        blocks = strategy.get("n_push", 1)
        steps = replicas * (self.steps + self.warm * blocks)
        return squall.Job(
            self.net.build,
            self.net.data(),
            strategy=squall.Downpour(rule=rule, **strategy),
            replicas=replicas,
            batch_size=self.batch_size,
            steps=steps,
            threads=1,
            progress=False,
        )


def plain(workers: Workers, work: Work, name: str, *, threads: int = 1) -> Mapping[str, float]:
    """A plain loop's examples per second, under that name."""
    (told,) = workers.run(loops.plain_loop, [work.settings(threads=threads)])
    return {name: told["examples_per_s"]}


def start_data_parallel(workers: Workers, work: Work, folder: str) -> Team:
    """Two processes of DistributedDataParallel, one thread each, that meet in a file of that folder."""
    return _start_two(workers, loops.data_parallel, work, folder)


def _start_two(workers: Workers, function: Function, work: Work, folder: str, **more: Any) -> Team:
    store = str(Path(folder) / "store")
    return workers.start(function, [work.settings(rank=rank, store=store, **more) for rank in range(2)])


def pipeline(
    workers: Workers, work: Work, name: str, *, first: int, microbatches: int
) -> Mapping[str, float]:
    """Examples per second of torch's own pipeline of two processes; `first`: modules of the first stage."""
    with tempfile.TemporaryDirectory() as folder:
        team = _start_two(workers, loops.pipeline, work, folder, first=first, microbatches=microbatches)
        return {name: team.results()[0]["examples_per_s"]}


def data_parallel(workers: Workers, work: Work, name: str) -> Mapping[str, float]:
    """DistributedDataParallel's examples per second, of both processes together."""
    with tempfile.TemporaryDirectory() as folder:
        told = start_data_parallel(workers, work, folder).results()
    return {name: told[0]["examples_per_s"]}


def downpour(cluster: Any, work: Work, name: str, *, replicas: int, **strategy: Any) -> Mapping[str, float]:
    """Squall's examples per second, from the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        job = work.job(replicas=replicas, **strategy)
        run = squall.fit(job, cluster=cluster, out=Path(folder) / "run")
        return {name: steady_rate(run.ledger(), warm=work.warm)}


def ceiling(workers: Workers, work: Work, prefix: str) -> Mapping[str, float]:
    """The terms of the ceiling for two replicas, and the ceiling itself as "ceiling", all names with a prefix.

    Both processes do the same at the same time; of each term the mean of the two counts. The ceiling is
    2 x plain / (plain + copy out + finiteness check + fetch), in the speed of the plain loop.
    """
    both = workers.run(loops.terms, [work.settings()] * 2)
    told = {name: (both[0][name] + both[1][name]) / 2 for name in both[0]}
    told["ceiling"] = ceiling_of(**{name: told[name] for name in ("step_s", "copy_and_check_s", "fetch_s")})
    return {f"{prefix}{name}": value for name, value in told.items()}


def ceiling_of(*, step_s: float, copy_and_check_s: float, fetch_s: float) -> float:
    """How many times a plain loop two replicas can be at most.

    >>> ceiling_of(step_s=0.6, copy_and_check_s=0.1, fetch_s=0.1)
    1.5
    """
    return 2 * step_s / (step_s + copy_and_check_s + fetch_s)
