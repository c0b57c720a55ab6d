"""Modules that stay whole: one op in the graph, with what is known of its outputs' shapes.

A module is opaque when its insides cannot be written as a graph of aten ops: a loop or branch on values, a backward
of its own, state that lives in Python. In the graph it is one call, ``squall.opaque``, of its inputs, parameters and
buffers; its outputs are the module's tensors and then its buffers after the call. It runs whole on one partition.

What shapes come out is learned from example runs at two batch sizes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.errors import ModelError
from squall.model.stand_in import Call, is_on_meta
from squall.model.structure import Structure

TARGET = "squall.opaque.default"
_MARK = "_squall_opaque"


def opaque(module: nn.Module) -> nn.Module:
    """Mark a module to stay whole when the model is cut: its insides are not looked at.

    Args:
        module: marked and returned.

    >>> layer = opaque(nn.Linear(2, 2))
    >>> is_marked(layer)
    True
    """
    module.__dict__[_MARK] = True
    return module


def is_marked(module: nn.Module) -> bool:
    """Whether `opaque` was called on it."""
    return bool(module.__dict__.get(_MARK, False))


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor that an opaque call returns, at one batch size."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueCall:
    """One call of an opaque module in one forward.

    Attributes:
        key: names the call, as in ``"encoder.lstm#0"``; the first argument of its node.
        module: qualified name of the module.
        arguments, result: the structures of ``(args, kwargs)`` and of what it returns.
        inputs: shapes of its input tensors on the example.
        outputs: its tensors on the example.
        parameters, buffers: names within the module, each tensor once; the order in which the node takes them.
        is_random: whether it drew from torch's generator, or might.
    """

    key: str
    module: str
    arguments: Structure
    result: Structure
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[Output, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    is_random: bool

    def bind(self, module: nn.Module) -> Callable[..., list[Tensor]]:
        """The op itself: ``(inputs, parameters, buffers)`` to the outputs and then the new buffers."""
        own = tuple(module.get_parameter(name) for name in self.parameters)

        def run(
            key: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]
        ) -> list[Tensor]:
            args, kwargs = self.arguments.build(inputs)
            with _buffers_lent(module, self.buffers, [buffer.clone() for buffer in buffers]) as after:
                if all(a is b for a, b in zip(parameters, own, strict=True)):
                    result = module(*args, **kwargs)
                else:
                    given = dict(zip(self.parameters, parameters, strict=True))
                    result = torch.func.functional_call(module, given, args, kwargs)
                written = after()
            tensors, structure = Structure.of(result)
            if structure != self.result:
                raise self._changed()
            return [*tensors, *written]

        return run

    def _changed(self) -> ModelError:
        return ModelError(
            subject=f"opaque module {self.module!r}",
            expected="a result of the same form as on the example",
            got="another form",
            remedy="Let it return the same nesting of tensors for every batch.",
        )


@contextmanager
def _buffers_lent(
    module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]
) -> Iterator[Callable[[], list[Tensor]]]:
    """While in the block the module has these buffers; what the block is given returns what became of them."""
    places = []
    for name in names:
        path, _, last = name.rpartition(".")
        places.append((module.get_submodule(path)._buffers, last))
    own = [buffers[last] for buffers, last in places]
    try:
        for (buffers, last), lent in zip(places, tensors, strict=True):
            buffers[last] = lent
        yield lambda: [tensor for buffers, last in places if (tensor := buffers[last]) is not None]
    finally:
        for (buffers, last), tensor in zip(places, own, strict=True):
            buffers[last] = tensor


# What example runs show of opaque calls.


class Recorder:
    """Wraps opaque modules of a stand-in for an example run, and keeps what each call took and gave."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._counts: dict[str, int] = {}
        self.calls: list[OpaqueCall] = []

    def wrap(self, name: str, module: nn.Module, call: Call) -> Call | None:
        if name not in self._names:
            return None

        def recorded(*args: Any, **kwargs: Any) -> Any:
            before = torch.default_generator.get_state()
            result = call(*args, **kwargs)
            drew = not torch.equal(before, torch.default_generator.get_state())
            is_random = drew or is_on_meta(module)  # without values nothing is drawn
            self.calls.append(self._describe(name, module, (args, kwargs), result, is_random))
            return result

        return recorded

    def _describe(
        self, name: str, module: nn.Module, arguments: Any, result: Any, is_random: bool
    ) -> OpaqueCall:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        inputs, form = Structure.of(arguments)
        outputs, result_form = Structure.of(result)
        return OpaqueCall(
            key=f"{name}#{count}",
            module=name,
            arguments=form,
            result=result_form,
            inputs=tuple(tuple(tensor.shape) for tensor in inputs),
            outputs=tuple(Output(tuple(t.shape), t.dtype, t.device) for t in outputs),
            parameters=tuple(name for name, _ in module.named_parameters()),
            buffers=tuple(name for name, _ in module.named_buffers()),
            is_random=is_random,
        )


# While torch.export traces, an opaque module is this op.


@dataclass(frozen=True, slots=True)
class Shapes:
    """How an opaque call's outputs follow the batch: their sizes at two batch sizes.

    Attributes:
        batches: the two batch sizes.
        first, second: the call at each.
    """

    batches: tuple[int, int]
    first: OpaqueCall
    second: OpaqueCall

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Outputs without values for inputs without values, whose sizes may be symbols."""
        batch = self._batch(tensors)
        return [
            torch.empty(self._sizes(one.shape, two.shape, batch), dtype=one.dtype, device=one.device)
            for one, two in zip(self.first.outputs, self.second.outputs, strict=True)
        ]

    def _batch(self, tensors: Sequence[Tensor]) -> Any:
        """The batch size, read off the inputs' sizes."""
        for tensor, one, two in zip(tensors, self.first.inputs, self.second.inputs, strict=True):
            for dim, sizes in enumerate(zip(one, two, strict=True)):
                if sizes == self.batches:
                    return tensor.shape[dim]
        for tensor, one, two in zip(tensors, self.first.inputs, self.second.inputs, strict=True):
            for dim, (low, high) in enumerate(zip(one, two, strict=True)):
                scale, rest = divmod(high - low, self.batches[1] - self.batches[0])
                if scale and not rest and low == scale * self.batches[0]:
                    return tensor.shape[dim] // scale
        return self.batches[0]

    def _sizes(self, one: tuple[int, ...], two: tuple[int, ...], batch: Any) -> list[Any]:
        step = self.batches[1] - self.batches[0]
        sizes = []
        for low, high in zip(one, two, strict=True):
            scale, rest = divmod(high - low, step)
            offset = low - scale * self.batches[0]
            if rest or scale < 0:
                raise ModelError(
                    subject=f"opaque module {self.first.module!r}",
                    expected="sizes that are fixed or grow evenly with the batch",
                    got=f"{low} for a batch of {self.batches[0]}, {high} for {self.batches[1]}",
                    remedy="Make a larger module opaque, whose result has such sizes.",
                )
            sizes.append(scale * batch + offset if scale else low)
        return sizes


_SHAPES: ContextVar[Mapping[str, Shapes]] = ContextVar("squall_opaque_shapes")


@torch.library.custom_op("squall::opaque", mutates_args=())
def _opaque(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    raise NotImplementedError(key)


@_opaque.register_fake
def _opaque_fake(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return _SHAPES.get()[key].fake(tensors)


class Placeholders:
    """Wraps opaque modules of a stand-in for torch.export: each call becomes one op."""

    def __init__(self, shapes: Mapping[str, Shapes]) -> None:
        self._shapes = shapes
        self._names = frozenset(shape.first.module for shape in shapes.values())
        self._counts: dict[str, int] = {}

    def __enter__(self) -> "Placeholders":
        self._token = _SHAPES.set(self._shapes)
        return self

    def __exit__(self, *error: object) -> None:
        _SHAPES.reset(self._token)

    def wrap(self, name: str, module: nn.Module, call: Call) -> Call | None:
        if name not in self._names:
            return None

        def placed(*args: Any, **kwargs: Any) -> Any:
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            tensors, structure = Structure.of((args, kwargs))
            first = self._shapes[f"{name}#{count}"].first
            if structure != first.arguments:
                raise first._changed()
            return first.result.build(torch.ops.squall.opaque(first.key, tensors))

        return placed


# Types that capture always keeps whole: their loops run inside one call of torch anyway.
ALWAYS: tuple[type[nn.Module], ...] = (nn.RNNBase,)
