"""A model's buffers as bytes: what replicas leave for evaluation, and one set made of several.

Buffers are not trained and are not on the shards. Each replica keeps its own and writes a copy after every
push; whoever evaluates or exports takes one merged set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from squall.errors import ConfigError
from squall.model.exchange import Arena

_ALIGNMENT = 16
_HEADER_BYTES = 16
_MAX_TRIES = 1000


POLICIES = ("mean", "max", "first")


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer, where its bytes lie, and how several replicas' values become one.

    Attributes:
        policy: "mean", "max" (both element by element) or "first", the lowest replica's.
    """

    name: str
    policy: str
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
    def of(cls, model: nn.Module, policies: Mapping[str, str] | None = None) -> "BufferSpace":
        """Read the space off a model.

        Args:
            policies: name pattern to policy; the first that fits a name holds. What none fits: the mean of
                floating-point buffers, the maximum of integer ones, the lowest replica's of all others.

        Raises:
            ConfigError: a policy is unknown, cannot be used for such a buffer, or fits none.
        """
        specs, start = [], _HEADER_BYTES
        _check_patterns(policies or {}, [name for name, _ in model.named_buffers()])
        for name, buffer in model.named_buffers():
            policy = _policy(name, buffer, policies or {})
            spec = BufferSpec(name, policy, tuple(buffer.shape), buffer.dtype, start)
            specs.append(spec)
            start += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(specs))

    def merge(self, sets: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """One set of buffers made of several, lowest replica first; nothing of nothing.

        >>> space = BufferSpace.of(nn.BatchNorm1d(1))
        >>> one = {"running_mean": torch.tensor([1.0]), "running_var": torch.tensor([1.0]),
        ...        "num_batches_tracked": torch.tensor(3)}
        >>> other = {name: value + 2 for name, value in one.items()}
        >>> space.merge([one, other])["running_mean"], space.merge([one, other])["num_batches_tracked"]
        (tensor([2.]), tensor(5))
        """
        if not sets:
            return {}
        return {
            spec.name: _merged(spec.policy, [values[spec.name] for values in sets]) for spec in self.specs
        }

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


def _merged(policy: str, values: Sequence[Tensor]) -> Tensor:
    first = values[0]
    if policy == "mean":
        return torch.stack([value.double() for value in values]).mean(dim=0).to(first.dtype)
    if policy == "max":
        return torch.stack(list(values)).amax(dim=0)
    return first


def _policy(name: str, buffer: Tensor, policies: Mapping[str, str]) -> str:
    is_float, is_ordered = buffer.is_floating_point(), not buffer.is_complex() and buffer.dtype != torch.bool
    for pattern, policy in policies.items():
        if not fnmatchcase(name, pattern):
            continue
        if (policy == "mean" and not is_float) or (policy == "max" and not is_ordered):
            raise ConfigError(
                subject=f"Job(buffers=): {pattern!r}",
                expected=f"a policy for a buffer of {buffer.dtype}, {name!r}",
                got=repr(policy),
                remedy="'mean' is for floating-point buffers, 'max' for numbers; 'first' is for all.",
            )
        return policy
    return "mean" if is_float else "max" if is_ordered else "first"


def _check_patterns(policies: Mapping[str, str], names: Sequence[str]) -> None:
    for pattern, policy in policies.items():
        if policy not in POLICIES:
            raise ConfigError(
                subject=f"Job(buffers=): {pattern!r}",
                expected=f"one of {', '.join(POLICIES)}",
                got=repr(policy),
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                subject=f"Job(buffers=): {pattern!r}",
                expected="a pattern that fits a buffer of the model",
                got="one that fits none",
                remedy=f"Its buffers are {', '.join(names) or 'none'}.",
            )


def _view(memory: Tensor, spec: BufferSpec) -> Tensor:
    return memory[spec.start : spec.start + spec.num_bytes].view(spec.dtype).view(spec.shape)


@torch.no_grad()
def set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy values into the model's buffers of these names."""
    buffers = dict(model.named_buffers())
    for name, value in values.items():
        buffers[name].copy_(value)
