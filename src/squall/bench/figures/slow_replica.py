"""One of two workers gets a quarter of its core: Squall, which waits for nobody, against DistributedDataParallel.

The paper's network, batch 128. From outside, one worker of each side is stopped for three quarters of every tenth of a
second (SIGSTOP, SIGCONT). Target: 2.2 times DistributedDataParallel.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import squall
from squall.bench.figure import Report, Settings, ratio_of, series_of
from squall.bench.nets import speech_net
from squall.bench.place import Place
from squall.bench.rounds import alternate, steady_rate
from squall.bench.sides import Work, start_data_parallel
from squall.bench.throttle import Throttle, throttle_replica
from squall.bench.workers import Workers

BATCH_SIZE = 128
SHARE = 0.25
STEPS, WARM = 16, 2
QUICK_STEPS = 15
LONGER, QUICK_LONGER = 3, 40
"""Downpour's steps as a multiple: the slow one does a fifth of the blocks, and has to do enough of them for a rate.

A toy's block is over long before the slow one's next turn, so its run has to last for many turns.
"""


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    work = Work(
        net=speech_net(quick=settings.quick),
        batch_size=8 if settings.quick else BATCH_SIZE,
        steps=QUICK_STEPS if settings.quick else STEPS,
        warm=WARM,
    )
    sides = [
        partial(_downpour, place.cluster, work, QUICK_LONGER if settings.quick else LONGER),
        partial(_data_parallel, place.workers, work),
    ]
    rounds = alternate(sides, settings.rounds)
    return Report(
        series=series_of(rounds, ("two replicas", "data parallel"), "examples/s"),
        ratios={
            "two replicas / data parallel": ratio_of(rounds, "two replicas", "data parallel", target=2.2)
        },
        sizes={
            "net": work.net.as_json(),
            "batch_size": work.batch_size,
            "steps": work.steps,
            "share": SHARE,
        },
    )


def _downpour(cluster: squall.Local, work: Work, longer: int) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        job = work.job(replicas=2)
        job = replace(job, cluster=cluster, out=path, steps=longer * (job.steps or 0))
        with throttle_replica(path, "replica1.0", share=SHARE):
            run = squall.fit(job)
        return {"two replicas": steady_rate(run.ledger(), warm=work.warm)}


def _data_parallel(workers: Workers, work: Work) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        team = start_data_parallel(workers, work, folder)
        with Throttle(team.roles[1].kill, share=SHARE):
            told = team.results()
    return {"data parallel": told[0]["examples_per_s"]}
