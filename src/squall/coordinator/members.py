"""What the coordinator knows of each living replica, and how long it waits for one."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from squall.blocks import Block
from squall.coordinator.events import ToReplica
from squall.wire.messages import Lease, Leave, Recall

REMEMBERED_REQUESTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the coordinator waits, in seconds.

    A replica's lease is overdue after `factor` times the median of its own recent blocks, but not before
    `least_s`; until it has finished one, after `first_s`. So a replica ten times slower is not overdue. A checkpoint that
    cannot be had within `hold_s` is called off and tried again. A coordinator that follows one that was lost waits
    `recover_s` for replicas to say what they hold.
    """

    start_s: float = 60.0
    leave_s: float = 5.0
    first_s: float = 60.0
    least_s: float = 5.0
    factor: float = 10.0
    hold_s: float = 2.0
    recover_s: float = 5.0


@dataclass(slots=True)
class Member:
    """One living replica.

    Attributes:
        leases: blocks that it holds, in the order granted.
        heard: when it last said anything, or was given its first lease.
        seen: numbers of its recent requests.
        replies: what was answered to them.
        parked: its requests that wait for an answer, each behind the turn in which it came.
        durations: seconds that its recent blocks took.
        is_measured: this coordinator saw its block begin, or the one before end.
        has_resumed: it has told this coordinator, which follows another, what it holds.
        strikes: blocks that were not finite from it and finite from someone else.
    """

    replica: int
    incarnation: int
    heard: float
    leases: dict[Block, int] = field(default_factory=dict)
    newest: int = 0
    seen: set[int] = field(default_factory=set)
    replies: dict[int, Lease | Leave] = field(default_factory=dict)
    parked: deque[tuple[int, int]] = field(default_factory=deque)
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    strikes: int = 0
    good_in_a_row: int = 0
    is_overdue: bool = False
    has_resumed: bool = False
    is_measured: bool = True

    @property
    def name(self) -> str:
        return f"replica{self.replica}"

    def has_asked(self, request: int) -> bool:
        """Whether it is a resend, or so old that it must be one."""
        return request in self.seen or request <= self.newest - REMEMBERED_REQUESTS

    def remember(self, request: int) -> None:
        self.newest = max(self.newest, request)
        self.seen.add(request)
        for old in [number for number in self.seen if number <= self.newest - REMEMBERED_REQUESTS]:
            self.seen.discard(old)
            self.replies.pop(old, None)

    def tell(self, message: Lease | Leave | Recall) -> ToReplica:
        """A message for it; an answer is kept, to be given again to who asks again."""
        if not isinstance(message, Recall):
            self.replies[message.request] = message
        return ToReplica(replica=self.replica, incarnation=self.incarnation, message=message)

    def grant(self, block: Block, attempt: int, now: float) -> None:
        """It holds a block from now on; of its first one it is heard by being given it."""
        if not self.leases:
            self.heard = now
        self.leases[block] = attempt

    def resume(self, block: Block, attempt: int) -> None:
        """It held a block before this coordinator was there."""
        self.leases[block] = attempt
        self.is_measured = False

    def finish(self, block: Block, now: float) -> bool:
        """It has done with a block; False if it does not hold it any more."""
        if self.leases.pop(block, None) is None:
            return False
        if self.is_measured:
            self.durations.append(now - self.heard)
        self.is_measured = True
        return True

    def is_late(self, now: float, patience: Patience) -> bool:
        """Whether it has been silent for too long; who waits for the coordinator, and holds nothing, may be."""
        is_due = bool(self.leases) or not self.parked
        return is_due and not self.is_overdue and now - self.heard > self.deadline_s(patience)

    def deadline_s(self, patience: Patience) -> float:
        if not self.durations:
            return patience.first_s
        return max(patience.least_s, patience.factor * median(self.durations))
