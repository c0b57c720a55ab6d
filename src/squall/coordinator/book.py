"""Where each block of a stage stands, from the plan to its end.

    fresh       nobody has had it: the plan yields it next
      |  `choose`                 the gate on staleness, a warm start and a rest may hold it back
      |
    held        one member has it   ----- `take_back` ----->   back    to be handed out before what is fresh
      |   \\---- `withdraw`: nobody can compute it                |
    `close`    `refuse`                                     `choose`: held, once more
      |   /
    settled     every slice has it, or keeps it as refused; a shard may lose it: `reopen`

The book knows blocks, and not who is there: members note which blocks they hold.
"""

from collections import OrderedDict
from collections.abc import Callable, Container
from itertools import islice
from typing import NamedTuple

from squall.blocks import Block, BlockSet
from squall.coordinator.events import Found
from squall.coordinator.gate import StalenessGate
from squall.coordinator.recovery import Past
from squall.coordinator.work import Rhythm, WorkPlan
from squall.slices import Cover


class Handed(NamedTuple):
    """How a block is handed out: the how-many-th time, and why not for the first."""

    attempt: int
    why_again: str = ""


class BlockBook:
    """One entry for each block that was handed out, until it is settled.

    Args:
        plan: the blocks of the stage.
        settled: what all slices have already; taken over.
        max_staleness: as of `StalenessGate` [updates].
        rhythm: of the only replica; None: it is never at rest.

    Attributes:
        settled: positions that all slices have settled.
        begun_with: those of them that were there before this run.

    >>> plan = WorkPlan(stage=0, minibatches_per_epoch=2, block_length=1, epochs=1, steps=None, warm_start=0)
    >>> book = BlockBook(plan, BlockSet())
    >>> first = book.choose()
    >>> book.hand_out(first), book.close(first), book.settled.num_minibatches
    (Handed(attempt=1, why_again=''), True, 1)
    """

    def __init__(
        self,
        plan: WorkPlan,
        settled: BlockSet,
        max_staleness: int | None = None,
        rhythm: Rhythm | None = None,
    ) -> None:
        self.settled = settled
        self.begun_with = BlockSet(settled.entries())
        self.num_handed_out = self._num_minibatches = 0
        self._plan, self._rhythm = plan, rhythm
        self._gate = StalenessGate(max_staleness)
        self._fresh = plan.blocks(settled)
        self._next_fresh: Block | None = next(self._fresh, None)
        self._returned: OrderedDict[Block, None] = OrderedDict()  # taken back, to be handed out again
        self._held: set[Block] = set()  # by a member; no block has two holders
        self._attempts: dict[Block, int] = {}  # of blocks handed out and not settled
        self._tries: dict[Block, int] = {}  # of settled ones that took more than one
        self._why_again: dict[Block, str] = {}
        self._untold: set[Block] = set()  # found to be done, and to be told once their holders have reported
        self._reopened: set[Block] = set()  # closed before, and lost by a shard since
        self._warm_left = plan.warm_start

    # What may be said of it -----------------------------------------------------------------------------

    @property
    def is_warm_start(self) -> bool:
        """One replica still works alone."""
        return self._warm_left > 0

    @property
    def is_done(self) -> bool:
        """Nothing is left to be handed out, and nothing is out."""
        return self._next_fresh is None and not self._attempts

    @property
    def num_undone(self) -> int:
        """What a shard has lost since it was done, and nobody has done again [minibatches]."""
        return sum(block.num_minibatches for block in self._reopened)

    def is_settled(self, block: Block) -> bool:
        return self.settled.cover(block) is not Cover.DISJOINT

    def is_still(self) -> bool:
        """Whether the only replica is as after a fresh start, and has nothing in hand; else that does not matter."""
        return self._rhythm is None or (self._is_at_rest() and not self._attempts)

    def _is_at_rest(self) -> bool:
        """Whether all that was handed out ends where the only replica has just fetched."""
        return self._rhythm is not None and self._rhythm.is_at_rest(
            self.num_handed_out, self._num_minibatches
        )

    # Handing out ----------------------------------------------------------------------------------------

    def has_work(self, *, must_rest: bool = False) -> bool:
        """There is a block that some member might have."""
        return bool(self._returned) or self._may_begin(must_rest)

    def _may_begin(self, must_rest: bool) -> bool:
        """Whether the next block that nobody has had may be handed out now."""
        fresh = self._next_fresh
        is_warm_over = self._warm_left == 0 or self.num_handed_out < self._plan.warm_start
        if fresh is None or not is_warm_over or (must_rest and self._is_at_rest()):
            return False
        return self._gate.may_start(fresh)

    def choose(
        self, may_try: Callable[[Block], bool] = lambda _: True, *, must_rest: bool = False
    ) -> Block | None:
        """Take out the next block: one that came back and `may_try` accepts, else a fresh one.

        Args:
            must_rest: begin nothing fresh once the only replica is at rest.
        """
        for block in self._returned:
            if may_try(block) and self._gate.may_start(block):
                del self._returned[block]
                return block
        return self.take_fresh() if self._may_begin(must_rest) else None

    def take_fresh(self) -> Block | None:
        """The next block that nobody has had, whatever speaks against it; None: there is none."""
        fresh = self._next_fresh
        if fresh is not None:
            self._next_fresh = next(self._fresh, None)
            self.num_handed_out += 1
            self._num_minibatches += fresh.num_minibatches
        return fresh

    def hand_out(self, block: Block) -> Handed:
        """A member is given a block that was chosen."""
        attempt = self._attempts[block] = self._attempts.get(block, 0) + 1
        self._held.add(block)
        self._gate.granted(block)
        if attempt == 1:
            return Handed(attempt)
        return Handed(attempt, self._why_again.pop(block, "not finite the first time"))

    # Coming back, and coming to an end -------------------------------------------------------------------

    def let_go(self, block: Block) -> None:
        """Its holder holds it no more."""
        self._held.discard(block)

    def take_back(self, block: Block, why: str) -> None:
        """Hand it out again, unless it is settled, or held, or to be handed out already."""
        if self.is_settled(block) or block in self._returned or block in self._held:
            return
        self._returned[block] = None
        self._why_again[block] = why

    def withdraw(self, block: Block) -> None:
        """Nobody can compute it: it is not handed out again, and stays open until it is refused."""
        self._returned.pop(block, None)

    def close(self, block: Block) -> bool:
        """Every slice has applied it; False if that was told before a shard lost it."""
        is_new = block not in self._reopened
        self._returned.pop(block, None)
        self._end(block, is_applied=True, is_new=is_new)
        return is_new

    def refuse(self, block: Block, *, is_new: bool) -> None:
        """Every shard keeps it as refused."""
        self._end(block, is_applied=False, is_new=is_new)

    def _end(self, block: Block, *, is_applied: bool, is_new: bool) -> None:
        self.settled.add(block)
        self._gate.settled(block, is_applied=is_applied)
        if is_new:
            self._warm_left = max(0, self._warm_left - 1)
        if (tries := self._attempts.pop(block, 1)) > 1:
            self._tries[block] = tries
        self._why_again.pop(block, None)
        self._reopened.discard(block)

    # After a shard that was killed ----------------------------------------------------------------------

    def lose(self, had: BlockSet) -> BlockSet:
        """A shard has come back with no more than this: what was settled and is not any more."""
        lost = BlockSet.union(part for block in self.settled.blocks() for part in had.missing(block))
        self.settled = self.settled.common(had)
        return lost

    def reopen(self, refused: Container[Block], why: str) -> list[Block]:
        """Hand out again what was settled before; under the same names, so that other slices know it.

        Returns:
            blocks of those among `refused`: nobody computes them, so they are to be refused again.
        """
        again = []
        for block in islice(self._plan.blocks(self.begun_with), self.num_handed_out):
            if block in self._attempts or self.settled.cover(block) is Cover.CONTAINED:
                continue
            self._attempts[block] = self._tries.get(block, 1)
            if block in refused:
                again.append(block)
                continue
            self._reopened.add(block)
            if block not in self._held:  # else its holder, though another has finished it, does it again
                self._returned[block] = None
                self._why_again[block] = why
        return again

    # After a coordinator that was lost ------------------------------------------------------------------

    def inherit(self, block: Block, past: Past) -> None:
        """Put a block into the book that the coordinator before had handed out."""
        if past.is_done or past.was_told:
            self._warm_left = max(0, self._warm_left - 1)
        if past.is_done:
            self.settled.add(block)
            if not past.was_told:
                self._untold.add(block)
            return
        self._attempts[block] = 1
        if past.was_told_done:
            self._reopened.add(block)
        else:
            self._gate.taken_over(block)

    def resume(self, block: Block, attempt: int) -> bool:
        """A member says that it holds a block: it does, unless another was given it since."""
        if block in self._held:
            return False
        if not self.is_settled(block):
            if block not in self._returned:
                return False
            del self._returned[block]
            self._gate.taken_over(block)
            self._why_again.pop(block, None)
            self._attempts[block] = max(self._attempts[block], attempt)
        self._held.add(block)
        return True

    def reach(self, block: Block) -> None:
        """Take all blocks up to this one as handed out: somebody speaks of it."""
        while self._next_fresh is not None and self._next_fresh <= block:
            fresh = self._next_fresh
            self.take_fresh()
            self._attempts[fresh] = 0
            self._gate.taken_over(fresh)
            self._returned[fresh] = None

    def tell(self, block: Block) -> bool:
        """Whether it was found to be done, and nobody was told; from now on somebody is."""
        is_untold = block in self._untold
        self._untold.discard(block)
        return is_untold

    def tell_found(self) -> tuple[Found, ...]:
        """What is done, and cannot be reported any more since nobody holds it."""
        found = sorted(self._untold - self._held) if self._untold else ()
        self._untold.difference_update(found)
        return (Found(blocks=tuple(found)),) if found else ()

    # ----------------------------------------------------------------------------------------------------

    def check_invariants(self, held: list[Block], settling: Container[Block]) -> None:
        """Against what members say that they hold, and what shards are asked to refuse."""
        for block in self._returned:
            assert not self.is_settled(block), "a settled block is not handed out again"
        for block in held:
            assert self._attempts.get(block, 0) >= 1 or self.settled.cover(block) is Cover.CONTAINED
        assert len(held) == len(self._held) == len(self._held & set(held)), "one holder"
        for block in self._attempts:
            assert block in self._held or block in self._returned or block in settling, "no block is lost"
        assert not self._held & set(self._returned)
        for block in self._reopened:
            assert block in self._attempts, "what a shard has lost is done again"
        for block in (*self._attempts, *self._why_again):
            assert not self.is_settled(block), "what is settled is forgotten"
