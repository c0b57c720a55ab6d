"""What one worker of a cut replica does with tensors: its partition's share of a minibatch, and of its gradient.

The walk is that of `squall.replica.compute`, with the engine of `squall.partition` in the place of the model. The
worker's own parameters are views of the parameter buffer in use, and its gradients go into the gradient vectors that
its shards read. Whoever drives it carries messages between partitions, and tells all of them, once every one has its
norm, by what the minibatch's gradient is scaled.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from squall.data.order import seed_for
from squall.errors import LocalProtocolError, SquallError, UserCodeError, is_out_of_memory
from squall.model.graph import Source
from squall.model.install import Bound
from squall.model.layout import Layout
from squall.model.parameters import TensorSpec
from squall.model.parts import Part
from squall.model.randomness import seed_everything
from squall.nouns import Noun
from squall.partition.cut import PREFIX, WithLoss, part_of
from squall.partition.engine import Message, Worker, inputs_for
from squall.partition.made import made_share
from squall.partition.masks import Draw
from squall.partition.program import Program
from squall.partition.shares import own_share, split
from squall.partition.slots import Slots, slots_between
from squall.replica.accrual import BlockGradient, LocalSteps
from squall.replica.compute import Task
from squall.replica.downpour import Compute, Computed
from squall.replica.loading import Loader, LoadsHere
from squall.rules.clip import clip_factor


class PartResult(Noun, frozen=True, kw_only=True):
    """What one partition has of a minibatch.

    Attributes:
        loss: its share of the mean loss: that of microbatches whose loss it computes.
        norm: of its part of the gradient; 0 if nobody wants to know.
    """

    loss: float
    norm: float


class PartGradient(Noun, frozen=True, kw_only=True):
    """What one partition says of its part of a block's gradient; of a minibatch within a block, nothing.

    Attributes:
        absent: tensors without one, those of other partitions among them.
        not_finite: the first tensor whose gradient is not; empty if all are finite.
    """

    absent: tuple[int, ...] = ()
    not_finite: str = ""


class PartCompute:
    """Computes one partition's share of minibatches.

    Args:
        name: the worker, as errors call it.
        task: what to compute; it has a cut.
        partition: which.
        gradients: one or two sets, by slice of this partition the vector that shards read, shape (S,); written.
        buffers: the two parameter buffers, by slice of this partition, which shards write.
        left: the model's buffers, whole, by name, in memory that all workers of the replica see; written at the end of
            each minibatch, each partition its own share.
        loader: where minibatches come from; None: they are loaded as they are computed.
    """

    def __init__(
        self,
        *,
        name: str,
        task: Task,
        partition: int,
        gradients: Sequence[Mapping[int, Tensor]],
        buffers: Sequence[Mapping[int, Tensor]],
        left: Mapping[str, Tensor],
        loader: Loader | None = None,
    ) -> None:
        assert task.cut is not None
        self._name, self._task, self._cut, self.partition = name, task, task.cut, partition
        self._left = left
        self._loader = loader or LoadsHere(task.minibatches, task.seed)
        layout = task.layout
        tensors = layout.space.tensors
        self._parameters = [_memory_for(spec, partition) for spec in tensors]
        self._bound = Bound(self._parameters, layout, [_filled(layout, each) for each in buffers])
        self._bound.swap_to(0)
        self._block = BlockGradient(
            layout, [_filled(layout, each) for each in gradients], is_one_minibatch=task.streams
        )
        self._local = None if task.local is None else LocalSteps(task.local, layout.space, self._parameters)
        values = self._cut.values_by_name()
        self._trained = {  # by value of the graph: index of the tensor
            values[spec.name]: index
            for index, spec in enumerate(tensors)
            if spec.partition == partition and spec.name in values and spec.numel
        }
        model = WithLoss(task.model.train(), task.objective)
        self._worker = Worker(
            partition,
            self._fixed(model),
            constants=self._cut.captured.constants,
            opaques=self._cut.captured.opaques,
            model=model,
        )

    def _fixed(self, model: nn.Module) -> dict[int, Tensor]:
        """This partition's share of what is not trained; of a deferred model made here, one tensor at a time."""
        graph, plan = self._cut.captured.graph, self._cut.plan
        if self._task.value is None:
            return own_share(graph, plan, self.partition, model, but=self._trained)
        buffers, value = dict(self._task.model.named_buffers()), self._task.value

        def made(name: str) -> Tensor:
            return buffers[name].clone() if name in buffers else value(name)

        return made_share(graph, plan, self.partition, made, prefix=PREFIX, but=self._trained)

    def slots(self, examples: int, peer: int) -> Slots:
        """Where what this partition and another send each other lies, for a minibatch of so many examples."""
        return slots_between(self._cut.program(examples), self._cut.count(examples), self.partition, peer)

    def swap(self, buffer: int) -> None:
        """Take the parameters from this buffer from now on; between two minibatches only."""
        self._bound.swap_to(buffer)
        if self._local is not None:
            self._local.fetched()

    def join(self) -> None:
        """Take this partition's share of the model's buffers from what is left."""
        for value, whole in self._buffers():
            self._worker.values[value] = self._part(value, whole).of(whole).clone()

    # A minibatch ----------------------------------------------------------------------------------------

    def begin(self, wish: Compute) -> list[Message]:
        """Begin a minibatch; returns what others are waiting for.

        Raises:
            UserCodeError: the user's data raised.
        """
        if wish.is_first:
            self._block.begin()
        self._block.use(wish.buffer, ends=wish.is_last)
        for value, index in self._trained.items():
            self._worker.values[value] = self._parameters[index].detach()
        examples = self._task.minibatches.size(wish.position)
        program = self._cut.program(examples)
        count = self._cut.count(examples)
        self._weights = [1 / count] * count
        micros = self._inputs(wish, program, count)
        draw = Draw(self._task.seed, wish.epoch, wish.position)
        return self._worker.begin(program, micros, weights=self._weights, policy=self._cut.policy, draw=draw)

    def _inputs(self, wish: Compute, program: Program, count: int) -> list[Mapping[int, Sequence[Tensor]]]:
        if not self._cut.reads_inputs(program, self.partition):
            seed_everything(seed_for(self._task.seed, wish.epoch, wish.position))
            return [{} for _ in range(count)]
        captured = self._cut.captured
        try:
            batch, _ = self._loader.load(wish.epoch, wish.position)
        except Exception as error:
            raise self._told(error, wish) from error
        tensors = captured.flat((batch,), {})
        captured.batch(tensors)
        names = captured.graph.from_outside(Source.INPUT)
        return [
            inputs_for(program, self.partition, dict(zip(names, micro, strict=True)))
            for micro in split(captured, tensors, count)
        ]

    def receive(self, message: Message) -> None:
        """Take in what another partition has sent; nothing runs."""
        self._worker.receive(message)

    def run_one(self, wish: Compute) -> list[Message] | None:
        """Run what is next; None if nothing is ready.

        Raises:
            UserCodeError: an op raised, or an opaque module of the user's.
            MemoryError: there was not enough of it.
        """
        try:
            return self._worker.run_one()
        except Exception as error:
            raise self._told(error, wish) from error

    @property
    def is_finished(self) -> bool:
        """Whether this partition's share of the minibatch is done, and all gradients of its parameters are here."""
        return self._worker.is_finished

    def _told(self, error: Exception, wish: Compute) -> Exception:
        if isinstance(error, SquallError):
            return error
        if is_out_of_memory(error):
            return MemoryError(str(error))
        step = f"epoch {wish.epoch}, position {wish.position}"
        return UserCodeError.of(error, role=self._name, step=step)

    def end(self, wish: Compute) -> PartResult:
        """The minibatch is computed: say what the others must know, and leave the buffers at the end of a block."""
        self._worker.finish()
        if wish.is_last:
            self._leave_buffers()
        self._found = {
            index: self._worker.gradients[value]
            for value, index in self._trained.items()
            if value in self._worker.gradients
        }
        norm = 0.0
        if self._task.clip_norm is not None and self._found:
            precise = [
                torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32))
                for each in self._found.values()
            ]
            norm = torch.linalg.vector_norm(torch.stack(precise)).item()
        return PartResult(loss=self._loss(), norm=norm)

    def settle(self, wish: Compute, scale: float) -> PartGradient:
        """Add its part of the gradient, scaled, to the block's, and take a local step if that is wished for."""
        if scale != 1.0:
            self._found = {index: gradient * scale for index, gradient in self._found.items()}
        self._block.add_all(self._found)
        if wish.local_step:
            assert self._local is not None
            for index, gradient in self._found.items():
                self._parameters[index].grad = gradient
            self._local.step(wish.minibatches)
            for index in self._found:
                self._parameters[index].grad = None
        self._found = {}
        if not wish.is_last:
            return PartGradient()
        absent, not_finite = self._block.end()
        return PartGradient(absent=absent, not_finite=not_finite)

    def _loss(self) -> float:
        loss = self._cut.loss
        if self._worker.program.data[loss].owners[self.partition].is_empty:
            return 0.0
        parts = enumerate(self._weights)
        return sum(weight * self._worker.output(loss, micro=micro).item() for micro, weight in parts)

    def _buffers(self) -> list[tuple[int, Tensor]]:
        return [
            (value, self._left[self._cut.name_of(value)])
            for value in self._cut.captured.graph.from_outside(Source.BUFFER)
            if value in self._worker.values
        ]

    def _part(self, value: int, whole: Tensor) -> Part:
        return part_of(self._cut.plan.regions(value, tuple(whole.shape))[self.partition])

    @torch.no_grad()
    def _leave_buffers(self) -> None:
        for value, whole in self._buffers():
            self._part(value, whole).put_(whole, self._worker.values[value])


def _memory_for(spec: TensorSpec, partition: int) -> nn.Parameter:
    """Memory for a tensor of this partition; what is another's takes none."""
    device = "cpu" if spec.partition == partition else "meta"
    return nn.Parameter(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device))


def _filled(layout: Layout, vectors: Mapping[int, Tensor]) -> list[Tensor]:
    """One vector for each slice; those of other partitions take no memory and are never read."""
    return [
        vectors[spec.slice]
        if spec.slice in vectors
        else torch.empty(spec.size, dtype=getattr(torch, spec.dtype), device="meta")
        for spec in layout.slices
    ]


def factor_of(task: Task, results: Sequence[PartResult]) -> float:
    """By what a minibatch's gradient is to be multiplied, by its norm over all partitions."""
    if task.clip_norm is None:
        return 1.0
    return clip_factor(math.hypot(*(result.norm for result in results)), task.clip_norm)


def computed_of(
    task: Task, wish: Compute, results: Sequence[PartResult], gradients: Sequence[PartGradient]
) -> Computed:
    """What all partitions have of a minibatch, as one replica's.

    A tensor has no gradient if none of them has one, and the first that is not finite is named.
    """
    absent = frozenset(gradients[0].absent).intersection(*(each.absent for each in gradients[1:]))
    return Computed(
        loss=sum(result.loss for result in results),
        examples=task.minibatches.size(wish.position),
        not_finite=next((each.not_finite for each in gradients if each.not_finite), ""),
        absent=tuple(sorted(absent)),
    )


class CutReplica:
    """All partitions of a replica in one thread, with the face of a `ReplicaCompute`.

    Args:
        parts: one for each partition, in order.
        count: told of each message from one partition to another.
    """

    def __init__(
        self,
        task: Task,
        parts: Sequence[PartCompute],
        count: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._task, self._parts, self._count = task, parts, count

    def swap(self, buffer: int) -> None:
        """Take the parameters from this buffer from now on; between two minibatches only."""
        for part in self._parts:
            part.swap(buffer)

    def join(self) -> None:
        """Take the model's buffers from what is left."""
        for part in self._parts:
            part.join()

    def compute(self, wish: Compute) -> Computed:
        """Compute one minibatch; raises as `PartCompute` does."""
        pending = deque(message for part in self._parts for message in part.begin(wish))
        while True:
            while pending:
                message = pending.popleft()
                self._count(message)
                self._parts[message.receiver].receive(message)
            sent = [part.run_one(wish) for part in self._parts]
            pending += [message for messages in sent if messages for message in messages]
            if not pending and all(messages is None for messages in sent):
                break
        waiting = [part.partition for part in self._parts if not part.is_finished]
        if waiting:
            raise LocalProtocolError(reason=f"expected every partition to finish, but {waiting} wait")
        results = [part.end(wish) for part in self._parts]
        scale = factor_of(self._task, results)
        gradients = [part.settle(wish, scale) for part in self._parts]
        return computed_of(self._task, wish, results, gradients)
