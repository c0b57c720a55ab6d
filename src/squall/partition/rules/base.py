"""What a rule is, and how one runs: needs by words, frames for the op, one aten call on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from squall.partition.call import Call, Ref, filled, operator, schema
from squall.partition.masks import Draw
from squall.partition.pieces import Frame
from squall.partition.regions import AnyRegion, Region, nothing
from squall.partition.stages import Stage, Stages
from squall.partition.words import Word

Words = tuple[Word, ...]
Kernel = Callable[[list[Tensor], Draw], Tensor]


class Rule:
    """How one family of ops is cut. Most say `words` and `kernel` and nothing else.

    Attributes:
        takes_flat: whether `needs` and `kernel` understand a `FlatRegion` of the output; otherwise its bounding
            product is computed and the flat region cut out of that.
    """

    takes_flat = False

    def applies(self, call: Call) -> bool:
        """Whether these arguments can be cut; an op whose rule does not apply is opaque."""
        return True

    def words(self, call: Call) -> tuple[Words, ...]:
        """For each tensor input, one word for each of its axes."""
        raise NotImplementedError(type(self).__name__)

    def needs(self, call: Call, out: Any) -> tuple[AnyRegion, ...]:
        """What of each input a region of the output is computed from. `out` is not empty."""
        return tuple(
            Region(
                spec.shape, tuple(word.reads(out, size) for word, size in zip(words, spec.shape, strict=True))
            )
            for words, spec in zip(self.words(call), call.inputs, strict=True)
        )

    def windows(self, call: Call) -> set[int]:
        """The output axes that must be one range for `kernel`."""
        return {word.windows for words in self.words(call) for word in words if word.windows is not None}

    def fill(self, call: Call, index: int) -> float:
        """The value that stands beyond the edges of input `index`."""
        return 0.0

    def frames(self, call: Call, out: Any) -> tuple[Frame, ...]:
        """What the kernel runs on: for each input a region that covers its needs, with edges."""
        frames = []
        for index, (words, spec) in enumerate(zip(self.words(call), call.inputs, strict=True)):
            spans = [word.frame(out, size) for word, size in zip(words, spec.shape, strict=True)]
            region = Region(spec.shape, tuple(span.indices for span in spans))
            before, after = (tuple(span.before for span in spans), tuple(span.after for span in spans))
            frames.append(Frame(region, before, after, self.fill(call, index)))
        return tuple(frames)

    def kernel(self, call: Call, out: Any) -> Kernel:
        """The function from frames to the output piece; `out` is one range on each axis of `windows`."""
        run = caller(call)
        return lambda tensors, draw: run(tensors)

    def stages(self, call: Call) -> Stages | None:
        """How the op is computed when an axis that it reduces is cut; None if it cannot be, or nothing is reduced."""
        return None


class ExactRule(Rule):
    """A rule whose kernel runs on exactly what is needed, whatever its shape: no edges, no axis that must be one range."""

    def windows(self, call: Call) -> set[int]:
        return set()

    def frames(self, call: Call, out: Any) -> tuple[Frame, ...]:
        return tuple(Frame.bare(need) for need in self.needs(call, out))


def caller(call: Call, **changes: Any) -> Callable[[Sequence[Tensor]], Any]:
    """The call's op as a function of its tensors, with some arguments changed; made once, run often."""
    operation = operator(call.target)
    args, kwargs = call.args, dict(call.kwargs)
    if changes:
        args, kwargs = _in_schema_order(call, changes)
    if any(_holds_ref(value) for value in kwargs.values()) or any(
        _holds_ref(value) and not isinstance(value, Ref) for value in args
    ):
        return lambda tensors: operation(*filled(args, list(tensors)), **filled(kwargs, list(tensors)))
    template = list(args)
    places = [(at, value.index) for at, value in enumerate(args) if isinstance(value, Ref)]

    def run(tensors: Sequence[Tensor]) -> Any:
        values = template.copy()
        for at, index in places:
            values[at] = tensors[index]
        return operation(*values, **kwargs)

    return run


def _in_schema_order(call: Call, changes: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {**call.arguments(), **changes}
    keyword_only = {
        each.name
        for each in operator(call.target)._schema.arguments  # type: ignore[attr-defined]
        if each.kwarg_only
    }
    positional = tuple(named[name] for name, _ in schema(call.target) if name not in keyword_only)
    return positional, {name: named[name] for name in keyword_only}


def _holds_ref(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_ref(each) for each in value)
    return isinstance(value, Ref)


def listed(text: str) -> tuple[str, ...]:
    """Names of ops, written as a text."""
    return tuple(text.split())


def per_axis(value: Any, count: int) -> tuple[int, ...]:
    """An argument of a window op, given as a number or a list, for each of `count` axes."""
    if isinstance(value, int):
        return (value,) * count
    values = tuple(value)
    return values * count if len(values) == 1 else values


def positive(dim: int, rank: int) -> int:
    """The same axis counted from the front."""
    return dim % rank if rank else 0


def dtype_of(call: Call, index: int = 0) -> torch.dtype:
    found: torch.dtype = getattr(torch, call.inputs[index].dtype)
    return found


def add_bias(call: Call, rule: Rule, axis: int) -> Stage:
    """The last stage of a product that was summed over partitions: add the bias, input 2, along an output axis."""
    trailing = (1,) * (len(call.shape) - 1 - axis % len(call.shape))

    def needs(share: Region) -> tuple[AnyRegion, ...]:
        return *(nothing(each.shape) for each in call.inputs[:2]), *rule.needs(call, share)[2:]

    def run(share: Region, inputs: Sequence[Tensor], combined: Sequence[Tensor]) -> Tensor:
        return combined[0] + inputs[2].reshape(-1, *trailing) if len(call.inputs) > 2 else combined[0]

    return Stage(
        space=call.shape,
        needs=needs,
        reads=lambda share: (share,),
        gives=lambda share: share,
        run=run,
        shape=call.shape,
    )
