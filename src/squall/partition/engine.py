"""Runs one partition's program: the doer of `Agenda`, with the tensors.

A worker owns its partition's share of parameters and buffers and nothing else. It is driven from outside: `begin` a
step, `receive` messages in any order, `run_one` job at a time; each returns the messages to send. How those travel is
not its business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from squall.errors import LocalProtocolError
from squall.model.opaque import OpaqueCall
from squall.partition.agenda import Agenda, Arrived, FillDrain, Job, Policy
from squall.partition.compiler import moved
from squall.partition.masks import Draw
from squall.partition.pieces import Assembly, Frame, Piece, adder, take
from squall.partition.program import FED, Program
from squall.partition.regions import AnyRegion, Region
from squall.partition.running import Runner, Slots


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """Some regions of one value, or the gradient of them, from one partition to another.

    Attributes:
        value: its number in `Program.data`.
        micro: the microbatch; None for what lasts for the step.
        tensors: for each region in the program's order.
    """

    sender: int
    receiver: int
    value: int
    micro: int | None
    is_gradient: bool
    tensors: tuple[Tensor, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Trace:
    """What a piece's backward needs: the leaves that it read, which parts of which values these are, what it gave."""

    leaves: list[Tensor]
    places: list[tuple[int, int]]
    gives: dict[int, Tensor]


@dataclass(slots=True)
class _Context:
    """One microbatch under way; or, without jobs of its own, what lasts for the step.

    Attributes:
        slots: the parts of values that are here.
        traces: of pieces that ran forward and not backward yet.
        back: value -> by which job -> the gradient of each of its parts.
        returned: value -> from which partition -> the gradients of the regions that it was sent.
    """

    slots: Slots
    traces: dict[int, _Trace] = field(default_factory=dict)
    back: dict[int, dict[Job, list[Tensor | None]]] = field(default_factory=dict)
    returned: dict[int, dict[int, Sequence[Tensor]]] = field(default_factory=dict)


class Worker:
    """One partition of a model.

    Args:
        partition: which.
        values: its own share of each parameter and buffer that it owns any of, by number of the value.
        constants: by the names of their values, whole.
        opaques, model: the opaque calls, and a module that has those that run here.
    """

    def __init__(
        self,
        partition: int,
        values: Mapping[int, Tensor],
        *,
        constants: Mapping[str, Tensor] | None = None,
        opaques: Mapping[str, OpaqueCall] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.partition = partition
        self.values = dict(values)
        self.gradients: dict[int, Tensor] = {}
        self._constants, self._opaques, self._model = dict(constants or {}), opaques or {}, model
        self._runners: dict[int, list[Runner]] = {}

    def _load(self, program: Program) -> None:
        self.program, self.part = program, program.parts[self.partition]
        if program.batch not in self._runners:
            self._runners[program.batch] = [
                Runner(program, self.part, piece, self._opaques, self._model) for piece in self.part.pieces
            ]
        self._pieces = self._runners[program.batch]

    def begin(
        self,
        program: Program,
        inputs: Sequence[Mapping[int, Sequence[Tensor]]],
        *,
        weights: Sequence[float] = (1.0,),
        policy: Policy | None = None,
        draw: Draw | None = None,
    ) -> list[Message]:
        """Begin a step.

        Args:
            program: for the microbatches' number of examples; made ready once for each.
            inputs: for each microbatch, the parts of its inputs that `inputs_for` names.
            weights: for each microbatch, what its loss counts in that of the minibatch.
            policy: the order of jobs; fill and drain by default.
            draw: names the minibatch, for random masks, which are those of the minibatch in one.
        """
        self._load(program)
        self._weights, self._draw = tuple(weights), draw or Draw()
        self._trains = self.program.loss is not None
        self._agenda = Agenda(self.part, len(inputs), policy or FillDrain(), self._trains)
        self.gradients = {}
        self._lasting = _Context(self._lasting_slots())
        self._micros = [_Context(self._slots(each)) for each in inputs]
        messages: list[Message] = []
        for value in self.part.sends:
            if self.program.data[value].lasts:
                messages += self._sent(value, None, self.values[value])
            elif value not in self.part.makers:
                for micro, context in enumerate(self._micros):
                    own = context.slots[value][0]
                    assert own is not None
                    messages += self._sent(value, micro, own)
        return messages

    def _lasting_slots(self) -> Slots:
        slots: Slots = {}
        for value, parts in self.part.holds.items():
            if self.program.data[value].lasts:
                slots[value] = [None] * len(parts)
                for at, held in enumerate(parts):
                    if held.sender == FED:
                        whole = self._constants[self.program.data[value].name]
                        slots[value][at] = take(_whole(whole), held.region)
                    elif held.sender == self.partition:
                        slots[value][at] = self.values[value]
        return slots

    def _slots(self, inputs: Mapping[int, Sequence[Tensor]]) -> Slots:
        slots: Slots = {
            value: [None] * len(parts)
            for value, parts in self.part.holds.items()
            if not self.program.data[value].lasts
        }
        for value, tensors in inputs.items():
            slots[value][: len(tensors)] = list(tensors)
        return slots

    def _sent(self, value: int, micro: int | None, own: Tensor) -> list[Message]:
        piece = Piece(self.program.data[value].owners[self.partition], own.detach())
        return [
            Message(
                sender=self.partition,
                receiver=receiver,
                value=value,
                micro=micro,
                is_gradient=False,
                tensors=tuple(take(piece, region).contiguous() for region in regions),
            )
            for receiver, regions in self.part.sends[value].items()
        ]

    def receive(self, message: Message) -> None:
        """Take in a message; nothing runs."""
        context = self._lasting if message.micro is None else self._micros[message.micro]
        if message.is_gradient:
            peers = context.returned.setdefault(message.value, {})
            self._refuse_again(message, message.sender in peers)
            peers[message.sender] = message.tensors
        else:
            places = self._places(message.value, message.sender)
            slots = context.slots[message.value]
            self._refuse_again(message, any(slots[at] is not None for at in places))
            for at, tensor in zip(places, message.tensors, strict=True):
                slots[at] = tensor
        self._agenda.happened(Arrived(message.value, message.sender, message.is_gradient, message.micro))

    def _refuse_again(self, message: Message, is_here: bool) -> None:
        if is_here:
            raise LocalProtocolError(reason=f"expected each value once, but got another {message}")

    def _places(self, value: int, sender: int) -> list[int]:
        return [at for at, held in enumerate(self.part.holds[value]) if held.sender == sender]

    @property
    def is_finished(self) -> bool:
        """Whether every job is done, and every gradient of its parameters is here."""
        return (
            self._agenda.is_finished
            and self._all_is_here()
            and all(
                set(self._lasting.returned.get(value, ())) == set(peers)
                for value, peers in self.part.expects.items()
                if self.program.data[value].lasts
            )
        )

    def _all_is_here(self) -> bool:
        """Whether what its buffers become is here; nothing else waits for that."""
        return all(
            tensor is not None
            for buffer, value in moved(self.program.graph)
            if buffer in self.values
            for context in self._micros
            for tensor in context.slots.get(value, ())
        )

    def run_one(self) -> list[Message] | None:
        """Run the next job that is ready; None if none is."""
        job = self._agenda.next()
        if job is None:
            return None
        messages = self._backward(job) if job.is_backward else self._forward(job)
        self._agenda.happened(job)
        if self._agenda.is_done(job.micro):
            self._let_go(self._micros[job.micro])
        return messages

    def _let_go(self, context: _Context) -> None:
        """A microbatch is done here: keep nothing of it but results."""
        context.slots = {
            value: slots for value, slots in context.slots.items() if value in self.program.results
        }
        context.back, context.returned = {}, {}

    def _forward(self, job: Job) -> list[Message]:
        context, runner = self._micros[job.micro], self._pieces[job.piece]
        leaves, names, made = runner.forward(
            {**context.slots, **self._lasting.slots},
            replace(self._draw, part=job.micro, parts=len(self._micros)),
            self.program.batch,
            self._trains,
        )
        piece, messages = self.part.pieces[job.piece], []
        for value in piece.gives:
            context.slots.setdefault(value, [None] * len(self.part.holds[value]))[0] = made[value].detach()
            if value in self.part.sends:
                messages += self._sent(value, job.micro, made[value])
        if self._trains and piece.has_backward:
            context.traces[job.piece] = _Trace(leaves, names, {value: made[value] for value in piece.gives})
        return messages

    def _backward(self, job: Job) -> list[Message]:
        context = self._micros[job.micro]
        trace = context.traces.pop(job.piece)
        outputs, gradients = [], []
        for value, tensor in trace.gives.items():
            total = self._total(context, value, tensor, job.micro) if tensor.requires_grad else None
            if total is not None:
                outputs.append(tensor)
                gradients.append(total)
        found: Sequence[Tensor | None] = [None] * len(trace.leaves)
        if outputs and trace.leaves:
            found = torch.autograd.grad(outputs, trace.leaves, gradients, allow_unused=True)
        by_value: dict[int, list[Tensor | None]] = {}
        for (value, at), gradient in zip(trace.places, found, strict=True):
            by_value.setdefault(value, [None] * len(self.part.holds[value]))[at] = gradient
        messages: list[Message] = []
        for value, readers in self.part.readers.items():
            if job.piece in readers:
                mine = by_value.get(value, [None] * len(self.part.holds[value]))
                messages += self._came_back(job, value, mine)
        return messages

    def _came_back(self, job: Job, value: int, mine: list[Tensor | None]) -> list[Message]:
        """A piece's gradient of what it read; when it was the last one, what goes back to the senders."""
        lasts = self.program.data[value].lasts
        context, micro = (self._lasting, None) if lasts else (self._micros[job.micro], job.micro)
        back = context.back.setdefault(value, {})
        back[job] = mine
        expected = len(self.part.readers[value]) * (len(self._micros) if lasts else 1)
        if len(back) < expected:
            return []
        messages = []
        for sender in self.part.receives.get(value, ()):
            if (value, sender) in self.part.returns:
                places = self._places(value, sender)
                tensors = tuple(self._summed(context, value, at) for at in places)
                messages.append(
                    Message(
                        sender=self.partition,
                        receiver=sender,
                        value=value,
                        micro=micro,
                        is_gradient=True,
                        tensors=tensors,
                    )
                )
        return messages

    def _summed(self, context: _Context, value: int, at: int) -> Tensor:
        """The gradient of one held part, over all pieces that read it, in their order."""
        parts = [slots[at] for _, slots in sorted(context.back[value].items(), key=_by_key)]
        total = _sum([part for part in parts if part is not None])
        if total is None:
            held = context.slots[value][at]
            assert held is not None
            return torch.zeros_like(held)
        return total.contiguous()

    def _total(self, context: _Context, value: int, like: Tensor, micro: int | None) -> Tensor | None:
        """The gradient of this partition's own part of a value, from everybody who reads it."""
        parts: list[Tensor] = []
        if value == self.program.loss and micro is not None:
            parts.append(torch.full_like(like, self._weights[micro]))
        for _, slots in sorted(context.back.get(value, {}).items(), key=_by_key):
            if slots[0] is not None and self.part.holds[value][0].sender == self.partition:
                parts.append(slots[0])
        total, peers = _sum(parts), context.returned.get(value, {})
        if peers:
            plain = torch.contiguous_format
            total = (
                torch.zeros_like(like, requires_grad=False, memory_format=plain)
                if total is None
                else total.clone(memory_format=plain)
            )
            own = self.program.data[value].owners[self.partition]
            for peer in sorted(peers):
                for region, tensor in zip(self.part.sends[value][peer], peers[peer], strict=True):
                    adder(own, region)(total, tensor)
        return total

    def finish(self) -> None:
        """End the step: the gradients of its own parameters are in `gradients`, its buffers have moved.

        A parameter without a gradient has none there.
        """
        for value in self._lasting.slots:
            own = self.values.get(value)
            if own is not None and self.program.data[value].has_gradient:
                total = self._total(self._lasting, value, own, None)
                if total is not None:
                    self.gradients[value] = total
        for buffer, value in moved(self.program.graph):
            if buffer in self.values:
                self.values[buffer] = self.output(value, self.program.data[buffer].owners[self.partition])

    def output(self, value: int, region: AnyRegion | None = None, micro: int = 0) -> Tensor:
        """What is held here of a value after a step: its own region, or one that its parts cover."""
        wanted = self.program.data[value].owners[self.partition] if region is None else region
        return self._put_together(value, wanted, self._micros[micro])

    def _put_together(self, value: int, region: AnyRegion, context: _Context) -> Tensor:
        slots = (self._lasting if self.program.data[value].lasts else context).slots[value]
        parts = [
            (held.region, tensor)
            for held, tensor in zip(self.part.holds[value], slots, strict=True)
            if tensor is not None and not (held.region & region).is_empty
        ]
        assembly = Assembly(Frame.bare(region), region, [each for each, _ in parts])
        return assembly([tensor for _, tensor in parts]).clone()


def inputs_for(program: Program, partition: int, whole: Mapping[int, Tensor]) -> dict[int, list[Tensor]]:
    """The parts of a minibatch's inputs that one partition has from outside.

    Args:
        whole: the input tensors, by number of their values.
    """
    part, found = program.parts[partition], {}
    for value, tensor in whole.items():
        parts = [held.region for held in part.holds.get(value, ()) if held.sender in (FED, partition)]
        if parts:
            found[value] = [take(_whole(tensor), region) for region in parts]
    return found


def _by_key(item: tuple[Job, object]) -> Job:
    return item[0]


def _whole(tensor: Tensor) -> Piece:
    return Piece(Region.whole(tuple(tensor.shape)), tensor)


def _sum(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum in this order, of one part that part itself; None of nothing."""
    if len(parts) < 2:
        return parts[0] if parts else None
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
