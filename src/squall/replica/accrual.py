"""What a worker makes of a model's gradients: the sum that is pushed, and its own steps between two fetches.

What adds up over minibatches is kept in float32 where parameters are bfloat16 or float16: the gradient of a block of
several, which is rounded once, at its end, and what local steps move.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from squall.model.install import Piece, pieces_of
from squall.model.layout import Layout, SliceSpec
from squall.model.parameters import LOW_PRECISION, ParameterSpace
from squall.rules.apply import CHUNK, copy_gradient_, is_finite
from squall.rules.rule import Rule

LARGE = CHUNK
"""Elements from which a tensor is worth a call of its own, as soon as backward has made its gradient, which is then
in cache. All smaller ones are copied by one call, and checked by as few as possible: calls are what they cost."""


class _Neighbours(NamedTuple):
    """Tensors that are not large and lie side by side in a slice, so that one sum checks them all."""

    vector: Tensor
    tensors: tuple[int, ...]


class BlockGradient:
    """The gradient of one block, summed in the vectors that shards read.

    It is checked for being finite once, at the block's end: a sum is finite only if all its terms are.

    Attributes:
        large: tensors with at least `LARGE` elements.

    Args:
        layout: says what lies where.
        gradients: one or two sets of vectors, one per slice, shape (S,); written. On the meta device those of other
            partitions, which nothing is added to.
        is_one_minibatch: blocks are of one minibatch only, so that nothing is ever added.
    """

    def __init__(
        self, layout: Layout, gradients: Sequence[Sequence[Tensor]], *, is_one_minibatch: bool
    ) -> None:
        self._tensors = layout.space.tensors
        self.large = frozenset(index for index, spec in enumerate(self._tensors) if spec.numel >= LARGE)
        self._pieces = [pieces_of(layout, vectors) for vectors in gradients]
        # By tensor, in float32: its sum over a block of several minibatches.
        self._sums: dict[int, tuple[Piece]] = {} if is_one_minibatch else self._fresh_sums()
        self._wholes = [self._in_one_piece(pieces) for pieces in self._pieces]
        self._neighbours = [
            [
                run
                for spec in layout.slices
                if not vectors[spec.slice].is_meta
                for run in self._runs(spec, vectors[spec.slice])
            ]
            for vectors in gradients
        ]
        self._buffer = 0
        self._ends = False
        self._present: set[int] = set()  # tensors with a gradient in this block
        self._checked: set[int] = set()  # those of them that need no look at the end
        self._not_finite: set[int] = set()

    def _fresh_sums(self) -> dict[int, tuple[Piece]]:
        return {
            index: (Piece(start=0, stop=spec.numel, vector=torch.zeros(spec.numel)),)
            for index, spec in enumerate(self._tensors)
            if spec.dtype in LOW_PRECISION
        }

    def _in_one_piece(self, pieces: Sequence[tuple[Piece, ...]]) -> dict[int, Tensor]:
        """Where gradients go that need not be cut: by tensor a view of its shape."""
        targets = {index: self._sums.get(index, own) for index, own in enumerate(pieces)}
        return {
            index: own[0].vector.view(self._tensors[index].shape)
            for index, own in targets.items()
            if len(own) == 1
        }

    def _runs(self, spec: SliceSpec, vector: Tensor) -> Iterator[_Neighbours]:
        """Of one slice."""
        start, tensors = 0, list[int]()
        for segment in spec.segments:
            if segment.tensor not in self.large:
                tensors.append(segment.tensor)
                continue
            if tensors:
                yield _Neighbours(vector[start : segment.start], tuple(tensors))
            start, tensors = segment.stop, []
        if tensors:
            yield _Neighbours(vector[start:], tuple(tensors))

    def begin(self) -> None:
        """Forget the last block."""
        self._present.clear()
        self._checked.clear()
        self._not_finite.clear()

    def use(self, buffer: int, *, ends: bool) -> None:
        """Write into this set of vectors from now on; `ends`: the minibatch that comes is known to be the block's last."""
        self._buffer, self._ends = buffer, ends

    def add(self, index: int, gradient: Tensor) -> None:
        """Copy a tensor's gradient of one minibatch, in ordinary memory, or add it to the block's."""
        pieces = self._sums.get(index) or self._pieces[self._buffer][index]
        checks = self._ends and index in self.large and index not in self._sums
        if not copy_gradient_(pieces, gradient, accumulate=index in self._present, check=checks):
            self._not_finite.add(index)
        if checks:
            self._checked.add(index)
        self._present.add(index)

    def sums(self) -> Mapping[int, Tensor]:
        """By tensor, the memory in use now that its gradients are summed in, in its shape, if that is in one piece."""
        return self._wholes[self._buffer]

    def add_all(self, gradients: Mapping[int, Tensor]) -> None:
        """The same for several tensors at once."""
        wholes = self._wholes[self._buffer]
        for call, indices in (
            (torch._foreach_copy_, gradients.keys() - self._present),
            (torch._foreach_add_, gradients.keys() & self._present),
        ):
            simple = [i for i in indices if i in wholes and gradients[i].layout is torch.strided]
            if simple:
                call([wholes[index] for index in simple], [gradients[index] for index in simple])
                self._present.update(simple)
            for index in indices.difference(simple):
                self.add(index, gradients[index])

    def end(self) -> tuple[tuple[int, ...], str]:
        """The block is over: round its sums to what shards read, and check what is not checked yet.

        Returns:
            The tensors without a gradient, and the name of the first whose is not finite, or "".
        """
        pieces = self._pieces[self._buffer]
        for index in self._sums.keys() & self._present:
            copy_gradient_(pieces[index], self._sums[index][0].vector, accumulate=False, check=False)
        for index in self._suspects():
            if not all(is_finite(piece.vector) for piece in pieces[index]):
                self._not_finite.add(index)
        absent = tuple(index for index in range(len(self._tensors)) if index not in self._present)
        return absent, self._tensors[min(self._not_finite)].name if self._not_finite else ""

    def _suspects(self) -> set[int]:
        """Tensors of this block to be looked at one by one: large ones not checked yet, others if their sum is not finite."""
        found = set(self.large)
        for run in self._neighbours[self._buffer]:
            if not is_finite(run.vector):
                found.update(run.tensors)
        return (found & self._present) - self._checked


class LocalSteps:
    """Moves a worker's own parameters between two fetches.

    Args:
        rule: of the steps; it keeps no slots.
        space: of the parameters.
        parameters: in its order; written.
    """

    def __init__(self, rule: Rule, space: ParameterSpace, parameters: Sequence[nn.Parameter]) -> None:
        self._rule = rule
        self._tensors = space.tensors
        self._parameters = parameters
        self._moved: dict[int, Tensor] = {}  # by tensor, in float32: what local steps have made of it

    def fetched(self) -> None:
        """The parameters are the shards' again."""
        self._moved.clear()

    @torch.no_grad()
    def step(self, minibatches: int, scale: float = 1.0) -> None:
        """Take a step along the parameters' gradients, which are scaled first.

        Args:
            minibatches: what a schedule counts.
        """
        rate = self._rule.rate_at(minibatches)
        for index, parameter in enumerate(self._parameters):
            if (gradient := parameter.grad) is None or not parameter.numel():
                continue
            if scale != 1.0:
                gradient.mul_(scale)
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            values = self._to_move(index, parameter)
            self._rule.update_(values, dense.reshape(-1).to(values.dtype), (), learning_rate=rate, step=1)
            if values.data_ptr() != parameter.data_ptr():
                parameter.copy_(values.view(parameter.shape))

    def _to_move(self, index: int, parameter: Tensor) -> Tensor:
        """What a local step moves, in C order: the parameter's own memory if it can, else a copy."""
        if self._tensors[index].dtype not in LOW_PRECISION:
            return parameter.detach().contiguous().view(-1)
        if index not in self._moved:
            self._moved[index] = parameter.detach().float().contiguous().view(-1)
        return self._moved[index]
