"""What a worker makes of a model's gradients: the sum that is pushed, and its own steps between two fetches.

What adds up over minibatches is kept in float32 where parameters are bfloat16 or float16: the gradient of a block of
several, which is rounded once, at its end, and what local steps move.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from squall.model.install import Piece, pieces_of
from squall.model.layout import Layout
from squall.model.parameters import LOW_PRECISION, ParameterSpace
from squall.rules.apply import copy_gradient_
from squall.rules.rule import Rule


class BlockGradient:
    """The gradient of one block, summed in the vectors that shards read.

    Args:
        layout: says what lies where.
        gradients: one or two sets of vectors, one per slice, shape (S,); written.
        is_one_minibatch: blocks are of one minibatch only, so that nothing is ever added.
    """

    def __init__(
        self, layout: Layout, gradients: Sequence[Sequence[Tensor]], *, is_one_minibatch: bool
    ) -> None:
        self._tensors = layout.space.tensors
        self._pieces = [pieces_of(layout, vectors) for vectors in gradients]
        # By tensor, in float32: its sum over a block of several minibatches.
        self._sums: dict[int, tuple[Piece]] = {} if is_one_minibatch else self._fresh_sums()
        self._buffer = 0
        self._present: set[int] = set()  # tensors with a gradient in this block
        self._not_finite: set[int] = set()

    def _fresh_sums(self) -> dict[int, tuple[Piece]]:
        return {
            index: (Piece(start=0, stop=spec.numel, vector=torch.zeros(spec.numel)),)
            for index, spec in enumerate(self._tensors)
            if spec.dtype in LOW_PRECISION
        }

    def begin(self) -> None:
        """Forget the last block."""
        self._present.clear()
        self._not_finite.clear()

    def use(self, buffer: int) -> None:
        """Write into this set of vectors from now on."""
        self._buffer = buffer

    def add(self, index: int, gradient: Tensor) -> None:
        """Copy a tensor's gradient of one minibatch, in ordinary memory, or add it to the block's."""
        pieces = self._sums.get(index) or self._pieces[self._buffer][index]
        if not copy_gradient_(pieces, gradient, accumulate=index in self._present):
            self._not_finite.add(index)
        self._present.add(index)

    def end(self) -> tuple[tuple[int, ...], str]:
        """The block is over: round its sums to what shards read.

        Returns:
            The tensors without a gradient, and the name of the first whose is not finite, or "".
        """
        for index, (total,) in self._sums.items():
            if index in self._present:
                pieces = self._pieces[self._buffer][index]
                if not copy_gradient_(pieces, total.vector, accumulate=False):
                    self._not_finite.add(index)
        absent = tuple(index for index in range(len(self._tensors)) if index not in self._present)
        return absent, self._tensors[min(self._not_finite)].name if self._not_finite else ""


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
