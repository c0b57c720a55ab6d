"""A model's buffers as bytes: what replicas leave for evaluation, and one set made of several.

Buffers are not trained and are not on the shards. Each replica keeps its own and writes a copy with every push;
whoever evaluates, exports or joins takes one merged set. A memory holds the last few copies, each with the
minibatch that it is as of, so that a checkpoint gets those that belong to its parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import Tensor, nn

from squall.errors import ConfigError
from squall.model.exchange import Arena

_ALIGNMENT = 16
_SLOTS = 4
"""Sets in one memory: that of the newest checkpoint, two on the way to the shards, and one that is written."""
_COUNT, _SERIAL, _EPOCH, _POSITION = range(4)
"""Of a set's header: writes begun and ended; the how-manieth set; what it is as of."""
_HEADER_BYTES = 32
_MAX_TRIES = 1000


Place: TypeAlias = tuple[int, int]
"""A minibatch: its epoch and its position in it."""
JOINED: Place = (-1, -1)
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
    (['running_mean', 'running_var', 'num_batches_tracked'], 320)
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
        return _SLOTS * self._slot_bytes if self.specs else 0

    @property
    def _slot_bytes(self) -> int:
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

    def whole(self, memory: Tensor) -> dict[str, Tensor]:
        """One set of buffers, by name, in memory of `num_bytes` of its own: what the workers of a cut model share."""
        return {spec.name: _view(memory, spec) for spec in self.specs}

    @torch.no_grad()
    def write(self, model: nn.Module | Mapping[str, Tensor], memory: Tensor, after: Place = JOINED) -> None:
        """Copy the model's buffers into `memory`, shape (num_bytes,), uint8, over the oldest set there.

        Args:
            model: or its buffers by name.
            after: the minibatch (epoch, position) that they are as of; `JOINED`: none of this replica's own.
        """
        if not self.specs:
            return
        slots = self._slots(memory)
        newest = max(int(_header(slot)[_SERIAL]) for slot in slots)
        slot = min(slots, key=lambda slot: int(_header(slot)[_SERIAL]))
        header = _header(slot)
        buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else model
        header[_COUNT] += 1  # odd: a write is under way
        header[_SERIAL], header[_EPOCH], header[_POSITION] = newest + 1, *after
        for spec in self.specs:
            _view(slot, spec).copy_(buffers[spec.name])
        header[_COUNT] += 1

    def read(
        self, memory: Tensor, is_part: Callable[[int, int], bool] | None = None
    ) -> dict[str, Tensor] | None:
        """The buffers as last written, never torn; None if nothing has been written yet.

        Args:
            is_part: says of a minibatch (epoch, position) whether it is part of a checkpoint; then the newest
                buffers after such a one. A replica writes no more than two sets while it waits for a checkpoint.
        """
        if not self.specs:
            return {}
        for _ in range(_MAX_TRIES):
            written = [slot for slot in self._slots(memory) if int(_header(slot)[_SERIAL])]
            written.sort(key=lambda slot: int(_header(slot)[_SERIAL]), reverse=True)
            fit = [slot for slot in written if is_part is None or _is_of(slot, is_part)]
            if not fit and len(written) == _SLOTS:
                fit = written[-1:]  # what came before has been written over: the nearest there is
            if not fit:
                return None
            if (values := self._values(fit[0])) is not None:
                return values
        return None

    def join(self, model: nn.Module, memories: Sequence[Tensor], own: Tensor) -> None:
        """Have a replica's model begin with what others have left, merged; if none has, it stays as it is.

        Args:
            memories: of all replicas, the lowest first.
            own: this replica's memory, in which it leaves what it begins with.
        """
        sets = [self.read(memory) for memory in memories]
        if left := [values for values in sets if values]:
            set_buffers(model, self.merge(left))
            self.write(model, own)

    def _slots(self, memory: Tensor) -> list[Tensor]:
        return list(memory[: self.num_bytes].view(_SLOTS, self._slot_bytes).unbind())

    def _values(self, slot: Tensor) -> dict[str, Tensor] | None:
        """A set; None if it is being written."""
        header = _header(slot)
        before = int(header[_COUNT])
        values = {spec.name: _view(slot, spec).clone() for spec in self.specs}
        return values if before % 2 == 0 and int(header[_COUNT]) == before else None


def _header(slot: Tensor) -> Tensor:
    return slot[:_HEADER_BYTES].view(torch.int64)


def _is_of(slot: Tensor, is_part: Callable[[int, int], bool]) -> bool:
    place = int(_header(slot)[_EPOCH]), int(_header(slot)[_POSITION])
    return place == JOINED or is_part(*place)


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
