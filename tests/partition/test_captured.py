"""Ops with the very arguments that torch.export gives them, of nets with all the layers that can be cut."""

import operator as python_operator
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from squall.model.layers import L2Pool2d, LocalContrastNorm2d, LocallyConnected2d
from squall.partition.call import Call, Ref
from squall.partition.regions import Region
from squall.partition.rules import is_opaque, needs, stages
from tests.partition.cutting import Case, case_of, check_cut, check_stages


def vision() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect"),
        nn.GroupNorm(2, 4),
        nn.PReLU(4),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.LocalResponseNorm(3),
        LocallyConnected2d(4, 4, size=(5, 5), kernel=3, padding=1),
        L2Pool2d(2, 1),
        LocalContrastNorm2d(3),
        nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.ReLU(),
        nn.AvgPool2d(2, count_include_pad=False),
        nn.LPPool2d(2, 2),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(2, 3),
        nn.LogSoftmax(1),
    )


class Language(nn.Module):
    """Tokens, places, one block of attention, a classifier tied to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.qkv, self.norm = nn.Linear(8, 24), nn.RMSNorm(8)

    def forward(self, index: Tensor) -> Tensor:
        value = self.block(self.token(index) + self.place)
        batch, length, width = value.shape
        heads = self.qkv(self.norm(value)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        query, key, extra = heads.unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, extra, is_causal=True)
        joined = torch.cat([seen.transpose(1, 2).reshape(batch, length, width), value], -1)
        first, second = joined.chunk(2, -1)
        return functional.linear((first * second)[:, 1:].mean(1), self.token.weight)


class Losses(nn.Module):
    def forward(self, logits: Tensor, target: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.cross_entropy(logits, target, label_smoothing=0.1),
            functional.mse_loss(logits, other),
            functional.binary_cross_entropy_with_logits(logits, other),
            functional.softmax(logits, -1).sum(1),
        )


def net(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    if name == "vision":
        return vision().double(), (torch.randn(2, 2, 8, 8, dtype=torch.float64),)
    if name == "language":
        return Language().double(), (torch.randint(0, 11, (2, 5)),)
    logits = torch.randn(4, 3, dtype=torch.float64)
    return Losses(), (logits, torch.tensor([0, 2, 1, 1]), logits.sigmoid())


def cases(name: str) -> Iterator[Case]:
    """Each op of a captured net, on the tensors that reach it."""
    module, inputs = net(name)
    program = torch.export.export(module, inputs, strict=False)
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    held = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    for spec, node in zip(program.graph_signature.input_specs, program.graph.nodes, strict=False):
        values[node] = held[spec.target].detach() if spec.target in held else next(given)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is python_operator.getitem:
            source, output = node.args
            values[node] = values[source][output]
            yield made(source, values, output)
            continue
        args = fx.node.map_arg((node.args, node.kwargs), lambda each: values[each])
        with torch.no_grad():
            values[node] = node.target(*args[0], **args[1])
        if isinstance(values[node], Tensor):
            yield made(node, values, 0)


def made(node: fx.Node, values: dict[fx.Node, Any], output: int) -> Case:
    tensors: list[Tensor] = []

    def placed(each: fx.Node) -> Ref:
        tensors.append(values[each].detach().clone())
        return Ref(len(tensors) - 1)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), placed)
    return case_of(str(node.target), args, tensors, output=output, kwargs=kwargs)


@pytest.mark.parametrize("name", ["vision", "language", "losses"])
def test_no_op_of_these_nets_is_opaque_and_each_can_be_cut(name: str) -> None:
    rng, seen = random.Random(name), set()
    for case in cases(name):
        seen.add(case.call.name)
        assert not is_opaque(case.call), case
        for _ in range(3):
            check_cut(case, rng)
        if stages(case.call) is not None:
            check_stages(case, rng)
    assert len(seen) > 5, seen


def test_what_has_no_rule_is_opaque_and_needs_everything() -> None:
    value = torch.randn(4, 4, dtype=torch.float64)
    for name in ("lstm.input", "gru.input", "cumsum.default", "einsum.default"):
        assert is_opaque(Call(target=f"aten.{name}"))
    indices = case_of("aten.max_pool2d_with_indices.default", (Ref(0), [2, 2]), [value[None]], output=1)
    assert is_opaque(indices.call)
    floats, rows = value.float(), torch.tensor([2, 1])
    look_alikes = [
        case_of("aten.im2col.default", (Ref(0), [2, 2], [1, 1], [1, 1], [1, 1]), [value[None, None]]),
        case_of("aten.view.dtype", (Ref(0), torch.int32), [floats]),
        case_of("aten.where.default", (Ref(0),), [value > 0]),
        case_of("aten.repeat_interleave.Tensor", (Ref(0),), [rows]),
        case_of("aten.cross_entropy_loss.default", (Ref(0), Ref(1)), [value, value.softmax(1)]),
    ]
    for case in look_alikes:
        assert is_opaque(case.call), case
    assert not is_opaque(case_of("aten.max.other", (Ref(0), Ref(1)), [value, value]).call)
    summed = case_of("aten.cumsum.default", (Ref(0), 1), [value])
    assert needs(summed.call, Region.of((4, 4), (0, 1), (0, 1))) == (Region.whole((4, 4)),)
    check_cut(summed, random.Random(1))
