"""Who waits for a lease, and who is next."""

from collections.abc import Mapping
from heapq import heappop, heappush

from squall.coordinator.members import Member


class WaitingLine:
    """Members that wait for a lease: those with the fewest leases first, then those that came first.

    A place is good as long as its member stands as it did when it took it; one that is out of date is passed over
    when its turn comes, so that no change has to look for it. A member that waits has a place that is good.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int, int]] = []  # a heap of: leases held, turn, replica

    def take_place(self, member: Member) -> None:
        """Note where a member stands now: when it has asked, has another number of leases, or is heard of again."""
        if (place := _place(member)) is not None:
            heappush(self._places, place)

    def pop(self, members: Mapping[int, Member]) -> Member | None:
        """Take the first out of the line; None if nobody waits."""
        while self._places:
            place = heappop(self._places)
            member = members.get(place[2])
            if member is not None and _place(member) == place:
                return member
        return None


def _place(member: Member) -> tuple[int, int, int] | None:
    if not member.parked or member.is_overdue:
        return None
    return len(member.leases), member.parked[0][0], member.replica
