"""Where the tensors that two partitions send each other lie in memory that both map: computed alike on both sides.

Every message of a step has a place of its own, so a place is written once a step and free again when the step is over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from squall.partition.program import Program
from squall.partition.regions import AnyRegion, Shape

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Key:
    """One message: from which of the two, and what it is of.

    Attributes:
        micro: the microbatch; None for what lasts for the step.
    """

    sender: int
    value: int
    micro: int | None
    is_gradient: bool


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor: where it begins [bytes], its dtype, as in ``"float32"``, and its shape."""

    start: int
    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Slots:
    """The places of all messages between two partitions in one step.

    Attributes:
        num_bytes: of the memory that they need.
        places: for each message, those of its tensors in order.
    """

    num_bytes: int
    places: Mapping[Key, tuple[Place, ...]]


def slots_between(program: Program, count: int, one: int, other: int) -> Slots:
    """The places of what two partitions send each other in a step of so many microbatches."""
    places: dict[Key, tuple[Place, ...]] = {}
    start = 0
    for key, value, regions in _messages(program, count, {one, other}):
        found = []
        for region in regions:
            datum = program.data[value]
            found.append(Place(start, datum.dtype, region.sizes))
            start += -(-region.size * datum.itemsize // _ALIGNMENT) * _ALIGNMENT
        places[key] = tuple(found)
    return Slots(start, places)


def _messages(
    program: Program, count: int, both: set[int]
) -> Iterator[tuple[Key, int, tuple[AnyRegion, ...]]]:
    for value, links in sorted(program.sent.items()):
        micros = (None,) if program.data[value].lasts else tuple(range(count))
        for (sender, receiver), regions in sorted(links.items(), key=lambda link: link[0]):
            if {sender, receiver} != both:
                continue
            goes_back = (value, sender) in program.parts[receiver].returns
            for micro in micros:
                yield Key(sender, value, micro, False), value, tuple(regions)
                if goes_back:
                    yield Key(receiver, value, micro, True), value, tuple(regions)
