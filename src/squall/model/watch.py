"""What an example run shows that a graph of ops would lose.

Three things, each blamed on the innermost module whose own code did it: a custom `torch.autograd.Function`, whose
backward torch.export drops; Python state that a forward changes (attributes, closures, globals that its code names);
and draws from Python's or NumPy's generators. What code does through other doors (files, time, C extensions) cannot
be seen here.
"""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from squall.model.stand_in import Call
from squall.model.structure import Structure

_MAX_DEPTH = 8
_MAX_LENGTH = 10_000
_OURS = "_call_impl"
_FRAMEWORK = {name for name in vars(nn.Module()) if name != "training"}


@dataclass(slots=True)
class Watcher:
    """Wraps every module of a stand-in for one run; afterwards `reasons` says what was seen.

    Attributes:
        reasons: name of a module to what its own code does that a graph would lose.
    """

    model: nn.Module
    reasons: dict[str, str] = field(default_factory=dict)
    _stack: list[str] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)
    _generators: tuple[Any, ...] = ()
    _before: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start(self) -> None:
        self._generators = _generator_states()
        self._before = {name: _state_of(module) for name, module in self.model.named_modules()}

    def finish(self) -> None:
        for name, module in self.model.named_modules():
            before, after = self._before[name], _state_of(module)
            for key in (*before, *(key for key in after if key not in before)):
                if before.get(key) != after.get(key):
                    self.reasons.setdefault(name, f"its forward changes {key}")

    def wrap(self, name: str, module: nn.Module, call: Call) -> Call:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._stack.append(name)
            try:
                result = call(*args, **kwargs)
            finally:
                self._turn()
                self._stack.pop()
            self._walk(name, result)
            return result

        return watched

    def _turn(self) -> None:
        """Another module's code is about to run: blame the one on top for what has been drawn."""
        now = _generator_states()
        if now != self._generators:
            self._generators = now
            if self._stack:
                self.reasons.setdefault(
                    self._stack[-1], "its forward draws from Python's or NumPy's random generator"
                )

    def _walk(self, name: str, result: Any) -> None:
        tensors, _ = Structure.of(result)
        waiting = [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor)]
        while waiting:
            function = waiting.pop()
            if function is None or id(function) in self._seen:
                continue
            self._seen[id(function)] = function
            if _is_custom(function):
                kind = type(function).__name__.removesuffix("Backward")
                self.reasons.setdefault(name, f"its forward uses the custom autograd function {kind!r}")
            waiting.extend(following for following, _ in function.next_functions)


def _is_custom(function: Any) -> bool:
    # What torch.library makes of a registered op's backward stays with the op, which stays in the graph.
    generated = type(function).__name__.startswith("GeneratedBackwardFor_")
    return isinstance(function, BackwardCFunction) and not generated


def _generator_states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    return random.getstate(), numpy["state"]["pos"], numpy["state"]["key"].tobytes()


# Python state that a module's code can reach, as values that can be compared.


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Fingerprints of a module's attributes, and of what its class's code names outside itself."""
    state = {f"self.{key}": _print(value) for key, value in _own_attributes(module)}
    for value in vars(module).values():
        if isinstance(value, FunctionType):
            state.update(_state_named_by(value))
    for kind in _users_classes(module):
        for key, value in vars(kind).items():
            if isinstance(value, FunctionType):
                state.update(_state_named_by(value))
            elif not key.startswith("__") and not callable(value):
                state[f"{kind.__name__}.{key}"] = _print(value)
    return state


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key not in _FRAMEWORK and key != _OURS:
            yield key, value


def _users_classes(module: nn.Module) -> Iterator[type]:
    for kind in type(module).__mro__:
        if kind.__module__.split(".")[0] not in ("torch", "builtins"):
            yield kind


def _state_named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Fingerprints of the closure cells and globals that a function, or one that it calls, names."""
    waiting, seen = [function], set()
    while waiting:
        now = waiting.pop()
        if now in seen or now.__module__.split(".")[0] in ("torch", "squall"):
            continue
        seen.add(now)
        for key, value in _named_by(now):
            if isinstance(value, FunctionType):
                waiting.append(value)
            elif not isinstance(value, ModuleType | type) and not callable(value):
                yield key, _print(value)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":
            try:
                yield f"the outer variable {name!r}", cell.cell_contents
            except ValueError:  # not set yet
                continue
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield f"the global {name!r}", function.__globals__[name]


def _names_in(code: CodeType) -> set[str]:
    """Names that a function's code, and functions inside it, look up beyond their own variables."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names_in(one) for one in inner))


def _print(value: Any, depth: int = 0, above: tuple[int, ...] = ()) -> Any:
    """A value that is equal before and after if nothing was changed, as far as can be seen."""
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, Tensor):
        return _Same(value), value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    inside = None if depth > _MAX_DEPTH or id(value) in above else _inside(value)
    if inside is None or len(inside) > _MAX_LENGTH:
        return _Same(value), None if inside is None else len(inside)
    return [_print(part, depth + 1, (*above, id(value))) for part in inside]


def _inside(value: Any) -> list[Any] | None:
    """The parts of a container or of a plain object; None of what is compared by identity."""
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=id)
    if isinstance(value, nn.Module | type | ModuleType) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return list(vars(value).values())


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Equal to another of the same object only; keeps it alive, so that its identity is not given anew."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)
