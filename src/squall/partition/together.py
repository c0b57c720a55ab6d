"""All partitions of a model in one process and one thread, with messages in any order: for tests and for trying a plan.

Nothing here decides anything: it carries messages between workers, in an order drawn from a seed.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import torch
from torch import Tensor, nn

from squall.errors import LocalProtocolError
from squall.model.captured import Captured
from squall.model.graph import Ref, Source
from squall.partition.agenda import Policy
from squall.partition.compiler import program_of
from squall.partition.coupling import refuse_coupled
from squall.partition.engine import Message, Worker, inputs_for
from squall.partition.masks import Draw
from squall.partition.pieces import Assembly, Frame
from squall.partition.plan import Plan
from squall.partition.program import Program
from squall.partition.records import Records, as_message, as_records
from squall.partition.regions import AnyRegion, Region
from squall.partition.shares import own_share, split


class Together:
    """A cut model, run in one process.

    Args:
        captured: the model's graph; in training mode its first output is the loss.
        model: where parameters and buffers are taken from, and opaque modules run.
        plan: checked here.
        seed: of the order of messages and of who works next.
        trains: whether there is a backward pass.
        records: whether messages travel node by node, each value with its number, in any order.
        shares: of parameters and buffers, one for each partition; None: taken from `model`.

    Attributes:
        workers: one for each partition.
        links: bytes sent since the start, ``(sender, receiver, is_gradient, lasts) -> bytes``.
    """

    def __init__(
        self,
        captured: Captured,
        model: nn.Module,
        plan: Plan,
        *,
        seed: int = 0,
        trains: bool = True,
        records: bool = False,
        shares: Sequence[Mapping[int, Tensor]] | None = None,
    ) -> None:
        plan.check(captured.graph)
        self._captured, self._plan, self._rng = captured, plan, Random(seed)
        self._programs: dict[int, Program] = {}
        self._records = records
        self.links: Counter[tuple[int, int, bool, bool]] = Counter()
        first = captured.graph.outputs[0]
        self._loss = first.index if trains and isinstance(first, Ref) else None
        self.workers = [
            Worker(
                p,
                own_share(captured.graph, plan, p, model) if shares is None else shares[p],
                constants=captured.constants,
                opaques=captured.opaques,
                model=model,
            )
            for p in range(plan.partitions)
        ]

    def program(self, batch: int) -> Program:
        """The program for so many examples; made once."""
        if batch not in self._programs:
            self._programs[batch] = program_of(self._captured.graph, self._plan, batch, self._loss)
        return self._programs[batch]

    def step(
        self,
        tensors: Sequence[Tensor],
        *,
        microbatches: int = 1,
        policy: Policy | None = None,
        draw: Draw | None = None,
    ) -> None:
        """One forward pass, and backward if it trains; gradients and new buffers are with the workers.

        Args:
            tensors: in the order of the graph's inputs.
            microbatches: equal parts of the minibatch; the loss is the mean of theirs.

        Raises:
            ConfigError: microbatches, and the model couples examples.
        """
        if microbatches > 1:
            refuse_coupled(self._captured.graph, self._loss)
        micros = split(self._captured, tensors, microbatches)
        program = self.program(self._captured.batch(micros[0]))
        names = self._captured.graph.from_outside(Source.INPUT)
        pending: list[Message] = []
        for worker in self.workers:
            inputs = [
                inputs_for(program, worker.partition, dict(zip(names, micro, strict=True)))
                for micro in micros
            ]
            weights = [1 / microbatches] * microbatches
            pending += worker.begin(program, inputs, weights=weights, policy=policy, draw=draw)
        self._run(program, pending)
        for worker in self.workers:
            worker.finish()

    def _run(self, program: Program, begun: Sequence[Message]) -> None:
        pending = self._posted(program, begun)
        idle: set[int] = set()
        while pending or len(idle) < len(self.workers):
            busy = [worker for worker in self.workers if worker.partition not in idle]
            if pending and (not busy or self._rng.random() < 0.5):
                message = pending.pop(self._rng.randrange(len(pending)))
                told = message if isinstance(message, Message) else as_message(message, program)
                self.workers[message.receiver].receive(told)
                idle.discard(message.receiver)
                continue
            worker = self._rng.choice(busy)
            sent = worker.run_one()
            if sent is None:
                idle.add(worker.partition)
            else:
                pending += self._posted(program, sent)
        stuck = [worker.partition for worker in self.workers if not worker.is_finished]
        if stuck:
            raise LocalProtocolError(
                reason=f"expected every partition to finish, but partitions {stuck} wait"
            )

    def _posted(self, program: Program, messages: Sequence[Message]) -> list[Message | Records]:
        """Messages as they travel, counted."""
        posted = [as_records(each, program) if self._records else each for each in messages]
        for each in posted:
            lasts = program.data[each.value].lasts
            self.links[each.sender, each.receiver, each.is_gradient, lasts] += each.num_bytes
        return posted

    def outputs(self, micro: int = 0) -> list[Tensor]:
        """What the model returned for a microbatch, whole."""
        return [self._whole(ref.index, micro) for ref in self._captured.graph.outputs]

    def _whole(self, value: int, micro: int) -> Tensor:
        owners = self.workers[0].program.data[value].owners
        parts = [
            (region, worker.output(value, micro=micro))
            for region, worker in zip(owners, self.workers, strict=True)
            if not region.is_empty
        ]
        return _joined(Region.whole(owners[0].shape), parts)

    def state(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole, by name."""
        return self._gathered([worker.values for worker in self.workers])

    def gradients(self) -> dict[str, Tensor]:
        """All gradients, whole, by name; a parameter of which no part has one is left out."""
        return self._gathered([worker.gradients for worker in self.workers])

    def _gathered(self, held: Sequence[Mapping[int, Tensor]]) -> dict[str, Tensor]:
        values, found = self._captured.graph.values, {}
        for value in sorted({value for each in held for value in each}):
            shape = values[value].shape_at(0)  # it has no axis that counts examples
            dtype = getattr(torch, values[value].dtype)
            parts = [
                (region, each.get(value, torch.zeros(region.sizes, dtype=dtype)))
                for region, each in zip(self._plan.regions(value, shape), held, strict=True)
                if not region.is_empty
            ]
            found[values[value].name] = _joined(Region.whole(shape), parts)
        return found


def _joined(whole: Region, parts: Sequence[tuple[AnyRegion, Tensor]]) -> Tensor:
    regions = [region for region, _ in parts]
    assembly = Assembly(Frame.bare(whole), whole, regions)
    return assembly([tensor for _, tensor in parts])
