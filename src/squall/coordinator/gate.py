"""The bound on staleness, kept by starting blocks later."""

from collections import OrderedDict

from squall.blocks import Block


class StalenessGate:
    """Says whether a lease may be granted without any push becoming staler than the bound.

    A push is as stale as the updates between its fetch and itself: at most those completed since its lease was
    granted, and those of all other blocks that are out. A block is out until it is settled, whoever holds it:
    a lost or silent holder's push may have been applied, or may still be.

    >>> gate, first, second = StalenessGate(0), Block(0, 0, 0, 1), Block(0, 0, 1, 2)
    >>> gate.granted(first)
    >>> gate.may_start(first), gate.may_start(second)
    (True, False)
    >>> gate.settled(first, is_applied=True)
    >>> gate.may_start(second)
    True
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._completed = 0
        # What was completed when it was first granted; the first of them has been out the longest.
        self._out: OrderedDict[Block, int] = OrderedDict()
        self._taken_over: set[Block] = set()  # those of them that another coordinator has granted
        self._late: set[Block] = set()  # those that were not known of when others were granted here

    def may_start(self, block: Block) -> bool:
        if self._bound is None:
            return True
        others = self._out
        if block in self._out:
            if block not in self._late:
                return True  # a second holder of a block adds no update: it is applied once
            others = OrderedDict(one for one in self._out.items() if one[0] not in self._late)
        oldest = next(iter(others.values()), self._completed)
        return self._completed - oldest + len(others) <= self._bound

    def granted(self, block: Block) -> None:
        if block in self._late:  # begun anew, beside what is out now
            self._forget(block)
        self._out.setdefault(block, self._completed)

    def taken_over(self, block: Block) -> None:
        """It is out since nobody knows when: as long as may be, so that nothing is begun beside it."""
        if self._bound is None or block in self._out:
            return
        if self._out.keys() - self._taken_over:
            self._late.add(block)
        self._taken_over.add(block)
        self._out[block] = self._completed - self._bound
        self._out.move_to_end(block, last=False)

    def settled(self, block: Block, *, is_applied: bool) -> None:
        self._completed += is_applied and block in self._out
        self._forget(block)

    def _forget(self, block: Block) -> None:
        self._out.pop(block, None)
        self._taken_over.discard(block)
        self._late.discard(block)
