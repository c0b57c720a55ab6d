"""Nested tuples, named tuples, lists and dicts of arrays: walked and rebuilt, without importing torch."""

from collections.abc import Callable
from typing import Any


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every leaf with the path a user would write to reach it, in a fixed order.

    >>> leaves({"x": 1, "more": (2, [3])})
    [("['x']", 1), ("['more'][0]", 2), ("['more'][1][0]", 3)]
    """
    if isinstance(tree, dict):
        return [found for key, value in tree.items() for found in leaves(value, f"{path}[{key!r}]")]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [found for key in tree._fields for found in leaves(getattr(tree, key), f"{path}.{key}")]
    if isinstance(tree, list | tuple):
        return [found for i, value in enumerate(tree) for found in leaves(value, f"{path}[{i}]")]
    return [(path, tree)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same shape, each leaf replaced by `function(leaf)`.

    >>> map_leaves(lambda leaf: leaf + 1, {"x": 1, "more": (2, [3])})
    {'x': 2, 'more': (3, [4])}
    """
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, value) for value in tree)
    return function(tree)
