"""The layout: which shard holds which part of the parameter space.

The flat vectors of all dtypes, one behind the other, are cut into one contiguous range per shard. What a shard
holds of one dtype is a slice: the unit of versions, of at-most-once and of the ledger. A slice is made of
segments, each a range of one tensor, so that rules, which run per tensor, know where tensors begin and end::

    tensors        |  a  |      b      |c|     d     |
    slices         |    slice 0    |     slice 1     |
    segments       |  a  |    b    | b |c|     d     |
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from squall.errors import ConfigError
from squall.model.parameters import ITEM_SIZES, ParameterSpace, master_dtype
from squall.slices import Range

CUT_MULTIPLE = 16
"""Cuts fall on multiples of this many elements (a cache line of float32) where balance allows it."""

CUT_TOLERANCE = 0.10
"""Balance allows it while each shard's bytes stay within this fraction of the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of one tensor in a slice.

    Attributes:
        tensor: its index in the space's `tensors`.
        tensor_range: which elements of it, in C order of its logical shape.
        start: where they begin in the slice [elements].
    """

    tensor: int
    tensor_range: Range
    start: int

    @property
    def size(self) -> int:
        return self.tensor_range.size

    @property
    def stop(self) -> int:
        return self.start + self.tensor_range.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSpec:
    """What one shard holds of one partition and dtype.

    Attributes:
        slice: its number in the layout, from 0.
        shard, partition: who holds it; whose parameters they are.
        dtype: of its elements.
        start, stop: its half-open range of that dtype's flat vector [elements].
        segments: the tensors in it, in order, without gaps; zero-sized tensors have none.
    """

    slice: int
    shard: int
    partition: int
    dtype: str
    start: int
    stop: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """What its values take, and a gradient, on their way to and from replicas."""
        return self.size * ITEM_SIZES[self.dtype]

    @property
    def master_dtype(self) -> str:
        """Of what the shard keeps of it: its values, and the rule's state."""
        return master_dtype(self.dtype)

    @property
    def num_master_bytes(self) -> int:
        """What one of the vectors that the shard keeps takes."""
        return self.size * ITEM_SIZES[self.master_dtype]


MOST_SHARDS = 65_536
"""Far more than anybody starts: a description that says more is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLoad:
    """A row of `Layout.table`: what a shard holds [bytes], and that as a multiple of the mean over shards."""

    shard: int
    num_slices: int
    num_bytes: int
    of_mean: float


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The slices of a parameter space, in order of (shard, partition, dtype).

    Attributes:
        space: what is laid out.
        num_shards: how many shards there are; one may hold nothing.
        slices: they tile each dtype's flat vector exactly once.

    >>> from torch import nn
    >>> layout = Layout.balanced(ParameterSpace.of(nn.Linear(32, 32)), num_shards=2)
    >>> [(spec.shard, spec.start, spec.stop, len(spec.segments)) for spec in layout.slices]
    [(0, 0, 528, 2), (1, 528, 1056, 1)]
    """

    space: ParameterSpace
    num_shards: int
    slices: tuple[SliceSpec, ...]

    def __post_init__(self) -> None:
        _expect_shards(self.num_shards)
        keys = [(spec.shard, spec.partition, spec.dtype) for spec in self.slices]
        _expect(keys == sorted(set(keys)), "slices ordered by shard, partition and dtype, each once", keys)
        numbers = [spec.slice for spec in self.slices]
        _expect(numbers == list(range(len(numbers))), "slices numbered from 0", numbers)
        shards = sorted({spec.shard for spec in self.slices} - set(range(self.num_shards)))
        _expect(not shards, f"shards from 0 to {self.num_shards - 1}", shards)
        unknown = sorted({spec.dtype for spec in self.slices} - set(self.space.dtypes))
        _expect(not unknown, f"dtypes {', '.join(self.space.dtypes)}", unknown)
        for dtype in self.space.dtypes:
            self._expect_tiles(dtype)
        for spec in self.slices:
            segments = _segments(self.space, spec.dtype, spec.start, spec.stop)
            _expect(spec.segments == segments, f"segments {segments} in slice {spec.slice}", spec.segments)

    def _expect_tiles(self, dtype: str) -> None:
        ranges = sorted((spec.start, spec.stop) for spec in self.slices if spec.dtype == dtype)
        end = 0
        for start, stop in ranges:
            _expect(end == start < stop, f"a slice of {dtype} that begins at {end}", (start, stop))
            end = stop
        _expect(end == self.space.numel(dtype), f"{self.space.numel(dtype)} elements of {dtype}", end)

    @classmethod
    def balanced(cls, space: ParameterSpace, num_shards: int) -> "Layout":
        """Give each shard one contiguous range of the space, balanced by bytes.

        A shard has at most one slice per dtype and partition. Cuts fall on multiples of `CUT_MULTIPLE` elements if all shards
        stay within `CUT_TOLERANCE` of the mean, and otherwise on the nearest element. With more shards than
        elements some hold nothing.

        Raises:
            ConfigError: `num_shards` is below 1.
        """
        _expect_shards(num_shards)
        slices = _cut(space, num_shards, CUT_MULTIPLE)
        mean = space.num_bytes / num_shards
        if any(abs(size - mean) > CUT_TOLERANCE * mean for size in _bytes_of_shards(slices, num_shards)):
            slices = _cut(space, num_shards, 1)
        return cls(space=space, num_shards=num_shards, slices=slices)

    @cached_property
    def _by_shard(self) -> tuple[tuple[SliceSpec, ...], ...]:
        return tuple(
            tuple(spec for spec in self.slices if spec.shard == shard) for shard in range(self.num_shards)
        )

    def slices_of(self, shard: int, partition: int | None = None) -> tuple[SliceSpec, ...]:
        """The slices that a shard holds, of one partition or of all; empty if it holds nothing."""
        held = self._by_shard[shard]
        return held if partition is None else tuple(spec for spec in held if spec.partition == partition)

    def shards_of(self, partition: int | None = None) -> tuple[int, ...]:
        """The shards that hold something, of one partition or of all."""
        return tuple(shard for shard in range(self.num_shards) if self.slices_of(shard, partition))

    def table(self) -> tuple[ShardLoad, ...]:
        """One row a shard, for printing: the largest `of_mean` is how far from balanced the layout is."""
        sizes = _bytes_of_shards(self.slices, self.num_shards)
        mean = self.space.num_bytes / self.num_shards
        return tuple(
            ShardLoad(
                shard=shard,
                num_slices=len(self.slices_of(shard)),
                num_bytes=size,
                of_mean=size / mean if mean else 1.0,
            )
            for shard, size in enumerate(sizes)
        )

    def layout_json(self) -> list[dict[str, Any]]:
        """One row a segment, for run directories: read them with no knowledge of this package.

        ``start`` and ``stop`` are elements of the slice, ``tensor_start`` and ``tensor_stop`` elements of the
        tensor in C order. Of a part of a tensor, one row for each run of the tensor.
        """
        return [
            {
                "tensor": self.space.tensors[segment.tensor].name,
                "aliases": list(self.space.tensors[segment.tensor].aliases),
                "shape": list(self.space.tensors[segment.tensor].whole_shape),
                "dtype": spec.dtype,
                "shard": spec.shard,
                "slice": spec.slice,
                "start": start,
                "stop": start + length,
                "tensor_start": tensor_start,
                "tensor_stop": tensor_start + length,
            }
            for spec in self.slices
            for segment in spec.segments
            for start, tensor_start, length in _runs(self.space, segment)
        ]

    def to_json(self) -> dict[str, Any]:
        """A value that `json.dumps` takes and `from_json` turns back into an equal layout."""
        rows = [{k: v for k, v in asdict(spec).items() if k != "segments"} for spec in self.slices]
        return {"space": self.space.to_json(), "num_shards": self.num_shards, "slices": rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Layout":
        """Rebuild a layout from `to_json`'s value; segments follow from the space.

        Raises:
            CorruptError: the space does not fit its hash.
            ConfigError: the slices do not tile the space.
        """
        space = ParameterSpace.from_json(value["space"])
        slices = tuple(
            SliceSpec(segments=_segments(space, row["dtype"], row["start"], row["stop"]), **row)
            for row in value["slices"]
        )
        return cls(space=space, num_shards=value["num_shards"], slices=slices)


def _runs(space: ParameterSpace, segment: Segment) -> Iterator[tuple[int, int, int]]:
    """A segment as runs of a whole tensor: where each begins in the slice and in the tensor, and its length."""
    reach, part = segment.tensor_range, space.tensors[segment.tensor].part
    if part is None:
        yield segment.start, reach.start, reach.size
        return
    for at, tensor_start, length in part.runs(reach.start, reach.stop):
        yield segment.start + at - reach.start, tensor_start, length


def _expect(is_so: bool, expected: str, got: object) -> None:
    if not is_so:
        raise ConfigError(
            subject="layout",
            expected=expected,
            got=repr(got),
            remedy="Make it with Layout.balanced(space, num_shards).",
        )


def _expect_shards(num_shards: int) -> None:
    if not 1 <= num_shards <= MOST_SHARDS:
        raise ConfigError(
            subject="shards",
            expected=f"1 to {MOST_SHARDS:,}",
            got=str(num_shards),
            remedy="Give the run a shard.",
        )


def _bytes_of_shards(slices: tuple[SliceSpec, ...], num_shards: int) -> list[int]:
    sizes = [0] * num_shards
    for spec in slices:
        sizes[spec.shard] += spec.num_bytes
    return sizes


def _cut(space: ParameterSpace, num_shards: int, multiple: int) -> tuple[SliceSpec, ...]:
    ideal = [space.num_bytes * shard // num_shards for shard in range(num_shards + 1)]
    ranges = sorted(
        (shard, partition, dtype, max(start, first), min(stop, last))
        for dtype, cuts in _cuts_by_dtype(space, ideal, multiple)
        for shard, (start, stop) in enumerate(pairwise(cuts))
        for partition, first, last in _partitions(space, dtype)
        if max(start, first) < min(stop, last)
    )
    return tuple(
        SliceSpec(
            slice=number,
            shard=shard,
            partition=partition,
            dtype=dtype,
            start=start,
            stop=stop,
            segments=_segments(space, dtype, start, stop),
        )
        for number, (shard, partition, dtype, start, stop) in enumerate(ranges)
    )


def _partitions(space: ParameterSpace, dtype: str) -> list[tuple[int, int, int]]:
    """Where each partition's parameters begin and end in a dtype's flat vector [elements]."""
    bounds: dict[int, tuple[int, int]] = {}
    for tensor, offset in zip(space.tensors, space.offsets, strict=True):
        if tensor.dtype == dtype:
            start, _ = bounds.get(tensor.partition, (offset, offset))
            bounds[tensor.partition] = (start, offset + tensor.numel)
    return [(partition, *bound) for partition, bound in bounds.items()]


def _cuts_by_dtype(space: ParameterSpace, ideal: list[int], multiple: int) -> Iterator[tuple[str, list[int]]]:
    """Translate cuts of the whole space [bytes] into cuts of each dtype's flat vector [elements]."""
    begin = 0
    for dtype in space.dtypes:
        grain, numel = multiple * ITEM_SIZES[dtype], space.numel(dtype)
        end = begin + numel * ITEM_SIZES[dtype]
        cuts = [_nearest(cut - begin, grain) * multiple for cut in ideal]
        # A cut at either end of the vector is exact: only what lies inside is rounded.
        yield (
            dtype,
            [
                0 if cut <= begin else numel if cut >= end else min(rounded, numel)
                for cut, rounded in zip(ideal, cuts, strict=True)
            ],
        )
        begin = end


def _nearest(value: int, grain: int) -> int:
    """How many grains are nearest to a value."""
    return (2 * value + grain) // (2 * grain)


def _segments(space: ParameterSpace, dtype: str, start: int, stop: int) -> tuple[Segment, ...]:
    """The tensors that meet ``[start, stop)`` of a dtype's flat vector."""
    members = space.members[dtype]
    segments = []
    first = max(bisect_right(members, start, key=lambda member: member[0]) - 1, 0)
    for offset, index in members[first:]:
        if offset >= stop:
            break
        begin, end = max(start, offset), min(stop, offset + space.tensors[index].numel)
        if begin < end:
            piece = Range(begin - offset, end - offset)
            segments.append(Segment(tensor=index, tensor_range=piece, start=begin - start))
    return tuple(segments)
