"""Real processes of this machine against the simulation of the same: staleness, and loss against steps.

The simulation gets the speeds and the jitter that the real run's ledger shows, and the real run's seed. Two real runs
are compared with each other as well: no simulation can be nearer to one than another real run is.
"""

from typing import Any

import numpy as np

import squall
from benchmarks.simulated.common import Ran, digits, draw, rounded, run, save

COUNTS = (1, 2, 4)
EPOCHS = 6


def real() -> dict[str, Any]:
    rows, pairs = [], {}
    with squall.Local() as local:
        for count in COUNTS:
            job = digits(replicas=count, epochs=EPOCHS, evaluate_every=0.25)
            first, second = run(job, cluster=local), run(job, cluster=local)
            speeds, jitter = _pace(first)
            simulated = run(
                job, cluster=squall.Simulated(seed=0, speeds=speeds, jitter=jitter, links=squall.Link(0.0))
            )
            pairs[count] = (first, simulated)
            rows.append(_row(job, first, second, simulated, speeds, jitter))
    draw("real-and-simulated", lambda axes: _paint(axes, pairs))
    return save("real", rows, epochs=EPOCHS)


def _pace(ran: Ran) -> tuple[tuple[float, ...], float]:
    """Minibatches a second of each replica, and how much the time of one varies (sigma of a lognormal)."""
    speeds, spreads = [], []
    for replica in np.unique(ran.applied["replica"]).tolist():
        times = ran.applied["time_s"][ran.applied["replica"] == replica]
        took = np.diff(times)
        took = took[took > 0]
        # The median of a lognormal is what its mean speed is stated by; a first, slow minibatch does not weigh.
        speeds.append(float(1 / np.median(took)))
        spreads.append(float(np.std(np.log(took))))
    return tuple(speeds), float(np.median(spreads))


def _row(
    job: squall.Job, first: Ran, second: Ran, simulated: Ran, speeds: tuple[float, ...], jitter: float
) -> dict[str, Any]:
    skip = job.strategy.warm_start + 2 * job.replicas
    real_stale, simulated_stale = first.staleness(skip), simulated.staleness(skip)
    return {
        "replicas": job.replicas,
        "speeds": [rounded(speed, 1) for speed in speeds],
        "jitter": rounded(jitter, 2),
        "staleness_real": rounded(real_stale.mean()),
        "staleness_real_again": rounded(second.staleness(skip).mean()),
        "staleness_simulated": rounded(simulated_stale.mean()),
        "deviation_real": rounded(real_stale.std()),
        "deviation_simulated": rounded(simulated_stale.std()),
        "loss_real": rounded(first.metrics["test_loss"], 4),
        "loss_simulated": rounded(simulated.metrics["test_loss"], 4),
        "loss_difference_mean": rounded(_difference(first, simulated), 4),
        "loss_difference_of_two_real": rounded(_difference(first, second), 4),
        "accuracy_real": rounded(first.metrics["test_accuracy"], 4),
        "accuracy_simulated": rounded(simulated.metrics["test_accuracy"], 4),
    }


def _difference(one: Ran, other: Ran) -> float:
    """Mean distance of two curves of test loss, over the steps at which the first was measured."""
    at, losses = _curve(one)
    return float(np.abs(losses - np.interp(at, *_curve(other))).mean())


def _curve(ran: Ran) -> tuple[Any, Any]:
    at = np.array([told["minibatches"] for told in ran.tests])
    return at, np.array([told["metrics"]["test_loss"] for told in ran.tests])


def _paint(axes: Any, pairs: dict[int, tuple[Ran, Ran]]) -> None:
    for color, (count, (really, simulated)) in zip(
        ("#1f6feb", "#d9730d", "#1a7f37"), pairs.items(), strict=True
    ):
        words = f"{count} replica" + "s" * (count > 1)
        axes.plot(*_curve(really), color=color, marker=".", linewidth=1.2, label=f"{words}, real")
        axes.plot(*_curve(simulated), color=color, linestyle="--", linewidth=1.2, label=f"{words}, simulated")
    axes.set_xlabel("minibatches done")
    axes.set_ylabel("test loss")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
