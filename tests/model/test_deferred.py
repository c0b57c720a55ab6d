"""A model without memory: what is made of it is what its constructor would have made.

Faults planted in `squall.model.deferred` by hand, each seen to fail a test: a random op without a seed of its own · its seed
without the parameter's name · what an op read not made first · values that are given forgotten · the caller's generator
not put back · one tensor handed out twice · views of a result in another layout · torch's own initialisers told that a
tensor is on the meta device, where they do nothing (`orthogonal_`; found here first, not planted).
"""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from squall.errors import ModelError
from squall.model.deferred import Deferred, _laid_out, _real, defer
from squall.model.randomness import random_state_kept, seed_everything
from tests.models import EXAMPLES


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def redone_in_order(deferred: Deferred) -> dict[str, Tensor]:
    """Everything that the constructor did, done again in its own order under its own seed: a plain construction."""
    made: dict[int, Tensor] = {}
    plain = Deferred(deferred.model, deferred._entries, {}, deferred._by_storage)
    with random_state_kept(), torch.no_grad():
        seed_everything(3)
        for at in range(len(deferred._entries)):
            plain._redo(at, made)
    return {name: _real(tensor.detach(), made) for name, tensor in tensors_of(deferred.model).items()}


MAKERS = {**{name: example.make for name, example in EXAMPLES.items()}, "odd": lambda: Odd()}


@pytest.mark.parametrize("name", MAKERS)
def test_done_again_in_order_it_is_a_plain_construction_to_the_bit(name: str) -> None:
    deferred = defer(MAKERS[name], seed=3)
    with random_state_kept():
        seed_everything(3)
        plain = MAKERS[name]()
    mine = redone_in_order(deferred)
    theirs = tensors_of(plain)
    assert list(mine) == list(theirs)
    for key, tensor in theirs.items():
        assert torch.equal(mine[key], tensor), key
        assert mine[key].stride() == tensor.stride()


def test_a_value_depends_neither_on_what_was_made_before_nor_on_the_callers_generators() -> None:
    first, second = (defer(EXAMPLES["decoder"].make, seed=3) for _ in range(2))
    names = list(tensors_of(first.model))
    expected = {name: first.value(name) for name in names}
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for name in reversed(names):
        assert torch.equal(second.value(name), expected[name]), name
    assert torch.equal(torch.get_rng_state(), before)
    other = defer(EXAMPLES["decoder"].make, seed=4)
    assert not torch.equal(other.value("position"), expected["position"])


def test_two_parameters_of_one_form_get_different_values_and_tied_ones_the_same() -> None:
    deferred = defer(EXAMPLES["decoder"].make, seed=1)
    assert torch.equal(deferred.value("head.weight"), deferred.value("embedding.weight"))
    pair = defer(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed=1)
    assert not torch.equal(pair.value("0.weight"), pair.value("1.weight"))


def test_a_layer_more_at_the_end_changes_no_value_before_it() -> None:
    short = defer(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed=1)
    long = defer(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), seed=1)
    for name in tensors_of(short.model):
        assert torch.equal(short.value(name), long.value(name))


class Odd(nn.Module):
    """Initialised in every way that people do it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.table = nn.Parameter(torch.from_numpy(np.arange(6.0)).float() * 2)
        self.register_buffer("small", torch.zeros(6, dtype=torch.bfloat16))
        self.apply(self._init)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight.t())
            self.first.weight[2] = 7.0
            self.first.bias += self.scale.sum()

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.constant_(module.bias, 0.5)


def test_applied_written_copied_and_given_values_are_made_as_they_were_meant() -> None:
    made = defer(Odd, seed=5)
    first, second = made.value("first.weight"), made.value("second.weight")
    assert torch.equal(first[2], torch.full((6,), 7.0))
    rest = [0, 1, 3, 4, 5]
    assert torch.equal(second.t()[rest], first[rest])
    torch.testing.assert_close(second @ second.t(), torch.eye(6))
    assert torch.equal(made.value("first.bias"), torch.full((6,), 6.5))
    assert made.value("scale").tolist() == [1, 2, 3]
    assert made.value("table").tolist() == [0, 2, 4, 6, 8, 10]
    assert made.value("small").dtype == torch.bfloat16
    made.value("scale").zero_()
    assert made.value("scale").tolist() == [1, 2, 3]


def test_a_result_is_kept_in_the_layout_that_views_of_it_will_be_taken_in() -> None:
    like, result = torch.empty(2, 3, device="meta"), torch.arange(6.0).reshape(3, 2).t()
    found = _laid_out(result, like)
    assert found.stride() == like.stride()
    assert torch.equal(found, result)
    assert _laid_out(found, like) is found


def test_no_parameter_of_the_deferred_model_has_memory() -> None:
    deferred = defer(lambda: nn.Linear(10**6, 10**6), seed=1)  # 4 TB
    assert all(tensor.device.type == "meta" for tensor in deferred.model.parameters())
    copy.deepcopy(deferred.model)


def test_a_constructor_that_looks_at_values_is_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            if self.weight.sum() > 0:
                self.weight.data.neg_()

    with pytest.raises(ModelError, match="without looking at the values"):
        defer(Looks, seed=1)
    with pytest.raises(ModelError, match=r"nn\.Module to be returned, but got a int"):
        defer(lambda: 3, seed=1)  # type: ignore[arg-type,return-value]
    with pytest.raises(KeyError):
        defer(lambda: nn.Linear(1, 1), seed=1).value("nothing")
