"""A model made without its memory: what its constructor does to each tensor is written down, and done when one is asked for.

The model function runs with its tensors on the meta device, and every op on them is recorded. To have one parameter, the
ops that lead to it are done again for real, and nothing else: a worker of a cut model makes its own share of a parameter
from one whole tensor at a time, whatever the model's size. It needs no convention of the model: initialisation in
constructors, in `reset_parameters`, by `apply`, by arithmetic, by copies of other parameters all work.

A random op draws from a generator of its own, named by the seed and by the parameter that it leads to. So values depend
neither on who makes them nor on what was made before, and are others than a plain constructor draws under that seed.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from squall.errors import ModelError, SquallError
from squall.model.randomness import random_state_kept, seed_everything

_META = torch.device("meta")
_CPU = torch.device("cpu")
# They make tensors of Python's own numbers, which the meta device would forget; small, as a rule.
_GIVEN = {"tensor", "as_tensor", "asarray", "from_numpy", "from_file", "frombuffer"}


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One op: what it read and wrote, by storage."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Deferred:
    """A model whose tensors have no memory, and how to make each of them.

    Attributes:
        model: its parameters and buffers are on the meta device, but for those made of Python's own numbers.

    >>> deferred = defer(lambda: nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 2)), seed=1)
    >>> deferred.model[0].weight.device.type, tuple(deferred.value("1.weight").shape)
    ('meta', (2, 1000))
    >>> torch.equal(deferred.value("1.weight"), deferred.value("1.weight"))
    True
    """

    model: nn.Module
    _entries: Sequence[_Entry] = field(repr=False)
    _seeds: Mapping[int, int] = field(repr=False)
    _by_storage: Mapping[int, Sequence[int]] = field(repr=False)

    def value(self, name: str) -> Tensor:
        """Make one parameter or buffer, in new memory; the same whenever it is asked for.

        Raises:
            KeyError: the model has none of this name.
        """
        tensor = _tensors(self.model)[name]
        if tensor.device != _META:
            return tensor.detach().clone()
        made: dict[int, Tensor] = {}
        with random_state_kept(), torch.no_grad():
            for at in _leading_to(tensor, self._entries, self._by_storage):
                self._redo(at, made)
        found: Tensor = _real(tensor.detach(), made)
        return found

    def whole(self) -> nn.Module:
        """The model itself, every tensor with its value; it is not made again, so this is for one caller."""
        made: dict[int, Tensor] = {}
        for name, tensor in _tensors(self.model).items():
            if id(tensor) not in made:
                value = self.value(name)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            _put(self.model, name, made[id(tensor)])
        return self.model

    def with_buffers(self, given: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The model with its buffers alone in memory: those that are given, the others as they are made."""
        for name, buffer in list(self.model.named_buffers(remove_duplicate=False)):
            if given and name in given:
                _put(self.model, name, given[name].clone())
            elif buffer.device == _META:
                _put(self.model, name, self.value(name))
        return self.model

    def _redo(self, at: int, made: dict[int, Tensor]) -> None:
        entry = self._entries[at]
        if at in self._seeds:
            seed_everything(self._seeds[at])
        args, kwargs = tree_map(lambda leaf: _real(leaf, made), (entry.args, dict(entry.kwargs)))
        if kwargs.get("device") == _META:
            kwargs["device"] = _CPU
        results, _ = tree_flatten(entry.op(*args, **kwargs))
        for like, result in zip(tree_flatten(entry.outputs)[0], results, strict=True):
            if isinstance(like, Tensor) and like.device == _META and _storage(like) not in made:
                made[_storage(like)] = _laid_out(result, like)


@dataclass(frozen=True, slots=True)
class ModelInParts:
    """A model function whose model nobody has whole, if it is cut over partitions. Made by `deferred`.

    Attributes:
        function: as of `defer`.
    """

    function: Callable[[], nn.Module]

    def __call__(self, seed: int) -> Deferred:
        return defer(self.function, seed)


def deferred(function: Callable[[], nn.Module]) -> ModelInParts:
    """Have a model made part by part, each where it is needed: for models that no process could hold.

    Workers and shards make their own share of it, one tensor at a time. Its initial values are keyed by the job's seed and
    each parameter's name: the same over any number of partitions, and others than `function` draws by itself.

    Args:
        function: returns the model; what it does to tensors must not depend on their values.

    >>> import squall
    >>> job = squall.Job(
    ...     squall.deferred(lambda: nn.Linear(3, 2)),
    ...     (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)),
    ...     partitions=2,
    ... )
    """
    return ModelInParts(function)


def defer(function: Callable[[], nn.Module], seed: int) -> Deferred:
    """Run a model function without memory for its tensors.

    Args:
        function: returns the model; what it does to tensors must not depend on their values.
        seed: of all that it draws with torch.

    Raises:
        ModelError: it looks at values while it builds the model, or returns none.
    """
    recorder = _Recorder()
    try:
        with random_state_kept(), _Emptied(), recorder:
            seed_everything(seed)
            model = function()
    except SquallError:
        raise
    except Exception as error:
        raise ModelError(
            subject="the model function",
            expected="one that builds the model without looking at the values of its tensors",
            got=f"{type(error).__name__}: {error}",
            remedy="Compute what depends on values in forward, or give the module itself instead of a function.",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            subject="the model function",
            expected="a torch.nn.Module to be returned",
            got=f"a {type(model).__name__}",
        )
    by_storage: dict[int, list[int]] = {}
    for at, entry in enumerate(recorder.entries):
        for storage in entry.writes:
            by_storage.setdefault(storage, []).append(at)
    return Deferred(model, recorder.entries, _seeds_of(model, recorder.entries, by_storage, seed), by_storage)


def _seeds_of(
    model: nn.Module, entries: Sequence[_Entry], by_storage: Mapping[int, Sequence[int]], seed: int
) -> dict[int, int]:
    """Of each random op, the seed: named by the first tensor that it leads to, and its place among that one's ops."""
    found: dict[int, int] = {}
    for name, tensor in _tensors(model).items():
        if tensor.device == _META:
            for place, at in enumerate(_leading_to(tensor, entries, by_storage)):
                if at not in found and torch.Tag.nondeterministic_seeded in entries[at].op.tags:
                    text = f"{seed} {name} {place}".encode()
                    found[at] = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    return found


def _leading_to(
    tensor: Tensor, entries: Sequence[_Entry], by_storage: Mapping[int, Sequence[int]]
) -> list[int]:
    """The ops that a tensor's values come from, in order."""
    found: set[int] = set()
    wanted = [(_storage(tensor), len(entries))]
    while wanted:
        storage, before = wanted.pop()
        for at in by_storage.get(storage, ()):
            if at < before and at not in found:
                found.add(at)
                wanted += [(read, at) for read in entries[at].reads if read != storage]
    return sorted(found)


class _Emptied(TorchFunctionMode):
    """Makes new tensors on the meta device, unless they are made of values that are given."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (
            getattr(function, "__self__", None) is torch.Tensor.is_meta
        ):  # torch's own initialisers do nothing on such tensors
            return False
        if (
            function in _device_constructors()
            and function.__name__ not in _GIVEN
            and kwargs.get("device") in (None, _CPU, "cpu")
        ):
            kwargs["device"] = _META
        return function(*args, **kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every op on tensors without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[_Entry] = []

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors_in((args, kwargs)))
        if all(each.device != _META for each in given) and kwargs.get("device") != _META:
            return op(*args, **kwargs)
        # Tensors with values are read as they are now.
        kept = tree_map(_kept, (args, kwargs))
        outputs = op(*tree_map(_emptied, args), **tree_map(_emptied, kwargs))
        reads = {_storage(each) for each in given if each.device == _META}
        made = {_storage(each) for each in _tensors_in(outputs)} - reads
        if not op._schema.is_mutable and not made:
            return outputs  # a view
        mutated = {_storage(each) for each in _written(op, args, kwargs)}
        self.entries.append(
            _Entry(
                op,
                kept[0],
                kept[1],
                tree_map(_kept, outputs),
                tuple(sorted(reads)),
                tuple(sorted(made | mutated)),
            )
        )
        return outputs


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an op writes to."""
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from _tensors_in(given)


def _tensors_in(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    # Entries keep the tensors, so that a number is not used again.
    return int(tensor.untyped_storage()._cdata)


def _kept(leaf: Any) -> Any:
    """A tensor as it is now: its values, or without any the memory that it names, of which a parameter may get another."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach() if leaf.device == _META else leaf.detach().clone()


def _emptied(leaf: Any) -> Any:
    return leaf.to(_META) if isinstance(leaf, Tensor) and leaf.device != _META else leaf


def _real(leaf: Any, made: Mapping[int, Tensor]) -> Any:
    """A tensor without memory as the same view of what was made."""
    if not isinstance(leaf, Tensor) or leaf.device != _META:
        return leaf
    base = made[_storage(leaf)]
    found = torch.empty(0, dtype=leaf.dtype)
    return found.set_(base.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """In the layout that the meta device said, of which later ops take views; some kernels give another."""
    if result.stride() == like.stride() and result.storage_offset() == like.storage_offset():
        return result
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).copy_(result)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(tensor, nn.Parameter):
        module._parameters[key] = tensor
    else:
        module._buffers[key] = tensor


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name that they have."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
