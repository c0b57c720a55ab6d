"""How a coordinator begins that follows one that was lost: it has no book but what others tell.

    shards      what is settled and refused, on some and on all of their slices (`Inquire`, `Books`)
    replicas    which blocks they hold, and their latest reports (`Resume`)
    launcher    which blocks it was told to be done or refused, so that it hears of none twice (`Inheritance`)

Until all have spoken nothing is handed out, and whatever else comes is put off. Replicas that stay silent are not
waited for without end: what one of them computes meanwhile is known to the shards by its block, whoever has it then.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

from squall.blocks import Block, BlockSet
from squall.coordinator.events import ToShard
from squall.slices import Cover
from squall.wire.messages import Books, Finished, Inquire, Resume


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """What the launcher knows, and tells a coordinator that follows another.

    Attributes:
        epoch: of the new one, from 1.
        expected: replicas that are alive.
        told: positions that it was told to be done.
        refused: blocks that it was told to be refused, with the reason.
        refused_in_a_row: how many of them since the last that was done.
        lives: by shard, the incarnation that it was told of last.
    """

    epoch: int
    expected: tuple[int, ...] = ()
    told: BlockSet = field(default_factory=BlockSet)
    refused: Mapping[Block, str] = field(default_factory=dict)
    refused_in_a_row: int = 0
    lives: Mapping[int, int] = field(default_factory=dict)


class Past(NamedTuple):
    """What is known of one block that the coordinator before had handed out.

    Attributes:
        is_done: every slice has it, and whoever must know why it is refused does.
        is_refused: some slice keeps it as refused, or the launcher was told so.
        was_told_done: the launcher was told that it is done.
        why_refused: what the launcher was told of its being refused; None: nothing.
    """

    is_done: bool
    is_refused: bool
    was_told_done: bool
    why_refused: str | None

    @property
    def was_told(self) -> bool:
        """The launcher knows how it ended."""
        return self.was_told_done or self.why_refused is not None


class Recovery:
    """Gathers what others tell, until it is enough to go on.

    Args:
        num_shards: all of which must speak.
        patience_s: how long to wait for replicas, from the first event on [seconds].

    Attributes:
        waiting: replicas that have not spoken.
        put_off: events that are to be handled when it is over.
        shards: which must speak.

    >>> recovery = Recovery(Inheritance(epoch=1, expected=(0,)), num_shards=1, patience_s=5.0)
    >>> recovery.ask()
    (ToShard(shard=0, message=Inquire(epoch=1)),)
    >>> done = (Block(0, 0, 0, 4),)
    >>> recovery.heard(0, Books(epoch=1, incarnation=0, anywhere=done, everywhere=done, refused=()))
    >>> recovery.is_over(10.0), recovery.is_over(16.0)
    (False, True)
    >>> recovery.everywhere.cover(Block(0, 0, 1, 2)).name, recovery.num_known(Block(0, 0, 2, 6))
    ('CONTAINED', 2)
    """

    def __init__(self, inheritance: Inheritance, num_shards: int, patience_s: float) -> None:
        self.inheritance = inheritance
        self.waiting = set(inheritance.expected)
        self.put_off: list[Any] = []
        self.shards = tuple(range(num_shards))
        self._patience_s = patience_s
        self._began: float | None = None
        self._books: dict[int, Books] = {}
        self._resumes: dict[int, Resume] = {}
        self.everywhere, self.refused, self._known = BlockSet(), BlockSet(), BlockSet()

    # Who speaks -------------------------------------------------------------------------------------------

    def ask(self) -> tuple[ToShard, ...]:
        """Ask the shards that have not answered, once more."""
        message = Inquire(epoch=self.inheritance.epoch)
        return tuple(
            ToShard(shard=shard, message=message) for shard in self.shards if shard not in self._books
        )

    def heard(self, shard: int, books: Books) -> None:
        if books.epoch == self.inheritance.epoch:
            self._books[shard] = books

    def forget(self, shard: int) -> None:
        """It was killed, and may come back with less."""
        self._books.pop(shard, None)

    def resumed(self, replica: int, resume: Resume) -> None:
        self.waiting.discard(replica)
        self._resumes[replica] = resume

    def left(self, replica: int) -> None:
        """A replica is gone, or is about to go."""
        self.waiting.discard(replica)
        self._resumes.pop(replica, None)

    def is_over(self, now: float) -> bool:
        """Whether all have spoken who are waited for; then the sets are made."""
        self._began = now if self._began is None else self._began
        is_late = now - self._began > self._patience_s
        if len(self._books) < len(self.shards) or (self.waiting and not is_late):
            return False
        self._gather()
        return True

    def waits(self) -> Iterable[str]:
        """Who is waited for, in words."""
        shards = [f"shard{shard}" for shard in self.shards if shard not in self._books]
        replicas = [f"replica{replica}" for replica in sorted(self.waiting)]
        yield f"the new coordinator waits for {', '.join((*shards, *replicas))}"

    # What they said ---------------------------------------------------------------------------------------

    def _gather(self) -> None:
        books = self._books.values()
        sets = [BlockSet.union(told.everywhere) for told in books if told.everywhere is not None]
        self.everywhere = reduce(BlockSet.common, sets) if sets else self.inheritance.told
        self.refused = BlockSet.union(block for told in books for block in told.refused)
        anywhere = (block for told in books for block in told.anywhere)
        held = (block for resume in self._resumes.values() for block in blocks_of(resume))
        told = (*self.inheritance.told.blocks(), *self.inheritance.refused)
        self._known = BlockSet.union((*anywhere, *held, *told))

    def num_handed_out(self, before: BlockSet) -> int:
        """How many minibatches somebody knows of, that had not been done `before`."""
        return sum(part.num_minibatches for block in self._known.blocks() for part in before.missing(block))

    def num_known(self, block: Block) -> int:
        """How many minibatches of it somebody knows of."""
        return block.num_minibatches - sum(part.num_minibatches for part in self._known.missing(block))

    def past_of(self, block: Block) -> Past:
        """What shards and launcher know of a block."""
        is_refused = self.refused.cover(block) is not Cover.DISJOINT
        why_refused = self.inheritance.refused.get(block)
        is_settled = self.everywhere.cover(block) is Cover.CONTAINED
        return Past(
            is_done=is_settled and (not is_refused or why_refused is not None),
            is_refused=is_refused or why_refused is not None,
            was_told_done=self.inheritance.told.cover(block) is Cover.CONTAINED,
            why_refused=why_refused,
        )

    def resumes(self) -> Iterable[tuple[int, Resume]]:
        """What each replica holds, by number."""
        return sorted(self._resumes.items(), key=lambda entry: entry[0])

    def had(self, shard: int) -> BlockSet | None:
        """What every slice of a shard has; None: it has no slices."""
        everywhere = self._books[shard].everywhere
        return None if everywhere is None else BlockSet.union(everywhere)

    def lost_since_told(self, shard: int) -> int | None:
        """Minibatches lost by a shard that came back while no coordinator heard it; None if it did not."""
        inheritance = self.inheritance
        if self.incarnation(shard) <= inheritance.lives.get(shard, 0):
            return None
        had = self.had(shard)
        if had is None:
            return 0
        lost = (part for block in inheritance.told.blocks() for part in had.missing(block))
        return sum(part.num_minibatches for part in lost)

    def incarnation(self, shard: int) -> int:
        return self._books[shard].incarnation


def blocks_of(resume: Resume) -> Iterable[Block]:
    """Every block that a replica speaks of."""
    yield from (block for block, _ in resume.leases)
    yield from (report.block for report in resume.done)


def reports_of(resumes: Iterable[tuple[int, Resume]]) -> Iterable[tuple[int, Finished]]:
    """All reports, in the order of each replica's own."""
    for replica, resume in resumes:
        for report in resume.done:
            yield replica, report
