"""Bytes of an epoch over TCP, counted by relays outside the engine, with fewer and fewer pushes and fetches.

They must fall as 1 / n_push and 1 / n_fetch, within 5 %, and be what the run itself says (`run.traffic()`), within 2 %.
What every run costs once (greetings, the first fetch) is taken out: of two runs that differ in epochs alone, the
difference counts.
"""

import tempfile
from pathlib import Path

import squall
from squall.bench.figure import Ratio, Report, Series, Settings
from squall.bench.nets import Net, small_net
from squall.bench.place import Place
from squall.cluster.relay import Relays

BATCH_SIZE = 16
REPLICAS = 2
EPOCHS = (1, 3)
# n_push and n_fetch
CASES = ((1, 1), (2, 2), (5, 5), (10, 10), (1, 10), (10, 1))
QUICK_CASES = ((1, 1), (2, 2))
SCALES_WITHIN, EQUALS_WITHIN = 0.05, 0.02


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file. Bytes do not differ from round to round, so there is one."""
    net = small_net()
    net = Net(recipe=net.recipe, examples=160 if settings.quick else 6400, sizes={})
    cases = QUICK_CASES if settings.quick else CASES
    with Relays() as relays, squall.Local(transport="tcp", relay=relays.between) as cluster:
        found = {case: _of_epoch(cluster, relays, net, *case) for case in cases}
    told = {case: f"n_push = {case[0]}, n_fetch = {case[1]}" for case in cases}
    series, ratios = {}, {}
    for case in cases:
        for way in ("pushed", "fetched"):
            counted, itself = found[case][way]
            series[f"{told[case]}: {way}"] = Series(values=(counted,), unit="bytes")
            ratios[f"{told[case]}: {way}, relays / run.traffic()"] = _within(counted / itself, EQUALS_WITHIN)
    for case in cases[1:]:
        for way, every in (("pushed", case[0]), ("fetched", case[1])):
            share = found[case][way][0] * every / found[1, 1][way][0]
            ratios[f"{told[case]}: {way} x {every} / {way} with n = 1"] = _within(share, SCALES_WITHIN)
    return Report(
        series=series,
        ratios=ratios,
        sizes={"net": net.as_json(), "batch_size": BATCH_SIZE, "replicas": REPLICAS},
        notes=("a ratio's target is how far from 1 it may be",),
    )


def _within(value: float, bound: float) -> Ratio:
    return Ratio(values=(abs(value - 1),), target=bound, at_most=True)


def _of_epoch(
    cluster: squall.Local, relays: Relays, net: Net, n_push: int, n_fetch: int
) -> dict[str, tuple[float, float]]:
    """Bytes of one epoch to the shards ("pushed") and from them ("fetched"): as relays saw them, as the run says."""
    strategy = squall.Downpour(n_push=n_push, n_fetch=n_fetch)
    few, many = (_of_run(cluster, relays, net, strategy, epochs) for epochs in EPOCHS)
    epochs = EPOCHS[1] - EPOCHS[0]
    return {
        way: ((many[way][0] - few[way][0]) / epochs, (many[way][1] - few[way][1]) / epochs) for way in few
    }


def _of_run(
    cluster: squall.Local, relays: Relays, net: Net, strategy: squall.Downpour, epochs: int
) -> dict[str, tuple[int, int]]:
    relays.forget()
    with tempfile.TemporaryDirectory() as folder:
        run = squall.fit(
            net.build,
            net.data(),
            strategy=strategy,
            replicas=REPLICAS,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            threads=1,
            cluster=cluster,
            out=Path(folder) / "run",
            progress=False,
        )
        itself = run.traffic()
    seen = {
        link: count
        for link, count in relays.counts().items()
        if link[0][:7] == "replica" and link[1][:5] == "shard"
    }
    return {
        "pushed": (sum(count[0] for count in seen.values()), sum(itself[link][0] for link in seen)),
        "fetched": (sum(count[1] for count in seen.values()), sum(itself[link[::-1]][0] for link in seen)),
    }
