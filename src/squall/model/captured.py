"""A captured model: its graph, and what is needed to call it as one calls the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from squall.errors import ModelError
from squall.model.graph import Graph, Source
from squall.model.opaque import OpaqueCall
from squall.model.straight import compile_straight
from squall.model.structure import Structure


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model as a graph, and what is needed to call it as one calls the model.

    Attributes:
        graph: its values from outside are, in order, parameters, buffers, constants and inputs.
        arguments: the structure of ``(args, kwargs)``.
        result: the structure of what the model returns; its tensors are `graph.outputs`.
        batch_dims: of each input tensor, the dimension that counts examples, or None.
        constants: tensors that are neither parameters nor buffers, by the names of their values.
        opaques: the calls of opaque modules, by key.
    """

    graph: Graph
    arguments: Structure
    result: Structure
    batch_dims: tuple[int | None, ...]
    constants: Mapping[str, Tensor] = field(repr=False)
    opaques: Mapping[str, OpaqueCall] = field(repr=False)

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        """The tensors among the arguments of a call, in the order of the graph's inputs.

        Raises:
            ModelError: the arguments are of another form than on the example.
        """
        if len(args) == self._num_plain and not kwargs and all(isinstance(arg, Tensor) for arg in args):
            return args
        tensors, structure = Structure.of((tuple(args), dict(kwargs)))
        if structure != self.arguments:
            raise ModelError(
                subject="arguments of a captured model",
                expected=f"the form and constants of the example: {_told(self.arguments)}",
                got=_told(structure),
                remedy="Capture the model anew for arguments of another form.",
            )
        return tensors

    def batch(self, tensors: Sequence[Tensor]) -> int:
        """How many examples these input tensors have.

        Raises:
            ModelError: their sizes are not those that the model was captured for.
        """
        batch = 0
        for tensor, dim in zip(tensors, self.batch_dims, strict=True):
            if dim is not None:
                batch = tensor.shape[dim]
                break
        for tensor, (before, at, after, dtype) in zip(tensors, self._forms, strict=True):
            shape = tensor.shape
            if at is None:
                fits = shape == before
            else:
                fits = len(shape) > at and shape[at] == batch and shape[at + 1 :] == after
                fits = fits and (at == 0 or shape[:at] == before)
            if not fits or tensor.dtype is not dtype:
                raise self._of_another_size(tensors, batch)
        return batch

    def _of_another_size(self, tensors: Sequence[Tensor], batch: int) -> ModelError:
        values = [self.graph.values[index] for index in self.graph.from_outside(Source.INPUT)]
        at = next(
            at
            for at, (tensor, value) in enumerate(zip(tensors, values, strict=True))
            if tuple(tensor.shape) != value.shape_at(batch) or _dtype_of(tensor) != value.dtype
        )
        return ModelError(
            subject=f"input {values[at].name}",
            expected=f"{values[at].dtype} of shape ({', '.join(map(str, values[at].shape))})",
            got=f"{_dtype_of(tensors[at])} of shape {tuple(tensors[at].shape)}",
            remedy="Only the number of examples may differ from the example it was captured with.",
        )

    @cached_property
    def _num_plain(self) -> int:
        """How many arguments there are if all are plain tensors by position; else a number that none has."""
        args, kwargs = self.arguments.parts
        return -1 if kwargs.parts or any(part.kind is not None for part in args.parts) else len(args.parts)

    @cached_property
    def _forms(self) -> tuple[tuple[tuple[int, ...], int | None, tuple[int, ...], torch.dtype], ...]:
        """Of each input the sizes before its batch dimension, where that is, the sizes after it, and the dtype.

        Compared with every call's tensors, so made ready once.
        """
        forms = []
        for index, dim in zip(self.graph.from_outside(Source.INPUT), self.batch_dims, strict=True):
            value = self.graph.values[index]
            shape = value.shape_at(0)
            before, after = (shape, ()) if dim is None else (shape[:dim], shape[dim + 1 :])
            forms.append((before, dim, after, getattr(torch, value.dtype)))
        return tuple(forms)

    def bind(self, model: nn.Module) -> Callable[..., Any]:
        """A function that is called like the model, and computes the graph with the model's own tensors.

        Gradients flow to the model's parameters; its buffers are updated as its own forward does.
        """
        run = compile_straight(self.graph, opaques=self.opaques, model=model)
        state = (
            *(model.get_parameter(self._name(index)) for index in self.graph.from_outside(Source.PARAMETER)),
            *(model.get_buffer(self._name(index)) for index in self.graph.from_outside(Source.BUFFER)),
            *self.constants.values(),
        )
        written = [model.get_buffer(name) for name, _ in self.graph.mutations]
        num_outputs = len(self.graph.outputs)
        flat, batch, build = self.flat, self.batch, self.result.build
        is_one_tensor = self.result.kind is None

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = flat(args, kwargs)
            results = run(batch(tensors), (*state, *tensors))
            if written:
                with torch.no_grad():
                    for buffer, value in zip(written, results[num_outputs:], strict=True):
                        buffer.copy_(value)
            return results[0] if is_one_tensor else build(results[:num_outputs])

        return call

    def _name(self, index: int) -> str:
        return self.graph.values[index].name


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _told(structure: Structure) -> str:
    return str(structure.build([f"tensor {at}" for at, _ in enumerate(structure.leaf_paths())]))
