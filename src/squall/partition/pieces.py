"""Tensor pieces of regions: cut one out of what is held, and put a frame together from own part, halo and edge fill."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from squall.errors import LocalProtocolError
from squall.partition.indices import Indices
from squall.partition.regions import AnyRegion, FlatRegion, Region

Index = slice | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of a value that somebody holds: the compact tensor of a region, of shape `region.sizes`.

    >>> Piece(Region.of((4, 4), (0, 2), (1, 3)), torch.zeros(2, 2)).region.size
    4
    """

    region: AnyRegion
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """What an op runs on: a region of its input, with edge fill around it.

    Attributes:
        region: within the input's bounds; at least what the op reads.
        before, after: how many indices of fill stand before and after it, axis by axis.
        fill: their value, and that of indices in `region` that the op does not read.
    """

    region: AnyRegion
    before: tuple[int, ...]
    after: tuple[int, ...]
    fill: float = 0.0

    @classmethod
    def bare(cls, region: AnyRegion) -> "Frame":
        """A region without edges."""
        none = (0,) * len(region.sizes)
        return cls(region, none, none)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a + n + b for a, n, b in zip(self.before, self.region.sizes, self.after, strict=True))

    @property
    def is_padded(self) -> bool:
        return any(self.before) or any(self.after)


def take(piece: Piece, region: AnyRegion) -> Tensor:
    """Cut the compact tensor of a region out of a piece that covers it: a view where slices suffice.

    >>> held = Piece(Region.of((8,), (2, 6)), torch.arange(2, 6))
    >>> take(held, Region.of((8,), (3, 5)))
    tensor([3, 4])
    """
    return cutter(piece.region, region)(piece.tensor)


def cutter(held: AnyRegion, region: AnyRegion) -> Callable[[Tensor], Tensor]:
    """`take` for many tensors of the same region: the index arithmetic is done once."""
    if held == region:
        return _itself
    if isinstance(held, FlatRegion) or isinstance(region, FlatRegion):
        position = _index(region.flat().positions_in(held.flat()))
        shape = region.sizes
        return lambda tensor: tensor.reshape(-1)[position].reshape(shape)
    positions = region.within(held)
    slices = tuple(_as_slice(axis) for axis in positions)
    if None not in slices:
        return lambda tensor: tensor[slices]
    plain = tuple(each if each is not None else slice(None) for each in slices)
    listed = [(at, _listed(axis)) for at, axis in enumerate(positions) if slices[at] is None]

    def cut(tensor: Tensor) -> Tensor:
        tensor = tensor[plain]
        for at, index in listed:
            tensor = tensor.index_select(at, index)
        return tensor

    return cut


def adder(held: AnyRegion, region: AnyRegion) -> Callable[[Tensor, Tensor], None]:
    """The function that adds the compact tensor of a region to that of a larger one, in place.

    >>> total = torch.zeros(4)
    >>> adder(Region.of((8,), (2, 6)), Region.of((8,), (3, 5)))(total, torch.ones(2))
    >>> total
    tensor([0., 1., 1., 0.])
    """
    if isinstance(held, FlatRegion) or isinstance(region, FlatRegion):
        position = torch.tensor(list(region.flat().positions_in(held.flat())), dtype=torch.long)

        def add(total: Tensor, part: Tensor) -> None:
            total.view(-1).index_add_(0, position, part.reshape(-1))

        return add
    place = _mesh(region.within(held))

    def add_there(total: Tensor, part: Tensor) -> None:
        total[place] += part

    return add_there


class Assembly:
    """Puts a frame together from pieces of known regions; made once, run for every microbatch.

    One piece that is the frame is handed on as it is, one that covers it is cut (a view), pieces that follow one
    another along an axis are concatenated with the edge fill; anything else is written into a new tensor.

    Args:
        frame: what is wanted.
        needs: what of it the op really reads.
        held: the regions of the pieces, disjoint, that together cover `needs`.

    Raises:
        LocalProtocolError: the pieces leave something out, or overlap.

    >>> frame = Frame(Region.of((4,), (0, 3)), (1,), (0,))
    >>> held = [Region.of((4,), (0, 2)), Region.of((4,), (2, 4))]
    >>> Assembly(frame, frame.region, held, torch.float32)([torch.ones(2), torch.full((2,), 2.0)])
    tensor([0., 1., 1., 2.])
    """

    def __init__(
        self, frame: Frame, needs: AnyRegion, held: Sequence[AnyRegion], dtype: torch.dtype = torch.float32
    ) -> None:
        self._frame, self._dtype = frame, dtype
        found = sum((each & needs).size for each in held)
        if found != needs.size:
            raise LocalProtocolError(
                reason=f"expected disjoint pieces that cover {needs}, but got {list(held)}"
            )
        parts = [(at, each & frame.region) for at, each in enumerate(held)]
        parts = [(at, part) for at, part in parts if not part.is_empty]
        self._cuts = [(at, cutter(held[at], part)) for at, part in parts]
        self._hands_on = list(held) == [frame.region] and not frame.is_padded
        self._run = self._plan([part for _, part in parts])

    @property
    def hands_on(self) -> bool:
        """Whether it gives back the one piece that it gets."""
        return self._hands_on

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._run([cut(tensors[at]) for at, cut in self._cuts])

    def _plan(self, parts: list[AnyRegion]) -> Callable[[list[Tensor]], Tensor]:
        frame = self._frame
        if not parts:
            return lambda tensors: torch.full(frame.sizes, frame.fill, dtype=self._dtype)
        if len(parts) == 1 and parts[0] == frame.region and not frame.is_padded:
            return lambda tensors: tensors[0]
        boxes = [part for part in parts if isinstance(part, Region)]
        if isinstance(frame.region, Region) and len(boxes) == len(parts):
            return self._concatenate(boxes, frame.region) or self._write(boxes, frame.region)
        return self._write_flat(parts)

    def _concatenate(self, parts: list[Region], whole: Region) -> Callable[[list[Tensor]], Tensor] | None:
        frame = self._frame
        uneven = [
            at
            for at, axis in enumerate(whole.axes)
            if frame.before[at] or frame.after[at] or any(part.axes[at] != axis for part in parts)
        ]
        if len(uneven) != 1:
            return None
        at = uneven[0]
        if not whole.axes[at].is_span or not all(part.axes[at].is_span for part in parts):
            return None
        order = _in_order(
            [part.axes[at] for part in parts], whole.axes[at], frame.before[at], frame.after[at]
        )

        def run(tensors: list[Tensor]) -> Tensor:
            return torch.cat(
                [self._gap(at, gap, tensors[0]) if part is None else tensors[part] for part, gap in order], at
            )

        return run

    def _gap(self, at: int, length: int, like: Tensor) -> Tensor:
        sizes = self._frame.sizes
        return like.new_full((*sizes[:at], length, *sizes[at + 1 :]), self._frame.fill)

    def _write(self, parts: list[Region], whole: Region) -> Callable[[list[Tensor]], Tensor]:
        places = [
            _mesh([axis.shifted(by) for axis, by in zip(part.within(whole), self._frame.before, strict=True)])
            for part in parts
        ]

        def run(tensors: list[Tensor]) -> Tensor:
            result = tensors[0].new_full(self._frame.sizes, self._frame.fill)
            for place, tensor in zip(places, tensors, strict=True):
                result[place] = tensor
            return result

        return run

    def _write_flat(self, parts: list[AnyRegion]) -> Callable[[list[Tensor]], Tensor]:
        frame, region = self._frame, self._frame.region
        places = [_index(part.flat().positions_in(region.flat())) for part in parts]
        edges = [each for pair in zip(frame.before[::-1], frame.after[::-1], strict=True) for each in pair]

        def run(tensors: list[Tensor]) -> Tensor:
            result = tensors[0].new_full((region.size,), frame.fill)
            for place, tensor in zip(places, tensors, strict=True):
                result[place] = tensor.reshape(-1)
            result = result.reshape(region.sizes)
            return pad(result, edges, value=frame.fill) if frame.is_padded else result

        return run


def _in_order(parts: list[Indices], whole: Indices, before: int, after: int) -> list[tuple[int | None, int]]:
    """Parts (by number) and gaps (None) with their lengths, as they follow one another along an axis."""
    order: list[tuple[int | None, int]] = []
    at = whole.start - before
    for part in sorted(range(len(parts)), key=lambda part: parts[part].start):
        if parts[part].start > at:
            order.append((None, parts[part].start - at))
        order.append((part, parts[part].size))
        at = parts[part].stop
    if whole.stop + after > at:
        order.append((None, whole.stop + after - at))
    return order


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _as_slice(axis: Indices) -> slice | None:
    """A slice, if these positions are one range or evenly spaced single ones."""
    if axis.is_span:
        return slice(axis.start, axis.stop)
    starts = [part.start for part in axis.ranges]
    step = starts[1] - starts[0]
    if axis.size == len(starts) and all(b - a == step for a, b in pairwise(starts)):
        return slice(axis.start, axis.stop, step)
    return None


def _listed(axis: Indices) -> Tensor:
    return torch.tensor(list(axis), dtype=torch.long)


def _index(axis: Indices) -> Index:
    found = _as_slice(axis)
    return _listed(axis) if found is None else found


def _mesh(axes: Sequence[Indices]) -> tuple[Index, ...]:
    """An index that names the product of these axes."""
    slices = [_as_slice(axis) for axis in axes]
    if None not in slices:
        return tuple(each for each in slices if each is not None)
    rank = len(axes)
    return tuple(
        _listed(axis).reshape([-1 if at == k else 1 for k in range(rank)]) for at, axis in enumerate(axes)
    )
