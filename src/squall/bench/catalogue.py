"""Which figures there are, found without importing any of them: each imports torch."""

import ast
import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from squall.bench.figure import Report, Settings
from squall.errors import ConfigError

if TYPE_CHECKING:
    from squall.bench.place import Place

PACKAGE = "squall.bench.figures"
NAMES = (
    "start",
    "exchange",
    "small",
    "speech-one",
    "speech-two",
    "cut",
    "slow-replica",
    "durability",
    "traffic",
    "time-to-loss",
)


class Figure(Protocol):
    """A module of `squall.bench.figures`."""

    def measure(self, settings: Settings, place: "Place") -> Report: ...


def described() -> dict[str, str]:
    """The figures in the order that they are measured in: name to first line of the description.

    >>> list(described())[0]
    'start'
    """
    told = {}
    for name in NAMES:
        spec = find_spec(_module(name))
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin, encoding="utf-8") as file:
            told[name] = (ast.get_docstring(ast.parse(file.read())) or "").split("\n")[0]
    return told


def chosen(names: list[str]) -> list[str]:
    """The figures asked for, each once; all if none is.

    Raises:
        ConfigError: there is no such figure.

    >>> chosen(["small", "small"])
    ['small']
    """
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                subject=f"the figure {name!r}",
                expected=f"one of {', '.join(NAMES)}",
                got=repr(name),
                remedy="`squall bench --list` says what each measures.",
            )
    return list(dict.fromkeys(names)) or list(NAMES)


def figure(name: str) -> Figure:
    """The module of a figure."""
    module: Figure = importlib.import_module(_module(name))
    return module


def _module(name: str) -> str:
    return f"{PACKAGE}.{name.replace('-', '_')}"
