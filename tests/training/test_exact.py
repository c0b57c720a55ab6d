"""One replica that is stopped, or loses all its processes' work since a checkpoint, and goes on as if nothing had been.

Everything that it goes on with is compared bit for bit with a run that was never interrupted: parameters, the rule's
state and steps, buffers, and the versions in the ledger.

Planted faults, each seen to fail a test here: buffers taken as last written instead of as of the cut · buffers written
without the minibatch that they are as of · stops and checkpoints that do not wait for a fetch · checkpoints alone that
do not · minibatches not counted where fetches fall within blocks.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import squall
from squall import schedules
from squall.observe.events import Checkpointed, Event
from squall.training import fit
from squall.training.checkpoint import newest_checkpoint
from squall.training.fit import StopRequest, carry_out

EPOCHS, PER_EPOCH = 2, 11


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(PER_EPOCH * 4 - 1, 5, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def network() -> nn.Module:
    """With all that has a state of its own, or draws lots."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2))


ADAM = squall.Adam(
    learning_rate=schedules.warmup(schedules.cosine(0.01, total=EPOCHS * PER_EPOCH), minibatches=4)
)
SGD = squall.Sgd(learning_rate=schedules.step(0.1, every=9, gamma=0.5))
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"rule": ADAM},
    "fetches seldom": {"rule": ADAM, "n_fetch": 4},
    "fetches seldom, pushes more often": {"rule": ADAM, "n_fetch": 5, "n_push": 2},
    "fetches within blocks": {"rule": SGD, "n_fetch": 2, "n_push": 3},
    "five local steps": {"rule": SGD, "n_fetch": 5, "n_push": 5},
    "local steps between pushes": {"rule": SGD, "n_fetch": 3},
    "bounded": {"rule": ADAM, "max_staleness": 0},
}


def job(out: Path, strategy: str, cluster: Any = None, **settings: Any) -> squall.Job:
    usual: dict[str, Any] = {
        "strategy": squall.Downpour(**STRATEGIES[strategy]),
        "cluster": cluster or squall.InProcess(),
        "replicas": 1,
        "shards": 2,
        "batch_size": 4,
        "epochs": EPOCHS,
        "clip_norm": 0.5,
        "seed": 7,
        "progress": False,
        "threads": 1,
        "out": out,
    }
    return squall.Job(network, data(), **(usual | settings))


class StopsAtEvent(StopRequest):
    """Asks a run to stop when it has been asked so many times whether to."""

    def __init__(self, moment: int) -> None:
        self._left = moment
        super().__init__()

    @property  # type: ignore[override]
    def why(self) -> str | None:
        self._left -= 1
        return "stopped" if self._left < 0 else None

    @why.setter
    def why(self, value: str | None) -> None:
        pass


def go(job: squall.Job, *, moment: int = 1_000_000, resume: bool = False) -> list[Event]:
    seen: list[Event] = []
    stop = StopsAtEvent(moment)
    carry_out(job, cluster=job.cluster, resume=resume, publish=seen.append, stop=stop)
    return seen


def state_of(out: Path) -> dict[str, np.ndarray]:
    """All that a run goes on with, by name."""
    checkpoint = newest_checkpoint(out / "checkpoints")
    found = {f"buffer {name}": value.numpy() for name, value in checkpoint.buffers.items()}
    for state, book in zip(checkpoint.states, checkpoint.books, strict=True):
        number = state.spec.slice
        found[f"{number} params"] = state.params.numpy()
        found[f"{number} steps"] = state.steps
        found |= {f"{number} {name}": slot.numpy() for name, slot in state.slots.items()}
        found[f"{number} book"] = np.array(
            [book.version, book.minibatches, *np.ravel(book.settled.entries())]
        )
    ledger = squall.load(out, model=network()).ledger()
    lost = {tuple(row) for row in ledger[ledger["outcome"] == "rolled_back"][["slice", "version"]].tolist()}
    assert not lost or (out / "killed").exists()
    applied = np.unique(
        ledger[ledger["outcome"] == "applied"][["slice", "version", "epoch", "first", "examples"]]
    )
    return found | {"ledger": applied}


def assert_same(out: Path, whole: Path) -> None:
    got, expected = state_of(out), state_of(whole)
    assert got.keys() == expected.keys()
    assert [name for name in expected if not np.array_equal(got[name], expected[name])] == []


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss curve costs more than these runs."""
    monkeypatch.setattr(fit, "plot_loss", lambda *_: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs that were never interrupted, by strategy, each made once."""
    made: dict[str, Path] = {}

    def of(strategy: str) -> Path:
        if strategy not in made:
            made[strategy] = tmp_path_factory.mktemp("whole") / "run"
            go(job(made[strategy], strategy))
        return made[strategy]

    return of


def stop_often(strategy: str, whole: Path, folder: Path, seed: int) -> None:
    draw = random.Random(f"{strategy} {seed}")
    out = folder / "run"
    go(job(out, strategy), moment=draw.randrange(5, 130))
    go(job(out, strategy), moment=draw.randrange(5, 130), resume=True)
    go(job(out, strategy), resume=True)
    assert_same(out, whole)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_stopped_at_random_moments_ends_as_if_it_had_not_been(
    whole: Any, tmp_path: Path, strategy: str, seed: int
) -> None:
    stop_often(strategy, whole(strategy), tmp_path, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_random_moments(whole: Any, tmp_path: Path, strategy: str, seed: int) -> None:
    stop_often(strategy, whole(strategy), tmp_path, seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_killed_goes_on_from_any_of_its_checkpoints_as_if_it_had_not_been(
    whole: Any, tmp_path: Path, strategy: str
) -> None:
    """Each checkpoint is copied as it becomes whole, with the ledger as far as it has been written by then."""
    out = tmp_path / "run"
    copies: list[Path] = []

    def publish(event: Event) -> None:
        if isinstance(event, Checkpointed):
            copies.append(tmp_path / f"copy{len(copies)}")
            shutil.copytree(out, copies[-1])
            (copies[-1] / "killed").touch()

    told = job(out, strategy, checkpoint_every=0.45)
    carry_out(told, cluster=told.cluster, resume=False, publish=publish, stop=StopRequest())

    assert len(copies) >= 3
    assert_same(out, whole(strategy))
    for copy in copies[:2]:
        go(job(copy, strategy), resume=True)
        assert_same(copy, whole(strategy))
