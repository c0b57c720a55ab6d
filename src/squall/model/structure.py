"""Nested arguments and results of a model: taken apart into tensors, and put together again.

Tuples, named tuples, lists, dicts and dataclasses, in any depth. What is no tensor is kept as a constant of the
structure.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Structure:
    """The form of a nested value without its tensors.

    Attributes:
        kind: the class of a container; None for a tensor; `Constant` for anything else.
        keys: the keys or field names of the parts; empty for tuples and lists.
        parts: the structures inside.
        constant: what stands here if it is no tensor and no container.

    >>> tensors, structure = Structure.of({"x": torch.zeros(2), "more": [torch.ones(1), "a"]})
    >>> len(tensors), structure.build([1, 2])
    (2, {'x': 1, 'more': [2, 'a']})
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    parts: tuple["Structure", ...] = ()
    constant: Any = None

    @classmethod
    def of(cls, tree: Any) -> tuple[list[Any], "Structure"]:
        """Take a value apart: its tensors (and sizes that torch follows symbolically) in order, and the rest."""
        leaves: list[Any] = []
        return leaves, _structure(tree, leaves)

    def build(self, leaves: Any) -> Any:
        """A value of this form with these tensors, in order."""
        return _built(self, iter(leaves))

    def constants(self, path: str = "") -> Iterator[tuple[str, Any]]:
        """What is no tensor, with the path a user would write to reach it."""
        if self.kind is Constant:
            yield path, self.constant
        for key, part in zip(self.keys or range(len(self.parts)), self.parts, strict=True):
            yield from part.constants(f"{path}[{key!r}]")

    def leaf_paths(self, path: str = "") -> Iterator[str]:
        """The path of every tensor, in order."""
        if self.kind is None:
            yield path
        for key, part in zip(self.keys or range(len(self.parts)), self.parts, strict=True):
            yield from part.leaf_paths(f"{path}[{key!r}]")


class Constant:
    """Marks what is neither a tensor nor a container."""


def is_plain(constant: Any) -> bool:
    """Whether it is data that cannot hide a tensor."""
    return isinstance(constant, _PLAIN) or type(constant).__module__ == "enum"


_LEAF = Structure(None)


def _structure(tree: Any, leaves: list[Any]) -> Structure:
    if isinstance(tree, Tensor | torch.SymInt | torch.SymFloat):
        leaves.append(tree)
        return _LEAF
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree))
        return _of_parts(type(tree), names, [getattr(tree, name, None) for name in names], leaves)
    if isinstance(tree, Mapping):
        return _of_parts(type(tree), tuple(tree), list(tree.values()), leaves)
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return _of_parts(type(tree), (), list(tree), leaves)
    return Structure(Constant, constant=tree)


def _of_parts(kind: type, keys: tuple[Any, ...], parts: list[Any], leaves: list[Any]) -> Structure:
    return Structure(kind, keys, tuple(_structure(part, leaves) for part in parts))


def _built(structure: Structure, leaves: Iterator[Any]) -> Any:
    kind: Any = structure.kind
    if kind is None:
        return next(leaves)
    if kind is Constant:
        return structure.constant
    parts = [_built(part, leaves) for part in structure.parts]
    if kind is tuple or kind is list:
        return kind(parts)
    if kind is dict:
        return dict(zip(structure.keys, parts, strict=True))
    if hasattr(kind, "_fields"):
        return kind(*parts)
    if dataclasses.is_dataclass(kind):
        return _built_dataclass(kind, dict(zip(structure.keys, parts, strict=True)))
    if issubclass(kind, Mapping):
        return _built_mapping(kind, list(zip(structure.keys, parts, strict=True)))
    return kind(parts)


def _built_dataclass(kind: Any, fields: dict[str, Any]) -> Any:
    if issubclass(kind, dict):  # such as the outputs of transformers, which fill themselves when made
        return kind(**fields)
    made = object.__new__(kind)  # its own __post_init__ has run already, in forward
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _built_mapping(kind: type, items: list[tuple[Any, Any]]) -> Any:
    if hasattr(kind, "default_factory"):
        return dict(items)
    return kind(items)
