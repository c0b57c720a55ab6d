"""Needs are tight, and within bounds: compared with what the uncut op's own gradient, or a poke at each input, shows."""

import random

import pytest
import torch
from torch import Tensor

from squall.partition.pieces import Piece, take
from squall.partition.regions import AnyRegion, FlatRegion, Region
from squall.partition.rules import needs
from tests.partition.cutting import Case, leaf, numbers, random_cut
from tests.partition.ops import OPS

# What an element of the output depends on follows from values here, not from the op alone: rows that are looked up.
LOOKED_UP = {"embedding": {0}, "index_select": {0}}
# Kinks hide dependencies from a gradient: every input element is changed, and the output watched.
POKED = {
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "reduction",
    "arithmetic",
    "activation",
    "elementwise_loss",
    "training_batch_norm",
}
# Grouped filters of a transposed convolution: a cut across groups asks for a rectangle of each weight.
LOOSE = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
SHARED = {"conv1d", "conv2d", "conv3d"}
CASES = 20


@pytest.mark.parametrize("name", OPS)
def test_an_op_asks_for_what_it_depends_on_and_for_nothing_else(name: str) -> None:
    for seed in range(CASES):
        rng = random.Random(f"needs of {name} {seed}")
        case = OPS[name](rng)
        region = rng.choice(
            [each for each in random_cut(case.call.shape, 3, rng) if not each.is_empty] or [None]
        )
        if region is None:
            continue
        wanted = needs(case.call, region)
        for at, (need, found) in enumerate(zip(wanted, dependencies(name, case, region), strict=True)):
            asked = set(numbers(need).tolist())
            told = f"{name}, seed {seed}, input {at}: {case}, {region}"
            assert found <= asked, told
            if name in SHARED and at == 1 and found:  # a tap that only ever meets padding is asked for, too
                taps = case.tensors[1][0].numel()
                assert {index // taps for index in asked} == {index // taps for index in found}, told
            elif is_exact(name, case, region, at):
                assert asked == found, told


def is_exact(name: str, case: Case, region: AnyRegion, at: int) -> bool:
    call = case.call
    if at in LOOKED_UP.get(name, ()) or call.inputs[at].dtype in ("int64", "bool"):
        return False
    if name in LOOSE and at == 1:
        return False
    if isinstance(region, FlatRegion) and call.name not in ("view", "reshape", "flatten"):
        return False  # computed by way of its bounding product
    if name in ("dropout", "triangle", "class_loss") or (name == "prelu" and at == 1):
        return False  # masked: what is zeroed is asked for, too
    if name == "softmax" and (call.shape[call.args[1]] == 1 or float(case.tensors[0].abs().max()) > 30):
        return False  # always 1, or saturated
    if name in SHARED and at == 1:
        return False  # the region lies in the padding
    if name == "attention" and call.args[4] > 0:
        return False  # dropped weights
    if name == "attention" and at != 2:
        return not call.args[5] and call.inputs[1].shape[-2] > 1  # a query with one key does not matter
    if call.name in ("detach", "sign", "clamp", "masked_fill", "where"):
        return False  # constant in places
    if call.name == "batch_norm":
        return call.inputs[at].shape == call.shape  # running statistics are written in training
    return True


def dependencies(name: str, case: Case, region: AnyRegion) -> list[set[int]]:
    """For each input, the numbers of the elements that can change the region of the output."""
    if name in POKED:
        return [poked(case, at, region) for at in range(len(case.tensors))]
    leaves = case.leaves()
    output = case.run(leaves)
    if not output.requires_grad:
        return [set() for _ in leaves]
    weight = torch.zeros(output.shape, dtype=torch.float64)
    picked = numbers(region)
    weight.view(-1)[picked] = torch.randn(
        len(picked), dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    wanted = [each for each in leaves if each.requires_grad]
    grads = iter(torch.autograd.grad(output, wanted, weight.to(output.dtype), allow_unused=True))
    return [nonzero(next(grads)) if each.requires_grad else set() for each in leaves]


def nonzero(grad: Tensor | None) -> set[int]:
    return set() if grad is None else set(grad.reshape(-1).nonzero().reshape(-1).tolist())


def poked(case: Case, at: int, region: AnyRegion) -> set[int]:
    """The elements of an input that, when changed a lot, change the region."""
    if not case.tensors[at].is_floating_point():
        return set()
    tensors = [leaf(each, fixed=True) for each in case.tensors]
    whole = Region.whole(case.call.shape)
    before = take(Piece(whole, case.run(tensors)), region).clone()
    found = set()
    for index in range(tensors[at].numel()):
        flat = tensors[at].reshape(-1)
        kept = float(flat[index])
        for value in (kept + 0.37, 100.0, -100.0):
            flat[index] = value
            if not torch.equal(before, take(Piece(whole, case.run(tensors)), region)):
                found.add(index)
                break
        flat[index] = kept
    return found
