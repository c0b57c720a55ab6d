"""What the experiments share: tasks, one way to run them, and where figures and results go."""

import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

import squall
from squall.data.source import TensorSource
from squall.training.recipe import find

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
SPEED = 10.0
"""Minibatches a virtual second of one replica; everything else is measured against it."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What is kept of a run.

    Attributes:
        metrics: of the run; empty if it diverged.
        applied: the rows of its ledger on the first slice, in the order of versions.
        tests: the records of its evaluations, in order.
        losses: (minibatches done, training loss), in order.
        error: what it ended with; empty if it came to its end.
    """

    metrics: Mapping[str, Any]
    applied: "np.ndarray[Any, np.dtype[np.void]]"
    tests: tuple[Mapping[str, Any], ...]
    losses: tuple[tuple[int, float], ...]
    error: str = ""

    def staleness(self, skip: int = 0) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Of each push but the first `skip`, which come from before all replicas were under way."""
        stale: np.ndarray[Any, np.dtype[np.int64]] = self.applied["staleness"][skip:]
        return stale

    def first_time(self, accuracy: float) -> float | None:
        """When the test set's accuracy first reached this [virtual seconds]; None: never."""
        times = [told["time_s"] for told in self.tests if told["metrics"]["test_accuracy"] >= accuracy]
        return min(times, default=None)


def run(job: squall.Job, **changes: Any) -> Ran:
    """Run a job into a temporary directory, and keep its figures."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        try:
            done = squall.fit(replace(job, out=path, progress=False, threads=1, **changes))
        except squall.DivergedError as error:
            return Ran(metrics={}, applied=_first_slice(squall.load(path, job.model)), tests=(), losses=(), error=str(error))  # type: ignore[arg-type]  # fmt: skip
        history = done.history
        return Ran(
            metrics=done.metrics,
            applied=_first_slice(done),
            tests=tuple(told for told in history if told["event"] == "Evaluated"),
            losses=tuple(
                (told["minibatches"], told["train_loss"])
                for told in history
                if told["event"] == "Progress" and told["train_loss"] is not None
            ),
        )


def _first_slice(done: squall.Run) -> "np.ndarray[Any, np.dtype[np.void]]":
    rows = done.ledger()
    rows = rows[(rows["outcome"] == "applied") & (rows["slice"] == 0)]
    return rows[np.argsort(rows["version"])]


# Tasks ---------------------------------------------------------------------------------------------------


def digits(**changes: Any) -> squall.Job:
    """The recipe of the package: 784-256-10, Adagrad, minibatches of 64, a warm start of 63 blocks."""
    return replace(find("digits"), **changes)


def frames(archive: Path, **changes: Any) -> squall.Job:
    """FSDD frames: 440-256-256-60."""
    return replace(find("fsdd", [("data", str(archive))]), **changes)


def stiff(**changes: Any) -> squall.Job:
    """Digits whose pixels are scaled by 10**u, u drawn evenly from [-2, 1], and a deep sigmoid network.

    So gradients of some weights are a thousand times those of others, and one rate cannot suit all of them.
    """
    scale = (10.0 ** np.random.default_rng(0).uniform(-2.0, 1.0, 784)).astype(np.float32)
    scaled = [TensorSource((part.tree[0] * scale, part.tree[1])) for part in squall.data.digits()]
    job = squall.Job(sigmoid_network, scaled[0], test=scaled[1], batch_size=32)
    return replace(job, **changes)


def sigmoid_network() -> nn.Module:
    """784-64-64-10 with sigmoids."""
    return nn.Sequential(nn.Linear(784, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10))


def nothing(num_minibatches: int, **changes: Any) -> squall.Job:
    """A task for modelled runs, where only the number of minibatches matters; each holds one example."""
    data = (torch.zeros(num_minibatches, 7), torch.zeros(num_minibatches, 1))
    job = squall.Job(nn.Linear(7, 1), data, loss="mse", batch_size=1, epochs=1)
    return replace(job, **changes)


# Results -------------------------------------------------------------------------------------------------


def save(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> dict[str, Any]:
    """Write a result with its date, machine and commit; a later one of the same day replaces it."""
    told = {
        "benchmark": f"simulated {name}",
        "date": date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        **facts,
        "rows": list(rows),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"simulated-{name}-{told['date']}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    return told


def newest(name: str) -> dict[str, Any]:
    """The newest result of this name."""
    found = sorted(RESULTS.glob(f"simulated-{name}-????-??-??.json"))
    told: dict[str, Any] = json.loads(found[-1].read_text())
    return told


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return done.stdout.strip() or "unknown"


def draw(name: str, paint: Callable[[Any], None], *, width: float = 7.0, height: float = 4.0) -> None:
    """Have a figure painted on one pair of axes, and write it as ``docs/figures/NAME.svg``."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.25)
    paint(axes)
    FIGURES.mkdir(exist_ok=True)
    # The same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(FIGURES / f"{name}.svg", format="svg", metadata={"Date": None})


def rounded(value: float | None, digits: int = 3) -> float | None:
    """A figure as it is told; None where there is none."""
    return None if value is None or not np.isfinite(value) else round(float(value), digits)
