"""Tests of squall.training.first: the values of a model on one side, and all else of it on the other.

Faults planted by hand, each caught: the parameters of a function's model emptied in place · a module with a
way of its own of being sent emptied.
"""

import threading
from typing import Any

import torch
from torch import nn

from squall.training.first import First, hollowed, trained


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.last.bias.requires_grad_(False)
        self.register_buffer("seen", torch.ones(2))


def test_what_is_trained_has_its_values_apart_and_all_else_stays() -> None:
    model = Tied()
    frozen = model.last.bias.clone()
    before = {name: value.clone() for name, value in trained(model).items()}
    values = trained(model)

    hollow, parameters = hollowed(model, is_ours=True)

    assert hollow is model
    assert list(values) == ["first.weight", "first.bias", "last.weight"]
    assert all(torch.equal(values[name], before[name]) for name in before)
    storages = {value.untyped_storage().data_ptr() for value in values.values()}
    assert not any(own.untyped_storage().data_ptr() in storages for own in model.parameters())
    assert len(parameters) == 2
    assert model.last.weight is model.first.weight
    assert torch.equal(model.last.bias, frozen)


def test_a_model_that_somebody_else_may_have_stays_as_it_is() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    hollow, parameters = hollowed(model, is_ours=False)

    assert isinstance(hollow, Tied)
    assert hollow is not model
    assert hollow.last.weight is hollow.first.weight
    assert len(parameters) == 2
    assert torch.equal(hollow.last.bias, model.last.bias)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Sent(nn.Linear):
    """Reads its parameters when it is sent."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"norm": float(self.weight.norm())}


class Uncopied(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.lock = threading.Lock()


def test_a_model_that_may_need_its_values_keeps_them() -> None:
    for model, is_ours in ((nn.Sequential(Sent(2, 2)), True), (Uncopied(), False)):
        before = [parameter.clone() for parameter in model.parameters()]

        hollow, parameters = hollowed(model, is_ours=is_ours)

        assert (hollow, parameters) == (model, ())
        assert all(map(torch.equal, before, model.parameters()))


def test_values_that_were_let_go_are_gone() -> None:
    first = First(values={"weight": torch.ones(1)})
    assert first.value("weight").item() == 1

    first.let_go()

    assert first.values is None
