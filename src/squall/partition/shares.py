"""What a partition has from outside of a step: its share of parameters and buffers, and minibatches in equal parts."""

from collections.abc import Container, Sequence

from torch import Tensor, nn

from squall.errors import ConfigError
from squall.model.captured import Captured
from squall.model.graph import Graph, Source
from squall.partition.pieces import Piece, take
from squall.partition.plan import Plan
from squall.partition.regions import Region


def own_share(
    graph: Graph, plan: Plan, partition: int, model: nn.Module, *, but: Container[int] = ()
) -> dict[int, Tensor]:
    """A partition's own share of the model's parameters and buffers, copied; without the values in `but`."""
    found = {}
    for index in graph.from_outside(Source.PARAMETER, Source.BUFFER):
        value = graph.values[index]
        get = model.get_buffer if value.source is Source.BUFFER else model.get_parameter
        tensor = get(value.name).detach()
        region = plan.regions(index, tuple(tensor.shape))[partition]
        if not region.is_empty and index not in but:
            found[index] = take(Piece(Region.whole(tuple(tensor.shape)), tensor), region).clone()
    return found


def split(captured: Captured, tensors: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """The minibatch in equal parts, by examples."""
    found: list[list[Tensor]] = [[] for _ in range(parts)]
    for tensor, dim in zip(tensors, captured.batch_dims, strict=True):
        if dim is not None and tensor.shape[dim] % parts:
            raise ConfigError(
                subject="microbatches",
                expected=f"a number that divides {tensor.shape[dim]} examples",
                got=str(parts),
                remedy="Choose another number.",
            )
        split = [tensor] * parts if dim is None else tensor.chunk(parts, dim)
        for micro, part in zip(found, split, strict=True):
            micro.append(part)
    return found
