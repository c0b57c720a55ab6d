"""A model's buffers as bytes: what replicas leave for evaluation, and one set made of several.

Buffers are not trained and are not on the shards. Each replica keeps its own and writes a copy after every
push; whoever evaluates or exports takes one merged set.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from squall.model.exchange import Arena

_ALIGNMENT = 16
_HEADER_BYTES = 16
_MAX_TRIES = 1000


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BufferSpace:
    """All buffers of a model, shared ones once.

    >>> space = BufferSpace.of(nn.BatchNorm1d(2))
    >>> [spec.name for spec in space.specs], space.num_bytes
    (['running_mean', 'running_var', 'num_batches_tracked'], 64)
    """

    specs: tuple[BufferSpec, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "BufferSpace":
        specs, start = [], _HEADER_BYTES
        for name, buffer in model.named_buffers():
            spec = BufferSpec(name, tuple(buffer.shape), buffer.dtype, start)
            specs.append(spec)
            start += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(specs))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that `write` needs; 0 if there are no buffers."""
        if not self.specs:
            return 0
        last = self.specs[-1]
        return last.start + -(-last.num_bytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def arena_bytes(self) -> int:
        """Bytes of shared memory to make for it: some, even if there are no buffers."""
        return max(_ALIGNMENT, self.num_bytes)

    def memory(self, arena: Arena) -> Tensor:
        """The arena as `write` and `read` want it; this arena's descriptor is given back."""
        memory = arena.tensor(torch.uint8, 0, self.arena_bytes)
        arena.close()
        return memory

    @torch.no_grad()
    def write(self, model: nn.Module, memory: Tensor) -> None:
        """Copy the model's buffers into `memory`, shape (num_bytes,), uint8.

        Its first eight bytes count the writes, twice each: an odd count says that one is under way.
        """
        if not self.specs:
            return
        count = memory[:8].view(torch.int64)
        buffers = dict(model.named_buffers())
        count += 1
        for spec in self.specs:
            _view(memory, spec).copy_(buffers[spec.name])
        count += 1

    def read(self, memory: Tensor) -> dict[str, Tensor] | None:
        """The buffers as last written, never torn; None if nothing has been written yet."""
        if not self.specs:
            return {}
        count = memory[:8].view(torch.int64)
        for _ in range(_MAX_TRIES):
            before = int(count)
            if before == 0:
                return None
            values = {spec.name: _view(memory, spec).clone() for spec in self.specs}
            if before % 2 == 0 and int(count) == before:
                return values
        return None


def merged(sets: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One set of buffers: the mean of floating-point ones, the maximum of integer ones, else the first's.

    >>> merged([{"mean": torch.tensor([1.0]), "count": torch.tensor(3)}, {"mean": torch.tensor([3.0]), "count": torch.tensor(5)}])
    {'mean': tensor([2.]), 'count': tensor(5)}
    """
    if not sets:
        return {}
    return {name: _merge([values[name] for values in sets]) for name in sets[0]}


def _merge(values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    if first.is_floating_point():
        return torch.stack([value.double() for value in values]).mean(dim=0).to(first.dtype)
    if first.dtype == torch.bool or first.is_complex():
        return first
    return torch.stack(list(values)).amax(dim=0)


def _view(memory: Tensor, spec: BufferSpec) -> Tensor:
    return memory[spec.start : spec.start + spec.num_bytes].view(spec.dtype).view(spec.shape)


@torch.no_grad()
def set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy values into the model's buffers of these names."""
    buffers = dict(model.named_buffers())
    for name, value in values.items():
        buffers[name].copy_(value)
