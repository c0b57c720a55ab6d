"""Half-open ranges: of a flat parameter vector, and of the minibatch positions that have been applied."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The half-open range ``[start, stop)``, never empty.

    >>> Range(0, 4).size
    4
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(
                f"a Range needs 0 <= start < stop, but got start={self.start}, stop={self.stop}. "
                "Leave an empty range out: nobody owns it, so nobody can be asked for it."
            )

    @property
    def size(self) -> int:
        return self.stop - self.start


class Cover(Enum):
    """How a set of ranges meets one more range."""

    DISJOINT = "disjoint"
    CONTAINED = "contained"
    PARTIAL = "partial"


class RangeSet:
    """A set of integers kept as sorted, disjoint, non-touching half-open ranges.

    >>> done = RangeSet([(0, 4)])
    >>> done.add(4, 6)
    >>> list(done), done.cover(2, 5), done.cover(5, 7)
    ([(0, 6)], <Cover.CONTAINED: 'contained'>, <Cover.PARTIAL: 'partial'>)
    """

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for start, stop in ranges:
            self.add(start, stop)

    def cover(self, start: int, stop: int) -> Cover:
        """Say whether ``[start, stop)`` is wholly outside, wholly inside, or neither."""
        at = bisect_right(self._ranges, (start, start))  # the first that begins at `start` or later
        for begin, end in self._ranges[max(at - 1, 0) : at + 1]:
            if begin <= start and stop <= end:
                return Cover.CONTAINED
            if begin < stop and start < end:
                return Cover.PARTIAL
        return Cover.DISJOINT

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``, which must be disjoint from what is there."""
        if start >= stop or self.cover(start, stop) is not Cover.DISJOINT:
            raise ValueError(f"[{start}, {stop}) is empty or meets {self._ranges}")
        at = bisect_right(self._ranges, (start, start))
        if at and self._ranges[at - 1][1] == start:
            at -= 1
            start = self._ranges.pop(at)[0]
        if at < len(self._ranges) and self._ranges[at][0] == stop:
            stop = self._ranges.pop(at)[1]
        self._ranges.insert(at, (start, stop))

    def gaps(self, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of ``[0, stop)`` that are not in the set, in order."""
        begin = 0
        for start, end in self._ranges:
            if start >= stop:
                break
            if begin < start:
                yield begin, start
            begin = end
        if begin < stop:
            yield begin, stop

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def __len__(self) -> int:
        """How many integers the set holds."""
        return sum(stop - start for start, stop in self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and self._ranges == other._ranges

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RangeSet({self._ranges})"
