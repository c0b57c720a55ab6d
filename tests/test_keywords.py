"""Tests of squall.keywords, and that all that is public and takes keywords answers a misspelt one.

Faults planted by hand, each seen to fail a test here: the hint left out · a signature lost · a public class without it.
"""

import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import squall
from squall.keywords import meant, named

MISSPELT = {
    "Job": {"replica": "replicas"},
    "Downpour": {"npush": "n_push"},
    "Interval": {"second": "seconds"},
    "Sgd": {"lr": ""},
    "Momentum": {"learningrate": "learning_rate"},
    "Adagrad": {"learn_rate": "learning_rate"},
    "Adam": {"weight_decays": "weight_decay"},
    "AdamW": {"beta": "betas"},
    "Rules": {"by_patterns": "by_pattern"},
    "InProcess": {"transport": ""},
    "Local": {"transports": "transport"},
    "Simulated": {"speed": "speeds"},
    "Link": {"latency": "latency_s"},
    "Restarts": {"mos": "most"},
    "TensorBoard": {"directories": "directory"},
    "Machine": {"speeds": "speed"},
    "DownpourOptimizer": {"tokens": "token"},
    "plan": {"partition": "partitions"},
    "serve": {"shard": "shards"},
    "load": {"modell": "model"},
}
WITHOUT_KEYWORDS = {"deferred", "Servers", "Run", "Rule", "Source", "Plan", "opaque", "fit", "start"}


def test_every_public_name_that_takes_keywords_is_here() -> None:
    made_by_us = {
        name for name, room in squall._PUBLIC.items() if room in ("squall.errors", "squall.observe.events")
    }
    assert set(squall._PUBLIC) - made_by_us - WITHOUT_KEYWORDS == set(MISSPELT)


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_keyword_is_answered_with_the_one_that_was_meant(name: str) -> None:
    ((wrong, right),) = MISSPELT[name].items()
    hint = f"Did you mean {right}=" if right else "They are "
    with pytest.raises(squall.ConfigError, match=rf"{name}\({wrong}=\): .*{hint}"):
        getattr(squall, name)(**{wrong: 1})


@pytest.mark.parametrize("call", [squall.fit, squall.start])
def test_what_takes_a_jobs_arguments_says_so_too(call: Any) -> None:
    x = [[0.0]]
    with pytest.raises(squall.ConfigError, match=r"Job\(epoch=\).*Did you mean epochs="):
        call(nn.Linear(1, 1), x, epoch=2)
    with pytest.raises(squall.ConfigError, match=r"Job\(epoch=\).*Did you mean epochs="):
        call(squall.Job(nn.Linear(1, 1), x), epoch=2)


def test_signatures_values_and_other_mistakes_stay_as_they_were() -> None:
    assert list(inspect.signature(squall.Job).parameters)[:3] == ["model", "train", "loss"]
    assert str(inspect.signature(squall.load)).startswith("(path:")
    rule = squall.Sgd(learning_rate=0.1)
    assert pickle.loads(pickle.dumps(rule)) == rule == replace(rule)
    with pytest.raises(TypeError, match="missing"):
        squall.Job(nn.Linear(1, 1))  # type: ignore[call-arg]


def test_what_is_like_nothing_gets_the_list() -> None:
    @named
    def drive(*, wheels: int = 4, doors: int = 2) -> None: ...

    with pytest.raises(squall.ConfigError, match=r"drive\(x=\): .*They are wheels, doors\."):
        drive(x=1)  # type: ignore[call-arg]
    assert meant("x", ["wheels"]) == ""
