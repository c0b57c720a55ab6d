"""Rules by name pattern: who gets which, and what is refused before anything is trained.

That a push with such rules is torch's optimizer with parameter groups is shown in `test_apply.py`.

Planted faults, each seen to fail a test here: the last match taken; aliases not asked; patterns compared without
regard to case; a pattern that matches nothing let through; one that never gets its turn let through; `"*"` refused
when there is no rest; a tensor without a pattern given the last rule; the order left out of `==`; equal rules counted
as two; the state's form without the slots.
"""

import json
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from torch import nn

from squall.errors import ConfigError
from squall.model.parameters import ParameterSpace
from squall.rules.adagrad import Adagrad
from squall.rules.adam import Adam
from squall.rules.momentum import Momentum
from squall.rules.patterns import RulePerTensor, Rules, rule_per_tensor, state_form
from squall.rules.rule import Rule
from squall.rules.sgd import Sgd
from squall.schedules import cosine

A, B, C = Sgd(learning_rate=1.0), Sgd(learning_rate=2.0), Adagrad()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def chosen(model: nn.Module, by_pattern: dict[str, Rule]) -> dict[str, Rule]:
    space = ParameterSpace.of(model)
    table = rule_per_tensor(Rules(by_pattern), space)
    assert isinstance(table, RulePerTensor)
    return {tensor.name: table.rule_of(at) for at, tensor in enumerate(space.tensors)}


def test_the_first_pattern_that_matches_is_taken() -> None:
    assert chosen(network(), {"0.*": A, "*.bias": B, "*": C}) == {
        "0.bias": A,
        "0.weight": A,
        "2.bias": B,
        "2.weight": C,
    }
    assert chosen(network(), {"*.bias": B, "0.*": A, "*": C})["0.bias"] == B


def test_a_pattern_matches_whole_names_with_their_case() -> None:
    model = nn.ModuleDict({"Head": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})

    assert chosen(model, {"head.weight": A, "*": B}) == {"Head.weight": B, "head.weight": A}
    with pytest.raises(ConfigError, match="'head'"):
        chosen(model, {"head": A, "*": B})


def test_a_tied_tensor_is_matched_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight

    assert chosen(model, {"b.weight": A, "*": B}) == {"a.weight": A, "b.bias": B}
    assert chosen(model, {"b.*": A}) == {"a.weight": A, "b.bias": A}


def test_a_tensor_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a pattern that matches parameter '0\.weight'.*'\*\.bias', '2"):
        chosen(network(), {"*.bias": A, "2.*": B})


def test_a_pattern_that_matches_nothing_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"pattern '\*\.gain': expected a trainable .* '2\.weight'\."
    ) as caught:
        chosen(network(), {"*.gain": A, "*": B})
    assert caught.value.subject == "Rules: pattern '*.gain'"

    frozen = network()
    frozen[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"pattern '0\.\*'"):
        chosen(frozen, {"0.*": A, "*": B})


def test_a_pattern_that_never_gets_its_turn_is_refused_unless_it_is_for_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"'\*\.bias': .* no pattern before it.*such as '0\.bias'"):
        chosen(network(), {"*": A, "*.bias": B})

    assert set(chosen(network(), {"*.bias": A, "*.weight": B, "*": C}).values()) == {A, B}


def test_one_rule_for_all_stays_one_rule() -> None:
    assert rule_per_tensor(C, ParameterSpace.of(network())) is C


def test_equal_rules_are_one_so_that_their_tensors_can_be_updated_together() -> None:
    table = rule_per_tensor(
        Rules({"*.bias": Sgd(learning_rate=1.0), "2.*": C, "*": A}), ParameterSpace.of(network())
    )

    assert table == RulePerTensor(rules=(A, C), which=(0, 0, 0, 1))


@pytest.mark.parametrize(
    "by_pattern", [{}, None, Sgd(), [("*", Sgd())], {1: Sgd()}, {"*": 0.1}, {"*": Rules({"*": Sgd()})}]
)
def test_what_is_no_mapping_from_patterns_to_rules_is_refused(by_pattern: Any) -> None:
    with pytest.raises(ConfigError, match="Rules"):
        Rules(by_pattern)


def test_rules_are_a_value_whose_order_counts() -> None:
    rules = Rules({"*.bias": A, "*": C})

    assert rules == Rules({"*.bias": A, "*": C}) == pickle.loads(pickle.dumps(rules))
    assert hash(rules) == hash(Rules({"*.bias": A, "*": C}))
    assert rules != Rules({"*": C, "*.bias": A})
    with pytest.raises(FrozenInstanceError):
        rules.entries = ()  # type: ignore[misc]


def test_a_table_survives_a_process_border_after_it_was_used() -> None:
    table = rule_per_tensor(Rules({"*.bias": A, "*": C}), ParameterSpace.of(network()))
    assert isinstance(table, RulePerTensor)
    assert table.which_array.tolist() == [0, 1, 0, 1]

    copy = pickle.loads(pickle.dumps(table))

    assert copy == table
    assert copy.which_array.tolist() == [0, 1, 0, 1]


def test_rules_do_not_change_with_the_mapping_that_they_were_made_of() -> None:
    by_pattern: dict[str, Rule] = {"*": A}
    rules = Rules(by_pattern)
    by_pattern["*"] = B

    assert rules.entries == (("*", A),)


def test_rules_describe_themselves_in_their_order() -> None:
    described = Rules({"z": Adam(learning_rate=cosine(0.1, 9)), "*": Sgd()}).describe()

    assert described == {
        "rule": "Rules",
        "entries": [
            {
                "pattern": "z",
                "rule": "Adam",
                "learning_rate": "cosine(learning_rate=0.1, total=9, final=0.0)",
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.0,
                "amsgrad": False,
            },
            {"pattern": "*", "rule": "Sgd", "learning_rate": 1e-3, "weight_decay": 0.0},
        ],
    }
    assert json.loads(json.dumps(described)) == described


def test_the_form_of_the_state_tells_what_a_resumed_run_must_have() -> None:
    assert state_form(Sgd()) == "Sgd"
    assert state_form(Momentum(momentum=0.0)) == "Momentum"
    assert state_form(Adam(learning_rate=1.0)) == state_form(Adam()) == "Adam(exp_avg, exp_avg_sq)"
    assert state_form(Adam(amsgrad=True)) == "Adam(exp_avg, exp_avg_sq, max_exp_avg_sq)"
    assert state_form(Rules({"*.bias": Momentum(), "*": C})) == (
        "*.bias: Momentum(momentum_buffer); *: Adagrad(sum)"
    )
