"""How a coordinator that follows one that was lost makes its book, once all have spoken."""

from collections.abc import Iterator

from squall.blocks import Block
from squall.coordinator.book import BlockBook
from squall.coordinator.events import Report, ToShard
from squall.coordinator.lives import ShardLives
from squall.coordinator.members import Member
from squall.coordinator.membership import Membership
from squall.coordinator.recovery import Recovery
from squall.coordinator.refusals import Refusals
from squall.observe.events import Recovered


def shards_found(recovery: Recovery, lives: ShardLives, now: float) -> Iterator[Report]:
    """Note what each shard has, and tell of those that have come back while no coordinator heard it."""
    for shard in recovery.shards:
        had, lost = recovery.had(shard), recovery.lost_since_told(shard)
        incarnation = recovery.incarnation(shard)
        lives.returned(shard, incarnation, recovery.everywhere if had is None else had)
        if lost is not None:
            role = f"shard{shard}"
            yield Report(event=Recovered(time_s=now, role=role, incarnation=incarnation, lost=lost))


def make_book(
    recovery: Recovery, membership: Membership, book: BlockBook, refusals: Refusals
) -> Iterator[ToShard]:
    """Go through all that was handed out: what is done, what is held, and what must be done again.

    Args:
        membership: who may hold a block; their leases are written.
        book: without an entry so far; written.
        refusals: written.
    """
    held: dict[Block, tuple[Member, int]] = {}
    for replica, resume in recovery.resumes():
        if (member := membership.members.get(replica)) is not None:
            for block, attempt in resume.leases:
                held.setdefault(block, (member, attempt))
    left = recovery.num_handed_out(book.begun_with)
    while left > 0 and (fresh := book.take_fresh()) is not None:
        left -= recovery.num_known(fresh)
        yield from _take_over(fresh, recovery, book, refusals)
        if fresh in held:
            resume_lease(fresh, *held[fresh], book, refusals)


def _take_over(block: Block, recovery: Recovery, book: BlockBook, refusals: Refusals) -> tuple[ToShard, ...]:
    """Put one block into the book, as shards and launcher know it."""
    past = recovery.past_of(block)
    if past.why_refused is not None:
        refusals.refused[block] = past.why_refused
    book.inherit(block, past)
    if past.is_done:
        return ()
    if past.is_refused:
        return refusals.settle(block)
    book.take_back(block, "the coordinator was lost")
    return ()


def resume_lease(block: Block, member: Member, attempt: int, book: BlockBook, refusals: Refusals) -> None:
    """A member says that it holds a block: it does, unless it is given up, or another was given it since."""
    if block not in refusals.settling and book.resume(block, attempt):
        member.resume(block, attempt)
