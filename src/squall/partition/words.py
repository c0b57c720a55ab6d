"""The words in which a rule says what an op reads: for one axis of an input, which indices an output region needs.

`Same`, `Window` and `All` say nearly everything. A word also gives the *frame* on which the op runs: the range of the
input that its windows span, and by how much they hang over the edges.
"""

from dataclasses import dataclass
from typing import Protocol

from squall.partition.indices import Indices
from squall.partition.regions import Region


@dataclass(frozen=True, slots=True)
class Span:
    """One axis of a frame: indices of the input, and how much edge fill stands before and after them."""

    indices: Indices
    before: int = 0
    after: int = 0


class Word(Protocol):
    """What one axis of an input has to do with an output region."""

    @property
    def windows(self) -> int | None:
        """The output axis that must be one range for the op to run on it; None if any set will do."""

    def reads(self, out: Region, size: int) -> Indices:
        """The indices of this axis, `size` long, that an output region needs."""

    def frame(self, out: Region, size: int) -> Span:
        """What the op runs on: at least what it reads."""


class _Plain:
    """A word whose frame is exactly what it reads."""

    __slots__ = ()

    @property
    def windows(self) -> int | None:
        return None

    def reads(self, out: Region, size: int) -> Indices:
        raise NotImplementedError

    def frame(self, out: Region, size: int) -> Span:
        return Span(self.reads(out, size))


@dataclass(frozen=True, slots=True)
class Same(_Plain):
    """The same indices as an axis of the output."""

    out_dim: int

    def reads(self, out: Region, size: int) -> Indices:
        return out.axes[self.out_dim]


@dataclass(frozen=True, slots=True)
class All(_Plain):
    """All indices, whatever is asked."""

    def reads(self, out: Region, size: int) -> Indices:
        return Indices.span(0, size)


@dataclass(frozen=True, slots=True)
class Window(_Plain):
    """A window that slides: output index `o` reads ``o * stride - padding + tap * dilation``.

    Indices beyond the edges are left out: nobody sends them, and the op's fill stands there.

    >>> out = Region.of((8,), (2, 4))
    >>> Window(0, kernel=3, padding=1).reads(out, 8), Window(0, kernel=1, stride=2).reads(out, 16)
    (Indices[1:5], Indices[4:5, 6:7])
    """

    out_dim: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def windows(self) -> int | None:
        return self.out_dim

    def reads(self, out: Region, size: int) -> Indices:
        pairs = (pair for one in out.axes[self.out_dim].pairs() for pair in self._pairs(*one))
        return Indices.of((max(start, 0), min(stop, size)) for start, stop in pairs)

    def _pairs(self, start: int, stop: int) -> "list[tuple[int, int]]":
        stride, dilation, first = self.stride, self.dilation, start * self.stride - self.padding
        taps = range(0, self.kernel * dilation, dilation)
        if self._is_dense:
            return [self._hull(start, stop)]
        if stride == 1:
            return [(first + tap, first + tap + stop - start) for tap in taps]
        outs = range(first, first + (stop - start) * stride, stride)
        return [(each + tap, each + tap + 1) for each in outs for tap in taps]

    @property
    def _is_dense(self) -> bool:
        return self.dilation == 1 and self.kernel >= self.stride

    def _hull(self, start: int, stop: int) -> tuple[int, int]:
        reach = (self.kernel - 1) * self.dilation + 1
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + reach

    def frame(self, out: Region, size: int) -> Span:
        axis = out.axes[self.out_dim]
        low, high = self._hull(axis.start, axis.stop)
        inside = Indices.span(max(low, 0), min(high, size))
        before = min(max(-low, 0), high - low)
        return Span(inside, before, high - low - before - inside.size)


@dataclass(frozen=True, slots=True)
class Spread(_Plain):
    """A window the other way round, as in transposed convolution: `i` reaches ``i * stride - padding + tap * dilation``.

    >>> Spread(0, kernel=3, stride=2, padding=1).reads(Region.of((9,), (2, 3)), 5)
    Indices[1:2]
    """

    out_dim: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def windows(self) -> int | None:
        return self.out_dim

    def reads(self, out: Region, size: int) -> Indices:
        found: list[tuple[int, int]] = []
        for start, stop in out.axes[self.out_dim].pairs():
            for tap in range(0, self.kernel * self.dilation, self.dilation):
                first, last = start + self.padding - tap, stop - 1 + self.padding - tap
                found.append((max(-(-first // self.stride), 0), min(last // self.stride + 1, size)))
        return Indices.of(found)

    def frame(self, out: Region, size: int) -> Span:
        return Span(self.reads(out, size).hull())


@dataclass(frozen=True, slots=True)
class Adaptive(_Plain):
    """Windows of adaptive pooling: output `o` of `out_size` reads ``[o * n // m, ceil((o + 1) * n / m))``."""

    out_dim: int
    out_size: int

    @property
    def windows(self) -> int | None:
        return self.out_dim

    def reads(self, out: Region, size: int) -> Indices:
        return Indices.of(self.window(index, size) for index in out.axes[self.out_dim])

    def window(self, index: int, size: int) -> tuple[int, int]:
        return index * size // self.out_size, -(-(index + 1) * size // self.out_size)


@dataclass(frozen=True, slots=True)
class Groups(_Plain):
    """Whole groups: output indices come `per_out` to a group, and each reads the `per_in` indices of its own group.

    >>> Groups(0, per_out=2, per_in=3).reads(Region.of((6,), (1, 3)), 9)
    Indices[0:6]
    """

    out_dim: int
    per_out: int
    per_in: int

    def reads(self, out: Region, size: int) -> Indices:
        return Indices.of(
            (group * self.per_in, (group + 1) * self.per_in) for group in self.touched(out.axes[self.out_dim])
        )

    def touched(self, axis: Indices) -> Indices:
        """The groups that some output index belongs to."""
        return Indices.of(
            (start // self.per_out, (stop - 1) // self.per_out + 1) for start, stop in axis.pairs()
        )


@dataclass(frozen=True, slots=True)
class Fixed(_Plain):
    """The same indices, whatever is asked."""

    indices: Indices

    def reads(self, out: Region, size: int) -> Indices:
        return self.indices


@dataclass(frozen=True, slots=True)
class Modulo(_Plain):
    """The place of an output index in its group of `per_out`: axis 1 of a transposed convolution's grouped weight."""

    out_dim: int
    per_out: int

    def reads(self, out: Region, size: int) -> Indices:
        return Indices.each(index % self.per_out for index in out.axes[self.out_dim])
