"""What every update rule is: a value that knows its formula, and owns no state."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from squall.errors import ConfigError

LearningRate = float | Callable[[int], float]
"""A constant, or a function of the minibatches that a slice had applied before this push."""


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """An update rule: how a gradient changes parameters.

    A rule is asked per run of elements, never per model: it sees flat vectors and the slots that belong to
    them, and whoever calls it keeps those. Subclasses are final.

    Attributes:
        learning_rate: a number of at least 0, or a function from the minibatches that the slice had applied
            before this push to such a number, as `squall.schedules` makes them.
    """

    learning_rate: LearningRate

    def __post_init__(self) -> None:
        if not callable(self.learning_rate):
            self._expect_at_least_zero("learning_rate")

    @property
    def slot_names(self) -> tuple[str, ...]:
        """Names of the vectors that the rule keeps beside the parameters."""
        return ()

    @abstractmethod
    def init_slot(self, name: str, params: Tensor) -> Tensor:
        """A fresh slot vector for parameters that have not been updated yet, of their shape and dtype."""

    @abstractmethod
    def update_(
        self, params: Tensor, grad: Tensor, slots: tuple[Tensor, ...], *, learning_rate: float, step: int
    ) -> None:
        """Change parameters and slots in place by one gradient, which is only read.

        Args:
            params: shape (N,), contiguous; written.
            grad: shape (N,), contiguous, of the same dtype.
            slots: one vector per name in `slot_names`, shape (N,); written.
            learning_rate: what `rate_at` said.
            step: which update of these elements this is, from 1.
        """

    def rate_at(self, minibatches: int) -> float:
        """The learning rate of a push to a slice that had `minibatches` applied before.

        Raises:
            ConfigError: the schedule returned something that is not a finite number of at least 0.
        """
        if not callable(self.learning_rate):
            return self.learning_rate
        rate = self.learning_rate(minibatches)
        try:
            value = float(rate)
        except (TypeError, ValueError):
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                subject=f"learning-rate schedule {_name(self.learning_rate)} of {type(self).__name__}",
                expected=f"a finite number of at least 0 after {minibatches} minibatches",
                got=repr(rate),
                remedy="Correct the schedule: it is called with the minibatches applied so far, from 0.",
            )
        return value

    def describe(self) -> dict[str, Any]:
        """The rule as a value for `json.dumps`; a schedule is told by its name."""
        return {"rule": type(self).__name__} | {
            field.name: _plain(getattr(self, field.name)) for field in fields(self)
        }

    def _expect_at_least_zero(self, name: str) -> None:
        value = getattr(self, name)
        is_so = _is_number(value) and math.isfinite(value) and value >= 0
        self._expect(name, is_so, "a finite number of at least 0", "0.01")

    def _expect_bool(self, name: str) -> None:
        self._expect(name, isinstance(getattr(self, name), bool), "True or False", "True")

    def _expect_betas(self, name: str) -> None:
        """Two factors of decaying averages, as Adam and its kin have them."""
        value = getattr(self, name)
        is_pair = isinstance(value, tuple) and len(value) == 2
        is_so = is_pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)
        self._expect(name, is_so, "a tuple of two numbers from 0 to below 1", "(0.9, 0.999)")

    def _expect(self, name: str, is_so: bool, expected: str, example: str) -> None:
        if not is_so:
            raise ConfigError(
                subject=f"{type(self).__name__}.{name}",
                expected=expected,
                got=repr(getattr(self, name)),
                remedy=f"Give it one, as in {type(self).__name__}({name}={example}).",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(setting: Any) -> Any:
    if callable(setting):
        return _name(setting)
    return list(setting) if isinstance(setting, tuple) else setting


def _name(schedule: object) -> str:
    return getattr(schedule, "__qualname__", None) or repr(schedule)
