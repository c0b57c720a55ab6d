"""A partition's own share of a model that nobody has whole: one tensor at a time is made, cut, and let go of."""

from collections.abc import Callable, Container

from torch import Tensor

from squall.model.graph import Graph, Source
from squall.partition.pieces import Piece, take
from squall.partition.plan import Plan
from squall.partition.regions import Region


def made_share(
    graph: Graph,
    plan: Plan,
    partition: int,
    made: Callable[[str], Tensor],
    *,
    prefix: str = "",
    but: Container[int] = (),
) -> dict[int, Tensor]:
    """The values of parameters and buffers that a partition owns any of, by number of the value.

    Beside them there is never more than what one whole tensor needs to be made.

    Args:
        made: name -> the tensor, whole, in memory of its own, as `Deferred.value` makes it.
        but: values that are left out.
        prefix: of the names of the deferred model within the graph, as in ``"model."``.
    """
    found = {}
    for index in graph.from_outside(Source.PARAMETER, Source.BUFFER):
        value = graph.values[index]
        whole = Region.whole(value.shape_at(0))  # it has no axis that counts examples
        region = plan.regions(index, whole.shape)[partition]
        if not region.is_empty and index not in but:
            tensor = made(value.name.removeprefix(prefix))
            found[index] = tensor if region.is_whole else take(Piece(whole, tensor), region).clone()
    return found
