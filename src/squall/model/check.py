"""Is a captured graph what the model computes? Asked of the model itself, on the example."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.errors import ModelError
from squall.model.graph import Graph, Node
from squall.model.randomness import random_state_kept, seed_everything

_SEED = 20120612


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one forward and backward gave.

    Attributes:
        outputs: the tensors returned, and the plain constants beside them.
        gradients: of a fixed weighted sum of the outputs, by parameter; None where there is none.
        buffers: by name, as they are afterwards.
    """

    outputs: tuple[Any, ...]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def outcome(outputs: Sequence[Any], leaves: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> Outcome:
    """Weigh the outputs, alike on every call, and differentiate.

    Args:
        leaves: parameters by name, of which gradients are wanted; they get a `grad`. None: no backward.
    """
    floats = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    if floats and leaves:
        torch.autograd.backward(floats, [_weights(output) for output in floats])
    return Outcome(tuple(outputs), {name: leaf.grad for name, leaf in leaves.items()}, buffers)


def _weights(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.rand(output.shape, generator=generator, dtype=torch.float64) + 0.5
    return weights.to(output.dtype).to(output.device)


def seeded() -> Any:
    """A block in which all generators start alike, and that leaves the caller's as they were."""
    return _Seeded()


class _Seeded:
    def __enter__(self) -> None:
        self._kept = random_state_kept()
        self._kept.__enter__()
        seed_everything(_SEED)

    def __exit__(self, *error: Any) -> None:
        self._kept.__exit__(*error)


def compare(graph: Graph, ours: Outcome, theirs: Outcome, *, batch: int, model: nn.Module) -> None:
    """Refuse a graph that does not compute what the model does.

    Raises:
        ModelError: an output, a gradient or a buffer differs, and which.
    """
    largest = max((_scale(gradient) for gradient in theirs.gradients.values()), default=0.0)
    for what, place, got, wanted in _pairs(graph, ours, theirs):
        # Some gradients are zero but for rounding, as a bias's before batch norm: others say what is small.
        difference = _difference(got, wanted, largest / 1000 if what.startswith("the gradient") else 0.0)
        if difference:
            raise ModelError(
                subject=f"model {type(model).__name__}, captured as a graph",
                expected=f"{what} of the model itself on {batch} examples",
                got=f"{difference}; {place}",
                remedy="Something in it cannot be seen from outside, such as a hook on a tensor, a size taken "
                "for fixed, or state kept elsewhere. Keep that module whole: opaque=('its.name',) or "
                f"squall.opaque(module).{' Known: ' * bool(graph.notes)}{'; '.join(graph.notes)}",
            )


def _pairs(graph: Graph, ours: Outcome, theirs: Outcome) -> Iterator[tuple[str, str, Any, Any]]:
    if len(ours.outputs) != len(theirs.outputs):
        yield "the number of results", "its form depends on the batch", len(ours.outputs), len(theirs.outputs)
        return
    for at, (got, wanted) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        yield f"output {at}", _where(graph.nodes[-1] if graph.nodes else None), got, wanted
    for name, got in sorted(ours.buffers.items()):
        yield f"buffer {name!r} after the call", f"buffer {name!r}", got, theirs.buffers[name]
    # The parameter used last comes first: what goes wrong in backward does so from there down.
    for name, node in _by_last_use(graph, ours.gradients):
        yield f"the gradient of {name!r}", _where(node), ours.gradients[name], theirs.gradients[name]


def _by_last_use(graph: Graph, gradients: dict[str, Tensor | None]) -> list[tuple[str, Node | None]]:
    users = {
        value.name: graph.users[index] for index, value in enumerate(graph.values) if value.name in gradients
    }
    order = sorted(gradients, key=lambda name: users[name][-1] if users.get(name) else -1, reverse=True)
    return [(name, graph.nodes[users[name][-1]] if users.get(name) else None) for name in order]


def _where(node: Node | None) -> str:
    if node is None:
        return "nothing reads it"
    return f"look at module {node.module!r} and what follows it ({node.line or 'no line is known'})"


def _difference(got: Any, wanted: Any, least_scale: float) -> str:
    """How two results differ; "" if they do not."""
    if not isinstance(got, Tensor) or not isinstance(wanted, Tensor):
        is_same = got is wanted or (not isinstance(got, Tensor) and (got == wanted or _are_nan(got, wanted)))
        return "" if is_same else f"{_kind(got)} instead of {_kind(wanted)}"
    if got.is_sparse or wanted.is_sparse:
        got, wanted = got.to_dense(), wanted.to_dense()
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"{_kind(got)} instead of {_kind(wanted)}"
    if not got.is_floating_point() and not got.is_complex():
        return "" if torch.equal(got, wanted) else "other values"
    scale = max(_scale(wanted), least_scale)
    within = 256 * torch.finfo(got.dtype).eps
    if torch.allclose(got, wanted, rtol=within, atol=within * scale, equal_nan=True):
        return ""
    worst = (got - wanted).detach().abs().max().item()
    return f"a difference of {worst:.3g} where the largest value is {scale:.3g}"


def _are_nan(*values: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in values)


def is_bit_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type hold the same bits; NaN is what it is.

    >>> is_bit_equal(torch.tensor(float("nan")), torch.tensor(float("nan")))
    True
    """
    one, other = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)


def _scale(tensor: Tensor | None) -> float:
    """The largest finite magnitude in it."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return float(dense.abs().nan_to_num(0, 0, 0).max())


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return "no gradient" if value is None else repr(value)
