"""How stale pushes are, and what that costs, from one replica to two hundred."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import squall
from benchmarks.simulated.common import SPEED, digits, draw, frames, nothing, rounded, run, save

COUNTS = (1, 4, 16, 64, 200)
STEPS = 2000
JITTER = 0.2


def cost(archive: Path | None) -> dict[str, Any]:
    """Digits, and FSDD frames if they are there: the same minibatches, computed by more and more replicas."""
    tasks: dict[str, Callable[..., squall.Job]] = {"digits": digits}
    if archive is not None:
        tasks["FSDD frames"] = partial(frames, archive)
    rows = [_cost_row(name, make, count) for name, make in tasks.items() for count in COUNTS]
    draw("accuracy-by-replicas", lambda axes: _paint_cost(axes, rows))
    return save("cost", rows, steps=STEPS, speed=SPEED, jitter=JITTER)


def _cost_row(name: str, make: Callable[..., squall.Job], count: int) -> dict[str, Any]:
    job = make(replicas=count, epochs=None, steps=STEPS, evaluate_every=1e9)
    ran = run(job, cluster=squall.Simulated(seed=0, speeds=(SPEED,), jitter=JITTER))
    # The first push of each replica counts from the one moment in which all began.
    stale = ran.staleness(skip=job.strategy.warm_start + 2 * count)
    return {
        "task": name,
        "replicas": count,
        "staleness_expected": count - 1,
        "staleness_mean": rounded(stale.mean()),
        "staleness_deviation": rounded(stale.std()),
        "staleness_most": int(stale.max()),
        "test_loss": rounded(ran.metrics.get("test_loss")),
        "test_accuracy": rounded(ran.metrics.get("test_accuracy"), 4),
        "virtual_s": rounded(ran.metrics.get("virtual_s"), 1),
        "error": ran.error,
    }


def _paint_cost(axes: Any, rows: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == name and row["test_accuracy"] is not None]
        axes.plot(
            [row["replicas"] for row in mine], [row["test_accuracy"] for row in mine], marker="o", label=name
        )
    axes.set_xscale("log")
    axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axes.set_xlabel("replicas (mean staleness is this, less one)")
    axes.set_ylabel(f"test accuracy after {STEPS:,} minibatches")
    axes.legend(frameon=False)


def overlap() -> dict[str, Any]:
    """Mean staleness with and without overlap; no gradient is needed for that."""
    rows = []
    for count in COUNTS:
        for overlaps in (False, True):
            job = nothing(40 * count + 2000, replicas=count, strategy=squall.Downpour(overlap=overlaps))
            cluster = squall.Simulated(seed=0, speeds=(SPEED,), jitter=JITTER, compute="modelled")
            ran = run(job, cluster=cluster)
            stale = ran.staleness(skip=4 * count)[: -2 * count]
            rows.append(
                {
                    "replicas": count,
                    "overlap": overlaps,
                    "staleness_expected": 2 * count - 1 if overlaps else count - 1,
                    "staleness_mean": rounded(stale.mean()),
                    "staleness_most": int(stale.max()),
                    "pushes": len(ran.applied),
                }
            )
    return save("overlap", rows, speed=SPEED, jitter=JITTER)


def bound() -> dict[str, Any]:
    """A bound on staleness with one replica ten times slower: who works how much, and what it costs."""
    rows = []
    for count in (4, 8):
        for most in (None, 3):
            job = nothing(200 * count, replicas=count, strategy=squall.Downpour(max_staleness=most))
            speeds = (SPEED / 10, *[SPEED] * (count - 1))
            ran = run(job, cluster=squall.Simulated(seed=0, speeds=speeds, jitter=JITTER, compute="modelled"))
            slow = ran.applied[ran.applied["replica"] == 0]
            rows.append(
                {
                    "replicas": count,
                    "max_staleness": most,
                    "staleness_most": int(ran.applied["staleness"].max()),
                    "staleness_mean": rounded(ran.applied["staleness"].mean()),
                    "staleness_of_the_slow_one": rounded(slow["staleness"].mean()),
                    "blocks": len(ran.applied),
                    "blocks_of_the_slow_one": len(slow),
                    "minibatches_per_s": rounded(ran.metrics["samples_per_second"], 1),
                }
            )
    return save("bound", rows, speed=SPEED, jitter=JITTER)
