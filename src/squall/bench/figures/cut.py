"""One replica cut over two workers of one thread each, against a plain loop and against one worker.

A convolutional net of 326 MFLOP an example (forward, multiplications and additions), batch 32: cut by feature maps and by
tiles (targets 1.65 of one worker), and between layers as a pipeline of four microbatches (1.4), where `squall.plan` puts the
cut for that batch. One partition through the engine: 0.97 of a plain loop.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import squall
from squall.bench.figure import Report, Settings, ratio_of, series_of
from squall.bench.nets import images_net
from squall.bench.place import Place
from squall.bench.rounds import alternate, steady_rate
from squall.bench.sides import Work, downpour, plain

BATCH_SIZE = 32
STEPS, WARM = 12, 3
MICROBATCHES = 4
PLAIN, WHOLE, ONE = "plain loop", "one worker, whole", "one partition"
MAPS, TILES, PIPELINE = "two by maps", "two by tiles", "two in line"
TARGETS = {MAPS: 1.65, TILES: 1.65, PIPELINE: 1.4}
TILED = ("conv2d", "relu", "max_pool2d")


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file."""
    net = images_net(quick=settings.quick)
    work = Work(net=net, batch_size=8 if settings.quick else BATCH_SIZE, steps=STEPS, warm=WARM)
    model, example = net.build(), net.data()[0][: work.batch_size]
    ways: dict[str, dict[str, Any]] = {
        ONE: {"partitions": squall.plan(model, example, partitions=1, how="vertical")},
        MAPS: {"partitions": squall.plan(model, example, partitions=2, how="vertical")},
        TILES: {"partitions": squall.plan(model, example, partitions=2, how="vertical", tiles=TILED)},
        PIPELINE: {
            "partitions": squall.plan(
                model, example, partitions=2, how="horizontal", microbatches=MICROBATCHES
            ),
            "microbatches": MICROBATCHES,
        },
    }
    sides = [
        partial(plain, place.workers, work, PLAIN),
        partial(downpour, place.cluster, work, WHOLE, replicas=1),
        *(partial(cut, place.cluster, work, name, **way) for name, way in ways.items()),
    ]
    rounds = alternate(sides, settings.rounds)
    ratios = {
        f"{name} / {WHOLE}": ratio_of(rounds, name, WHOLE, target=bound) for name, bound in TARGETS.items()
    }
    ratios |= {f"{name} / {PLAIN}": ratio_of(rounds, name, PLAIN) for name in (WHOLE, *TARGETS)}
    ratios[f"{ONE} / {PLAIN}"] = ratio_of(rounds, ONE, PLAIN, target=0.97)
    return Report(
        series=series_of(rounds, (PLAIN, WHOLE, *ways), "examples/s"),
        ratios=ratios,
        sizes={"net": net.as_json(), "batch_size": work.batch_size, "steps": STEPS},
    )


def cut(cluster: Any, work: Work, name: str, **way: Any) -> Mapping[str, float]:
    """Squall's examples per second with one replica that is cut, from the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        job = replace(work.job(replicas=1), **way)
        run = squall.fit(job, cluster=cluster, out=Path(folder) / "run")
        return {name: steady_rate(run.ledger(), warm=work.warm)}
