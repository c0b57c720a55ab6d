"""Who is a member, who is awaited by the start, and who is next: for a lease, to work alone, to be shut out.

No block is handed out or taken back here; `leases` of a member are written by whoever does that.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from squall.blocks import Block
from squall.coordinator.line import WaitingLine
from squall.coordinator.members import Member, Patience

STRIKES = 3
FORGIVEN_AFTER = 20


class Membership:
    """The living replicas of a run, one start of each.

    Args:
        expected: replicas that the start waits for.

    Attributes:
        members: by replica.
        awaited: by the start: expected or joined, not lost, and not heard of.

    >>> membership = Membership(expected=(0, 1))
    >>> member = membership.join(0, incarnation=0, now=0.0)
    >>> membership.asked(member, request=1, now=1.0)
    >>> membership.awaited, membership.find(0, 1), membership.next_waiting() is member
    ({1}, None, True)
    """

    def __init__(self, expected: Iterable[int]) -> None:
        self.members: dict[int, Member] = {}
        self.awaited = set(expected)
        self._line = WaitingLine()
        self._lowest: list[int] = []  # a heap of replicas; who has gone or is overdue is dropped at the top
        self._turns = 0

    # Who is there ---------------------------------------------------------------------------------------

    def find(self, replica: int, incarnation: int) -> Member | None:
        """A member in just this life."""
        member = self.members.get(replica)
        return member if member is not None and member.incarnation == incarnation else None

    def join(self, replica: int, incarnation: int, now: float) -> Member:
        member = self.members[replica] = Member(replica, incarnation, now)
        heappush(self._lowest, replica)
        self.awaited.add(replica)
        return member

    def remove(self, member: Member) -> None:
        self.awaited.discard(member.replica)
        del self.members[member.replica]

    def has_asked(self, replica: int) -> bool:
        member = self.members.get(replica)
        return member is not None and member.newest > 0

    def all_have_asked(self) -> bool:
        """Whether the start has nobody left to wait for."""
        return bool(self.members) and not self.awaited

    def missing(self, num_replicas: int) -> list[int]:
        """Who of so many has not asked yet."""
        return [replica for replica in range(num_replicas) if not self.has_asked(replica)]

    def all_heard(self, now: float) -> None:
        """Nobody's silence until now counts: all have waited for something else."""
        for member in self.members.values():
            member.heard = now

    def in_hand(self) -> Iterator[Block]:
        """What somebody computes who has been heard of of late."""
        for member in self.members.values():
            if not member.is_overdue:
                yield from member.leases

    # Whose turn it is -----------------------------------------------------------------------------------

    def asked(self, member: Member, request: int, now: float) -> None:
        """It waits for an answer, and takes its place in the line."""
        self.awaited.discard(member.replica)
        member.heard = now
        self._turns += 1
        member.parked.append((self._turns, request))
        self.heard_again(member)
        self.take_place(member)

    def heard_again(self, member: Member) -> None:
        """It may have been silent, and is not."""
        if member.is_overdue:
            member.is_overdue = False
            heappush(self._lowest, member.replica)
            self.take_place(member)

    def take_place(self, member: Member) -> None:
        """Whether it waits, or how many leases it holds, may have changed."""
        self._line.take_place(member)

    def next_waiting(self) -> Member | None:
        """Take the first out of the line; it takes its place again when it has been dealt with."""
        return self._line.pop(self.members)

    def lowest(self) -> Member | None:
        """Who works alone during a warm start: the lowest that is not overdue."""
        while self._lowest:
            member = self.members.get(self._lowest[0])
            if member is not None and not member.is_overdue:
                return member
            heappop(self._lowest)
        return None

    def is_alone(self, member: Member, *, is_warm_start: bool) -> bool:
        """No other replica could take over what this one could not compute."""
        if is_warm_start:
            return member is self.lowest()
        return all(other is member or other.is_overdue for other in self.members.values())

    # Who cannot be relied on ----------------------------------------------------------------------------

    def late(self, now: float, patience: Patience) -> Iterator[Member]:
        """Those that have just been silent for too long; each stays a member and may be heard of again."""
        for member in self.members.values():
            if member.is_late(now, patience):
                member.is_overdue = True
                yield member

    def praise(self, member: Member) -> None:
        """A block of it was good; enough of them in a row make up for those that were not."""
        member.good_in_a_row += 1
        if member.good_in_a_row >= FORGIVEN_AFTER:
            member.strikes = 0

    def blame(self, replicas: Sequence[int], finisher: Member) -> Iterator[Member]:
        """Count against each what was not finite from it and finite from another; yield who has had enough."""
        for replica in replicas:
            member = self.members.get(replica)
            if member is None or member is finisher:
                continue
            member.strikes += 1
            member.good_in_a_row = 0
            if member.strikes >= STRIKES:
                yield member

    def overdue_waits(self, now: float) -> Iterator[str]:
        """Who has been silent, in words."""
        for member in self.members.values():
            if member.is_overdue:
                yield f"{member.name} has been silent for {now - member.heard:.0f} s"
