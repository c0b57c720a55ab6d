"""The time until a held-out loss is reached: two replicas against a plain loop with one thread and with two.

Data sets: the digits that come with the package; Fashion-MNIST, whose four idx files are given with --data; and the frames of
spoken digits of the recipe `fsdd`. Each round is a seed. Time runs from the first step of the loop, or from when
the first replica is there, to the end of the evaluation that sees the loss; evaluations are as frequent on both sides
and included. Every side has the rule and learning rate of one grid that were fastest for it on seeds that are not measured.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import squall
from squall.bench.figure import Ratio, Report, Series, Settings, ratio_of, series_of
from squall.bench.learning import Lesson, downpour, lesson, plain_loop
from squall.bench.place import Place
from squall.bench.rounds import alternate
from squall.bench.workers import Workers
from squall.errors import ConfigError

Way = tuple[str, float]
"""A rule, a name of `RULES`, and its learning rate."""

WAYS: tuple[Way, ...] = (
    ("Adagrad", 0.01),
    ("Adagrad", 0.03),
    ("Adagrad", 0.1),
    ("Sgd", 0.03),
    ("Sgd", 0.1),
    ("Sgd", 0.3),
)
QUICK_WAYS: tuple[Way, ...] = (("Adagrad", 0.03),)
TUNING_SEEDS = (1000, 1001, 1002)
FINALISTS = 2
"""So many ways are tried on the other tuning seeds too."""
HOPELESS = 2.0
"""A way that takes so many times as long as the best so far is given up."""
DATA_SETS, QUICK_DATA_SETS = ("digits", "fashion", "fsdd"), ("digits",)
PLAIN = {"plain loop": 1, "plain loop, two threads": 2}
# Name -> minibatches to a push and to a fetch, and whether they go on behind the computing.
DOWNPOUR = {
    "Downpour, n = 1": (1, False),
    "Downpour, n = 1, overlap": (1, True),
    "Downpour, n = 10": (10, False),
    "Downpour, n = 10, overlap": (10, True),
}

Learner = Callable[[int, Way, float], tuple[float, bool]]
"""Learns with a seed, for so many seconds at most; returns seconds, and whether the loss was reached."""


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    series: dict[str, Series] = {}
    ratios: dict[str, Ratio] = {}
    sizes: dict[str, Any] = {}
    notes: list[str] = []
    for name in QUICK_DATA_SETS if settings.quick else DATA_SETS:
        files = [str(file) for file in settings.data]
        try:
            task = lesson(name, files, quick=settings.quick)
        except ConfigError as error:
            notes.append(f"{name} was skipped: {error}")
            continue
        told = {"name": name, "files": files, "quick": settings.quick}
        learned = _Learned(name=name, learners=_learners(place, task, told))
        learned.tune(QUICK_WAYS if settings.quick else WAYS)
        rounds = alternate(learned.sides(), settings.rounds)
        series |= series_of(rounds, [f"{name}: {side}" for side in learned.learners], "s")
        ratios |= _ratios(name, rounds)
        notes += learned.notes()
        sizes[name] = {"target": task.target, "batch_size": task.batch_size, "ways": learned.ways}
    return Report(series=series, ratios=ratios, sizes=sizes, notes=tuple(notes))


def _learners(place: Place, task: Lesson, told: dict[str, Any]) -> dict[str, Learner]:
    found: dict[str, Learner] = {
        name: partial(_plainly, place.workers, told, threads) for name, threads in PLAIN.items()
    }
    for name, (every, overlap) in DOWNPOUR.items():
        found[name] = partial(_by_downpour, place.cluster, task, every, overlap)
    return found


def _plainly(
    workers: Workers, told: dict[str, Any], threads: int, seed: int, way: Way, limit_s: float
) -> tuple[float, bool]:
    rule, rate = way
    settings = {
        "lesson": told,
        "seed": seed,
        "rule": rule,
        "rate": rate,
        "threads": threads,
        "limit_s": limit_s,
    }
    (result,) = workers.run(plain_loop, [settings])
    return result["seconds"], result["reached"]


def _by_downpour(
    cluster: squall.Local, task: Lesson, every: int, overlap: bool, seed: int, way: Way, limit_s: float
) -> tuple[float, bool]:
    rule, rate = way
    with tempfile.TemporaryDirectory() as folder:
        return downpour(
            cluster,
            task,
            Path(folder),
            seed=seed,
            rule=rule,
            rate=rate,
            every=every,
            overlap=overlap,
            limit_s=limit_s,
        )


@dataclass(frozen=True)
class _Trials:
    """How often one way did not reach the loss, and the seconds that it took in all."""

    failed: int = 0
    seconds: float = 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """What never got there comes last, the quickest to give up first."""
        return (self.failed, self.seconds)

    def having(self, learned: tuple[float, bool]) -> "_Trials":
        seconds, reached = learned
        return _Trials(self.failed + (not reached), self.seconds + seconds)


@dataclass(kw_only=True)
class _Learned:
    """All sides on one data set: how they learn, how many seeds each has had, and how often it gave up."""

    name: str
    learners: dict[str, Learner]
    ways: dict[str, Way] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def tune(self, ways: tuple[Way, ...]) -> None:
        """Find each side's fastest way, on seeds that are not measured; one way needs no finding.

        All are tried on the first seed, and the fastest few on the others too; then the least time in all counts.
        """
        for side, learn in self.learners.items():
            self.ways[side] = ways[0] if len(ways) == 1 else _fastest(learn, ways)

    def sides(self) -> list[Callable[[], Mapping[str, float]]]:
        return [partial(self._learn, side) for side in self.learners]

    def _learn(self, side: str) -> Mapping[str, float]:
        seed = self.seeds.get(side, 0)
        self.seeds[side] = seed + 1
        seconds, reached = self.learners[side](seed, self.ways[side], math.inf)
        if not reached:
            self.failed[side] = self.failed.get(side, 0) + 1
        return {f"{self.name}: {side}": seconds}

    def notes(self) -> list[str]:
        return [
            f"{self.name}: {side} did not reach the loss with {count} seeds; the whole time of these counts"
            for side, count in self.failed.items()
        ]


def _fastest(learn: Learner, ways: tuple[Way, ...]) -> Way:
    first, *others = TUNING_SEEDS
    tried: dict[Way, _Trials] = {}
    best_s = math.inf
    for way in ways:
        tried[way] = _Trials().having(learn(first, way, HOPELESS * best_s))
        if not tried[way].failed:
            best_s = min(best_s, tried[way].seconds)
    finalists = sorted(ways, key=lambda way: tried[way].rank)[:FINALISTS]
    for way in finalists:
        for seed in others:
            tried[way] = tried[way].having(learn(seed, way, 2 * HOPELESS * best_s))
    return min(finalists, key=lambda way: tried[way].rank)


def _ratios(name: str, rounds: list[Mapping[str, float]]) -> dict[str, Ratio]:
    """How many times faster than each plain loop."""
    return {
        f"{name}: {plain} / {side}": ratio_of(rounds, f"{name}: {plain}", f"{name}: {side}")
        for side in DOWNPOUR
        for plain in PLAIN
    }
