"""What all rules share: learning rates, their check, and the description in the run directory.

Planted faults, each seen to fail a test here: the schedule called with one minibatch too many; nan let through;
infinity let through; negative rates let through; a callable described by its address; `True` taken as a rate;
1 taken as a switch; betas described as a tuple.
"""

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from squall.errors import ConfigError
from squall.rules.adagrad import Adagrad
from squall.rules.adam import Adam, AdamW
from squall.rules.momentum import Momentum
from squall.rules.rule import Rule
from squall.rules.sgd import Sgd


def halving(minibatches: int) -> float:
    return 0.5**minibatches


def test_a_constant_rate_is_the_same_after_any_number_of_minibatches() -> None:
    rule = Sgd(learning_rate=0.25)

    assert [rule.rate_at(minibatches) for minibatches in (0, 1, 10**9)] == [0.25] * 3


def test_a_schedule_is_a_function_of_the_minibatches_applied_before() -> None:
    rule = Adagrad(learning_rate=halving)

    assert [rule.rate_at(minibatches) for minibatches in (0, 1, 3)] == [1, 0.5, 0.125]


def test_a_rate_of_zero_is_legal() -> None:
    assert Sgd(learning_rate=0).rate_at(0) == 0
    assert Sgd(learning_rate=lambda minibatches: 0).rate_at(0) == 0


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf, -1e-9, None, "fast", 1j])
def test_a_schedule_that_returns_no_rate_is_refused_by_name(rate: Any) -> None:
    def broken(minibatches: int) -> Any:
        return rate

    with pytest.raises(ConfigError, match=r"broken of Sgd.*after 7 minibatches") as caught:
        Sgd(learning_rate=broken).rate_at(7)

    assert caught.value.got == repr(rate)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None, True])
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Sgd, "learning_rate"),
        (Sgd, "weight_decay"),
        (Adagrad, "learning_rate"),
        (Adagrad, "lr_decay"),
        (Adagrad, "weight_decay"),
        (Adagrad, "initial_accumulator_value"),
        (Adagrad, "eps"),
        (Momentum, "learning_rate"),
        (Momentum, "momentum"),
        (Momentum, "dampening"),
        (Momentum, "weight_decay"),
        (Adam, "learning_rate"),
        (Adam, "eps"),
        (Adam, "weight_decay"),
        (AdamW, "learning_rate"),
        (AdamW, "eps"),
        (AdamW, "weight_decay"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_by_name(rule: type[Rule], name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{rule.__name__}\.{name}: expected a finite number"):
        rule(**{name: value})


@pytest.mark.parametrize("value", [0, 1, 1.0, "yes", None])
@pytest.mark.parametrize(("rule", "name"), [(Momentum, "nesterov"), (Adam, "amsgrad"), (AdamW, "amsgrad")])
def test_a_switch_that_is_neither_on_nor_off_is_refused_by_name(
    rule: type[Rule], name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"{rule.__name__}\.{name}: expected True or False"):
        rule(**{name: value})


@pytest.mark.parametrize(
    "rule", [Sgd(), Momentum(nesterov=True), Adagrad(), Adam(amsgrad=True), AdamW(learning_rate=halving)]
)
def test_a_rule_crosses_a_process_border(rule: Rule) -> None:
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert json.loads(json.dumps(rule.describe())) == rule.describe()


def test_a_rule_is_a_value() -> None:
    assert Adagrad(learning_rate=0.1) == Adagrad(learning_rate=0.1) != Adagrad(learning_rate=0.2)
    with pytest.raises(FrozenInstanceError):
        Sgd().weight_decay = 1.0  # type: ignore[misc]


def test_a_rule_describes_itself_and_a_schedule_by_its_name() -> None:
    described = Adagrad(learning_rate=halving, eps=1e-8).describe()

    assert described == {
        "rule": "Adagrad",
        "learning_rate": "halving",
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "initial_accumulator_value": 0.0,
        "eps": 1e-8,
    }
    assert json.loads(json.dumps(described)) == described
    assert Sgd().describe() == {"rule": "Sgd", "learning_rate": 1e-3, "weight_decay": 0.0}
