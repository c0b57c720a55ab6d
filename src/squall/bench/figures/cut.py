"""One replica cut over two workers of one thread each, against a plain loop and against one worker.

Batch 32, three nets. A convolutional one of 326 MFLOP an example (forward, multiplications and additions), cut by feature
maps and by tiles (targets 1.65 of one worker), and in line, whole layers to each, as a pipeline of four microbatches; its
second convolution alone is two thirds of its work, so in line it cannot reach much. A deeper one of 381 MFLOP, none of
whose layers has more than a fifth, in line (1.4), beside torch's own pipeline of two processes, cut at the same place. One
with locally connected layers, cut by tiles (1.6). Where cuts in line are, `squall.plan` says for that batch. One partition
through the engine: 0.97 of a plain loop.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import squall
from squall.bench.figure import Ratio, Report, Round, Series, Settings, ratio_of, series_of
from squall.bench.nets import Net, deep_images_net, images_net, unshared_images_net
from squall.bench.place import Place
from squall.bench.rounds import alternate, steady_rate
from squall.bench.sides import Work, downpour, pipeline, plain

BATCH_SIZE = 32
STEPS, WARM = 12, 3
MICROBATCHES = 4
TILED = ("conv2d", "relu", "max_pool2d")
UNSHARED = ("locally_connected2d", "avg_pool2d", "conv2d")

Side = Callable[[], Round]


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """All sides of one net, and what is compared.

    Attributes:
        sides: by name.
        targets: (name, name of what it is held against) -> bound, or None.
    """

    work: Work
    sides: Mapping[str, Side]
    targets: Mapping[tuple[str, str], float | None]


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    series: dict[str, Series] = {}
    ratios: dict[str, Ratio] = {}
    sizes: dict[str, Any] = {}
    for make in (_wide, _deep, _unshared):
        compared = make(place, quick=settings.quick)
        rounds = alternate(list(compared.sides.values()), settings.rounds)
        series |= series_of(rounds, list(compared.sides), "examples/s")
        ratios |= {
            f"{above} / {below}": ratio_of(rounds, above, below, target=bound)
            for (above, below), bound in compared.targets.items()
        }
        net = compared.work.net
        sizes[net.recipe] = {"net": net.as_json(), "batch_size": compared.work.batch_size, "steps": STEPS}
    return Report(series=series, ratios=ratios, sizes=sizes)


def _wide(place: Place, *, quick: bool) -> _Comparison:
    work = _work(images_net(quick=quick), quick=quick)
    names = loop, whole, one, maps, tiles, line = (
        "plain loop",
        "one worker, whole",
        "one partition",
        "two by maps",
        "two by tiles",
        "two in line",
    )
    ways = (
        {"partitions": _plan(work, partitions=1, how="vertical")},
        {"partitions": _plan(work, partitions=2, how="vertical")},
        {"partitions": _plan(work, partitions=2, how="vertical", tiles=TILED)},
        _in_line(work),
    )
    return _Comparison(
        work=work,
        sides=_uncut(place, work, loop, whole) | _cut(place, work, dict(zip(names[2:], ways, strict=True))),
        targets={
            (maps, whole): 1.65,
            (tiles, whole): 1.65,
            (line, whole): None,
            (one, loop): 0.97,
            **{(name, loop): None for name in (whole, maps, tiles, line)},
        },
    )


def _deep(place: Place, *, quick: bool) -> _Comparison:
    work = _work(deep_images_net(quick=quick), quick=quick)
    names = loop, whole, line, torchs = (
        "deep: plain loop",
        "deep: one worker, whole",
        "deep: two in line",
        "deep: torch's pipeline",
    )
    way = _in_line(work)
    side = partial(
        pipeline,
        place.workers,
        work,
        torchs,
        first=_modules_of_first(work.net, way["partitions"]),
        microbatches=MICROBATCHES,
    )
    return _Comparison(
        work=work,
        sides={**_uncut(place, work, loop, whole), **_cut(place, work, {line: way}), torchs: side},
        targets={(line, whole): 1.4, (line, torchs): 1.0, **{(name, loop): None for name in names[1:]}},
    )


def _unshared(place: Place, *, quick: bool) -> _Comparison:
    work = _work(unshared_images_net(quick=quick), quick=quick)
    loop, whole, tiles = "unshared: plain loop", "unshared: one worker, whole", "unshared: two by tiles"
    way = {"partitions": _plan(work, partitions=2, how="vertical", tiles=UNSHARED)}
    return _Comparison(
        work=work,
        sides={**_uncut(place, work, loop, whole), **_cut(place, work, {tiles: way})},
        targets={(tiles, whole): 1.6, (tiles, loop): None, (whole, loop): None},
    )


def _work(net: Net, *, quick: bool) -> Work:
    return Work(net=net, batch_size=8 if quick else BATCH_SIZE, steps=STEPS, warm=WARM)


def _plan(work: Work, **way: Any) -> squall.Plan:
    return squall.plan(work.net.build(), work.net.data()[0][: work.batch_size], **way)


def _in_line(work: Work) -> dict[str, Any]:
    plan = _plan(work, partitions=2, how="horizontal", microbatches=MICROBATCHES)
    return {"partitions": plan, "microbatches": MICROBATCHES}


def _modules_of_first(net: Net, plan: squall.Plan) -> int:
    """How many of the net's modules the first partition has, by whose parameters it has."""
    second = [name for name, owned in plan.parameters.items() if owned.holding[0] is None]
    return min(int(name.partition(".")[0]) for name in second)


def _uncut(place: Place, work: Work, loop: str, whole: str) -> dict[str, Side]:
    return {
        loop: partial(plain, place.workers, work, loop),
        whole: partial(downpour, place.cluster, work, whole, replicas=1),
    }


def _cut(place: Place, work: Work, ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Side]:
    return {name: partial(cut, place.cluster, work, name, **way) for name, way in ways.items()}


def cut(cluster: Any, work: Work, name: str, **way: Any) -> Mapping[str, float]:
    """Squall's examples per second with one replica that is cut, from the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        job = replace(work.job(replicas=1), **way)
        run = squall.fit(job, cluster=cluster, out=Path(folder) / "run")
        return {name: steady_rate(run.ledger(), warm=work.warm)}
