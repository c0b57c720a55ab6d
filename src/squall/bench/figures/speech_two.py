"""Two replicas on the paper's network, batch 128 and 32, against the ceiling, a plain loop and DistributedDataParallel.

The ceiling is 2 x plain / (plain + copy out + finiteness check + fetch), its terms measured in the same rounds with the
other core doing the same. Targets: 0.9 of it at batch 128 and 0.85 at batch 32; 1.05 and 1.2 times
DistributedDataParallel (gloo, two processes). A plain loop with two threads stands beside them.
"""

from functools import partial

from squall.bench.figure import Ratio, Report, Round, Series, Settings, ratio_of, series_of
from squall.bench.nets import speech_net
from squall.bench.place import Place
from squall.bench.rounds import Side, alternate
from squall.bench.sides import Work, ceiling, data_parallel, downpour, plain

# Batch size -> targets: of the ceiling, and of DistributedDataParallel.
TARGETS = {128: (0.9, 1.05), 32: (0.85, 1.2)}
QUICK_TARGETS = {8: (0.9, 1.05)}
STEPS, WARM = 12, 3
RATES = ("plain loop", "plain loop, two threads", "two replicas", "data parallel")
TERMS = ("step_s", "copy_s", "copy_and_check_s", "fetch_s")


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    targets = QUICK_TARGETS if settings.quick else TARGETS
    net = speech_net(quick=settings.quick)
    series: dict[str, Series] = {}
    ratios: dict[str, Ratio] = {}
    for batch_size, (of_ceiling, of_data_parallel) in targets.items():
        prefix = f"batch {batch_size}: "
        work = Work(net=net, batch_size=batch_size, steps=STEPS, warm=WARM)
        rounds = alternate(_sides(place, work, prefix), settings.rounds)
        series |= series_of(rounds, [prefix + name for name in RATES], "examples/s")
        series |= series_of(rounds, [prefix + name for name in TERMS], "s")
        ratios |= _ratios(rounds, prefix, of_ceiling, of_data_parallel)
    return Report(series=series, ratios=ratios, sizes={"net": net.as_json(), "steps": STEPS})


def _sides(place: Place, work: Work, prefix: str) -> list[Side]:
    return [
        partial(plain, place.workers, work, f"{prefix}plain loop"),
        partial(downpour, place.cluster, work, f"{prefix}two replicas", replicas=2),
        partial(data_parallel, place.workers, work, f"{prefix}data parallel"),
        partial(plain, place.workers, work, f"{prefix}plain loop, two threads", threads=2),
        partial(ceiling, place.workers, work, prefix),
    ]


def _ratios(rounds: list[Round], prefix: str, of_ceiling: float, of_data_parallel: float) -> dict[str, Ratio]:
    two, one = f"{prefix}two replicas", f"{prefix}plain loop"
    times = ratio_of(rounds, two, one)
    ceilings = tuple(done[f"{prefix}ceiling"] for done in rounds)
    shares = tuple(value / bound for value, bound in zip(times.values, ceilings, strict=True))
    return {
        f"{two} / plain loop": times,
        f"{prefix}ceiling / plain loop": Ratio(values=ceilings),
        f"{two} / ceiling": Ratio(values=shares, target=of_ceiling),
        f"{two} / data parallel": ratio_of(rounds, two, f"{prefix}data parallel", target=of_data_parallel),
        f"{two} / plain loop, two threads": ratio_of(rounds, two, f"{prefix}plain loop, two threads"),
    }
