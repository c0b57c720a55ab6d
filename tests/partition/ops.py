"""Random cases of every op that can be cut: small tensors, all arguments drawn."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from squall.partition.call import Ref
from squall.partition.masks import keep_mask
from squall.partition.regions import Region
from tests.partition.cutting import DRAW, Case, case_of, generator

Make = Callable[[random.Random], Case]
R = Ref
NAMES = "ABCDEFGH"


def randn(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(rng), dtype=torch.float64)


def positive(rng: random.Random, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator(rng), dtype=torch.float64) + 0.1


def integers(rng: random.Random, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator(rng))


def shape_of(rng: random.Random, least: int = 1, most: int = 4) -> tuple[int, ...]:
    return tuple(rng.randint(1, 5) for _ in range(rng.randint(least, most)))


def some(rng: random.Random, *values: Any) -> Any:
    return rng.choice(values)


# Products


def linear(rng: random.Random) -> Case:
    lead, inner, out = shape_of(rng, 0, 3), rng.randint(1, 6), rng.randint(1, 6)
    tensors = [randn(rng, *lead, inner), randn(rng, out, inner), randn(rng, out)]
    if rng.random() < 0.3:
        return case_of("aten.linear.default", (R(0), R(1)), tensors[:2])
    return case_of("aten.linear.default", (R(0), R(1), R(2)), tensors)


def matmul(rng: random.Random) -> Case:
    m, k, n = (rng.randint(1, 5) for _ in range(3))
    kind = rng.randrange(6)
    batch = shape_of(rng, 1, 2)
    if kind == 0:
        return case_of("aten.mm.default", (R(0), R(1)), [randn(rng, m, k), randn(rng, k, n)])
    if kind == 1:
        return case_of("aten.bmm.default", (R(0), R(1)), [randn(rng, 3, m, k), randn(rng, 3, k, n)])
    if kind == 2:
        return case_of("aten.matmul.default", (R(0), R(1)), [randn(rng, *batch, m, k), randn(rng, k)])
    if kind == 3:
        return case_of("aten.matmul.default", (R(0), R(1)), [randn(rng, k), randn(rng, *batch, k, n)])
    if kind == 4:
        return case_of("aten.matmul.default", (R(0), R(1)), [randn(rng, *batch, m, k), randn(rng, k, n)])
    wide = tuple(some(rng, 1, size) for size in batch)
    return case_of("aten.matmul.default", (R(0), R(1)), [randn(rng, *batch, m, k), randn(rng, *wide, k, n)])


def add_matmul(rng: random.Random) -> Case:
    m, k, n = (rng.randint(1, 5) for _ in range(3))
    scales = {"beta": 0.5, "alpha": 2.0} if rng.random() < 0.5 else {}
    if rng.random() < 0.5:
        term = randn(rng, *some(rng, (n,), (m, n), (1, n), (m, 1)))
        return case_of(
            "aten.addmm.default",
            (R(0), R(1), R(2)),
            [term, randn(rng, m, k), randn(rng, k, n)],
            kwargs=scales,
        )
    tensors = [randn(rng, 2, m, n), randn(rng, 2, m, k), randn(rng, 2, k, n)]
    return case_of("aten.baddbmm.default", (R(0), R(1), R(2)), tensors, kwargs=scales)


def embedding(rng: random.Random) -> Case:
    rows, width = rng.randint(2, 7), rng.randint(1, 5)
    padding = some(rng, -1, rng.randrange(rows))
    tensors = [randn(rng, rows, width), integers(rng, rows, *shape_of(rng, 1, 2))]
    return case_of("aten.embedding.default", (R(0), R(1), padding), tensors)


def index_select(rng: random.Random) -> Case:
    shape = shape_of(rng, 1, 3)
    dim = rng.randrange(len(shape))
    return case_of(
        "aten.index_select.default",
        (R(0), dim, R(1)),
        [randn(rng, *shape), integers(rng, shape[dim], rng.randint(1, 6))],
    )


# Convolution


def _spatial(rng: random.Random, count: int) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Sizes, kernel, stride, padding, dilation: the window fits at least once."""
    most = {1: 12, 2: 7, 3: 4}[count]
    sizes, kernel, stride, padding, dilation = [], [], [], [], []
    for _ in range(count):
        size, pad, spread = rng.randint(2, most), some(rng, 0, 0, 1, 2, 3), some(rng, 1, 1, 2, 3)
        width = rng.randint(1, max(1, min(5, (size + 2 * pad - 1) // spread)))
        for values, value in zip(
            (sizes, kernel, stride, padding, dilation),
            (size, width, some(rng, 1, 1, 2, 3), pad, spread),
            strict=True,
        ):
            values.append(value)
    return sizes, kernel, stride, padding, dilation


def convolution(count: int) -> Make:
    def make(rng: random.Random) -> Case:
        sizes, kernel, stride, padding, dilation = _spatial(rng, count)
        groups = some(rng, 1, 1, 2, 3)
        ins, outs = groups * rng.randint(1, 3), groups * rng.randint(1, 3)
        lead = () if rng.random() < 0.1 else (rng.randint(1, 3),)
        tensors = [randn(rng, *lead, ins, *sizes), randn(rng, outs, ins // groups, *kernel), randn(rng, outs)]
        refs: tuple[Any, ...] = (R(0), R(1), R(2))
        if rng.random() < 0.3:
            tensors, refs = tensors[:2], (R(0), R(1), None)
        if rng.random() < 0.15:
            args = (
                *refs,
                [1] * count,
                some(rng, "same", "valid"),
                dilation if rng.random() < 0.5 else [1],
                groups,
            )
            span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
            if args[4] == "same" or all(size >= each for size, each in zip(sizes, span, strict=True)):
                return case_of(f"aten.conv{count}d.padding", args, tensors)
        if rng.random() < 0.2:
            args = (*refs, stride, padding, dilation, False, [0] * count, groups)
            return case_of("aten.convolution.default", args, tensors) if lead else convolution(count)(rng)
        return case_of(f"aten.conv{count}d.default", (*refs, stride, padding, dilation, groups), tensors)

    return make


def transposed(count: int) -> Make:
    def make(rng: random.Random) -> Case:
        most = {1: 8, 2: 5, 3: 3}[count]
        sizes = [rng.randint(1, most) for _ in range(count)]
        kernel = [rng.randint(1, 4) for _ in range(count)]
        stride = [some(rng, 1, 2, 3) for _ in range(count)]
        dilation = [some(rng, 1, 1, 2) for _ in range(count)]
        extra = [rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
        reach = [
            (n - 1) * s + d * (k - 1) + e
            for n, s, d, k, e in zip(sizes, stride, dilation, kernel, extra, strict=True)
        ]
        padding = [rng.randint(0, min(2, each // 2)) for each in reach]
        groups = some(rng, 1, 1, 2, 3)
        ins, outs = groups * rng.randint(1, 2), rng.randint(1, 3)
        lead = () if rng.random() < 0.1 else (rng.randint(1, 3),)
        tensors = [randn(rng, *lead, ins, *sizes), randn(rng, ins, outs, *kernel), randn(rng, outs * groups)]
        refs: tuple[Any, ...] = (R(0), R(1), R(2))
        if rng.random() < 0.3:
            tensors, refs = tensors[:2], (R(0), R(1), None)
        if rng.random() < 0.2 and lead:
            args = (*refs, stride, padding, dilation, True, extra, groups)
            return case_of("aten.convolution.default", args, tensors)
        overload = "default" if count == 1 else "input"
        target = f"aten.conv_transpose{count}d.{'default' if count == 1 else overload}"
        return case_of(target, (*refs, stride, padding, extra, groups, dilation), tensors)

    return make


def locally_connected(rng: random.Random) -> Case:
    kernel, stride = [rng.randint(1, 4) for _ in range(2)], [rng.randint(1, 3) for _ in range(2)]
    sizes = [k + rng.randint(0, 6) for k in kernel]
    rows, columns = ((n - k) // s + 1 for n, k, s in zip(sizes, kernel, stride, strict=True))
    channels, outs = rng.randint(1, 3), rng.randint(1, 3)
    value = [
        randn(rng, 2, channels, *sizes),
        randn(rng, rows, columns, outs, channels * kernel[0] * kernel[1]),
    ]
    if rng.random() < 0.3:
        return case_of("squall.locally_connected2d.default", (R(0), R(1), None, kernel, stride), value)
    value.append(randn(rng, rows, columns, outs))
    return case_of("squall.locally_connected2d.default", (R(0), R(1), R(2), kernel, stride), value)


# Pooling


def max_pool(count: int) -> Make:
    def make(rng: random.Random) -> Case:
        sizes, kernel, stride, padding, dilation = _pool_arguments(rng, count, dilated=True)
        args = (R(0), kernel, stride, padding, dilation, some(rng, False, True))
        value = [randn(rng, *some(rng, (2,), (2, 3), (1, 2)), *sizes)]
        try:
            if rng.random() < 0.2 and count > 1:
                return case_of(f"aten.max_pool{count}d_with_indices.default", args, value)
            return case_of(f"aten.max_pool{count}d.default", args, value)
        except RuntimeError:  # the window does not fit
            return make(rng)

    return make


def average_pool(count: int) -> Make:
    def make(rng: random.Random) -> Case:
        sizes, kernel, stride, padding, _ = _pool_arguments(rng, count, dilated=False)
        args: tuple[Any, ...] = (
            R(0),
            kernel,
            stride,
            padding,
            some(rng, False, True),
            some(rng, False, True),
        )
        if count > 1:
            args = (*args, some(rng, None, None, 3))
        value = [randn(rng, *some(rng, (2,), (2, 3), (1, 2)), *sizes)]
        try:
            return case_of(f"aten.avg_pool{count}d.default", args, value)
        except RuntimeError:
            return make(rng)

    return make


def _pool_arguments(rng: random.Random, count: int, *, dilated: bool) -> tuple[list[int], ...]:
    most = {1: 12, 2: 8, 3: 5}[count]
    sizes = [rng.randint(2, most) for _ in range(count)]
    kernel = [rng.randint(1, 4) for _ in range(count)]
    stride = [] if rng.random() < 0.2 else [some(rng, 1, 2, 3) for _ in range(count)]
    dilation = [some(rng, 1, 1, 2) if dilated else 1 for _ in range(count)]
    padding = [rng.randint(0, k // 2) for k in kernel]
    return sizes, kernel, stride, padding, dilation


def adaptive_pool(rng: random.Random) -> Case:
    count = some(rng, 1, 2, 2, 3)
    sizes = [rng.randint(1, 7) for _ in range(count)]
    outs = [rng.randint(1, 6) for _ in range(count)]
    value = [randn(rng, *some(rng, (2,), (2, 3)), *sizes)]
    return case_of(f"aten.adaptive_avg_pool{count}d.default", (R(0), outs), value)


# Normalisation


def batch_norm(rng: random.Random) -> Case:
    shape = (rng.randint(2, 4), rng.randint(1, 5), *shape_of(rng, 0, 2))
    channels, training = shape[1], rng.random() < 0.7
    value, refs = [randn(rng, *shape) + 2], []
    for given in (rng.random() < 0.7, rng.random() < 0.7):
        refs.append(R(len(value)) if given else None)
        value += [randn(rng, channels)] if given else []
    if not training or rng.random() < 0.5:
        refs += [R(len(value)), R(len(value) + 1)]
        value += [randn(rng, channels), positive(rng, channels)]
    else:
        refs += [None, None]
    args = (R(0), *refs, training, 0.1, 1e-5, False)
    return case_of(
        "aten.batch_norm.default",
        args,
        value,
        whole=_without_memory(args),
        fixed=range(len(value) - 2, len(value)) if refs[2] else (),
    )


def _without_memory(args: tuple[Any, ...]) -> Callable[[Any], Tensor]:
    """Batch norm on copies of the running statistics, which it changes, and which get no gradient."""

    def whole(tensors: Any) -> Tensor:
        copies = [
            each.detach().clone() if args[3] and at >= args[3].index else each
            for at, each in enumerate(tensors)
        ]
        result: Tensor = torch.ops.aten.batch_norm.default(
            *(copies[a.index] if isinstance(a, Ref) else a for a in args)
        )
        return result

    return whole


def training_batch_norm(rng: random.Random) -> Case:
    """As capture writes it: running statistics in, and out."""
    shape = (rng.randint(2, 4), rng.randint(1, 5), *shape_of(rng, 0, 2))
    channels, output = shape[1], some(rng, 0, 0, 3, 4)
    value, refs = [randn(rng, *shape) + 2], []
    for given in (rng.random() < 0.7, rng.random() < 0.7):
        refs.append(R(len(value)) if given else None)
        value += [randn(rng, channels)] if given else []
    refs += [R(len(value)), R(len(value) + 1)]
    value += [randn(rng, channels), positive(rng, channels)]
    args = (R(0), *refs, True, 0.1, 1e-5)
    fixed = range(len(value)) if output else range(len(value) - 2, len(value))
    target = "aten._native_batch_norm_legit_functional.default"
    return case_of(target, args, value, output=output, fixed=fixed)


def layer_norm(rng: random.Random) -> Case:
    lead, last = shape_of(rng, 0, 2), tuple(rng.randint(2, 5) for _ in range(rng.randint(1, 2)))
    value, refs = [randn(rng, *lead, *last) + 1], []
    for given in (rng.random() < 0.7, rng.random() < 0.7):
        refs.append(R(len(value)) if given else None)
        value += [randn(rng, *last)] if given else []
    return case_of("aten.layer_norm.default", (R(0), list(last), *refs, 1e-5, False), value)


def rms_norm(rng: random.Random) -> Case:
    lead, last = shape_of(rng, 0, 2), (rng.randint(2, 5),)
    value = [randn(rng, *lead, *last), randn(rng, *last)]
    eps = some(rng, None, 1e-3)
    if rng.random() < 0.5:
        return case_of("aten.rms_norm.default", (R(0), list(last), None, eps), value[:1])
    return case_of("aten.rms_norm.default", (R(0), list(last), R(1), eps), value)


def group_norm(rng: random.Random) -> Case:
    groups, per_group = rng.randint(1, 4), rng.randint(1, 3)
    space = tuple(rng.randint(2, 4) for _ in range(rng.randint(1, 2)))
    channels = groups * per_group
    value, refs = [randn(rng, rng.randint(1, 3), channels, *space)], []
    weighted = rng.random() < 0.7  # torch's own backward fails on a bias without a weight
    for given in (weighted, weighted and rng.random() < 0.7):
        refs.append(R(len(value)) if given else None)
        value += [randn(rng, channels)] if given else []
    return case_of("aten.group_norm.default", (R(0), groups, *refs, 1e-5, False), value)


def instance_norm(rng: random.Random) -> Case:
    shape = (rng.randint(1, 3), rng.randint(1, 4), *(rng.randint(2, 4) for _ in range(rng.randint(1, 2))))
    value = [randn(rng, *shape), randn(rng, shape[1]), randn(rng, shape[1])]
    rest = (None, None, True, 0.1, 1e-5, False)
    if rng.random() < 0.5:
        return case_of("aten.instance_norm.default", (R(0), None, None, *rest), value[:1])
    return case_of("aten.instance_norm.default", (R(0), R(1), R(2), *rest), value)


# Elementwise

UNARY = [
    "relu",
    "sigmoid",
    "tanh",
    "gelu",
    "silu",
    "elu",
    "softplus",
    "leaky_relu",
    "hardtanh",
    "exp",
    "sin",
    "neg",
    "abs",
    "square",
    "mish",
    "selu",
    "clone",
    "detach",
    "relu6",
    "hardswish",
    "log_sigmoid",
    "erf",
    "sign",
]
BINARY = [
    "add.Tensor",
    "sub.Tensor",
    "mul.Tensor",
    "div.Tensor",
    "maximum.default",
    "minimum.default",
    "atan2.default",
]


def activation(rng: random.Random) -> Case:
    return case_of(f"aten.{rng.choice(UNARY)}.default", (R(0),), [randn(rng, *shape_of(rng))])


def arithmetic(rng: random.Random) -> Case:
    shape = shape_of(rng)
    other = tuple(some(rng, size, size, 1) for size in shape[rng.randint(0, len(shape)) :])
    pair = [randn(rng, *shape), positive(rng, *other)]
    kind = rng.random()
    if kind < 0.2:
        return case_of("aten.pow.Tensor_Scalar", (R(0), 2), pair[:1])
    if kind < 0.3:
        return case_of("aten.where.self", (R(0), R(1), R(2)), [pair[0] > 0, pair[0] * 2, pair[1]])
    if kind < 0.4:
        return case_of("aten.masked_fill.Scalar", (R(0), R(1), -7.0), [pair[0], pair[1] > 0.6])
    if kind < 0.5:
        return case_of("aten.clamp.default", (R(0), -0.5, 0.5), pair[:1])
    if kind < 0.55:
        return case_of("aten.gt.Scalar", (R(0), 0), pair[:1])
    if kind < 0.7:
        return case_of(
            f"aten.{rng.choice(BINARY)}", (R(0), R(1)), pair[::-1] if rng.random() < 0.5 and False else pair
        )
    if kind < 0.8:
        return case_of("aten.add.Tensor", (R(0), R(1)), pair[::-1], kwargs={"alpha": 2})
    return case_of(f"aten.{rng.choice(BINARY)}", (R(0), R(1)), pair)


def prelu(rng: random.Random) -> Case:
    shape = shape_of(rng, 2, 4)
    return case_of(
        "aten.prelu.default", (R(0), R(1)), [randn(rng, *shape), randn(rng, some(rng, 1, shape[1]))]
    )


def dropout(rng: random.Random) -> Case:
    shape, probability = shape_of(rng, 2, 4), some(rng, 0.0, 0.2, 0.5, 0.9, 1.0)
    name = some(rng, "dropout", "dropout", "feature_dropout")
    train = rng.random() < 0.9
    masked = shape[:2] if name == "feature_dropout" else shape

    def whole(tensors: Any) -> Tensor:
        if not train:
            return tensors[0] * 1
        keep = keep_mask(Region.whole(masked), 1 - probability, DRAW, 7).double()
        if probability == 1.0:
            return tensors[0] * 0
        scale: Tensor = keep.reshape(*masked, *[1] * (len(shape) - len(masked))) / (1 - probability)
        return tensors[0] * scale

    return case_of(f"aten.{name}.default", (R(0), probability, train), [randn(rng, *shape)], whole=whole)


def triangle(rng: random.Random) -> Case:
    shape = shape_of(rng, 2, 3)
    return case_of(
        f"aten.{some(rng, 'tril', 'triu')}.default", (R(0), rng.randint(-2, 2)), [randn(rng, *shape)]
    )


def like(rng: random.Random) -> Case:
    value = [randn(rng, *shape_of(rng))]
    if rng.random() < 0.5:
        return case_of("aten.ones_like.default", (R(0),), value)
    return case_of("aten.full_like.default", (R(0), 2.5), value)


def created(rng: random.Random) -> Case:
    kwargs = {"dtype": torch.float64}
    if rng.random() < 0.5:
        return case_of("aten.arange.default", (rng.randint(1, 9),), [], kwargs=kwargs)
    return case_of("aten.full.default", (list(shape_of(rng)), 1.5), [], kwargs=kwargs)


# Shape


def reshape(rng: random.Random) -> Case:
    kind = rng.randrange(7)
    shape = shape_of(rng, 2, 4)
    value = [randn(rng, *shape)]
    if kind == 0:
        return case_of("aten.flatten.using_ints", (R(0), rng.randrange(len(shape))), value)
    if kind == 1:
        return case_of("aten.view.default", (R(0), [shape[0], -1]), value)
    if kind == 2:
        return case_of("aten.unsqueeze.default", (R(0), rng.randint(-len(shape), len(shape))), value)
    if kind == 3:
        return case_of("aten.squeeze.default", (R(0),), value)
    if kind == 4:
        return case_of("aten.unflatten.int", (R(0), 0, [2, 2]), [randn(rng, 4, *shape[1:])])
    a, b, c = some(rng, (2, 3, 4), (4, 6, 2), (3, 4, 2), (1, 6, 4))
    other = some(rng, [c, b, a], [a * b, c], [a, b * c], [a * b * c], [1, a, b, 1, c], [b, c, a])
    return case_of("aten.reshape.default", (R(0), other), [randn(rng, a, b, c)])


def permute(rng: random.Random) -> Case:
    shape = shape_of(rng, 2, 4)
    rank = len(shape)
    order = list(range(rank))
    rng.shuffle(order)
    value = [randn(rng, *shape)]
    kind = rng.randrange(4)
    if kind == 0:
        return case_of("aten.permute.default", (R(0), order), value)
    if kind == 1:
        return case_of("aten.transpose.int", (R(0), order[0], -1), value)
    if kind == 2:
        return case_of("aten.mT.default", (R(0),), value)
    return case_of("aten.movedim.int", (R(0), order[0], order[-1]), value)


def expand(rng: random.Random) -> Case:
    shape = shape_of(rng, 1, 3)
    small = tuple(some(rng, size, 1) for size in shape)
    wide = (*shape_of(rng, 0, 1), *shape)
    value = [randn(rng, *small)]
    kind = rng.randrange(3)
    if kind == 0:
        return case_of("aten.expand_as.default", (R(0), R(1)), [*value, randn(rng, *wide)])
    if kind == 1:
        pair = [*value, randn(rng, *wide)]
        return case_of("aten.broadcast_tensors.default", ([R(0), R(1)],), pair, output=rng.randrange(2))
    return case_of("aten.expand.default", (R(0), list(wide)), value)


def join(rng: random.Random) -> Case:
    shape = shape_of(rng, 1, 3)
    count = rng.randint(2, 4)
    refs = [R(at) for at in range(count)]
    if rng.random() < 0.3:
        dim = rng.randint(-len(shape) - 1, len(shape))
        return case_of("aten.stack.default", (refs, dim), [randn(rng, *shape) for _ in refs])
    dim = rng.randint(-len(shape), len(shape) - 1)
    each = [list(shape) for _ in refs]
    for one in each:
        one[dim] = rng.randint(1, 4)
    return case_of("aten.cat.default", (refs, dim), [randn(rng, *one) for one in each])


def part(rng: random.Random) -> Case:
    shape = tuple(rng.randint(2, 6) for _ in range(rng.randint(1, 3)))
    dim = rng.randint(-len(shape), len(shape) - 1)
    size, value = shape[dim], [randn(rng, *shape)]
    kind = rng.randrange(6)
    if kind == 0:
        start = rng.randint(-size, size - 1)
        return case_of(
            "aten.slice.Tensor",
            (R(0), dim, start, some(rng, 2**63 - 1, size, -1 if start < -1 else size), rng.randint(1, 3)),
            value,
        )
    if kind == 1:
        return case_of("aten.select.int", (R(0), dim, rng.randint(-size, size - 1)), value)
    if kind == 2:
        start = rng.randrange(size)
        return case_of("aten.narrow.default", (R(0), dim, start, rng.randint(1, size - start)), value)
    if kind == 3:
        case = case_of("aten.split.Tensor", (R(0), rng.randint(1, 3), dim), value)
    elif kind == 4:
        case = case_of("aten.chunk.default", (R(0), rng.randint(1, 3), dim), value)
    else:
        case = case_of("aten.unbind.int", (R(0), dim), value)
    return Case(case.call.picking(rng.randrange(len(case.call.outputs))), value)


def pad(rng: random.Random) -> Case:
    shape = tuple(rng.randint(3, 6) for _ in range(rng.randint(2, 4)))
    axes = rng.randint(1, len(shape) - 1)
    kind = rng.random()
    if kind < 0.6:
        amounts = [rng.randint(-1, 3) for _ in range(2 * axes)]
        return case_of(
            "aten.pad.default", (R(0), amounts, "constant", some(rng, 0.0, 2.0, None)), [randn(rng, *shape)]
        )
    shape = tuple(rng.randint(3, 6) for _ in range(axes + 1))[:3]
    axes = len(shape) - 1
    amounts = [rng.randint(0, 2) for _ in range(2 * axes)]
    mode = some(rng, "reflect", "replicate", "circular")
    if axes > 1 or len(shape) == 2:
        shape = (2, *shape)
    return case_of("aten.pad.default", (R(0), amounts, mode), [randn(rng, *shape)])


def gather(rng: random.Random) -> Case:
    shape = tuple(rng.randint(2, 5) for _ in range(rng.randint(2, 3)))
    dim, value = rng.randrange(len(shape)), [randn(rng, *shape)]
    kind = rng.randrange(8)
    if kind == 0:
        return case_of("aten.flip.default", (R(0), [dim]), value)
    if kind == 1:
        return case_of("aten.roll.default", (R(0), [rng.randint(-3, 3)], [dim]), value)
    if kind == 2:
        return case_of("aten.repeat.default", (R(0), [rng.randint(1, 2) for _ in shape]), value)
    if kind == 3:
        return case_of("aten.repeat_interleave.self_int", (R(0), 2, dim), value)
    if kind == 4:
        return case_of("aten.unfold.default", (R(0), dim, 2, rng.randint(1, 2)), value)
    if kind == 5:
        return case_of("aten.diagonal.default", (R(0), 0, 0, 1), value)
    if kind == 6:
        return case_of("aten.pixel_shuffle.default", (R(0), 2), [randn(rng, 2, 8, 2, 3)])
    return case_of("aten.upsample_nearest2d.vec", (R(0), None, [2.0, 2.0]), [randn(rng, 2, 2, 3, 2)])


# Reductions


def total(rng: random.Random) -> Case:
    shape = shape_of(rng, 1, 4)
    name, value = some(rng, "sum", "mean"), [randn(rng, *shape)]
    if rng.random() < 0.3:
        return case_of(f"aten.{name}.default", (R(0),), value)
    dims = rng.sample(range(-len(shape), 0), rng.randint(1, len(shape)))
    overload = "dim_IntList" if name == "sum" else "dim"
    return case_of(f"aten.{name}.{overload}", (R(0), dims, some(rng, False, True)), value)


def reduction(rng: random.Random) -> Case:
    shape = tuple(rng.randint(2, 5) for _ in range(rng.randint(1, 3)))
    dim, keeps, value = (
        rng.randint(-len(shape), len(shape) - 1),
        some(rng, False, True),
        [positive(rng, *shape)],
    )
    kind = rng.randrange(6)
    if kind == 0:
        return case_of("aten.amax.default", (R(0), [dim], keeps), value)
    if kind == 1:
        return case_of("aten.logsumexp.default", (R(0), [dim], keeps), value)
    if kind == 2:
        return case_of("aten.max.dim", (R(0), dim, keeps), value)
    if kind == 3:
        return case_of("aten.prod.dim_int", (R(0), dim, keeps), value)
    if kind == 4:
        return case_of("aten.var.dim", (R(0), [dim], True, keeps), value)
    return case_of("aten.linalg_vector_norm.default", (R(0), 2, [dim], keeps), value)


def softmax(rng: random.Random) -> Case:
    shape = shape_of(rng, 1, 4)
    name = some(rng, "softmax", "log_softmax")
    return case_of(
        f"aten.{name}.int",
        (R(0), rng.randint(-len(shape), len(shape) - 1)),
        [randn(rng, *shape) * some(rng, 3, 2000)],
    )


# Attention and losses


def attention(rng: random.Random) -> Case:
    lead, queries, keys = shape_of(rng, 1, 2), rng.randint(1, 5), rng.randint(1, 5)
    width, out = rng.randint(1, 4), rng.randint(1, 4)
    tensors = [
        randn(rng, *lead, queries, width),
        randn(rng, *lead, keys, width),
        randn(rng, *lead, keys, out),
    ]
    mask: Any = None
    causal = rng.random() < 0.4
    if not causal and rng.random() < 0.5:
        batch = tuple(some(rng, 1, size) for size in lead[rng.randint(0, len(lead)) :])
        tensors.append(randn(rng, *batch, some(rng, 1, queries), keys))
        mask = R(3)
    drop = some(rng, 0.0, 0.0, 0.3)
    args = (R(0), R(1), R(2), mask, drop, causal)
    return (
        case_of(
            "aten.scaled_dot_product_attention.default",
            args,
            tensors,
            whole=_attended(drop, causal),
            kwargs={"scale": some(rng, None, 0.7)} if not drop else {},
        )
        if drop
        else case_of(
            "aten.scaled_dot_product_attention.default", args, tensors, kwargs={"scale": some(rng, None, 0.7)}
        )
    )


def _attended(drop: float, causal: bool) -> Callable[[Any], Tensor]:
    """Attention with our mask for dropout, as the formula says."""

    def whole(tensors: Any) -> Tensor:
        query, key, value = tensors[:3]
        scores = torch.einsum("...qe,...ke->...qk", query, key) / query.shape[-1] ** 0.5
        if causal:
            scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=torch.float64).triu(1)
        if len(tensors) > 3:
            scores = scores + tensors[3]
        keep = keep_mask(Region.whole(tuple(scores.shape)), 1 - drop, DRAW, 7).double() / (1 - drop)
        return torch.einsum("...qk,...ke->...qe", scores.softmax(-1) * keep, value)

    return whole


def elementwise_loss(rng: random.Random) -> Case:
    shape, reduction = shape_of(rng, 1, 3), rng.randrange(3)
    name = some(
        rng, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"
    )
    tensors = [randn(rng, *shape), torch.rand(shape, generator=generator(rng), dtype=torch.float64)]
    if name.startswith("binary"):
        weights = [positive(rng, shape[-1]), positive(rng, shape[-1])]
        if rng.random() < 0.5:
            return case_of(
                f"aten.{name}.default",
                (R(0), R(1), R(2), R(3), reduction),
                [*tensors, *weights],
                fixed=(2, 3),
            )
        return case_of(f"aten.{name}.default", (R(0), R(1), None, None, reduction), tensors)
    return case_of(f"aten.{name}.default", (R(0), R(1), reduction), tensors)


def class_loss(rng: random.Random) -> Case:
    examples, classes = rng.randint(2, 5), rng.randint(2, 6)
    space = shape_of(rng, 0, 2)
    target = integers(rng, classes, examples, *space)
    ignored = some(rng, -100, int(target.flatten()[0])) if examples > 1 and classes > 1 else -100
    if bool((target == ignored).all()):
        ignored = -100
    tensors, weight = [randn(rng, examples, classes, *space) * some(rng, 2, 2000), target], None
    if rng.random() < 0.4:
        weight = R(2)
        tensors.append(positive(rng, classes))
    if rng.random() < 0.3:
        return case_of(
            "aten.nll_loss_nd.default", (R(0), R(1), weight, some(rng, 1, 2), ignored), tensors, fixed=(2,)
        )
    args = (R(0), R(1), weight, some(rng, 1, 2), ignored, some(rng, 0.0, 0.0, 0.2))
    return case_of("aten.cross_entropy_loss.default", args, tensors, fixed=(2,))


OPS: dict[str, Make] = {
    "linear": linear,
    "matmul": matmul,
    "add_matmul": add_matmul,
    "embedding": embedding,
    "index_select": index_select,
    **{f"conv{n}d": convolution(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": transposed(n) for n in (1, 2, 3)},
    "locally_connected": locally_connected,
    **{f"max_pool{n}d": max_pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": average_pool(n) for n in (1, 2, 3)},
    "adaptive_avg_pool": adaptive_pool,
    "batch_norm": batch_norm,
    "training_batch_norm": training_batch_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "activation": activation,
    "arithmetic": arithmetic,
    "prelu": prelu,
    "dropout": dropout,
    "triangle": triangle,
    "like": like,
    "created": created,
    "reshape": reshape,
    "permute": permute,
    "expand": expand,
    "join": join,
    "part": part,
    "pad": pad,
    "gather": gather,
    "total": total,
    "reduction": reduction,
    "softmax": softmax,
    "attention": attention,
    "elementwise_loss": elementwise_loss,
    "class_loss": class_loss,
}
# Those whose reduced axes may be cut.
STAGED = [
    "linear",
    "matmul",
    "embedding",
    "conv1d",
    "conv2d",
    "conv3d",
    "total",
    "softmax",
    "batch_norm",
    "training_batch_norm",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "instance_norm",
    "elementwise_loss",
    "class_loss",
]
