"""Learning rates that change as training goes on: functions of the minibatches that a slice has had applied.

Pass one as ``learning_rate`` of any update rule::

    squall.Adagrad(learning_rate=squall.schedules.warmup(squall.schedules.cosine(0.1, total=10_000), 500))

Each is a value: equal to another with the same settings, picklable, and told in the run directory as it was
written. A schedule is asked once per push, with the minibatches applied to that slice before; minibatches are those
of all replicas together. Any function of that number will do as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, final

from squall.errors import ConfigError

Schedule = Callable[[int], float]
"""From the minibatches applied before, from 0, to a learning rate."""


def step(learning_rate: float, every: int, gamma: float) -> Schedule:
    """Multiply the rate by `gamma` after every `every` minibatches.

    Args:
        learning_rate: the rate at first, at least 0.
        every: minibatches between two changes, at least 1.
        gamma: the factor of a change, at least 0.
    Raises:
        ConfigError: a setting is out of its range.
    Source: torch.optim.lr_scheduler.StepLR, stepped once per minibatch.

    >>> schedule = step(0.5, every=10, gamma=0.5)
    >>> schedule(9), schedule(10), schedule(25)
    (0.5, 0.25, 0.125)
    >>> schedule
    step(learning_rate=0.5, every=10, gamma=0.5)
    """
    return _Step(learning_rate=learning_rate, every=every, gamma=gamma)


def cosine(learning_rate: float, total: int, final: float = 0.0) -> Schedule:
    """Fall along half a cosine from `learning_rate` to `final`, and stay there.

    Args:
        learning_rate: the rate at first, at least 0.
        total: minibatches until it has fallen, at least 1.
        final: the rate after that, at least 0.
    Raises:
        ConfigError: a setting is out of its range.
    Source: torch.optim.lr_scheduler.CosineAnnealingLR, stepped once per minibatch, which rises again after `total`;
        Loshchilov, Hutter, "SGDR", 2017, equation 5 without restarts.

    >>> schedule = cosine(1.0, total=100)
    >>> schedule(0), round(schedule(50), 9), schedule(100), schedule(1000)
    (1.0, 0.5, 0.0, 0.0)
    """
    return _Cosine(learning_rate=learning_rate, total=total, final=final)


def linear(start: float, final: float, total: int) -> Schedule:
    """Go in a straight line from `start` to `final`, and stay there.

    Args:
        start: the rate at first, at least 0.
        final: the rate from `total` minibatches on, at least 0.
        total: minibatches on the way, at least 1.
    Raises:
        ConfigError: a setting is out of its range.
    Source: torch.optim.lr_scheduler.LinearLR, stepped once per minibatch, with rates in place of factors.

    >>> schedule = linear(1.0, 0.5, total=10)
    >>> schedule(0), schedule(5), schedule(10), schedule(11)
    (1.0, 0.75, 0.5, 0.5)
    """
    return _Linear(start=start, final=final, total=total)


def warmup(schedule: float | Schedule, minibatches: int) -> Schedule:
    """Begin with a small part of a rate or schedule and come to the whole of it.

    The minibatch after `m` others has ``(m + 1) / minibatches`` of the rate, and the whole from there on. The
    schedule inside counts from the first minibatch too: ``warmup(cosine(0.1, total=1000), 50)`` ends after 1000.
    Not to be confused with Downpour's ``warm_start``, in which one replica computes alone.

    Args:
        schedule: a rate of at least 0, or any function of the minibatches applied before.
        minibatches: how many until the whole rate holds, at least 1.
    Raises:
        ConfigError: a setting is out of its range.
    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.2 (gradual warmup); for a rate the same as
        torch.optim.lr_scheduler.LinearLR from 1 / minibatches in minibatches - 1 steps.

    >>> schedule = warmup(0.5, 4)
    >>> [schedule(minibatches) for minibatches in (0, 1, 2, 3, 4)]
    [0.125, 0.25, 0.375, 0.5, 0.5]
    >>> warmup(step(1.0, every=2, gamma=0.5), 2)
    warmup(schedule=step(learning_rate=1.0, every=2, gamma=0.5), minibatches=2)
    """
    return _Warmup(schedule=schedule, minibatches=minibatches)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class _Step:
    learning_rate: float
    every: int
    gamma: float

    def __post_init__(self) -> None:
        _expect_rate("step(learning_rate=)", self.learning_rate)
        _expect_count("step(every=)", self.every)
        _expect_rate("step(gamma=)", self.gamma)

    def __call__(self, minibatches: int) -> float:
        try:
            return float(self.learning_rate * self.gamma ** (minibatches // self.every))
        except OverflowError:
            return math.inf  # which the rule refuses, naming this schedule

    def __repr__(self) -> str:
        return _call("step", self)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class _Cosine:
    learning_rate: float
    total: int
    final: float

    def __post_init__(self) -> None:
        _expect_rate("cosine(learning_rate=)", self.learning_rate)
        _expect_count("cosine(total=)", self.total)
        _expect_rate("cosine(final=)", self.final)

    def __call__(self, minibatches: int) -> float:
        done = min(minibatches / self.total, 1.0)
        return self.final + (self.learning_rate - self.final) * (1 + math.cos(math.pi * done)) / 2

    def __repr__(self) -> str:
        return _call("cosine", self)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class _Linear:
    start: float
    final: float
    total: int

    def __post_init__(self) -> None:
        _expect_rate("linear(start=)", self.start)
        _expect_rate("linear(final=)", self.final)
        _expect_count("linear(total=)", self.total)

    def __call__(self, minibatches: int) -> float:
        done = min(minibatches / self.total, 1.0)
        return self.start * (1 - done) + self.final * done  # exact at both ends

    def __repr__(self) -> str:
        return _call("linear", self)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class _Warmup:
    schedule: float | Schedule
    minibatches: int

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            _expect_rate("warmup(schedule=)", self.schedule)
        _expect_count("warmup(minibatches=)", self.minibatches)

    def __call__(self, minibatches: int) -> float:
        rate = self.schedule(minibatches) if callable(self.schedule) else self.schedule
        return rate * min((minibatches + 1) / self.minibatches, 1.0)

    def __repr__(self) -> str:
        return _call("warmup", self)


def _call(name: str, schedule: Any) -> str:
    """The call that makes an equal schedule; a function in it by its name."""
    settings = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    told = {key: getattr(value, "__qualname__", None) or repr(value) for key, value in settings.items()}
    return f"{name}({', '.join(f'{key}={value}' for key, value in told.items())})"


def _expect_rate(subject: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and value >= 0):  # type: ignore[arg-type, operator]
        raise ConfigError(
            subject=f"squall.schedules.{subject}", expected="a finite number of at least 0", got=repr(value)
        )


def _expect_count(subject: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            subject=f"squall.schedules.{subject}",
            expected="a whole number of minibatches of at least 1",
            got=repr(value),
        )
