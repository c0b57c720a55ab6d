"""Recipes: Python functions that return a `Job`, found by name or by file, with settings changed by name."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from squall.errors import ConfigError
from squall.keywords import meant
from squall.training.job import Job, Recipe

PACKAGE = "squall.recipes"


def available() -> dict[str, str]:
    """The recipes that come with Squall: name to first line of their description."""
    import squall.recipes

    names = sorted(module.name for module in pkgutil.iter_modules(squall.recipes.__path__))
    return {name: _first_line(importlib.import_module(f"{PACKAGE}.{name}").__doc__) for name in names}


def find(request: str, settings: Sequence[tuple[str, str]] = ()) -> Job:
    """Make the job of ``NAME``, ``FILE.py`` or ``FILE.py:FUNCTION``.

    Args:
        settings: ``("strategy.n_push", "5")`` and the like, applied to the job in order. One that is named like an
            argument of the function is handed to it instead.

    Raises:
        ConfigError: there is no such recipe, function or setting.
    """
    name, _, function = request.partition(":")
    path = _path_of(name)
    function = function or path.stem
    recipe = Recipe(
        name=name if not name.endswith(".py") else str(path),
        function=function,
        settings=tuple((key, value) for key, value in settings),
        hash=_hash(path),
    )
    return _make(recipe, path)


def job_of(told: dict[str, Any], settings: Sequence[tuple[str, str]] = ()) -> Job:
    """Make the job of a run again, from what its directory says.

    Args:
        settings: more of them, after its own.

    Raises:
        ConfigError: the recipe's file has changed since.
    """
    recipe = Recipe(
        name=told["name"],
        function=told["function"],
        settings=(*((key, value) for key, value in told["settings"]), *settings),
        hash=told["hash"],
    )
    path = _path_of(recipe.name)
    if _hash(path) != recipe.hash:
        raise ConfigError(
            subject=f"the recipe {recipe.name!r}",
            expected=f"the file that the run began with (sha256 {recipe.hash[:12]}...)",
            got="a file that has changed since",
            remedy="Put the old file back, or start a new run.",
        )
    return _make(recipe, path)


def module_name(recipe: Recipe) -> str:
    """The module that the recipe's functions live in, in this process."""
    if not recipe.name.endswith(".py"):
        return f"{PACKAGE}.{recipe.name}"
    return f"squall_recipe_{hashlib.sha256(recipe.name.encode()).hexdigest()[:12]}"


def _make(recipe: Recipe, path: Path) -> Job:
    module = _module(recipe, path)
    function = getattr(module, recipe.function, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if _is_recipe(module, value)]
        raise ConfigError(
            subject=f"the recipe {recipe.name!r}",
            expected=f"a function {recipe.function!r} that returns a squall.Job",
            got=f"the functions {', '.join(names) or 'none'}",
            remedy=f"Name one: squall train {recipe.name}:FUNCTION.",
        )
    arguments, settings = _arguments(function, recipe)
    job: Any = function(**arguments)
    if not isinstance(job, Job):
        raise ConfigError(
            subject=f"the recipe {recipe.name}:{recipe.function}",
            expected="a squall.Job to be returned",
            got=f"a {type(job).__name__}",
        )
    for key, value in settings:
        job = _changed(job, key.split("."), value, key)
    made: Job = replace(job, recipe=recipe)
    return made


def _arguments(function: Callable[..., Any], recipe: Recipe) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What a recipe's function takes of the settings, and the rest, which is the job's."""
    parameters = inspect.signature(function).parameters
    arguments: dict[str, Any] = {}
    rest: list[tuple[str, str]] = []
    for key, value in recipe.settings:
        if key in parameters:
            default = parameters[key].default
            arguments[key] = _parsed(value, "" if default is inspect.Parameter.empty else default, key)
        else:
            rest.append((key, value))
    for name, parameter in parameters.items():
        if name not in arguments and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                subject=f"the recipe {recipe.name}:{recipe.function}",
                expected=f"its argument {name!r}",
                got="none",
                remedy=f"Say --set {name}=...",
            )
    return arguments, rest


def _path_of(name: str) -> Path:
    if name.endswith(".py"):
        path = Path(name).absolute()
        if not path.is_file():
            raise ConfigError(subject=f"the recipe {name!r}", expected="a Python file", got="no such file")
        return path
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}") if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ConfigError(
            subject=f"the recipe {name!r}",
            expected=f"one of {', '.join(available())}, or a Python file",
            got="neither",
            remedy=meant(name, available()) or "`squall recipes` lists those that come with Squall.",
        )
    return Path(spec.origin)


def _module(recipe: Recipe, path: Path) -> ModuleType:
    name = module_name(recipe)
    if not recipe.name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _is_recipe(module: ModuleType, value: Any) -> bool:
    return (
        callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and not value.__name__.startswith("_")
    )


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[0]


def _changed(value: Any, names: list[str], text: str, key: str) -> Any:
    """A frozen dataclass with one leaf changed, however deep."""
    name, *rest = names
    known = {field.name for field in fields(value)} if is_dataclass(value) else set()
    if name not in known:
        raise ConfigError(
            subject=f"--set {key}={text}",
            expected=f"one of {', '.join(sorted(known)) or 'no further names'}",
            got=repr(name),
            remedy=meant(name, known),
        )
    old = getattr(value, name)
    new = _changed(old, rest, text, key) if rest else _parsed(text, old, key)
    return replace(value, **{name: new})


def _parsed(text: str, old: Any, key: str) -> Any:
    """The text as a Python literal; as itself where a text stood or it is no literal."""
    if isinstance(old, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(
            subject=f"--set {key}={text}",
            expected="a number, True, False, None or another literal",
            got=repr(text),
        ) from None
