"""Tests of squall.training.trial: a test set or a metric that does not fit is refused before anything is trained.

Faults planted by hand, each seen to fail a test here: the test set not tried · metrics left out of the trial · the run's own
model tried instead of a copy · the caller's random state moved on · a model that fails on everything blamed on the test set ·
only a few examples tried, where the model wants whole minibatches · an error at the end left as it was.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.training.prepare import prepare

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()


def fit(model: Any, train: Any = (X, Y), **settings: Any) -> squall.Run:
    usual = {"cluster": squall.InProcess(), "progress": False, "threads": 1, "batch_size": 8}
    return squall.fit(model, train, **(usual | settings))


def with_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def raising(output: Tensor, target: Tensor) -> float:
    raise LookupError("no such figure")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "inputs of another shape": (
        {"test": (X[:, :3], Y)},
        r"Job\(test=\): expected .* train= do: float32 \(8, 4\), int64 \(8,\), .*RuntimeError: mat1 .*float32 \(64, 3\)",
    ),
    "inputs of another dtype": (
        {"test": (X.double(), Y)},
        r"Job\(test=\): .*RuntimeError.*float64 \(64, 4\)",
    ),
    "targets of another dtype": ({"test": (X, Y.float())}, r"Job\(test=\): .*RuntimeError.*float32 \(64,\)"),
    "targets of another shape": ({"test": (X, Y[:, None])}, r"Job\(test=\): .*int64 \(64, 1\)"),
    "a target that is no class": ({"test": (X, Y + 5)}, r"Job\(test=\): .*IndexError: Target"),
    "no pair": ({"test": (X, Y, Y)}, r"expected a pair \(inputs, targets\)"),
    "a metric that raises": (
        {"test": (X, Y), "metrics": {"mine": raising}},
        r"Job\(metrics=\): 'mine': expected .*LookupError: no such figure \(File .*test_trial.py",
    ),
    "a metric that is no number": (
        {"test": (X, Y), "metrics": {"mine": lambda output, target: output}},
        r"Job\(metrics=\): 'mine': expected",
    ),
    "what a step cannot take": (
        {"test": (X[:, :3], Y), "step": with_step},
        r"Job\(test=\): .*RuntimeError: mat1",
    ),
}


@pytest.mark.parametrize(("settings", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_refused_before_anything_is_there(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(squall.ConfigError, match=said):
        fit(nn.Linear(4, 2), out=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


class Remembers(nn.Module):
    """Counts its forwards in a buffer and in Python, and in training as in evaluation draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 2), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return self.inner(x + 0 * torch.rand(()))  # type: ignore[no-any-return]


def test_the_trial_leaves_no_trace() -> None:
    model = Remembers()
    torch.manual_seed(3)
    before = torch.get_rng_state()

    prepared = prepare(squall.Job(model, (X, Y), test=(X, Y)))

    assert torch.equal(torch.get_rng_state(), before)
    for left in (model, prepared.model):
        assert (left.calls, int(left.seen)) == (0, 0)
        assert all(parameter.grad is None for parameter in left.parameters())


class Uncopied(nn.Linear):
    """Cannot be copied; a function has to make each."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_made_once_more_for_the_trial() -> None:
    with pytest.raises(squall.ConfigError, match=r"Job\(test=\)"):
        fit(lambda: Uncopied(), test=(X[:, :3], Y))


def test_what_fails_on_the_training_set_as_well_is_left_to_training() -> None:
    with pytest.raises(squall.UserCodeError, match=r"replica\d.0 at epoch 0, position \d"):
        fit(nn.Linear(3, 2), test=(X, Y), steps=3)


class WholeMinibatches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, 8, 4)).view(-1, 2)


def test_a_model_that_takes_whole_minibatches_only_is_not_refused() -> None:
    assert "test_loss" in fit(WholeMinibatches(4, 2), test=(X, Y)).metrics


def test_what_only_a_later_example_brings_about_names_the_line_and_leaves_the_model(tmp_path: Path) -> None:
    y = Y.clone()
    y[-1] = 7
    x = X.repeat(8, 1)
    with pytest.raises(squall.UserCodeError, match=r"evaluator: IndexError: Target 7 is out of bounds"):
        fit(nn.Linear(4, 2), test=(x, torch.cat([Y.repeat(7), y])), steps=3, out=tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").exists()
