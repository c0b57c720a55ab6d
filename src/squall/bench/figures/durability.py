"""What it costs that a killed shard comes back: nothing kept, a snapshot every five seconds, each push before its answer.

The network of 784-256-10 (batch 64, two replicas, a push for each minibatch) and the paper's (batch 128, one replica),
under ``durability="none"``, ``squall.Interval(5)`` and ``"ack"``. Target: snapshots leave 0.95 of the speed. What "ack"
costs is up to the disk, which takes every gradient.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import squall
from squall.bench.figure import Report, Settings, ratio_of, series_of
from squall.bench.nets import small_net, speech_net
from squall.bench.place import Place
from squall.bench.rounds import alternate, steady_rate
from squall.bench.sides import Work
from squall.training.durability import Durability

INTERVAL_S = 5.0
QUICK_INTERVAL_S = 0.05
QUICK_STEPS = 20


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    promises: dict[str, Durability] = {
        "none": "none",
        "interval": squall.Interval(QUICK_INTERVAL_S if settings.quick else INTERVAL_S),
        "ack": "ack",
    }
    works = _works(quick=settings.quick)
    sides = [
        partial(_run, place.cluster, work, replicas, promise, f"{net}, {name}")
        for net, (work, replicas) in works.items()
        for name, promise in promises.items()
    ]
    rounds = alternate(sides, settings.rounds)
    return Report(
        series=series_of(rounds, [f"{net}, {name}" for net in works for name in promises], "examples/s"),
        ratios={
            f"{net}: {name} / none": ratio_of(
                rounds, f"{net}, {name}", f"{net}, none", target=0.95 if name == "interval" else None
            )
            for net in works
            for name in ("interval", "ack")
        },
        sizes={
            "nets": {net: work.net.as_json() for net, (work, _) in works.items()},
            "interval_s": INTERVAL_S,
        },
    )


def _works(*, quick: bool) -> dict[str, tuple[Work, int]]:
    """By the network's name: what is trained, and by how many replicas."""
    small = Work(
        net=small_net(), batch_size=64, steps=QUICK_STEPS if quick else 6000, warm=2 if quick else 30
    )
    speech = Work(
        net=speech_net(quick=quick),
        batch_size=8 if quick else 128,
        steps=QUICK_STEPS if quick else 24,
        warm=3,
    )
    return {"small": (small, 2), "speech": (speech, 1)}


def _run(
    cluster: squall.Local, work: Work, replicas: int, promise: Durability, name: str
) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        job = work.job(replicas=replicas)
        run = squall.fit(replace(job, cluster=cluster, durability=promise, out=Path(folder) / "run"))
        return {name: steady_rate(run.ledger(), warm=work.warm)}
