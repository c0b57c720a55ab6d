"""One language for what goes wrong: in simulated schedules, in tests, and later on real processes.

A text is a list of faults, separated by ``;``::

    kill:replica1@t=2            the role dies at two seconds; ",restart=1" starts it again a second later
    kill:replica@p=0.01          each replica dies with this probability before each minibatch
    pause:replica2,3s@step=20    the role stands still for three seconds from its 20th minibatch on
    drop:push.reply=0.05         a message is lost with this probability; kinds: push, fetch, ask, refuse, hold,
                                 release, goodbye, recall, each with ".reply" for its answer; "*" is every message
    dup:push=0.1                 a message arrives twice
    delay=50ms+-20               every message takes 30 to 70 ms, so that messages overtake one another
    cut:replica2|shard0,5s@t=1   nothing passes between the two for five seconds

>>> parse("drop:push.reply=0.05; pause:replica2,3s@step=20")
(Drop(kind='push.reply', probability=0.05), Pause(role='replica2', seconds=3.0, when=AtStep(step=20)))
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from squall.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AtTime:
    """At this time [seconds from the start]."""

    seconds: float


@dataclass(frozen=True, slots=True)
class AtStep:
    """When the role begins its `step`-th minibatch, counted from 0."""

    step: int


@dataclass(frozen=True, slots=True)
class Chance:
    """With this probability before each minibatch of the role."""

    probability: float


When: TypeAlias = AtTime | AtStep | Chance


@dataclass(frozen=True, slots=True)
class Kill:
    """The role dies; `role` without a number stands for all of its kind. It starts again after `restart` s."""

    role: str
    when: When
    restart: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """The role stands still for so long [seconds]."""

    role: str
    seconds: float
    when: When


@dataclass(frozen=True, slots=True)
class Drop:
    """A message of this kind is lost with this probability."""

    kind: str
    probability: float


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A message of this kind arrives twice with this probability."""

    kind: str
    probability: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Every message takes between ``seconds - spread`` and ``seconds + spread``."""

    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between two roles for so long [seconds]."""

    one: str
    other: str
    seconds: float
    when: AtTime


Fault: TypeAlias = Kill | Pause | Drop | Duplicate | Delay | Cut

KINDS = {
    f"{kind}{reply}"
    for kind in ("push", "fetch", "ask", "refuse", "hold", "release")
    for reply in ("", ".reply")
} | {
    "goodbye",
    "recall",
    "*",
}
_ROLE = r"(?:replica|shard|coordinator)\d*"
_SECONDS = r"(\d+(?:\.\d+)?)(ms|s)?"
_WHEN = r"(?:@(t|step|p)=(\d+(?:\.\d+)?)(s)?)?"


def parse(text: str) -> tuple[Fault, ...]:
    """Read a list of faults.

    Raises:
        ConfigError: naming the fault that is not understood.
    """
    return tuple(_fault(part.strip()) for part in text.split(";") if part.strip())


def _fault(text: str) -> Fault:
    if match := re.fullmatch(rf"kill:({_ROLE})(?:,restart={_SECONDS})?{_WHEN}", text):
        role, restart, unit, *when = match.groups()
        return Kill(role, _when(text, *when), None if restart is None else _seconds(restart, unit))
    if match := re.fullmatch(rf"pause:({_ROLE}),{_SECONDS}{_WHEN}", text):
        role, amount, unit, *when = match.groups()
        return Pause(role, _seconds(amount, unit), _when(text, *when))
    if match := re.fullmatch(r"(drop|dup):([a-z.*]+)=(\d+(?:\.\d+)?)", text):
        name, kind, amount = match.groups()
        if kind in KINDS and 0 <= float(amount) <= 1:
            return (Drop if name == "drop" else Duplicate)(kind, float(amount))
    if match := re.fullmatch(rf"delay={_SECONDS}(?:\+-{_SECONDS})?", text):
        amount, unit, spread, spread_unit = match.groups()
        return Delay(_seconds(amount, unit), _seconds(spread or "0", spread_unit or unit))
    if match := re.fullmatch(rf"cut:({_ROLE})\|({_ROLE}),{_SECONDS}{_WHEN}", text):
        one, other, amount, unit, *when = match.groups()
        at = _when(text, *when)
        if isinstance(at, AtTime):
            return Cut(one, other, _seconds(amount, unit), at)
    raise _misread(text)


def _seconds(amount: str, unit: str | None) -> float:
    return float(amount) / (1000 if unit == "ms" else 1)


def _when(text: str, kind: str | None, amount: str | None, unit: str | None) -> When:
    if kind is None or amount is None:
        return AtTime(0.0)
    if kind == "t":
        return AtTime(float(amount))
    if kind == "step" and amount.isdigit() and unit is None:
        return AtStep(int(amount))
    if kind == "p" and float(amount) <= 1 and unit is None:
        return Chance(float(amount))
    raise _misread(text)


def _misread(text: str) -> ConfigError:
    return ConfigError(
        subject=f"the fault {text!r}",
        expected="something like 'kill:replica1@t=2', 'pause:replica2,3s@step=20', 'drop:push.reply=0.05', "
        "'dup:push=0.1', 'delay=50ms+-20' or 'cut:replica2|shard0,5s@t=1'",
        got="a text that is none of these",
        remedy=f"Message kinds are {', '.join(sorted(KINDS))}; probabilities lie between 0 and 1.",
    )
