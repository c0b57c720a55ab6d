"""Fixed rate against Adagrad, with and without a warm start, on a stiff task with sixteen replicas.

Source of the claim: Dean et al., NIPS 2012, section 4.1 and figures 4 and 5: Adagrad with a warm start makes many
replicas work where a fixed rate does not. Each arm has its rate chosen from a grid of six, on a seed of its own. A wider grid
before, in half decades from 0.01 to 10 for Sgd and from 0.003 to 3 for Adagrad, showed where to look.

A first experiment had the deadline at twice the tuning seed's time and the seeds 0 to 4: every arm but the fixed rate with a
warm start made it. This one has it at a quarter more than that time, and five seeds that no choice has seen.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

import squall
from benchmarks.simulated.common import SPEED, Ran, draw, rounded, run, save, stiff

REPLICAS = 16
SECONDS = 24.0
"""Virtual time of each run: above the deadline, so that everyone has until then."""
WARM_START = 64
TARGET = 0.85
TUNED_ON = 100
SEEDS = (10, 11, 12, 13, 14)
MARGIN = 1.25
RATES: Mapping[str, tuple[float, ...]] = {
    "Sgd": (0.03, 0.06, 0.1, 0.15, 0.2, 0.3),
    "Adagrad": (0.01, 0.02, 0.03, 0.05, 0.1, 0.2),
}
ARMS = [(rule, warm) for rule in RATES for warm in (0, WARM_START)]


def rules() -> dict[str, Any]:
    tuned = {arm: {rate: _run(arm, rate, TUNED_ON) for rate in RATES[arm[0]]} for arm in ARMS}
    best = {arm: max(runs, key=lambda rate: _merit(runs[rate])) for arm, runs in tuned.items()}
    fastest = tuned["Adagrad", WARM_START][best["Adagrad", WARM_START]].first_time(TARGET)
    # Set before any of the five seeds has run: a quarter more than the last arm needed on the seed of the tuning.
    deadline = MARGIN * fastest if fastest is not None else math.nan
    assert not deadline > SECONDS, f"a deadline of {deadline} s needs longer runs"
    rows, curves = [], {}
    for arm in ARMS:
        runs = [_run(arm, best[arm], seed) for seed in SEEDS]
        rows.append(_row(arm, best[arm], runs, deadline))
        curves[_words(arm, best[arm])] = runs
    draw("loss-by-time", lambda axes: _paint(axes, curves, deadline))
    grid = [
        {"arm": _words(arm, rate), "time_s": rounded(ran.first_time(TARGET), 2), "best_accuracy": _best(ran)}
        for arm, runs in tuned.items()
        for rate, ran in runs.items()
    ]
    return save(
        "rules",
        rows,
        replicas=REPLICAS,
        seconds=SECONDS,
        target=TARGET,
        deadline_s=rounded(deadline, 2),
        tuned_on_seed=TUNED_ON,
        grid=grid,
    )


def _run(arm: tuple[str, int], rate: float, seed: int) -> Ran:
    name, warm_start = arm
    rule = squall.Sgd(learning_rate=rate) if name == "Sgd" else squall.Adagrad(learning_rate=rate)
    job = stiff(
        replicas=REPLICAS,
        time_s=SECONDS,
        seed=seed,
        evaluate_every=0.2,
        strategy=squall.Downpour(rule=rule, warm_start=warm_start),
    )
    return run(job, cluster=squall.Simulated(seed=seed, speeds=(SPEED,)))


def _merit(ran: Ran) -> tuple[float, float]:
    """The sooner at the target the better; if never, the nearer to it."""
    time_s = ran.first_time(TARGET)
    return (-time_s if time_s is not None else -math.inf), _best(ran)


def _best(ran: Ran) -> float:
    return max((told["metrics"]["test_accuracy"] or 0.0 for told in ran.tests), default=0.0)


def _words(arm: tuple[str, int], rate: float) -> str:
    name, warm_start = arm
    return f"{name}({rate:g})" + (f", warm start of {warm_start} blocks" if warm_start else "")


def _row(arm: tuple[str, int], rate: float, runs: list[Ran], deadline: float) -> dict[str, Any]:
    times = [ran.first_time(TARGET) for ran in runs]
    reached = [time for time in times if time is not None]
    return {
        "arm": _words(arm, rate),
        "times_s": [rounded(time, 2) for time in times],
        "median_s": rounded(statistics.median([math.inf if time is None else time for time in times]), 2),
        "in_time": sum(time <= deadline for time in reached),
        "seeds": len(runs),
        "final_loss": [rounded(ran.metrics.get("test_loss")) for ran in runs],
        "final_accuracy": [rounded(ran.metrics.get("test_accuracy"), 4) for ran in runs],
    }


def _paint(axes: Any, curves: Mapping[str, list[Ran]], deadline: float) -> None:
    colors = ("#d9730d", "#8250df", "#1f6feb", "#1a7f37")
    for color, (words, runs) in zip(colors, curves.items(), strict=True):
        for at, ran in enumerate(runs):
            times = [told["time_s"] for told in ran.tests]
            losses = [told["metrics"]["test_loss"] for told in ran.tests]
            axes.plot(times, losses, color=color, alpha=0.7, linewidth=1.2, label=None if at else words)
    axes.axvline(deadline, color="black", linestyle=":", label="deadline")
    axes.set_ylim(0, 2.5)
    axes.set_xlabel(f"virtual seconds, {REPLICAS} replicas")
    axes.set_ylabel("test loss")
    axes.legend(frameon=False, fontsize=8)
