"""Which elements of a tensor: products of index sets, one for each axis, with a flat list of indices as the escape.

A `Region` is what nearly every cut looks like: rows 0 to 8 of channels 3 and 5. A `FlatRegion` holds any set of
elements, numbered in row-major order; it is what is left when a reshape tears a product apart. Both know their
tensor's shape, and both may be empty. The compact tensor of a region has the shape `sizes` and keeps the order.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

from squall.partition.indices import Indices

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A product of index sets, one for each axis of a tensor.

    Attributes:
        shape: the whole tensor's.
        axes: one set for each axis, within its bounds.
        sizes: the shape of its compact tensor.
        size: how many elements it has.

    Raises:
        ValueError: another number of axes than the shape has, or an index beyond its axis.

    >>> tile = Region.of((4, 6), rows := (0, 2), columns := (3, 6))
    >>> tile.size, tile.sizes, (tile & Region.of((4, 6), (1, 4), (0, 4))).sizes
    (6, (2, 3), (1, 1))
    """

    shape: Shape
    axes: tuple[Indices, ...]
    sizes: Shape = field(init=False, compare=False)
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        fits = len(self.axes) == len(self.shape)
        if not fits or any([axis.stop > size for axis, size in zip(self.axes, self.shape, strict=True)]):
            raise ValueError(
                f"a Region of shape {self.shape}: expected indices within it, but got {self.axes}"
            )
        object.__setattr__(self, "sizes", tuple([axis.size for axis in self.axes]))
        object.__setattr__(self, "size", prod(self.sizes))

    @classmethod
    def of(cls, shape: Shape, *spans: tuple[int, int]) -> "Region":
        """One range for each axis."""
        return cls(tuple(shape), tuple(Indices.span(*span) for span in spans))

    @classmethod
    def whole(cls, shape: Shape) -> "Region":
        return _whole(tuple(shape))

    @property
    def is_empty(self) -> bool:
        return self.size == 0

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape

    def replace(self, axis: int, indices: Indices) -> "Region":
        """The same with other indices on one axis."""
        return Region(self.shape, (*self.axes[:axis], indices, *self.axes[axis + 1 :]))

    def flat(self) -> Indices:
        """The same elements, numbered in row-major order."""
        return flat_of(self.axes, self.shape)

    def bounding(self) -> "Region":
        return self

    def __and__(self, other: "AnyRegion") -> "AnyRegion":
        if isinstance(other, FlatRegion):
            return other & self
        _check_same(self, other)
        return Region(self.shape, tuple(a & b for a, b in zip(self.axes, other.axes, strict=True)))

    def __sub__(self, other: "AnyRegion") -> "tuple[AnyRegion, ...]":
        """What is left, as disjoint regions, none of them empty.

        >>> [left.sizes for left in Region.whole((4, 4)) - Region.of((4, 4), (1, 4), (0, 2))]
        [(1, 4), (3, 2)]
        """
        if isinstance(other, FlatRegion) or not self.shape:
            return FlatRegion(self.shape, self.flat()) - other
        if (self & other).is_empty:
            return (self,) if self.size else ()
        left, rest = [], self
        for at, (mine, theirs) in enumerate(zip(self.axes, other.axes, strict=True)):
            left.append(rest.replace(at, mine - theirs))
            rest = rest.replace(at, mine & theirs)
        return tuple(region for region in left if not region.is_empty)

    def covers(self, other: "AnyRegion") -> bool:
        return (self & other).size == other.size

    def joined(self, other: "Region") -> "Region | None":
        """The union, if it is a product again: they differ on one axis at most, or one covers the other."""
        _check_same(self, other)
        for large, small in ((self, other), (other, self)):
            if large.covers(small):
                return large
        differ = [at for at, (a, b) in enumerate(zip(self.axes, other.axes, strict=True)) if a != b]
        if len(differ) > 1:
            return None
        return self.replace(differ[0], self.axes[differ[0]] | other.axes[differ[0]])

    def within(self, outer: "Region") -> tuple[Indices, ...]:
        """Where it stands in the compact tensor of `outer`, axis by axis."""
        return tuple(mine.positions_in(theirs) for mine, theirs in zip(self.axes, outer.axes, strict=True))

    def boxes(self, axes: Iterable[int]) -> "list[Region]":
        """Split so that each of the given axes is one range in every part; in row-major order of the parts."""
        parts = [self]
        for at in sorted(axes):
            parts = [part.replace(at, Indices((one,))) for part in parts for one in part.axes[at].ranges]
        return parts

    def __repr__(self) -> str:
        inside = ", ".join("+".join(f"{a}:{b}" for a, b in axis.pairs()) or "none" for axis in self.axes)
        return f"Region[{inside}] of {self.shape}"


@dataclass(frozen=True)
class FlatRegion:
    """Any set of elements of a tensor, numbered in row-major order. Its compact tensor has one axis.

    >>> corner = FlatRegion((2, 3), Indices.each([0, 4, 5]))
    >>> corner.size, corner.bounding()
    (3, Region[0:2, 0:3] of (2, 3))
    """

    shape: Shape
    indices: Indices

    def __post_init__(self) -> None:
        if self.indices.stop > prod(self.shape):
            raise ValueError(
                f"a FlatRegion of shape {self.shape}: expected indices within it, but got {self.indices}"
            )

    @property
    def size(self) -> int:
        return self.indices.size

    @property
    def sizes(self) -> Shape:
        return (self.size,)

    @property
    def is_empty(self) -> bool:
        return self.size == 0

    @property
    def is_whole(self) -> bool:
        return self.size == prod(self.shape)

    def flat(self) -> Indices:
        return self.indices

    def bounding(self) -> Region:
        """The smallest product that covers it (nothing of a scalar is bounded by all of it)."""
        seen: list[set[int]] = [set() for _ in self.shape]
        for index in self.indices:
            for at in reversed(range(len(self.shape))):
                index, here = divmod(index, self.shape[at])
                seen[at].add(here)
        return Region(self.shape, tuple(Indices.each(axis) for axis in seen))

    def __and__(self, other: "AnyRegion") -> "FlatRegion":
        _check_same(self, other)
        return FlatRegion(self.shape, self.indices & other.flat())

    def __sub__(self, other: "AnyRegion") -> "tuple[AnyRegion, ...]":
        _check_same(self, other)
        left = FlatRegion(self.shape, self.indices - other.flat())
        return () if left.is_empty else (left,)

    def covers(self, other: "AnyRegion") -> bool:
        return (self & other).size == other.size


AnyRegion = Region | FlatRegion


@lru_cache(maxsize=4096)
def _whole(shape: Shape) -> Region:
    return Region(shape, tuple(Indices.span(0, size) for size in shape))


@lru_cache(maxsize=4096)
def nothing(shape: Shape) -> AnyRegion:
    """The empty region of a tensor, of a scalar too."""
    return Region(shape, tuple(Indices() for _ in shape)) if shape else FlatRegion((), Indices())


def uncovered(region: AnyRegion, parts: Iterable[AnyRegion]) -> tuple[AnyRegion, ...]:
    """What of a region no part covers, as disjoint regions; empty if they cover it all.

    >>> uncovered(Region.whole((4,)), [Region.of((4,), (0, 1)), Region.of((4,), (2, 4))])
    (Region[1:2] of (4,),)
    """
    left: tuple[AnyRegion, ...] = () if region.is_empty else (region,)
    for part in parts:
        left = tuple(rest for one in left for rest in one - part)
    return left


def tiles(parts: Iterable[AnyRegion], region: AnyRegion) -> bool:
    """Whether disjoint parts make up exactly this region."""
    parts = list(parts)
    return sum(part.size for part in parts) == region.size and not uncovered(region, parts)


def flat_of(axes: Iterable[Indices], shape: Shape) -> Indices:
    """The elements of a product, numbered in row-major order.

    >>> flat_of([Indices.span(0, 2), Indices.span(1, 3)], (2, 3))
    Indices[1:3, 4:6]
    """
    axes = tuple(axes)
    stride = 1
    ranges: tuple[tuple[int, int], ...] = ((0, 1),)
    for axis, size in zip(reversed(axes), reversed(shape), strict=True):
        if len(ranges) == 1 and ranges[0] == (0, stride):
            ranges = tuple((start * stride, stop * stride) for start, stop in axis.pairs())
        else:
            ranges = tuple((index * stride + a, index * stride + b) for index in axis for a, b in ranges)
        stride *= size
    return Indices.of(ranges)


def product_of(indices: Indices, shape: Shape) -> tuple[Indices, ...] | None:
    """The axes whose product these row-major numbers are, or None if they are no product.

    >>> product_of(Indices.of([(1, 3), (4, 6)]), (2, 3))
    (Indices[0:2], Indices[1:3])
    >>> product_of(Indices.of([(1, 3), (3, 4)]), (2, 3)) is None
    True
    """
    if len(shape) <= 1:
        return (indices,) if shape else ()
    inner = prod(shape[1:])
    if inner == 0 or indices.size == 0:
        return tuple(Indices() for _ in shape)
    rows: dict[Indices, list[int]] = {}
    for start, stop, pattern in _rows(indices, inner):
        rows.setdefault(pattern, []).extend((start, stop))
    if len(rows) != 1:
        return None
    (pattern, ends), *_ = rows.items()
    rest = product_of(pattern, shape[1:])
    return None if rest is None else (Indices.of(zip(ends[::2], ends[1::2], strict=True)), *rest)


def _rows(indices: Indices, inner: int) -> Iterator[tuple[int, int, Indices]]:
    """Runs of rows `[start, stop)` of length `inner`, with the indices that each has."""
    partial: dict[int, list[tuple[int, int]]] = {}
    full: list[tuple[int, int]] = []
    for start, stop in indices.pairs():
        while start < stop:
            row, at = divmod(start, inner)
            if at == 0 and stop - start >= inner:
                last = stop // inner
                full.append((row, last))
                start = last * inner
            else:
                end = min(stop, (row + 1) * inner)
                partial.setdefault(row, []).append((at, end - row * inner))
                start = end
    for first, last in full:
        yield first, last, Indices.span(0, inner)
    for row, pairs in partial.items():
        yield row, row + 1, Indices.of(pairs)


def _check_same(one: AnyRegion, other: AnyRegion) -> None:
    if one.shape != other.shape:
        raise ValueError(f"two regions: expected one shape, but got {one.shape} and {other.shape}")
