"""Traffic from needs alone, against the formulas, and against what partitions that compute a whole net receive.

A fully connected layer of n units over P partitions: ``B * n * (P - 1)`` values up; a locally connected one cut into
strips, receptive field k: ``B * C * W * (k - 1) * (P - 1)``; down, the same sets reversed.
"""

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from squall.partition.call import Call, Ref, TensorSpec, run_whole
from squall.partition.indices import Indices
from squall.partition.masks import Draw
from squall.partition.pieces import Piece, take
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.rules import needs, prepare
from squall.partition.traffic import count, transfers, united
from tests.partition.cutting import add_into

B = 4


def spans(size: int, parts: int, rng: random.Random) -> list[Indices]:
    """Uneven ranges, none of them empty."""
    ends = sorted(rng.sample(range(1, size), parts - 1))
    return [Indices.span(a, b) for a, b in zip([0, *ends], [*ends, size], strict=True)]


def dense(inputs: int, outputs: int) -> Call:
    return Call(
        target="aten.linear.default",
        args=(Ref(0), Ref(1)),
        inputs=(TensorSpec((B, inputs), "float64"), TensorSpec((outputs, inputs), "float64")),
        outputs=((B, outputs),),
    )


def local(channels: int, outs: int, size: tuple[int, int], kernel: int) -> Call:
    rows, columns = size[0] - kernel + 1, size[1] - kernel + 1
    weight = (rows, columns, outs, channels * kernel * kernel)
    return Call(
        target="squall.locally_connected2d.default",
        args=(Ref(0), Ref(1), None, [kernel, kernel], [1, 1]),
        inputs=(TensorSpec((B, channels, *size), "float64"), TensorSpec(weight, "float64")),
        outputs=((B, outs, rows, columns),),
    )


def wanted(call: Call, regions: Sequence[AnyRegion], index: int = 0) -> list[list[AnyRegion]]:
    return [[needs(call, region)[index]] for region in regions]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_a_dense_layer_sends_each_unit_once_to_each_other_partition(parts: int) -> None:
    rng = random.Random(parts)
    units, call = 24, dense(24, 17)
    owners = [Region.whole((B, units)).replace(1, each) for each in spans(units, parts, rng)]
    regions = [Region.whole((B, 17)).replace(1, each) for each in spans(17, parts, rng)]

    sent = transfers(owners, wanted(call, regions))

    assert count(sent) == B * units * (parts - 1)
    for (sender, _), pieces in sent.items():
        assert sum(piece.size for piece in pieces) == owners[sender].size
    twice = [[*each, *each] for each in wanted(call, regions)]
    assert count(transfers(owners, twice)) == count(sent)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("kernel", [1, 2, 5])
def test_a_locally_connected_layer_sends_only_its_halo(parts: int, kernel: int) -> None:
    rng = random.Random(parts * 10 + kernel)
    channels, height, width = 3, 30, 7
    call = local(channels, 2, (height, width), kernel)
    rows = spans(height - kernel + 1, parts, rng)
    regions = [Region.whole(call.shape).replace(2, each) for each in rows]
    mine = [*rows[:-1], Indices.span(rows[-1].start, height)]
    owners = [Region.whole(call.inputs[0].shape).replace(2, each) for each in mine]

    assert count(transfers(owners, wanted(call, regions))) == B * channels * width * (kernel - 1) * (
        parts - 1
    )
    weights = [needs(call, region)[1] for region in regions]
    assert count(transfers(weights, [[each] for each in weights])) == 0


def test_a_padded_convolution_sends_half_a_halo_each_way_over_each_border() -> None:
    call = Call(
        target="aten.conv2d.default",
        args=(Ref(0), Ref(1), None, [1, 1], "same"),
        inputs=(TensorSpec((B, 3, 20, 8)), TensorSpec((6, 3, 5, 5))),
        outputs=((B, 6, 20, 8),),
    )
    strips = [Indices.span(0, 7), Indices.span(7, 12), Indices.span(12, 20)]
    owners = [Region.whole((B, 3, 20, 8)).replace(2, each) for each in strips]
    sent = transfers(owners, wanted(call, [Region.whole(call.shape).replace(2, each) for each in strips]))
    assert {pair: count({pair: parts}) for pair, parts in sent.items()} == {
        pair: B * 3 * 8 * 2 for pair in [(0, 1), (1, 0), (1, 2), (2, 1)]
    }


def test_ops_of_one_partition_that_need_the_same_value_get_it_once() -> None:
    value = (10,)
    first, second = Region.of(value, (0, 6)), Region.of(value, (4, 9))
    owners = [Region.of(value, (0, 5)), Region.of(value, (5, 10))]
    sent = transfers(owners, [[first, second], [nothing(value)]])
    assert {pair: sum(part.size for part in parts) for pair, parts in sent.items()} == {(1, 0): 4}
    assert sum(part.size for part in united([first, second, first])) == 9


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("kind", ["dense", "local"])
def test_partitions_that_get_just_these_messages_compute_the_net_and_its_gradients(
    parts: int, kind: str
) -> None:
    rng = random.Random(f"{kind} {parts}")
    calls = (
        [dense(12, 20), dense(20, 9)]
        if kind == "dense"
        else [local(2, 3, (22, 5), 3), local(3, 2, (20, 3), 2)]
    )
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(calls[0].inputs[0].shape, dtype=torch.float64, generator=generator)
    weights = [torch.randn(call.inputs[1].shape, dtype=torch.float64, generator=generator) for call in calls]
    leaves = [each.clone().requires_grad_() for each in weights]
    whole_data = data.clone().requires_grad_()
    expected = run_whole(calls[1], [run_whole(calls[0], [whole_data, leaves[0]]).tanh(), leaves[1]])
    expected.square().sum().backward()

    net = Net(calls, parts, 1 if kind == "dense" else 2, rng)
    output, grads, data_grad = net.step(data, weights)

    torch.testing.assert_close(output, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(data_grad, whole_data.grad, rtol=0, atol=1e-10)
    for mine, theirs in zip(grads, leaves, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=0, atol=1e-10)
    formula = B * 20 * (parts - 1) if kind == "dense" else B * 3 * 3 * (2 - 1) * (parts - 1)
    assert net.up == net.down == formula


class Net:
    """Two layers with tanh between them, each cut along one axis; counts what crosses between partitions in the middle."""

    def __init__(self, calls: list[Call], parts: int, axis: int, rng: random.Random) -> None:
        self._calls, self._parts = calls, parts
        last = spans(calls[1].shape[axis], parts, rng)
        hidden = calls[0].shape[axis]
        middle = (
            spans(hidden, parts, rng) if axis == 1 else [*last[:-1], Indices.span(last[-1].start, hidden)]
        )
        self._hidden = [Region.whole(calls[0].shape).replace(axis, each) for each in middle]
        self._last = [Region.whole(calls[1].shape).replace(axis, each) for each in last]
        self.up = self.down = 0

    def step(self, data: Tensor, weights: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
        first, second = self._calls
        grads = [torch.zeros_like(each) for each in weights]
        data_grad = torch.zeros_like(data)
        below = [self._layer(first, self._hidden[p], data, weights[0]) for p in range(self._parts)]
        hidden = [made.tanh() for made, _ in below]
        sent = transfers(self._hidden, [[needs(second, region)[0]] for region in self._last])
        output = torch.zeros(second.shape, dtype=data.dtype)
        hidden_grads = [torch.zeros_like(each) for each in hidden]
        for p, region in enumerate(self._last):
            own, inbox = hidden[p].detach().requires_grad_(), self._inbox(sent, p, hidden)
            held = [[self._hidden[p], *(piece.region for _, piece in inbox)], [needs(second, region)[1]]]
            weight = (
                take(Piece(Region.whole(second.inputs[1].shape), weights[1]), held[1][0])
                .clone()
                .requires_grad_()
            )
            tensors = [[own, *(piece.tensor for _, piece in inbox)], [weight]]
            made = prepare(second, region, held)(tensors, Draw())
            made.square().sum().backward()
            add_into(output, region, made.detach())
            add_into(grads[1], held[1][0], weight.grad)
            hidden_grads[p] += own.grad if own.grad is not None else 0
            for sender, piece in inbox:
                self.down += piece.tensor.grad.numel()
                total = torch.zeros(first.shape, dtype=data.dtype)
                add_into(total, piece.region, piece.tensor.grad)
                hidden_grads[sender] += take(Piece(Region.whole(first.shape), total), self._hidden[sender])
        for p, (_, leaves) in enumerate(below):
            hidden[p].backward(hidden_grads[p])
            for total, (region, tensor) in zip((data_grad, grads[0]), leaves, strict=True):
                add_into(total, region, tensor.grad)
        return output, grads, data_grad

    def _layer(
        self, call: Call, region: Region, data: Tensor, weight: Tensor
    ) -> tuple[Tensor, list[tuple[AnyRegion, Tensor]]]:
        wanted = needs(call, region)
        whole = zip(wanted, call.inputs, (data, weight), strict=True)
        leaves = [
            take(Piece(Region.whole(s.shape), w), need).clone().requires_grad_() for need, s, w in whole
        ]
        made = prepare(call, region, [[each] for each in wanted])([[each] for each in leaves], Draw())
        return made, list(zip(wanted, leaves, strict=True))

    def _inbox(
        self, sent: dict[tuple[int, int], tuple[AnyRegion, ...]], p: int, hidden: list[Tensor]
    ) -> list[tuple[int, Piece]]:
        found: dict[int, list[Piece]] = defaultdict(list)
        for (sender, receiver), regions in sent.items():
            for region in regions if receiver == p else ():
                piece = (
                    take(Piece(self._hidden[sender], hidden[sender].detach()), region)
                    .clone()
                    .requires_grad_()
                )
                self.up += piece.numel()
                found[sender].append(Piece(region, piece))
        return [(sender, piece) for sender, pieces in found.items() for piece in pieces]
