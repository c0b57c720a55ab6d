"""Tests of squall.training.recipe: what a setting changes.

Faults planted by hand, each seen to fail a test: an argument applied to the job as well · a default's kind not looked at ·
a missing argument left to Python · the rest of the settings lost.
"""

from pathlib import Path

import pytest

import squall
from squall.training.recipe import find

RECIPE = """
import squall
from torch import nn

def wide(width: int = 2, name: str = "x", must_not=None):
    job = squall.Job(nn.Linear(width, 1), None, replicas=width)
    assert name == "x" or name.startswith("/")
    return job

def needs(path):
    return squall.Job(nn.Linear(1, 1), None, out=path)

def names_a_field(seed=1):
    return squall.Job(nn.Linear(1, 1), None, seed=10 * seed)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "made_here.py"
    file.write_text(RECIPE)
    return str(file)


def test_a_setting_named_like_an_argument_goes_to_the_function_and_the_rest_to_the_job(recipe: str) -> None:
    job = find(f"{recipe}:wide", [("width", "5"), ("name", "/a/path"), ("strategy.n_push", "3")])
    assert (job.model.in_features, job.replicas, job.strategy.n_push) == (5, 5, 3)  # type: ignore[union-attr]
    assert job.recipe is not None
    assert len(job.recipe.settings) == 3


def test_an_argument_without_a_default_is_a_text_and_must_be_given(recipe: str) -> None:
    assert find(f"{recipe}:needs", [("path", "runs/x")]).out == "runs/x"
    with pytest.raises(
        squall.ConfigError, match=r"expected its argument 'path', but got none. Say --set path="
    ):
        find(f"{recipe}:needs")


def test_an_argument_named_like_a_field_of_the_job_is_the_functions(recipe: str) -> None:
    assert find(f"{recipe}:names_a_field", [("seed", "3")]).seed == 30


def test_a_value_that_does_not_fit_the_default_is_refused(recipe: str) -> None:
    with pytest.raises(squall.ConfigError, match="--set width=broad: expected a number"):
        find(f"{recipe}:wide", [("width", "broad")])
