"""One replica on the paper's network against a plain loop: what Squall costs where it can win nothing.

41.8 million parameters, batch 128, one thread. Targets: 0.9 of the plain loop, 0.95 with overlap.
"""

from functools import partial

from squall.bench.figure import Report, Settings, ratio_of, series_of
from squall.bench.nets import speech_net
from squall.bench.place import Place
from squall.bench.rounds import alternate
from squall.bench.sides import Work, downpour, plain

BATCH_SIZE = 128
STEPS, WARM = 12, 3


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    work = Work(
        net=speech_net(quick=settings.quick),
        batch_size=8 if settings.quick else BATCH_SIZE,
        steps=STEPS,
        warm=WARM,
    )
    sides = [
        partial(plain, place.workers, work, "plain loop"),
        partial(downpour, place.cluster, work, "one replica", replicas=1),
        partial(downpour, place.cluster, work, "one replica, overlap", replicas=1, overlap=True),
    ]
    rounds = alternate(sides, settings.rounds)
    return Report(
        series=series_of(rounds, ("plain loop", "one replica", "one replica, overlap"), "examples/s"),
        ratios={
            "one replica / plain loop": ratio_of(rounds, "one replica", "plain loop", target=0.9),
            "one replica, overlap / plain loop": ratio_of(
                rounds, "one replica, overlap", "plain loop", target=0.95
            ),
        },
        sizes={"net": work.net.as_json(), "batch_size": work.batch_size, "steps": STEPS},
    )
