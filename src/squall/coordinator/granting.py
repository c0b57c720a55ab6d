"""Who is given which block: the first in the line, and the first block that it may try."""

from squall.blocks import Block
from squall.coordinator.book import BlockBook
from squall.coordinator.events import Report, ToReplica
from squall.coordinator.members import Member
from squall.coordinator.membership import Membership
from squall.coordinator.refusals import Refusals
from squall.observe.events import Redone
from squall.wire.messages import Lease


class Granting:
    """Hands blocks to members as long as somebody waits and there is a block for them.

    Args:
        membership: who waits; written.
        book: what there is; written.
        refusals: who has tried which block in vain.
    """

    def __init__(self, membership: Membership, book: BlockBook, refusals: Refusals) -> None:
        self._membership = membership
        self._book = book
        self._refusals = refusals

    def grant(
        self, now: float, asked_now: tuple[Member, int] | None, *, must_rest: bool
    ) -> tuple[ToReplica | Report, ...]:
        """Grant all that can be granted.

        Args:
            asked_now: who has just asked, and the number of the request; all others have waited.
            must_rest: begin nothing fresh once the only replica is at rest.
        """
        effects: list[ToReplica | Report] = []
        while granted := self._round(now, asked_now, must_rest=must_rest):
            effects.extend(granted)
        return tuple(effects)

    def is_alone(self, member: Member) -> bool:
        """No other replica could take over what this one could not compute."""
        return self._membership.is_alone(member, is_warm_start=self._book.is_warm_start)

    def _round(
        self, now: float, asked_now: tuple[Member, int] | None, *, must_rest: bool
    ) -> list[ToReplica | Report]:
        """Grant a lease to each member that waits, in the order of their line, as long as there is a block."""
        effects: list[ToReplica | Report] = []
        met: list[Member] = []
        while self._book.has_work(must_rest=must_rest) and (member := self._next_waiting(met)) is not None:
            met.append(member)
            if (block := self._choose(member, must_rest=must_rest)) is None:
                continue
            _, request = member.parked.popleft()
            is_idle = not member.leases and (asked_now is None or asked_now != (member, request))
            effects.extend(self._lease(member, request, block, now, refresh=is_idle))
        for member in met:
            self._membership.take_place(member)
        return effects

    def _next_waiting(self, met: list[Member]) -> Member | None:
        if not self._book.is_warm_start:
            return self._membership.next_waiting()
        alone = self._membership.lowest()
        return alone if alone is not None and alone.parked and not met else None

    def _choose(self, member: Member, *, must_rest: bool) -> Block | None:
        def may_try(block: Block) -> bool:
            return not self._refusals.has_found(block, member.replica) or self.is_alone(member)

        return self._book.choose(may_try, must_rest=must_rest)

    def _lease(
        self, member: Member, request: int, block: Block, now: float, *, refresh: bool
    ) -> list[ToReplica | Report]:
        handed = self._book.hand_out(block)
        member.grant(block, handed.attempt, now)
        lease = Lease(request=request, block=block, attempt=handed.attempt, refresh=refresh)
        effects: list[ToReplica | Report] = [member.tell(lease)]
        if handed.attempt > 1:
            again = Redone(
                time_s=now,
                block=block,
                attempt=handed.attempt,
                replica=member.replica,
                why=handed.why_again,
            )
            effects.append(Report(event=again))
        return effects
