"""Different rules for different tensors, chosen by name, and the table that comes of it for a model."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from squall.errors import ConfigError
from squall.keywords import named
from squall.model.parameters import ParameterSpace, TensorSpec
from squall.rules.rule import Rule

CATCH_ALL = "*"
"""The one pattern that may come too late: it says what holds for the rest, if there is any."""


@named
@final
@dataclass(frozen=True)
class Rules:
    """A rule for each tensor, by patterns of names: the first pattern in the order given that matches is taken.

    A pattern is matched against the whole qualified name, as in ``"encoder.0.bias"``; ``*`` stands for any
    characters, dots too, ``?`` for one, ``[ab]`` for one of these. A tied tensor has several names, and each of them
    counts.

    Args:
        by_pattern: at least one rule, by pattern.
    Attributes:
        entries: pattern and rule, in order.
    Raises:
        ConfigError: there is no pattern, or something is not a rule. Whether the patterns fit a model is said by
            `rule_per_tensor`, before anything is trained.
    Source: as torch's parameter groups, but by name.

    >>> from squall.rules.adagrad import Adagrad
    >>> from squall.rules.sgd import Sgd
    >>> rules = Rules({"*.bias": Sgd(learning_rate=0.1), "*": Adagrad()})
    >>> [pattern for pattern, rule in rules.entries]
    ['*.bias', '*']
    """

    by_pattern: InitVar[Mapping[str, Rule]]
    entries: tuple[tuple[str, Rule], ...] = field(init=False)

    def __post_init__(self, by_pattern: Mapping[str, Rule]) -> None:
        is_mapping = isinstance(by_pattern, Mapping) and len(by_pattern) > 0
        if not is_mapping or not all(isinstance(pattern, str) for pattern in by_pattern):
            raise _wrong("Rules", "a mapping from patterns of names to rules", repr(by_pattern))
        for pattern, rule in by_pattern.items():
            if not isinstance(rule, Rule):
                raise _wrong(f"Rules: pattern {pattern!r}", "an update rule", repr(rule))
        object.__setattr__(self, "entries", tuple(by_pattern.items()))

    def describe(self) -> dict[str, Any]:
        """The rules as a value for `json.dumps`, in their order."""
        return {
            "rule": type(self).__name__,
            "entries": [{"pattern": pattern} | rule.describe() for pattern, rule in self.entries],
        }


@dataclass(frozen=True, kw_only=True)
class RulePerTensor:
    """Which rule has which tensor of a parameter space. Made by `rule_per_tensor`.

    Attributes:
        rules: different ones, at least one.
        which: of each tensor in the space's order, where its rule is in `rules`.
    """

    rules: tuple[Rule, ...]
    which: tuple[int, ...]

    def rule_of(self, tensor: int) -> Rule:
        return self.rules[self.which[tensor]]

    @cached_property
    def which_array(self) -> NDArray[np.int64]:
        """`which` as an array, to be indexed with many tensors at once."""
        return np.array(self.which, dtype=np.int64)


def rule_per_tensor(rule: Rule | Rules, space: ParameterSpace) -> Rule | RulePerTensor:
    """Find the rule of every tensor; one rule for all of them is returned as it is.

    Raises:
        ConfigError: a tensor that no pattern matches, a pattern that matches no tensor, or one that never gets its
            turn because patterns before it match all that it does (``"*"`` excepted).

    >>> from torch import nn
    >>> from squall.rules.adagrad import Adagrad
    >>> from squall.rules.sgd import Sgd
    >>> space = ParameterSpace.of(nn.Linear(3, 2))
    >>> table = rule_per_tensor(Rules({"bias": Sgd(), "*": Adagrad()}), space)
    >>> [(tensor.name, type(table.rule_of(at)).__name__) for at, tensor in enumerate(space.tensors)]
    [('bias', 'Sgd'), ('weight', 'Adagrad')]
    """
    if isinstance(rule, Rule):
        return rule
    chosen = [_first_match(rule, tensor) for tensor in space.tensors]
    for at, (pattern, _) in enumerate(rule.entries):
        if at not in chosen:
            _refuse_idle(pattern, space)
    different: list[Rule] = []
    for _, own in rule.entries:
        if own not in different:
            different.append(own)
    which = tuple(different.index(rule.entries[at][1]) for at in chosen)
    return RulePerTensor(rules=tuple(different), which=which)


def state_form(rule: Rule | Rules) -> str:
    """Which rules keep which slots where: what a run must have in common with one that it resumes.

    >>> from squall.rules.adagrad import Adagrad
    >>> from squall.rules.sgd import Sgd
    >>> state_form(Rules({"*.bias": Sgd(learning_rate=0.1), "*": Adagrad()}))
    '*.bias: Sgd; *: Adagrad(sum)'
    """
    if isinstance(rule, Rules):
        return "; ".join(f"{pattern}: {state_form(own)}" for pattern, own in rule.entries)
    name = type(rule).__name__
    return f"{name}({', '.join(rule.slot_names)})" if rule.slot_names else name


def _first_match(rules: Rules, tensor: TensorSpec) -> int:
    for at, (pattern, _) in enumerate(rules.entries):
        if _matches(pattern, tensor):
            return at
    raise _wrong(
        "Rules",
        f"a pattern that matches parameter {tensor.name!r}",
        ", ".join(repr(pattern) for pattern, _ in rules.entries),
        f"Add one, or {CATCH_ALL!r} as the last.",
    )


def _matches(pattern: str, tensor: TensorSpec) -> bool:
    return any(fnmatchcase(name, pattern) for name in (tensor.name, *tensor.aliases))


def _refuse_idle(pattern: str, space: ParameterSpace) -> None:
    """Say what is wrong with a pattern that no tensor took."""
    matched = [tensor.name for tensor in space.tensors if _matches(pattern, tensor)]
    if not matched:
        names = ", ".join(repr(tensor.name) for tensor in space.tensors[:5])
        more = "" if len(space.tensors) <= 5 else f" and {len(space.tensors) - 5} more"
        raise _wrong(
            f"Rules: pattern {pattern!r}",
            "a trainable parameter that it matches",
            f"none among {names}{more}",
            "Correct it, or leave it out.",
        )
    if pattern != CATCH_ALL:
        raise _wrong(
            f"Rules: pattern {pattern!r}",
            "a parameter that no pattern before it matches",
            f"only such as {matched[0]!r}, which are taken",
            "The first match is taken: put it further to the front.",
        )


def _wrong(subject: str, expected: str, got: str, remedy: str = "") -> ConfigError:
    example = 'Write squall.Rules({"*.bias": squall.Sgd(learning_rate=0.1), "*": squall.Adagrad()}).'
    return ConfigError(subject=subject, expected=expected, got=got, remedy=remedy or example)
