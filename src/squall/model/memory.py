"""Memory as the traced program sees it: which tensors lie in the same, and what each holds after writes.

The graph itself has no memory: a write makes a new value. Here is kept which value a traced tensor has now.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from squall.model.builder import Builder, map_traced
from squall.model.graph import Ref
from squall.model.twins import unwrite


class Offence(Exception):  # noqa: N818  it becomes a ModelError or one more opaque module
    """Something that cannot be a graph; the module that did it can be made opaque."""

    def __init__(self, *, module: str, reason: str, line: str) -> None:
        self.module, self.reason, self.line = module, reason, line
        super().__init__(reason)


@dataclass(slots=True)
class Storage:
    """Memory that several traced tensors share: how often it was written, and why it can be read no more."""

    version: int = 0
    broken: str = ""


@dataclass(slots=True)
class Traced:
    """A traced tensor: the value that it has now, and how to see it again after a write through another.

    Attributes:
        value: index of its value as of `version` of the storage.
        source: what it is a view of; None for one that owns its memory.
        view: the op that views it, and which of its outputs this is.
    """

    value: int
    storage: Storage
    version: int
    source: "Traced | None" = None
    view: "tuple[Call, int] | None" = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call with traced arguments, to be made again."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Memory:
    """All traced tensors' memory, by the storage that torch gave them while tracing."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._storages: dict[int, Storage] = {}

    def outside(self, fake: Tensor, value: int) -> Traced:
        """A tensor from outside; two of them may share memory."""
        storage = self._storages.setdefault(_storage_of(fake), Storage())
        return Traced(value, storage, storage.version)

    def join(self, fake: Tensor, traced: Traced) -> None:
        """Another name for the memory of a traced tensor."""
        self._storages[_storage_of(fake)] = traced.storage

    def make(self, call: Call, known: Sequence[Any] | None = None) -> list[Any]:
        args, kwargs = map_traced(self.ref, call.args), map_traced(self.ref, call.kwargs)
        return self._builder.emit(call.op, *args, known=known, **kwargs)

    def enter(self, fake: Tensor, value: int | None, call: Call, at: int) -> Traced:
        """A new traced tensor, a view if it lies in the memory of an argument."""
        assert value is not None
        storage = self._storages.get(_storage_of(fake))
        if storage is None:
            return self.fresh(fake, value)
        for leaf in _leaves((call.args, call.kwargs)):
            if isinstance(leaf, Traced) and leaf.storage is storage:
                return Traced(value, storage, storage.version, leaf, (call, at))
        return Traced(value, storage, storage.version)

    def fresh(self, fake: Tensor, value: int) -> Traced:
        storage = self._storages[_storage_of(fake)] = Storage()
        return Traced(value, storage, 0)

    def read(self, traced: Traced) -> int:
        """The value that a traced tensor has now."""
        storage = traced.storage
        if traced.version != storage.version:
            if storage.broken or traced.source is None or traced.view is None:
                raise self.offence(
                    storage.broken or "it writes in place to memory that is read in another way"
                )
            self.read(traced.source)
            call, at = traced.view
            value = self.make(call)[at]
            assert value is not None
            traced.value, traced.version = value, storage.version
        return traced.value

    def write(self, traced: Traced, value: int) -> None:
        """Give a traced tensor a new value, and with it all that it is a view of."""
        above: list[tuple[Traced, Traced, int]] = []
        child = traced
        while child.source is not None:
            above.append((child, child.source, self.read(child.source)))
            child = child.source
        storage = traced.storage
        storage.version += 1
        traced.value, traced.version = value, storage.version
        for child, parent, old in above:
            assert child.view is not None
            call, at = child.view
            arguments = map_traced(self._old_ref(parent, old), call.args)
            made = unwrite(self._builder, call.op, arguments, dict(call.kwargs), at, old, child.value)
            if made is None:
                storage.broken = (
                    f"it writes in place through {call.op} to memory that is read again afterwards"
                )
                return
            parent.value, parent.version = made, storage.version

    def _old_ref(self, parent: Traced, old: int) -> Callable[[Any], Any]:
        def ref(leaf: Any) -> Any:
            if leaf is parent:
                return Ref(old)
            return Ref(leaf.value) if isinstance(leaf, Traced) else leaf

        return ref

    def ref(self, leaf: Any) -> Any:
        return Ref(self.read(leaf)) if isinstance(leaf, Traced) else leaf

    def offence(self, reason: str) -> Offence:
        place = self._builder.place
        return Offence(module=place.module, reason=reason, line=place.line)


def _leaves(argument: Any) -> Iterator[Any]:
    found: list[Any] = []
    map_traced(found.append, argument)
    yield from found


def _storage_of(fake: Tensor) -> int:
    key: int = fake.untyped_storage()._cdata
    return key
