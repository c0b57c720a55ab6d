"""The memory that one worker shares with one shard: per slice one or two gradients and two parameter buffers."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from squall.model.layout import SliceSpec

_ALIGNMENT = 64


class Arena(Protocol):
    """Shared memory that hands out tensors."""

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> Tensor: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExchangeViews:
    """Tensors over shared memory, by slice.

    Attributes:
        gradients: one or two sets, written by the worker; none for one that only fetches.
        buffers: the two parameter buffers, written by the shard.
    """

    gradients: tuple[dict[int, Tensor], ...]
    buffers: tuple[dict[int, Tensor], dict[int, Tensor]]


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Where everything lies, computed alike on both sides.

    Attributes:
        specs: the shard's slices of the worker's partition, in order.
        num_gradients: 1; 2 if pushes overlap with computing; 0 for a worker that only fetches.
    """

    specs: tuple[SliceSpec, ...]
    num_gradients: int

    @property
    def num_bytes(self) -> int:
        return max(_ALIGNMENT, self._num_vectors * sum(_aligned(spec.num_bytes) for spec in self.specs))

    @property
    def _num_vectors(self) -> int:
        return 2 + self.num_gradients

    def views(self, arena: Arena) -> ExchangeViews:
        """Tensors of shape (S,) over the arena, which must have `num_bytes`; its descriptor is given back."""
        start = 0
        parts: list[dict[int, Tensor]] = []
        for _ in range(self._num_vectors):
            part = {}
            for spec in self.specs:
                part[spec.slice] = arena.tensor(getattr(torch, spec.dtype), start, spec.size)
                start += _aligned(spec.num_bytes)
            parts.append(part)
        arena.close()
        return ExchangeViews(gradients=tuple(parts[2:]), buffers=(parts[0], parts[1]))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
