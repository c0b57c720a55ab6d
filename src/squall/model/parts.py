"""A part of a tensor: what one partition of a cut model owns of a parameter."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open ranges of indices, in order and disjoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A product of index sets, one for each axis of a tensor.

    Attributes:
        whole: the tensor's own shape.
        axes: for each axis, which indices.

    >>> part = Part(whole=(4, 3), axes=(((0, 1), (3, 4)), ((0, 3),)))
    >>> part.shape, part.of(torch.arange(12).view(4, 3)).tolist()
    ((2, 3), [[0, 1, 2], [9, 10, 11]])
    """

    whole: tuple[int, ...]
    axes: tuple[Ranges, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the part."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.axes)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor of shape `whole`: of shape `shape`, a view where it can be one."""
        return tensor[self._places()]

    def put_(self, whole: Tensor, part: Tensor) -> None:
        """Write the part into a tensor of shape `whole`."""
        whole[self._places()] = part

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements `start` to `stop` of the part, as runs of the whole tensor, both in C order.

        Returns:
            For each run where it begins in the part, where in the whole tensor, and its length.

        >>> list(Part(whole=(2, 4), axes=(((0, 2),), ((1, 3),))).runs(1, 4))
        [(1, 2, 1), (2, 5, 2)]
        """
        numbers = np.arange(prod(self.whole)).reshape(self.whole)
        flat = numbers[np.ix_(*map(_listed, self.axes))].reshape(-1)[start:stop]
        ends = np.flatnonzero(np.diff(flat) != 1) + 1
        for run in np.split(np.arange(len(flat)), ends):
            if len(run):
                yield start + int(run[0]), int(flat[run[0]]), len(run)

    def _places(self) -> tuple[Any, ...]:
        if all(len(ranges) == 1 for ranges in self.axes):
            return tuple(slice(start, stop) for ((start, stop),) in self.axes)
        return tuple(torch.from_numpy(index) for index in np.ix_(*map(_listed, self.axes)))

    def to_json(self) -> dict[str, Any]:
        """A value that `json.dumps` takes."""
        return {"whole": list(self.whole), "axes": [[list(pair) for pair in ranges] for ranges in self.axes]}

    @classmethod
    def from_json(cls, value: Any) -> "Part":
        """The part of such a description."""
        axes = tuple(tuple((int(start), int(stop)) for start, stop in ranges) for ranges in value["axes"])
        return cls(whole=tuple(value["whole"]), axes=axes)


def _listed(ranges: Ranges) -> Any:
    return np.concatenate([np.arange(start, stop) for start, stop in ranges] or [np.arange(0)])
