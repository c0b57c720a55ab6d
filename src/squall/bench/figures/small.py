"""A network of 784-256-10, batch 64, where a step takes a millisecond: two replicas against a plain loop.

Targets: 1.2 times the plain loop with a push and a fetch at each step, 1.8 times with one for every ten. One replica stands
beside it.
"""

from functools import partial

from squall.bench.figure import Report, Settings, ratio_of, series_of
from squall.bench.nets import small_net
from squall.bench.place import Place
from squall.bench.rounds import alternate
from squall.bench.sides import Work, downpour, plain

BATCH_SIZE = 64
STEPS, WARM = 3000, 30
QUICK_STEPS, QUICK_WARM = 40, 2
# Name -> replicas, minibatches to a push and to a fetch, and the target.
CASES = {
    "one replica, n = 1": (1, 1, None),
    "two replicas, n = 1": (2, 1, 1.2),
    "two replicas, n = 10": (2, 10, 1.8),
}


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    steps, warm = (QUICK_STEPS, QUICK_WARM) if settings.quick else (STEPS, WARM)
    work = Work(net=small_net(), batch_size=BATCH_SIZE, steps=steps, warm=warm)
    sides = [
        partial(plain, place.workers, work, "plain loop"),
        *(
            partial(downpour, place.cluster, work, name, replicas=replicas, n_fetch=every, n_push=every)
            for name, (replicas, every, _) in CASES.items()
        ),
    ]
    rounds = alternate(sides, settings.rounds)
    return Report(
        series=series_of(rounds, ("plain loop", *CASES), "examples/s"),
        ratios={
            f"{name} / plain loop": ratio_of(rounds, name, "plain loop", target=target)
            for name, (_, _, target) in CASES.items()
        },
        sizes={"net": work.net.as_json(), "batch_size": BATCH_SIZE, "steps": steps},
    )
