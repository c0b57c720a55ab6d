"""Work has one name: a block of minibatch positions, whoever does it."""

from collections.abc import Iterable
from enum import StrEnum

from squall.nouns import Noun
from squall.slices import Cover, RangeSet


class Block(Noun, frozen=True, order=True):
    """Minibatch positions ``[first, stop)`` of one epoch of one stage, in the order fixed by seed and epoch.

    Attributes:
        stage: index of the strategy in the run's list.
        epoch: pass over the training data, from 0.
        first, stop: positions of minibatches in that epoch's order.

    >>> Block(0, 2, 10, 15)
    Block(stage=0, epoch=2, first=10, stop=15)
    >>> str(Block(0, 2, 10, 15)), Block(0, 2, 10, 15).num_minibatches
    ('epoch 2, positions 10 to 14', 5)
    """

    stage: int
    epoch: int
    first: int
    stop: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.epoch < 0 or not 0 <= self.first < self.stop:
            raise ValueError(
                f"a Block needs stage >= 0, epoch >= 0 and 0 <= first < stop, but got stage={self.stage}, "
                f"epoch={self.epoch}, first={self.first}, stop={self.stop}"
            )

    @property
    def num_minibatches(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        if self.num_minibatches == 1:
            return f"epoch {self.epoch}, position {self.first}"
        return f"epoch {self.epoch}, positions {self.first} to {self.stop - 1}"


class Outcome(StrEnum):
    """What became of a block on one slice: as a shard answers it, and as the ledger has it."""

    APPLIED = "applied"
    """The update rule ran: the slice is one version further."""
    REPEATED = "repeated"
    """The slice had the whole block already: nothing was changed."""
    NOT_FINITE = "not_finite"
    """The gradient was not finite: nothing was changed, and the block may come again from someone else."""
    REFUSED = "refused"
    """The block meets what the slice has only in part, or was settled as refused: it will never be applied."""
    ROLLED_BACK = "rolled_back"
    """In the ledger alone: the shard came back from an older state, without this block. It takes back one
    applied row of the same slice and block, with the same examples."""


class BlockSet:
    """The positions that have been settled, by stage and epoch: what makes a repeat a repeat."""

    __slots__ = ("_ranges",)

    def __init__(self, entries: tuple[tuple[int, int, int, int], ...] = ()) -> None:
        self._ranges: dict[tuple[int, int], RangeSet] = {}
        for stage, epoch, first, stop in entries:
            self.add(Block(stage, epoch, first, stop))

    def cover(self, block: Block) -> Cover:
        ranges = self._ranges.get((block.stage, block.epoch))
        return Cover.DISJOINT if ranges is None else ranges.cover(block.first, block.stop)

    def add(self, block: Block) -> None:
        self._ranges.setdefault((block.stage, block.epoch), RangeSet()).add(block.first, block.stop)

    def missing(self, block: Block) -> tuple[Block, ...]:
        """The parts of a block that are not in the set, in order.

        >>> BlockSet(((0, 0, 2, 4),)).missing(Block(0, 0, 1, 6))
        (Block(stage=0, epoch=0, first=1, stop=2), Block(stage=0, epoch=0, first=4, stop=6))
        """
        gaps = self.of(block.stage, block.epoch).gaps(block.stop)
        return tuple(
            Block(block.stage, block.epoch, max(start, block.first), stop)
            for start, stop in gaps
            if stop > block.first
        )

    def of(self, stage: int, epoch: int) -> RangeSet:
        """The positions of one epoch; an empty set if there are none. Not to be written to."""
        return self._ranges.get((stage, epoch), RangeSet())

    def entries(self) -> tuple[tuple[int, int, int, int], ...]:
        """All ranges as ``(stage, epoch, first, stop)``, sorted: the form in which a set is stored."""
        return tuple(
            (stage, epoch, first, stop)
            for (stage, epoch), ranges in sorted(self._ranges.items())
            for first, stop in ranges
        )

    def blocks(self) -> tuple[Block, ...]:
        """All ranges as blocks, sorted: the form in which a set is sent."""
        return tuple(Block(*entry) for entry in self.entries())

    @classmethod
    def union(cls, blocks: Iterable[Block]) -> "BlockSet":
        """The positions that are in any of the blocks, which may overlap.

        >>> BlockSet.union([Block(0, 0, 0, 3), Block(0, 0, 2, 5)]).entries()
        ((0, 0, 0, 5),)
        """
        union = cls()
        for block in blocks:
            for part in union.missing(block):
                union.add(part)
        return union

    def common(self, other: "BlockSet") -> "BlockSet":
        """The positions that are in both.

        >>> one, two = BlockSet(((0, 0, 0, 5),)), BlockSet(((0, 0, 2, 3), (0, 0, 4, 9)))
        >>> one.common(two).entries()
        ((0, 0, 2, 3), (0, 0, 4, 5))
        """
        return BlockSet(
            tuple(
                (stage, epoch, max(a, c), min(b, d))
                for stage, epoch, a, b in self.entries()
                for c, d in other.of(stage, epoch)
                if max(a, c) < min(b, d)
            )
        )

    @property
    def num_minibatches(self) -> int:
        return sum(len(ranges) for ranges in self._ranges.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSet) and self.entries() == other.entries()

    __hash__ = None  # type: ignore[assignment]
