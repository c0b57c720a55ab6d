"""One op of the captured graph, as the rules see it: what is called, on which shapes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from squall.partition.regions import Shape


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in a call's arguments for its tensor number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype (as in ``"float32"``) of one tensor argument.

    >>> TensorSpec((2, 3)).dtype
    'float32'
    """

    shape: Shape
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One op on whole, uncut tensors. Parameters and buffers are ordinary tensor arguments.

    Attributes:
        target: the op, as in ``"aten.conv2d.default"``.
        args: positional arguments, each tensor replaced by its `Ref`; lists may hold `Ref`s too.
        kwargs: named arguments.
        inputs: what the `Ref`s stand for, in the order of the tensor arguments.
        outputs: shapes of all outputs.
        examples: of each output, the axis that counts examples, where one axis does nothing else.
        output: which output this call stands for: indexing an op's tuple of outputs is folded in.
        site: number of the op in its graph; keys its random mask.

    >>> Call(
    ...     target="aten.linear.default",
    ...     args=(Ref(0), Ref(1)),
    ...     inputs=(TensorSpec((8, 4)), TensorSpec((3, 4))),
    ...     outputs=((8, 3),),
    ... ).shape
    (8, 3)
    """

    target: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[Shape, ...] = ()
    examples: tuple[int | None, ...] = ()
    output: int = 0
    site: int = 0

    @property
    def shape(self) -> Shape:
        """The shape of the output that this call stands for."""
        return self.outputs[self.output]

    @property
    def example_axis(self) -> int | None:
        """The axis of that output that counts examples; None if none does, or one that counts something else too."""
        return self.examples[self.output] if self.examples else None

    @property
    def name(self) -> str:
        """The op without library and overload: ``"conv2d"``."""
        return self.target.split(".")[1]

    def picking(self, output: int) -> "Call":
        return replace(self, output=output)

    def arguments(self) -> dict[str, Any]:
        """All arguments by the names of the op's schema, defaults filled in.

        >>> call = Call(target="aten.linear.default", args=(Ref(0), Ref(1)))
        >>> call.arguments()
        {'input': Ref(index=0), 'weight': Ref(index=1), 'bias': None}
        """
        given = dict(schema(self.target))
        given.update(zip(given, self.args, strict=False))
        return {**given, **self.kwargs}

    def is_given(self, name: str) -> bool:
        """Whether the argument of this name is a tensor."""
        return isinstance(self.arguments().get(name), Ref)


@cache
def operator(target: str) -> Callable[..., Any]:
    """The torch op of this name.

    >>> operator("aten.relu.default")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    library, name, overload = target.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, library), name), overload)
    return found


@cache
def schema(target: str) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an op's arguments, in order."""
    arguments = operator(target)._schema.arguments  # type: ignore[attr-defined]
    return tuple((each.name, each.default_value if each.has_default_value() else None) for each in arguments)


def run_whole(call: Call, tensors: "list[torch.Tensor]") -> Any:
    """Run the op uncut on whole tensors; `call.output` of its outputs if there are several."""
    result = operator(call.target)(*filled(call.args, tensors), **filled(call.kwargs, tensors))
    return result[call.output] if isinstance(result, (tuple, list)) else result


def filled(value: Any, tensors: "list[torch.Tensor]") -> Any:
    """The same arguments with tensors in the place of their `Ref`s."""
    if isinstance(value, Ref):
        return tensors[value.index]
    if isinstance(value, (tuple, list)):
        return [filled(each, tensors) for each in value]
    if isinstance(value, Mapping):
        return {name: filled(each, tensors) for name, each in value.items()}
    return value
