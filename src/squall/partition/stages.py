"""How partitions share an op when an axis that it reduces is cut: partial results, combined, then finished.

A sum over a cut axis is P partial sums and one add. Softmax over one is a maximum, a sum and a finish; batch
normalisation is one sum (of values and squares) and a finish. Each `Stage` says what a *share* of its space reads,
to which region of the combined value it contributes, and how contributions are combined. A combined value is a value
like any other: who contributes, who owns it and who reads it follows from regions, and so do the messages.

Gradients need no rule of their own. The gradient of a sum is handed to each contributor; that of a maximum to nobody,
since stages use one only to shift exponents, where it cancels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from squall.partition.pieces import Frame
from squall.partition.regions import AnyRegion, Region, Shape

Tensors = Sequence[Tensor]


class Combine(Enum):
    """How contributions to one element become one."""

    ADD = "add"
    MAX = "max"


def _nothing_earlier(share: Region) -> tuple[AnyRegion, ...]:
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """One step in which each partition works on its share alone.

    Attributes:
        space: the index space that is cut into shares; disjoint shares must cover it. It need not be the op's
            output: a sum cuts its input, a matrix product the output's axes and the summed one.
        needs: share -> what it reads of each input of the call.
        frames: share -> on what `run` works, as in `Rule.frames`; None: on exactly what it needs.
        reads: share -> what it reads of each earlier stage's combined value.
        gives: share -> the region of this stage's value that it computes (of the op's output, in the last stage).
        run: (share, inputs, combined) -> its contribution, the compact tensor of `gives(share)`.
        shape: of the whole combined value.
        combine: how contributions to it are combined; None in the last stage, where shares give disjoint regions.
        dtype: of the combined value, as in ``"float64"``; None for the output's.
        windows: the axes of the space on which a share must be one range.
    """

    space: Shape
    needs: Callable[[Region], tuple[AnyRegion, ...]]
    frames: Callable[[Region], tuple[Frame, ...]] | None = None
    reads: Callable[[Region], tuple[AnyRegion, ...]] = _nothing_earlier
    gives: Callable[[Region], AnyRegion]
    run: Callable[[Region, Tensors, Tensors], Tensor]
    shape: Shape
    combine: Combine | None = None
    dtype: str | None = None
    windows: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Stages:
    """An op as stages; the last one gives the output."""

    stages: tuple[Stage, ...]

    @property
    def rounds(self) -> int:
        """How often the partitions wait for one another."""
        return len(self.stages) - 1
