"""What each partition does in one step: tasks in pieces, what it holds, and what it sends to whom.

A plan says who owns what. From that and the rules' needs follow the rest: each op becomes a `Task` on each partition
that owns some of its output; an op in stages becomes contributions, an addition (or a maximum) and a finish. What a task
reads and its partition does not own is received, once for each value and sender. Backward, the gradient of everything
that was received goes back the same way, summed first over all tasks of the receiver.

A *fused piece* is a run of consecutive tasks of one partition. It begins anew at the first task that reads something received,
and ends with each value that is sent: so no message waits for more than it must, in either direction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from squall.model.graph import Graph
from squall.partition.call import Call
from squall.partition.plan import Plan
from squall.partition.regions import AnyRegion, Region, Shape
from squall.partition.stages import Combine, Stage
from squall.partition.traffic import Transfers

FED = -1
"""The sender of what is handed in from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One part of a value that a partition has, and from whom: itself, another partition, or `FED`."""

    region: AnyRegion
    sender: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One value of the program: one of the graph, a contribution to a stage, or what these add up to.

    Attributes:
        name: for messages to people.
        dtype: as in ``"float32"``.
        owners: what each partition makes of it, or has from outside.
        lasts: whether it stays for the whole step (parameters, buffers), and not for one microbatch.
        has_gradient: whether the loss depends on it in a differentiable way.
    """

    name: str
    shape: Shape
    dtype: str
    owners: tuple[AnyRegion, ...]
    lasts: bool = False
    has_gradient: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        bits = "".join(
            letter for letter in self.dtype.replace("e4m3", "").replace("e5m2", "") if letter.isdigit()
        )
        return max(1, int(bits) // 8) if bits else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Compute a region of one output of a call, by its rule."""

    call: Call
    out: AnyRegion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """Run a node of the graph as it is."""

    node: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """Compute a share of a stage. The first reads are the call's inputs, the others earlier stages' combined values."""

    call: Call
    stage: Stage
    share: Region


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merge:
    """Combine contributions into a region."""

    out: AnyRegion
    combine: Combine


Work = Cut | Whole | Share | Merge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One thing that one partition computes.

    Attributes:
        node: number of the node of the graph that it belongs to.
        reads: for each input, the value and the region needed of it.
        makes: values of which it makes the partition's own region.
    """

    partition: int
    node: int
    work: Work
    reads: tuple[tuple[int, AnyRegion], ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPiece:
    """Consecutive tasks of one partition, run as one.

    Attributes:
        tasks: in order.
        reads: values that it does not make itself.
        gives: values that others read: later pieces, other partitions, or whoever wants the model's outputs.
        has_backward: whether a gradient flows back through it.
    """

    tasks: tuple[Task, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    has_backward: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The program of one partition.

    Attributes:
        pieces: in an order in which they can run.
        holds: for each value that it touches, the parts that it has: its own first, then by sender.
        sends: value -> receiver -> regions.
        returns: (value, sender) of what was received and gets a gradient that goes back.
        expects: value -> receivers of it that send a gradient back.
    """

    partition: int
    data: tuple[Datum, ...]
    pieces: tuple[FusedPiece, ...]
    holds: Mapping[int, tuple[Held, ...]]
    sends: Mapping[int, Mapping[int, tuple[AnyRegion, ...]]]
    returns: frozenset[tuple[int, int]]
    expects: Mapping[int, tuple[int, ...]]

    @cached_property
    def receives(self) -> Mapping[int, tuple[int, ...]]:
        """Value -> who sends some of it here, in order."""
        found = {}
        for value, parts in self.holds.items():
            senders = tuple(
                dict.fromkeys(part.sender for part in parts if part.sender not in (FED, self.partition))
            )
            if senders:
                found[value] = senders
        return found

    @cached_property
    def makers(self) -> Mapping[int, int]:
        """Value -> the piece that makes this partition's region of it."""
        return {
            value: at for at, piece in enumerate(self.pieces) for task in piece.tasks for value in task.makes
        }

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """Value -> pieces that read it without making it, and through which its gradient comes back."""
        found: dict[int, list[int]] = {}
        for at, piece in enumerate(self.pieces):
            read = [each for task in piece.tasks if self._flows(task) for each in task.reads]
            for value in dict.fromkeys(value for value, region in read if not region.is_empty):
                if value in piece.reads and self.data[value].has_gradient:
                    found.setdefault(value, []).append(at)
        return {value: tuple(readers) for value, readers in found.items()}

    def _flows(self, task: Task) -> bool:
        return any(self.data[value].has_gradient for value in task.makes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A cut model at one batch size.

    Attributes:
        data: all values; the first ones are the graph's, by the same numbers.
        parts: for each partition, what it does.
        sent: for each value, (sender, receiver) -> regions.
        loss: the value that is differentiated; None for a forward pass alone.
        results: values that are wanted after the step: the model's outputs, and what its buffers become.
    """

    graph: Graph
    plan: Plan
    batch: int
    data: tuple[Datum, ...]
    parts: tuple[Part, ...]
    sent: Mapping[int, Transfers]
    loss: int | None
    results: frozenset[int]

    def bytes_up(self, lasting: bool = False) -> dict[tuple[int, int], int]:
        """Bytes of one forward pass, (sender, receiver) -> bytes: activations, or what lasts for a step (parameters)."""
        return self._bytes(lambda value, sender, receiver: self.data[value].lasts == lasting)

    def bytes_down(self, lasting: bool = False) -> dict[tuple[int, int], int]:
        """Bytes of gradients of one backward pass, by the link (sender, receiver) of the values that they belong to."""

        def returns(value: int, sender: int, receiver: int) -> bool:
            return self.data[value].lasts == lasting and (value, sender) in self.parts[receiver].returns

        return self._bytes(returns)

    def _bytes(self, counts: Callable[[int, int, int], bool]) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for value, links in self.sent.items():
            for link, regions in links.items():
                if counts(value, *link):
                    size = sum(region.size for region in regions) * self.data[value].itemsize
                    found[link] = found.get(link, 0) + size
        return found
