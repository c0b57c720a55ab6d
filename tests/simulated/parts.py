"""The tests of pure parts that are alone with them: what is quick to see through a mutant, before whole schedules."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

MODULES = (
    "tests.coordinator.test_book",
    "tests.coordinator.test_granting",
    "tests.coordinator.test_hold",
    "tests.coordinator.test_machine",
    "tests.coordinator.test_membership",
    "tests.coordinator.test_refusals",
    "tests.coordinator.test_takeover",
    "tests.replica.test_downpour",
)


def parts() -> Iterator[tuple[str, Callable[[], None]]]:
    """Each test of theirs that needs no fixture, once for each set of its parameters, by name."""
    for module in map(importlib.import_module, MODULES):
        for name, test in _tests_of(module):
            for number, facts in enumerate(_parameters(test)):
                if facts.keys() == inspect.signature(test).parameters.keys():
                    yield f"{module.__name__}.{name}/{number}", partial(test, **facts)


def _tests_of(module: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    for name, test in vars(module).items():
        if name.startswith("test_"):
            yield name, test


def _parameters(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """What a test is parametrised with; at most once."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    if not marks:
        yield {}
        return
    (mark,) = marks
    names, values = mark.args
    for value in values:
        yield {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
