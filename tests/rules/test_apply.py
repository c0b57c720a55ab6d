"""Pushes applied to slices, against torch.optim in a plain loop over the whole model.

Planted faults, each seen to fail a test here: absent tensors updated with zeros; steps of absent tensors counted;
one step for the whole slice; absent values not written through; nothing written past the first chunk; runs of
different steps joined; runs not cut at chunks; the rate taken after counting the minibatches; minibatches counted as
one; the sum trusted when it overflows; the last bad tensor named instead of the first; bad places counted from the
chunk's begin; `accumulate` ignored; a split gradient copied from its begin to every piece.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from squall.errors import ConfigError, LocalProtocolError
from squall.model.install import assemble, pieces_of, split
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.rules import apply
from squall.rules.adagrad import Adagrad
from squall.rules.apply import SliceState, apply_, copy_and_check_, copy_gradient_
from squall.rules.rule import LearningRate, Rule
from squall.rules.sgd import Sgd

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def parameters(*sizes: int) -> nn.ParameterDict:
    """A model of float32 vectors ``0``, ``1``, ... of these sizes."""
    return nn.ParameterDict({str(number): torch.randn(size) for number, size in enumerate(sizes)})


def mixed() -> nn.ParameterDict:
    return nn.ParameterDict(
        {
            "a": torch.randn(7, 5),
            "b": torch.randn(()),
            "c": torch.randn(3, 4, dtype=torch.float64),
            "d": torch.randn(0, 4),
            "e": torch.randn(30).view(5, 6).t(),
            "f": torch.randn(9, dtype=torch.float64),
        }
    )


def states_of(model: nn.Module, layout: Layout, rule: Rule) -> list[SliceState]:
    flat = {dtype: layout.space.flat(model, dtype) for dtype in layout.space.dtypes}
    vectors = split(layout, flat)
    return [
        SliceState.create(spec, vector, rule) for spec, vector in zip(layout.slices, vectors, strict=True)
    ]


def one_slice(model: nn.Module, rule: Rule) -> SliceState:
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    (state,) = states_of(model, layout, rule)
    return state


def gradient_vectors(layout: Layout, grads: Sequence[Tensor | None]) -> tuple[list[Tensor], frozenset[int]]:
    """One gradient vector per slice, and who is absent; what belongs to an absent tensor is not a number."""
    vectors = [torch.full((spec.size,), math.nan, dtype=getattr(torch, spec.dtype)) for spec in layout.slices]
    for pieces, grad in zip(pieces_of(layout, vectors), grads, strict=True):
        if grad is not None:
            copy_gradient_(pieces, grad, accumulate=False)
    return vectors, frozenset(index for index, grad in enumerate(grads) if grad is None)


RULES = [
    (Sgd(learning_rate=0.1), torch.optim.SGD, {"lr": 0.1}),
    (Sgd(learning_rate=0.1, weight_decay=0.2), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    (Adagrad(learning_rate=0.1), torch.optim.Adagrad, {"lr": 0.1}),
    (
        Adagrad(learning_rate=0.1, lr_decay=0.5, weight_decay=0.2),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.2},
    ),
]


@pytest.mark.parametrize("chunk", [4, 16, 131_072])
@pytest.mark.parametrize("num_shards", [1, 3, 7])
@pytest.mark.parametrize(("rule", "optimizer", "settings"), RULES)
def test_pushes_to_slices_are_torchs_optimizer_on_the_whole_model(
    rule: Rule,
    optimizer: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    num_shards: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply, "CHUNK", chunk)
    torch.manual_seed(0)
    model = mixed()
    layout = Layout.balanced(ParameterSpace.of(model), num_shards)
    states = states_of(model, layout, rule)
    outs = [torch.full_like(state.params, math.nan) for state in states]
    owners = layout.space.parameters_of(model)
    plain = optimizer(owners, **settings)

    for step in range(12):
        grads = [None if (step + at) % 4 == 0 else torch.randn_like(own) for at, own in enumerate(owners)]
        for own, grad in zip(owners, grads, strict=True):
            own.grad = None if grad is None else grad.clone()
        plain.step()
        vectors, absent = gradient_vectors(layout, grads)
        for state, vector, out in zip(states, vectors, outs, strict=True):
            assert apply_(state, rule, vector, absent=absent, minibatches=1, out=out) is None

    for vectors in ([state.params for state in states], outs):
        for name, value in assemble(layout, vectors).items():
            want = model[name].detach()
            tolerance = TOLERANCE[want.dtype]
            torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance)


def test_an_absent_tensor_keeps_its_values_slots_and_step() -> None:
    torch.manual_seed(0)
    rule = Adagrad(weight_decay=0.1)
    state = one_slice(parameters(3, 4, 5), rule)
    apply_(state, rule, torch.randn(12), minibatches=1)
    before, sums = state.params.clone(), state.slots["sum"].clone()

    apply_(state, rule, torch.randn(12), absent=frozenset({1, 99}), minibatches=1)

    changed = [slice(0, 3), slice(7, 12)]
    assert torch.equal(state.params[3:7], before[3:7])
    assert torch.equal(state.slots["sum"][3:7], sums[3:7])
    assert all((state.params[part] != before[part]).all() for part in changed)
    assert state.steps.tolist() == [2, 1, 2]


def test_a_push_without_any_gradient_writes_the_old_values_through() -> None:
    rule = Adagrad()
    state = one_slice(parameters(3, 4), rule)
    out = torch.full((7,), math.nan)

    apply_(state, rule, torch.ones(7), absent=frozenset({0, 1}), minibatches=2, out=out)

    assert torch.equal(out, state.params)
    assert (state.steps.tolist(), state.minibatches) == ([0, 0], 2)


@dataclass(frozen=True, kw_only=True)
class Recorder(Rule):
    """A rule that writes down where it was called, with how many elements and which step."""

    learning_rate: LearningRate = 1.0
    calls: list[tuple[int, int, int]] = field(default_factory=list)

    def init_slot(self, name: str, params: Tensor) -> Tensor:
        raise KeyError(name)

    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        self.calls.append((int(params.storage_offset()), len(params), step))


def test_neighbours_with_equal_steps_are_one_run() -> None:
    rule = Recorder()
    state = one_slice(parameters(2, 3, 4, 5, 6), rule)

    apply_(state, rule, torch.zeros(20), minibatches=1)
    apply_(state, rule, torch.zeros(20), absent=frozenset({2}), minibatches=1)
    apply_(state, rule, torch.zeros(20), minibatches=1)

    assert rule.calls == [(0, 20, 1), (0, 5, 2), (9, 11, 2), (0, 5, 3), (5, 4, 2), (9, 11, 3)]


def test_five_thousand_tiny_tensors_are_one_call() -> None:
    rule = Recorder()
    model = nn.ParameterDict({f"{number:04}": torch.zeros(3) for number in range(5000)})
    state = one_slice(model, rule)

    apply_(state, rule, torch.zeros(15_000), minibatches=1)

    assert rule.calls == [(0, 15_000, 1)]


def test_runs_are_cut_at_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "CHUNK", 8)
    rule = Recorder()
    state = one_slice(parameters(3, 10, 7), rule)
    state.steps = np.array([0, 4, 4])

    apply_(state, rule, torch.zeros(20), minibatches=1)

    assert rule.calls == [(0, 3, 1), (3, 5, 5), (8, 8, 5), (16, 4, 5)]


def test_the_rate_is_that_of_the_minibatches_applied_before() -> None:
    rule = Sgd(learning_rate=lambda minibatches: float(minibatches))
    state = one_slice(parameters(1), rule)
    state.params.zero_()

    values = []
    for minibatches in (3, 5, 1):
        apply_(state, rule, torch.ones(1), minibatches=minibatches)
        values.append(state.params.item())

    assert values == [0, -3, -11]
    assert state.minibatches == 9
    assert state.steps.tolist() == [3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("places", "tensor"), [([0], 0), ([2, 11], 0), ([3], 1), ([6], 1), ([11], 2), ([9, 8, 4], 1)]
)
@pytest.mark.parametrize("chunk", [5, 131_072])
def test_the_first_tensor_that_is_not_finite_is_named(
    chunk: int, places: list[int], tensor: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK", chunk)
    rule = Sgd()
    state = one_slice(parameters(3, 4, 5), rule)
    grad = torch.zeros(12)
    grad[places] = bad
    out = torch.zeros(12)

    assert apply_(state, rule, grad, minibatches=1, out=out) == tensor

    assert torch.isfinite(out).logical_not().nonzero().flatten().tolist() == sorted(places)


def test_opposite_infinities_do_not_cancel() -> None:
    rule = Sgd(learning_rate=1.0)
    state = one_slice(parameters(4), rule)

    assert apply_(state, rule, torch.tensor([0, math.inf, -math.inf, 0]), minibatches=1) == 0


def test_a_sum_that_overflows_is_no_proof() -> None:
    rule = Sgd(learning_rate=1.0)
    state = one_slice(parameters(4), rule)
    state.params.zero_()

    assert apply_(state, rule, torch.full((4,), 3e38), minibatches=1) is None
    assert copy_and_check_(torch.zeros(4), torch.full((4,), 3e38), accumulate=False)


def test_a_broken_schedule_changes_nothing() -> None:
    rule = Sgd(learning_rate=lambda minibatches: math.nan)
    state = one_slice(parameters(3), rule)
    before = state.params.clone()

    with pytest.raises(ConfigError, match="schedule"):
        apply_(state, rule, torch.ones(3), minibatches=1)

    assert torch.equal(state.params, before)
    assert (state.steps.tolist(), state.minibatches) == ([0], 0)


@pytest.mark.parametrize(
    "vector", [torch.zeros(2), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2], torch.zeros(3, 1)]
)
@pytest.mark.parametrize("which", ["gradient", "buffer"])
def test_a_vector_that_is_not_the_slices_is_refused_and_changes_nothing(vector: Tensor, which: str) -> None:
    rule = Sgd()
    state = one_slice(parameters(3), rule)
    before = state.params.clone()
    grad, out = (vector, torch.zeros(3)) if which == "gradient" else (torch.ones(3), vector)

    with pytest.raises(LocalProtocolError, match=f"{which} for slice 0"):
        apply_(state, rule, grad, minibatches=1, out=out)

    assert torch.equal(state.params, before)


def test_a_state_with_vectors_of_another_size_is_refused() -> None:
    good = one_slice(parameters(3), Adagrad())
    with pytest.raises(LocalProtocolError, match="parameters of slice 0"):
        SliceState.create(good.spec, torch.zeros(4), Adagrad())
    with pytest.raises(LocalProtocolError, match="slot 'sum'"):
        SliceState(
            spec=good.spec, params=good.params, slots={"sum": torch.zeros(4)}, steps=good.steps, minibatches=0
        )
    with pytest.raises(LocalProtocolError, match="one for each of its 1 segments"):
        SliceState(
            spec=good.spec, params=good.params, slots={}, steps=np.zeros(2, dtype=np.int64), minibatches=0
        )


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_copying_overwrites_and_accumulating_adds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "CHUNK", 8)
    src = torch.arange(float(size))
    copied, added = torch.ones(size), torch.ones(size)

    assert copy_and_check_(copied, src, accumulate=False)
    assert copy_and_check_(added, src, accumulate=True)

    assert torch.equal(copied, src)
    assert torch.equal(added, src + 1)


@pytest.mark.parametrize("place", [0, 7, 8, 19])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_value_that_is_not_finite_is_seen_wherever_it_is(
    place: int, bad: float, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "CHUNK", 8)
    src, dst = torch.ones(20), torch.zeros(20)
    src[place] = bad

    assert not copy_and_check_(dst, src, accumulate=accumulate)

    assert torch.equal(torch.isfinite(dst), torch.isfinite(src))
    assert dst[torch.isfinite(dst)].sum() == 19


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_gradient_of_any_memory_order_reaches_all_its_pieces(num_shards: int, accumulate: bool) -> None:
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": torch.randn(2, 3, 4, 5)})
    layout = Layout.balanced(ParameterSpace.of(model), num_shards)
    vectors = [torch.ones(spec.size) for spec in layout.slices]
    grad = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)

    assert copy_gradient_(pieces_of(layout, vectors)[0], grad, accumulate=accumulate)

    assert torch.equal(torch.cat(vectors), grad.flatten() + (1 if accumulate else 0))


def test_one_bad_piece_makes_a_gradient_bad_and_the_others_are_still_copied() -> None:
    model = parameters(64)
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=4)
    vectors = [torch.zeros(spec.size) for spec in layout.slices]
    grad = torch.ones(64)
    grad[20] = math.nan

    assert not copy_gradient_(pieces_of(layout, vectors)[0], grad, accumulate=False)

    assert [vector.sum().item() for vector in vectors if torch.isfinite(vector).all()] == [16, 16, 16]


def test_a_sparse_gradient_counts_as_dense() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    layout = Layout.balanced(ParameterSpace.of(embedding), num_shards=1)
    vectors = [torch.full((15,), math.nan)]
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    assert embedding.weight.grad is not None

    assert copy_gradient_(pieces_of(layout, vectors)[0], embedding.weight.grad, accumulate=False)

    assert vectors[0].view(5, 3)[:, 0].tolist() == [0, 1, 0, 2, 0]


def test_a_zero_sized_gradient_has_no_pieces_and_is_finite() -> None:
    assert copy_gradient_((), torch.zeros(0, 3), accumulate=False)
