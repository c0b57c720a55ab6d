"""Messages node by node, on request: each element as a record of its number and its value.

By default a message is one contiguous tensor for each region, in an order that both sides know from the plan
(group-level), so that no numbers travel. Records cost about twice as much in float32; they can come in any order, and can
be read by whoever knows no plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from squall.partition.engine import Message
from squall.partition.program import Program
from squall.partition.regions import AnyRegion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """What a `Message` says, element by element.

    Attributes:
        numbers: of the elements in row-major order of the whole value, int32 where they fit; shape (N,).
        values: of the same elements; shape (N,).
    """

    sender: int
    receiver: int
    value: int
    micro: int | None
    is_gradient: bool
    numbers: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of numbers and values."""
        return sum(each.numel() * each.element_size() for each in (self.numbers, self.values))


def as_records(message: Message, program: Program) -> Records:
    """A message as records."""
    regions = _regions(message, program)
    told = torch.cat([numbers(region) for region in regions])
    fits = not told.numel() or int(told.max()) <= torch.iinfo(torch.int32).max
    return Records(
        sender=message.sender,
        receiver=message.receiver,
        value=message.value,
        micro=message.micro,
        is_gradient=message.is_gradient,
        numbers=told.to(torch.int32) if fits else told,
        values=torch.cat([tensor.reshape(-1) for tensor in message.tensors]),
    )


def as_message(records: Records, program: Program) -> Message:
    """Records, in any order, as the message that they were."""
    order = records.numbers.argsort()
    known, values = records.numbers[order].long(), records.values[order]
    tensors = [
        values[torch.searchsorted(known, numbers(region))].reshape(region.sizes)
        for region in _regions(records, program)
    ]
    return Message(
        sender=records.sender,
        receiver=records.receiver,
        value=records.value,
        micro=records.micro,
        is_gradient=records.is_gradient,
        tensors=tuple(tensors),
    )


def numbers(region: AnyRegion) -> Tensor:
    """The row-major numbers of a region's elements, in the order of its compact tensor; shape (N,), int64.

    >>> from squall.partition.regions import Region
    >>> numbers(Region.of((3, 4), (1, 3), (0, 2)))
    tensor([4, 5, 8, 9])
    """
    spans = [torch.arange(start, stop) for start, stop in region.flat().pairs()]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def _regions(message: Message | Records, program: Program) -> Sequence[AnyRegion]:
    """The regions that a message is about: those of the value's way forward, in which its gradient comes back."""
    sender, receiver = message.sender, message.receiver
    link = (receiver, sender) if message.is_gradient else (sender, receiver)
    return program.sent[message.value][link]
