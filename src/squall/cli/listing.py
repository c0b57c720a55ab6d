"""``squall recipes``: what there is to train, read from the files without running them."""

import ast
import pkgutil
from importlib.util import find_spec

import squall.recipes


def recipe_lines() -> list[str]:
    """One line a recipe: its name, and the first line of its description.

    >>> [line.split()[0] for line in recipe_lines()]
    ['digits', 'fsdd', 'mnist', 'speech']
    """
    told = {name: _first_line(name) for name in _names()}
    width = max(map(len, told), default=0)
    return [f"{name:<{width}}  {words}" for name, words in told.items()]


def _names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(squall.recipes.__path__))


def _first_line(name: str) -> str:
    # The file is parsed, not imported: a recipe imports torch.
    spec = find_spec(f"{squall.recipes.__name__}.{name}")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return (ast.get_docstring(ast.parse(file.read())) or "").split("\n")[0]
