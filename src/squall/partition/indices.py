"""Which indices of one axis: sorted ranges, as sets."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from squall.slices import Range


@dataclass(frozen=True)
class Indices:
    """A set of indices of one axis: sorted, disjoint, non-touching half-open ranges.

    >>> Indices.of([(4, 6), (0, 2), (2, 3)])
    Indices[0:3, 4:6]
    >>> Indices.span(0, 5) - Indices.span(1, 3), Indices.span(0, 5) & Indices.of([(3, 9)])
    (Indices[0:1, 3:5], Indices[3:5])
    """

    ranges: tuple[Range, ...] = ()
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum([part.stop - part.start for part in self.ranges]))

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Indices":
        """Unite half-open ranges in any order; empty ones vanish."""
        joined: list[list[int]] = []
        for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([start, stop])
        return cls(tuple(Range(start, stop) for start, stop in joined))

    @classmethod
    def span(cls, start: int, stop: int) -> "Indices":
        """One range, or nothing if it is empty."""
        return cls((Range(start, stop),)) if start < stop else cls()

    @classmethod
    def each(cls, indices: Iterable[int]) -> "Indices":
        """Single indices, in any order, repeats allowed."""
        return cls.of((index, index + 1) for index in indices)

    @property
    def start(self) -> int:
        """The first index; 0 of an empty set."""
        return self.ranges[0].start if self.ranges else 0

    @property
    def stop(self) -> int:
        """One past the last index; 0 of an empty set."""
        return self.ranges[-1].stop if self.ranges else 0

    @property
    def is_span(self) -> bool:
        """Whether it is one range, or empty."""
        return len(self.ranges) <= 1

    def hull(self) -> "Indices":
        return self if self.is_span else Indices.span(self.start, self.stop)

    def pairs(self) -> Iterator[tuple[int, int]]:
        return ((part.start, part.stop) for part in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges:
            yield from range(part.start, part.stop)

    def __and__(self, other: "Indices") -> "Indices":
        mine, theirs = self.ranges, other.ranges
        if len(mine) == len(theirs) == 1:
            return Indices.span(max(mine[0].start, theirs[0].start), min(mine[0].stop, theirs[0].stop))
        found = []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            start, stop = max(mine[i].start, theirs[j].start), min(mine[i].stop, theirs[j].stop)
            if start < stop:
                found.append(Range(start, stop))
            if mine[i].stop < theirs[j].stop:
                i += 1
            else:
                j += 1
        return Indices(tuple(found))

    def __or__(self, other: "Indices") -> "Indices":
        return Indices.of([*self.pairs(), *other.pairs()])

    def __sub__(self, other: "Indices") -> "Indices":
        left: list[tuple[int, int]] = []
        for start, stop in self.pairs():
            for begin, end in (self & other).pairs():
                if start <= begin < stop:
                    left.append((start, begin))
                    start = end
            left.append((start, stop))
        return Indices.of(left)

    def covers(self, other: "Indices") -> bool:
        """Whether every index of `other` is in this set."""
        return (self & other).size == other.size

    def shifted(self, by: int) -> "Indices":
        return Indices(tuple(Range(part.start + by, part.stop + by) for part in self.ranges))

    def positions_in(self, outer: "Indices") -> "Indices":
        """Where these indices stand in the compact order of `outer`, which must cover them.

        >>> Indices.of([(5, 6), (8, 9)]).positions_in(Indices.of([(0, 2), (5, 9)]))
        Indices[2:3, 5:6]
        """
        if len(outer.ranges) == 1 and outer.start <= self.start and self.stop <= outer.stop:
            return self.shifted(-outer.start) if outer.start else self
        starts = [part.start for part in outer.ranges]
        before = [0]
        for part in outer.ranges:
            before.append(before[-1] + part.size)
        found = []
        for start, stop in self.pairs():
            while start < stop:
                at = bisect_right(starts, start) - 1
                if at < 0 or start >= outer.ranges[at].stop:
                    raise ValueError(f"{outer}: expected to cover {self}, but got no index {start}")
                end = min(stop, outer.ranges[at].stop)
                offset = before[at] - starts[at]
                found.append((start + offset, end + offset))
                start = end
        return Indices.of(found)

    def __repr__(self) -> str:
        return f"Indices[{', '.join(f'{start}:{stop}' for start, stop in self.pairs())}]"
