"""What one partition can run now: pieces whose inputs are here, in the order of a policy. Nothing here touches a tensor.

A piece runs forward when every value that it reads is here, and backward when every gradient of what it gives is.
There is no clock and no round: only what has arrived and what was done. Microbatches are contexts of their own; what
lasts for the step (parameters) arrives once for all of them.
"""

from collections import defaultdict
from dataclasses import dataclass

from squall.partition.program import FED, Part


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """One piece of one microbatch, forward or backward."""

    micro: int
    piece: int
    is_backward: bool = False


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message: some of a value from another partition, or the gradient of what was sent to it.

    Attributes:
        micro: the microbatch; None for what lasts for the step.
        peer: who sent it.
    """

    value: int
    peer: int
    is_gradient: bool
    micro: int | None


Event = Arrived | Job
"""Something arrived, or a job is done."""


@dataclass(frozen=True, slots=True)
class FillDrain:
    """All forward work first, microbatch by microbatch, then all backward work."""

    def key(self, job: Job) -> tuple[int, int, int]:
        """Jobs with a smaller key run first."""
        return (1, job.micro, -job.piece) if job.is_backward else (0, job.micro, job.piece)

    @property
    def in_flight(self) -> int | None:
        """How many microbatches a partition may have begun and not finished; None for any number."""
        return None


@dataclass(frozen=True, slots=True)
class BackwardFirst:
    """Backward work before forward work, and no more than `in_flight` microbatches begun: 1F1B where stages are in line.

    A microbatch's place is free again when its backward is done, and with it what was kept for it.
    """

    in_flight: int | None = 2

    def key(self, job: Job) -> tuple[int, int, int]:
        """Jobs with a smaller key run first."""
        return (0, job.micro, -job.piece) if job.is_backward else (1, job.micro, job.piece)


Policy = FillDrain | BackwardFirst


def policy_for(partitions: int, microbatches: int) -> Policy:
    """The order in which a run computes its jobs, and in which a plan is priced.

    As many microbatches under way as there are partitions would do if all took equally long. Twice as many keep the
    slowest busy until the first gradient comes back, wherever in the line it is.
    """
    return FillDrain() if microbatches == 1 else BackwardFirst(2 * partitions)


class Agenda:
    """The jobs of one partition in one step.

    Args:
        part: its program.
        num_micro: how many microbatches there are.
        policy: which of the ready jobs is next.
        trains: whether there is a backward pass.
    """

    def __init__(self, part: Part, num_micro: int, policy: Policy, trains: bool = True) -> None:
        self._policy = policy
        self._missing: dict[Job, int] = {}
        self._waiting: dict[Event, list[Job]] = defaultdict(list)
        self._ready: set[Job] = set()
        self._left = [0] * num_micro
        for micro in range(num_micro):
            for piece in range(len(part.pieces)):
                self._add(Job(micro, piece), _forward_waits(part, piece, micro))
                if trains and part.pieces[piece].has_backward:
                    self._add(Job(micro, piece, True), _backward_waits(part, piece, micro))

    def _add(self, job: Job, waits: set[Event]) -> None:
        self._left[job.micro] += 1
        self._missing[job] = len(waits)
        for event in waits:
            self._waiting[event].append(job)
        if not waits:
            self._ready.add(job)

    @property
    def is_finished(self) -> bool:
        """Whether every job is done."""
        return not any(self._left)

    def is_done(self, micro: int) -> bool:
        """Whether every job of one microbatch is done."""
        return not self._left[micro]

    def next(self) -> Job | None:
        """The next job; None if none is ready, or only those of microbatches that may not begin yet."""
        begun = [job for job in self._ready if self._may_run(job)]
        if not begun:
            return None
        job = min(begun, key=self._policy.key)
        self._ready.remove(job)
        return job

    def _may_run(self, job: Job) -> bool:
        limit = self._policy.in_flight
        return limit is None or job.micro in [m for m, left in enumerate(self._left) if left][:limit]

    def happened(self, event: Event) -> None:
        """Something arrived, or a job was done."""
        if isinstance(event, Job):
            self._left[event.micro] -= 1
        for job in self._waiting.pop(event, ()):
            self._missing[job] -= 1
            if not self._missing[job]:
                self._ready.add(job)


def _forward_waits(part: Part, piece: int, micro: int) -> set[Event]:
    found: set[Event] = set()
    for value in part.pieces[piece].reads:
        when = None if part.data[value].lasts else micro
        for held in part.holds[value]:
            if held.sender == part.partition:
                if value in part.makers:
                    found.add(Job(micro, part.makers[value]))
            elif held.sender != FED:
                found.add(Arrived(value, held.sender, False, when))
    return found


def _backward_waits(part: Part, piece: int, micro: int) -> set[Event]:
    found: set[Event] = {Job(micro, piece)}
    for value in part.pieces[piece].gives:
        found |= {Job(micro, reader, True) for reader in part.readers.get(value, ())}
        found |= {Arrived(value, peer, True, micro) for peer in part.expects.get(value, ())}
    return found
