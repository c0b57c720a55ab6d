"""What a replica does with tensors: minibatch in, gradient out, in memory that its shards can read.

Walk of a minibatch: seed the random generators by its position, load it, forward, loss, backward; as backward
finishes each parameter, a hook copies its gradient into the slices' gradient vectors and checks it while it is
in cache. The parameters themselves are views of the parameter buffer in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from squall.data.minibatches import Minibatches
from squall.data.order import seed_for
from squall.errors import SquallError, UserCodeError, is_out_of_memory
from squall.model.install import install, pieces_of
from squall.model.layout import Layout
from squall.model.objective import Objective
from squall.model.randomness import seed_everything
from squall.replica.downpour import Compute, Computed
from squall.rules.apply import copy_gradient_
from squall.rules.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every replica of a run computes, whichever minibatches it is given.

    Attributes:
        model: this replica's own copy; its parameters will be views of the replica's buffers.
        local: the rule of steps between fetches; None: none are taken.
        seed: of the run; all randomness of a minibatch follows from (seed, epoch, position).
    """

    model: nn.Module
    objective: Objective
    minibatches: Minibatches
    layout: Layout
    local: Rule | None
    seed: int


class ReplicaCompute:
    """Computes minibatches for one worker.

    Args:
        name: the worker, as errors call it.
        task: what to compute.
        gradients: per slice, the vector that shards read, shape (S,); written.
        buffers: the two parameter buffers, per slice a vector of shape (S,), which shards write; local steps
            write the one in use.
    """

    def __init__(
        self, *, name: str, task: Task, gradients: Sequence[Tensor], buffers: Sequence[Sequence[Tensor]]
    ) -> None:
        self._name = name
        self._task = task
        self._model = task.model
        self._model.train()
        self._bound = install(self._model, task.layout, buffers)
        self._pieces = pieces_of(task.layout, gradients)
        self._parameters = task.layout.space.parameters_of(self._model)
        self._present: set[int] = set()  # tensors with a gradient in this block
        self._not_finite: set[int] = set()
        self._keeps_gradients = False
        for index, parameter in enumerate(self._parameters):
            parameter.grad = None
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter, index=index: self._took(index, parameter)
            )

    def swap(self, buffer: int) -> None:
        """Take the parameters from this buffer from now on; between two minibatches only."""
        self._bound.swap_to(buffer)

    def compute(self, wish: Compute) -> Computed:
        """Compute one minibatch.

        Raises:
            UserCodeError: the user's model, loss or data raised.
            MemoryError: there was not enough of it, which is this machine's trouble and nobody's bug.
        """
        if wish.is_first:
            self._present.clear()
            self._not_finite.clear()
        self._keeps_gradients = wish.local_step
        try:
            loss, examples = self._step(wish)
        except SquallError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            step = f"epoch {wish.epoch}, position {wish.position}"
            raise UserCodeError.of(error, role=self._name, step=step) from error
        if wish.local_step:
            self._move(wish.minibatches)
        if not wish.is_last:
            return Computed(loss=loss, examples=examples)
        tensors = self._task.layout.space.tensors
        absent = tuple(index for index in range(len(tensors)) if index not in self._present)
        bad = tensors[min(self._not_finite)].name if self._not_finite else ""
        return Computed(loss=loss, examples=examples, not_finite=bad, absent=absent)

    def _step(self, wish: Compute) -> tuple[float, int]:
        seed_everything(seed_for(self._task.seed, wish.epoch, wish.position))
        batch, examples = self._task.minibatches.load(wish.epoch, wish.position)
        loss = self._task.objective.mean(self._model, batch)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), examples

    def _took(self, index: int, parameter: Tensor) -> None:
        """Backward has finished this parameter's gradient: copy it out, or add it to the block's."""
        gradient = parameter.grad
        assert gradient is not None
        if not copy_gradient_(self._pieces[index], gradient, accumulate=index in self._present):
            self._not_finite.add(index)
        self._present.add(index)
        if not self._keeps_gradients:
            parameter.grad = None

    @torch.no_grad()
    def _move(self, minibatches: int) -> None:
        """Take a local step along this minibatch's gradients."""
        rule = self._task.local
        assert rule is not None
        rate = rule.rate_at(minibatches)
        for parameter in self._parameters:
            if (gradient := parameter.grad) is None:
                continue
            if parameter.numel():
                values = parameter.detach().contiguous().view(-1)
                rule.update_(values, gradient.reshape(-1), (), learning_rate=rate, step=1)
                if not parameter.is_contiguous():
                    parameter.copy_(values.view(parameter.shape))
            parameter.grad = None
