"""What a replica does with tensors: minibatch in, gradient out, in memory that its shards can read.

Walk of a minibatch: seed the random generators by its position, load it, forward, loss, backward; as backward
finishes each parameter, a hook copies its gradient into the slices' gradient vectors and checks it while it is
in cache. The parameters themselves are views of the parameter buffer in use. On a device with memory of its own
they are not: they are copied there at each swap, minibatches at each step, and gradients back. What adds up over
minibatches is in `squall.replica.accrual`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from squall.data.minibatches import Minibatches
from squall.data.order import seed_for
from squall.errors import ModelError, SquallError, UserCodeError, is_out_of_memory
from squall.model.device import CPU, seed_device, to_device
from squall.model.install import install
from squall.model.layout import Layout
from squall.model.objective import Objective
from squall.partition.cut import Cut
from squall.replica.accrual import BlockGradient, LocalSteps
from squall.replica.data_worker import DataWorkers
from squall.replica.downpour import Compute, Computed
from squall.replica.loading import Loader, LoadsHere
from squall.rules.clip import clip_factor
from squall.rules.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every replica of a run computes, whichever minibatches it is given.

    Attributes:
        model: this replica's own copy; its parameters will be views of the replica's buffers.
        local: the rule of steps between fetches; None: none are taken.
        seed: of the run; all randomness of a minibatch follows from (seed, epoch, position).
        workers: processes that load minibatches ahead, where a replica is a process.
        clip_norm: scale each minibatch's gradient down to this norm; None: never.
        streams: a block is one minibatch, so that its gradient can go out as backward makes it, and be scaled later.
        device: where the model computes; all but "cpu" (which "cpu:0" is not) have memory of their own.
        cut: how the model is computed by several workers; None: each replica is one.
        value: of a cut model that nobody has whole, name -> a tensor made anew; None: `model` has all of them.
    """

    model: nn.Module
    objective: Objective
    minibatches: Minibatches
    layout: Layout
    local: Rule | None
    seed: int
    workers: DataWorkers = field(default_factory=DataWorkers)
    clip_norm: float | None = None
    streams: bool = True
    device: torch.device = CPU
    cut: Cut | None = None
    value: Callable[[str], Tensor] | None = None


class ReplicaCompute:
    """Computes minibatches for one worker.

    Args:
        name: the worker, as errors call it.
        task: what to compute.
        gradients: one or two sets, per slice the vector that shards read, shape (S,); written.
        buffers: the two parameter buffers, per slice a vector of shape (S,), which shards write; local steps
            write the one in use.
        loader: where minibatches come from; None: they are loaded as they are computed.

    Raises:
        UserCodeError: the model cannot be moved to its device.
        MemoryError: the device has not enough of it.
    """

    def __init__(
        self,
        *,
        name: str,
        task: Task,
        gradients: Sequence[Sequence[Tensor]],
        buffers: Sequence[Sequence[Tensor]],
        loader: Loader | None = None,
    ) -> None:
        self._name = name
        self._task = task
        self._loader = loader or LoadsHere(task.minibatches, task.seed)
        self._has_own_memory = task.device != CPU
        self._model = task.model
        self._model.train()
        if self._has_own_memory:
            self._to_device()
        self._bound = install(self._model, task.layout, buffers, copied=self._has_own_memory)
        self._block = BlockGradient(task.layout, gradients, is_one_minibatch=task.streams)
        self._norms: list[Tensor] = []  # of this minibatch's gradients, if they are to be clipped
        self._clips_first = task.clip_norm is not None and not task.streams
        self._parameters = task.layout.space.parameters_of(self._model)
        self._local = (
            None if task.local is None else LocalSteps(task.local, task.layout.space, self._parameters)
        )
        self._keeps_gradients = False
        large = () if self._clips_first else self._block.large
        self._others = {i: own for i, own in enumerate(self._parameters) if i not in large}
        # Of them those whose gradients backward itself may add to the block's sums.
        self._summed: frozenset[int] = frozenset()
        if not (task.streams or task.clip_norm or task.local or self._has_own_memory):
            self._summed = frozenset(i for i, own in self._others.items() if self._is_summed(i, own))
        for index in large:
            self._parameters[index].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter, index=index: self._took(index, parameter)
            )
        self._drop_gradients()

    def swap(self, buffer: int) -> None:
        """Take the parameters from this buffer from now on; between two minibatches only."""
        self._bound.swap_to(buffer)
        if self._local is not None:
            self._local.fetched()

    def compute(self, wish: Compute) -> Computed:
        """Compute one minibatch.

        Raises:
            UserCodeError: the user's model, loss or data raised.
            MemoryError: there was not enough of it, which is this machine's trouble and nobody's bug.
        """
        if wish.is_first:
            self._block.begin()
            if self._summed:
                self._drop_gradients()  # which are the sums of the block before
        self._block.use(wish.buffer, ends=wish.is_last)
        self._keeps_gradients = wish.local_step or self._clips_first
        try:
            loss, examples = self._step(wish)
        except SquallError:
            raise
        except Exception as error:
            raise self._told(error, f"epoch {wish.epoch}, position {wish.position}") from error
        scale = self._clip() if self._norms else 1.0
        if wish.local_step:
            assert self._local is not None
            self._local.step(wish.minibatches, scale)
        if self._keeps_gradients:
            self._drop_gradients()
        if not wish.is_last:
            return Computed(loss=loss, examples=examples)
        absent, not_finite = self._block.end()
        if not_finite:
            return Computed(loss=loss, examples=examples, not_finite=not_finite, absent=absent)
        return Computed(loss=loss, examples=examples, absent=absent, scale=scale)

    def _to_device(self) -> None:
        try:
            self._model.to(self._task.device)
        except Exception as error:
            raise self._told(error, "") from error

    def _told(self, error: Exception, step: str) -> Exception:
        """What to raise for an exception that came out of the user's code."""
        if is_out_of_memory(error):
            return MemoryError(str(error))
        return UserCodeError.of(error, role=self._name, step=step)

    def _step(self, wish: Compute) -> tuple[float, int]:
        batch, examples = self._loader.load(wish.epoch, wish.position)
        if self._has_own_memory:
            seed_device(self._task.device, seed_for(self._task.seed, wish.epoch, wish.position))
            batch = to_device(batch, self._task.device)
        before = [parameter._version for parameter in self._parameters]
        with self._task.objective.computing(self._task.device):
            loss = self._task.objective.mean(self._model, batch)
        self._expect_unwritten(before)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            self._take_others()
        return loss.item(), examples

    def _expect_unwritten(self, before: list[int]) -> None:
        """A forward that moves its own parameters would be undone by the next fetch, without a word."""
        for index, parameter in enumerate(self._parameters):
            if parameter._version != before[index]:
                raise ModelError(
                    subject=f"parameter {self._task.layout.space.tensors[index].name!r}",
                    expected="to be changed by the update rule alone",
                    got="a forward that writes to it, as Embedding(max_norm=) and clamping in place do",
                    remedy="Write it as a function of the parameter, such as torch.nn.utils.parametrizations.",
                )

    def _took(self, index: int, parameter: Tensor) -> None:
        """Backward has finished a large parameter's gradient: copy it out while it is in cache."""
        gradient = self._measured(parameter.grad)
        self._block.add(index, gradient)
        if not self._keeps_gradients:
            parameter.grad = None

    def _take_others(self) -> None:
        """Backward is over: copy out the gradients of all the others, unless they are to be clipped first.

        Where that can be, a parameter's gradient then is its sum in the block's memory, to which backward adds.
        """
        sums = self._block.sums() if self._summed else {}
        present = {
            i: own for i, own in self._others.items() if own.grad is not None and own.grad is not sums.get(i)
        }
        gradients = {index: self._measured(own.grad) for index, own in present.items()}
        if self._clips_first:
            return
        self._block.add_all(gradients)
        if not self._keeps_gradients:
            for index, parameter in present.items():
                parameter.grad = sums.get(index) if index in self._summed else None

    def _is_summed(self, index: int, parameter: Tensor) -> bool:
        """Whether its sum is in one piece and of its dtype, and no hook of the user wants a minibatch's own gradient."""
        sums = self._block.sums()
        is_alike = index in sums and sums[index].dtype == parameter.dtype
        return is_alike and not parameter._post_accumulate_grad_hooks

    def _measured(self, gradient: Tensor | None) -> Tensor:
        """The gradient in ordinary memory, its norm noted if one is wanted."""
        assert gradient is not None
        if self._task.clip_norm is not None:
            precise = torch.promote_types(gradient.dtype, torch.float32)
            self._norms.append(torch.linalg.vector_norm(gradient, dtype=precise))
        # In one copy from where it is; slice by slice and added there would be many.
        return gradient.to(CPU) if self._has_own_memory else gradient

    @torch.no_grad()
    def _clip(self) -> float:
        """Clip the minibatch's gradient; return what is left to be multiplied with what has gone out already."""
        assert self._task.clip_norm is not None
        total = torch.linalg.vector_norm(torch.stack([norm.to(CPU) for norm in self._norms])).item()
        self._norms.clear()
        factor = clip_factor(total, self._task.clip_norm)
        if not self._clips_first:
            return factor
        gradients = {i: own.grad.mul_(factor) for i, own in self._others.items() if own.grad is not None}
        self._block.add_all({i: own.to(CPU) for i, own in gradients.items()})
        return 1.0

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
