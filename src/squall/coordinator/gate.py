"""The bound on staleness, kept by starting blocks later."""

from collections import OrderedDict

from squall.blocks import Block


class StalenessGate:
    """Says whether a lease may be granted without any push becoming staler than the bound.

    A push is as stale as the updates between its fetch and itself: at most those completed since its lease was
    granted, and those of all other blocks that are out. A block is out until it is settled, whoever holds it:
    a lost or silent holder's push may have been applied, or may still be.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._completed = 0
        # What was completed when it was first granted; the first of them has been out the longest.
        self._out: OrderedDict[Block, int] = OrderedDict()

    def may_start(self, block: Block) -> bool:
        if self._bound is None or block in self._out:
            return True  # a second holder of a block adds no update: it is applied once
        oldest = next(iter(self._out.values()), self._completed)
        return self._completed - oldest + len(self._out) <= self._bound

    def granted(self, block: Block) -> None:
        self._out.setdefault(block, self._completed)

    def taken_over(self, block: Block) -> None:
        """It is out since nobody knows when: as long as may be, so that nothing is begun beside it."""
        if self._bound is not None:
            self._out.setdefault(block, self._completed - self._bound)

    def settled(self, block: Block, *, is_applied: bool) -> None:
        if self._out.pop(block, None) is not None:
            self._completed += is_applied
