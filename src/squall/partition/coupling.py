"""Whether a minibatch can be computed in parts: which ops make one example's result depend on another's.

Found from needs: an op whose first examples need other examples' rows couples them. The loss may, if it is a mean.
"""

from squall.errors import ConfigError
from squall.model.graph import Extent, Graph, Size, Value
from squall.partition.call import Call
from squall.partition.calls import bound
from squall.partition.indices import Indices
from squall.partition.regions import Region
from squall.partition.rules import is_opaque, needs

_PARTS = 3
_MEAN = 1


def couplings(graph: Graph, loss: int | None = None, within: str = "") -> tuple[str, ...]:
    """Why microbatches would compute something else than the minibatch; empty if they do not.

    A mean over examples is the mean of the means of equal microbatches. Of a cross entropy that holds as long as no
    target is ignored: whoever ignores some gives each microbatch the weight of what it counts.

    Args:
        loss: the value that is differentiated.
        within: beginning of the names of the modules that are looked at, as in ``"model."``.
    """
    found = [f"buffer {name!r} is moved by every call" for name, _ in graph.mutations]
    for at, node in enumerate(graph.nodes):
        reason = _reason(graph, at, loss) if f"{node.module}.".startswith(within) else ""
        if reason:
            found.append(f"{node.target} {reason} ({node.line or node.module or node.name})")
    return tuple(found)


def refuse_coupled(graph: Graph, loss: int | None) -> None:
    """Refuse microbatches of a model that couples examples.

    Raises:
        ConfigError: with every reason.
    """
    reasons = couplings(graph, loss)
    if reasons:
        raise ConfigError(
            subject="microbatches",
            expected="a model in which examples do not depend on one another",
            got="; ".join(reasons),
            remedy="Use one microbatch.",
        )


def _reason(graph: Graph, at: int, loss: int | None) -> str:
    node, here = graph.nodes[at], bound(graph, at, _PARTS)
    if not any(
        _axis(graph.values[index]) is not None for index in (*node.inputs, *node.outputs) if index is not None
    ):
        return ""
    if node.is_random and not _has_mask_by_example(here.call):
        return "draws one mask for the whole minibatch"
    for k, index in enumerate(node.outputs):
        if index is None:
            continue
        call = here.call.picking(k)
        if is_opaque(call):
            return "has no rule, so it may couple examples"
        if index == loss:
            if not _is_mean(call):
                return "is a loss that is no plain mean over examples"
        elif _couples(graph, call, here.values, index):
            return "couples examples"
    return ""


def _couples(graph: Graph, call: Call, inputs: tuple[int, ...], index: int) -> bool:
    """Whether the first third of the output needs more than the first third of the examples of some input."""
    out, axis = Region.whole(call.shape), _axis(graph.values[index])
    if axis is not None:
        out = out.replace(axis, _third(call.shape[axis]))
    for value, need in zip(inputs, needs(call, out), strict=True):
        at = _axis(graph.values[value])
        if at is None or need.is_empty:
            continue
        if axis is None or not _third(need.shape[at]).covers(need.bounding().axes[at]):
            return True
    return False


def _has_mask_by_example(call: Call) -> bool:
    """Whether a random op has a mask of ours, of which each microbatch can make its own examples' rows."""
    masked = {
        "dropout": len(call.shape),
        "feature_dropout": 2,
        "scaled_dot_product_attention": len(call.shape) - 2,
    }
    axis = call.example_axis
    return axis is not None and axis < masked.get(call.name, 0)


def _third(size: int) -> Indices:
    return Indices.span(0, size // _PARTS)


def _axis(value: Value) -> int | None:
    """The axis that grows with the number of examples."""
    sizes: tuple[Size, ...] = value.shape
    return next((at for at, size in enumerate(sizes) if isinstance(size, Extent)), None)


def _is_mean(call: Call) -> bool:
    if call.name == "mean":
        return True
    named = call.arguments()
    return named.get("reduction") == _MEAN and named.get("weight") is None
