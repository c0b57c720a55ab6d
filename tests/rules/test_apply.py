"""Pushes applied to slices, against torch.optim in a plain loop over the whole model.

Planted faults, each seen to fail a test here: absent tensors updated with zeros; steps of absent tensors counted;
one step for the whole slice; absent values not written through; nothing written past the first chunk; runs of
different steps joined; runs not cut at chunks; the rate taken after counting the minibatches; minibatches counted as
one; the sum trusted when it overflows; the last bad tensor named instead of the first; bad places counted from the
chunk's begin; `accumulate` ignored; a split gradient copied from its begin to every piece. With
rules by name: runs of different rules joined; the first rule or the first rate for all; slots of one tensor started
for all, or not at all; a shared slot started anew by each rule; rules found by segment instead of by tensor. Of what is
kept from push to push: calls kept when others are absent, or for another rule; the step of the first segment for all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from squall.rules.adam import Adam, AdamW
from squall.rules.apply import SliceState, apply_, copy_and_check_, copy_gradient_
from squall.rules.momentum import Momentum
from squall.rules.patterns import RulePerTensor, Rules, rule_per_tensor
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


def states_of(model: nn.Module, layout: Layout, rule: Rule | RulePerTensor) -> list[SliceState]:
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


def halving(minibatches: int) -> float:
    return 0.5 ** (minibatches // 3)


# A rule, and torch's optimizer with the same settings.
RULES = [
    (Sgd(learning_rate=0.1), torch.optim.SGD, {"lr": 0.1}),
    (Sgd(learning_rate=0.1, weight_decay=0.2), torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    (
        Momentum(learning_rate=0.1, momentum=0.8, dampening=0.3, weight_decay=0.2),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2},
    ),
    (
        Momentum(learning_rate=0.1, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    (Adagrad(learning_rate=0.1), torch.optim.Adagrad, {"lr": 0.1}),
    (
        Adagrad(learning_rate=0.1, lr_decay=0.5, weight_decay=0.2),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.2},
    ),
    (Adam(learning_rate=0.05), torch.optim.Adam, {"lr": 0.05}),
    (
        Adam(learning_rate=0.05, betas=(0.8, 0.9), weight_decay=0.2, amsgrad=True),
        torch.optim.Adam,
        {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.2, "amsgrad": True},
    ),
    (AdamW(learning_rate=0.05, weight_decay=0.2), torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.2}),
]


def expect_equal_training(
    model: nn.Module,
    rule: Rule | Rules,
    optimizer: torch.optim.Optimizer,
    num_shards: int,
    factor: Callable[[int], float] = lambda minibatches: 1.0,
) -> None:
    """Train slices and the model itself, with gradients missing now and then, and compare all along the way."""
    layout = Layout.balanced(ParameterSpace.of(model), num_shards)
    resolved = rule_per_tensor(rule, layout.space)
    states = states_of(model, layout, resolved)
    outs = [torch.full_like(state.params, math.nan) for state in states]
    owners = layout.space.parameters_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    for step in range(12):
        grads = [None if (step + at) % 4 == 0 else torch.randn_like(own) for at, own in enumerate(owners)]
        for own, grad in zip(owners, grads, strict=True):
            own.grad = None if grad is None else grad.clone()
        optimizer.step()
        scheduler.step()
        vectors, absent = gradient_vectors(layout, grads)
        for state, vector, out in zip(states, vectors, outs, strict=True):
            assert apply_(state, resolved, vector, absent=absent, minibatches=1, out=out) is None

    for vectors in ([state.params for state in states], outs):
        for name, value in assemble(layout, vectors).items():
            want = model.get_parameter(name).detach()
            tolerance = TOLERANCE[want.dtype]
            torch.testing.assert_close(value, want, rtol=tolerance, atol=tolerance)


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

    expect_equal_training(model, rule, optimizer(model.parameters(), **settings), num_shards)


@pytest.mark.parametrize("num_shards", [1, 3, 7])
@pytest.mark.parametrize(("rule", "optimizer", "settings"), RULES)
def test_with_a_schedule_they_are_torchs_optimizer_under_lambda_lr(
    rule: Rule, optimizer: type[torch.optim.Optimizer], settings: dict[str, Any], num_shards: int
) -> None:
    torch.manual_seed(0)
    model = mixed()
    scheduled = replace(rule, learning_rate=lambda minibatches: settings["lr"] * halving(minibatches))

    expect_equal_training(model, scheduled, optimizer(model.parameters(), **settings), num_shards, halving)


@pytest.mark.parametrize("chunk", [4, 131_072])
@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_rules_by_name_are_torchs_parameter_groups(
    num_shards: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of one kind with other settings, so that they share slots, and of different kinds with other slots."""
    monkeypatch.setattr(apply, "CHUNK", chunk)
    torch.manual_seed(0)
    model, other = mixed(), mixed()
    alike = Rules(
        {
            "[be]": Adam(learning_rate=0.05, betas=(0.5, 0.7)),
            "c": Adam(learning_rate=0.2, weight_decay=0.3),
            "*": Adam(learning_rate=0.05, amsgrad=True),
        }
    )
    groups: list[dict[str, Any]] = [
        {"params": [model["b"], model["e"]], "betas": (0.5, 0.7)},
        {"params": [model["c"]], "lr": 0.2, "weight_decay": 0.3},
        {"params": [model["a"], model["d"], model["f"]], "amsgrad": True},
    ]
    expect_equal_training(model, alike, torch.optim.Adam(groups, lr=0.05), num_shards)

    mixture = Rules(
        {
            "[ac]": Momentum(learning_rate=0.05, momentum=0.8),
            "b": Sgd(learning_rate=0.1, weight_decay=0.2),
            "*": Momentum(learning_rate=0.1, nesterov=True),
        }
    )
    groups = [
        {"params": [other["a"], other["c"]], "lr": 0.05, "momentum": 0.8},
        {"params": [other["b"]], "weight_decay": 0.2},
        {"params": [other["d"], other["e"], other["f"]], "momentum": 0.9, "nesterov": True},
    ]
    expect_equal_training(other, mixture, torch.optim.SGD(groups, lr=0.1), num_shards)


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_rules_of_different_kinds_each_train_their_own_tensors(num_shards: int) -> None:
    torch.manual_seed(0)
    model = mixed()
    rules = Rules(
        {
            "a": Adagrad(learning_rate=0.1, initial_accumulator_value=0.5),
            "e": Adagrad(learning_rate=0.2),
            "[bf]": AdamW(learning_rate=0.05),
            "*": Sgd(learning_rate=halving),
        }
    )
    optimizers = [
        torch.optim.Adagrad([model["a"]], lr=0.1, initial_accumulator_value=0.5),
        torch.optim.Adagrad([model["e"]], lr=0.2),
        torch.optim.AdamW([model["b"], model["f"]], lr=0.05),
        torch.optim.SGD([model["c"], model["d"]], lr=1.0),
    ]

    class Together(torch.optim.SGD):
        """Stands for all of them in the common loop; its schedule is that of the last."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            optimizers[3].param_groups[0]["lr"] = self.param_groups[0]["lr"]
            for optimizer in optimizers:
                optimizer.step()

    together = Together([nn.Parameter(torch.zeros(1))], lr=1.0)
    expect_equal_training(model, rules, together, num_shards, halving)


def test_a_slice_keeps_the_slots_that_its_own_tensors_need() -> None:
    model = parameters(3, 4)
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    rules = Rules({"0": Adagrad(initial_accumulator_value=0.5), "1": Momentum()})

    (state,) = states_of(model, layout, rule_per_tensor(rules, layout.space))
    (plain,) = states_of(model, layout, rule_per_tensor(Rules({"*": Sgd()}), layout.space))

    assert {name: slot.tolist() for name, slot in state.slots.items()} == {
        "sum": [0.5, 0.5, 0.5, 0, 0, 0, 0],
        "momentum_buffer": [0.0] * 7,
    }
    assert plain.slots == {}


@pytest.mark.parametrize(
    "rule",
    [
        Sgd(weight_decay=0.1),
        Momentum(weight_decay=0.1),
        Adagrad(weight_decay=0.1),
        Adam(weight_decay=0.1, amsgrad=True),
        AdamW(weight_decay=0.1),
    ],
)
def test_an_absent_tensor_keeps_its_values_slots_and_step(rule: Rule) -> None:
    torch.manual_seed(0)
    state = one_slice(parameters(3, 4, 5), rule)
    apply_(state, rule, torch.randn(12), minibatches=1)
    vectors = (state.params, *state.slots.values())
    before = [vector.clone() for vector in vectors]

    apply_(state, rule, torch.randn(12), absent=frozenset({1, 99}), minibatches=1)

    assert len(before) == 1 + len(rule.slot_names)
    assert all(torch.equal(now[3:7], was[3:7]) for now, was in zip(vectors, before, strict=True))
    assert all((state.params[part] != before[0][part]).all() for part in (slice(0, 3), slice(7, 12)))
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


def test_what_the_last_push_called_is_not_taken_for_another_rules_calls() -> None:
    one, other = Sgd(learning_rate=1.0), Sgd(learning_rate=2.0)
    state = one_slice(parameters(2), one)
    state.params.zero_()

    for rule in (one, other, one):
        apply_(state, rule, torch.ones(2), minibatches=1)

    assert state.params.tolist() == [-4, -4]


def test_neighbours_with_different_rules_are_not_joined_and_those_with_one_are() -> None:
    one, other = Recorder(learning_rate=1.0), Recorder(learning_rate=2.0)
    model = parameters(2, 3, 4, 5, 6)
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    rules = rule_per_tensor(Rules({"[034]": one, "*": other}), layout.space)
    (state,) = states_of(model, layout, rules)

    apply_(state, rules, torch.zeros(20), absent=frozenset({3}), minibatches=1)
    apply_(state, rules, torch.zeros(20), minibatches=1)

    assert one.calls == [(0, 2, 1), (14, 6, 1), (0, 2, 2), (9, 5, 1), (14, 6, 2)]
    assert other.calls == [(2, 7, 1), (2, 7, 2)]


def test_a_broken_schedule_of_one_rule_of_several_changes_nothing() -> None:
    model = parameters(3, 4)
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    broken = Sgd(learning_rate=lambda minibatches: math.inf)
    rules = rule_per_tensor(Rules({"1": broken, "*": Sgd()}), layout.space)
    (state,) = states_of(model, layout, rules)
    before = state.params.clone()

    with pytest.raises(ConfigError, match="schedule"):
        apply_(state, rules, torch.ones(7), minibatches=1)

    assert torch.equal(state.params, before)
    assert (state.steps.tolist(), state.minibatches) == ([0, 0], 0)


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
