"""One language for what goes wrong: in `Job(chaos=)`, on real processes as in virtual time, and in tests.

A text is a list of faults, separated by ``;``::

    kill:replica1@t=2            the role dies at two seconds; ",restart=1" starts it again a second later
    kill:replica@p=0.01          each replica dies with this probability before each minibatch
    pause:replica2,3s@step=20    the role stands still for three seconds from its 20th minibatch on
    drop:push.reply=0.05         a message is lost with this probability; kinds: push, fetch, ask, refuse, hold,
                                 release and inquire, each with ".reply" for its answer; goodbye, recall,
                                 resume, returned; "*" is every message
    dup:push=0.1                 a message arrives twice
    delay=50ms+-20               every message takes 30 to 70 ms, so that messages overtake one another
    cut:replica2|shard0,5s@t=1   nothing passes between the two for five seconds

Roles are replica2, shard0, coordinator and evaluator; a kind without a number, as in ``replica``, is each of its roles.
``@t`` is seconds from the start, ``@step`` and ``@p`` are of the role's own minibatches, or of the whole run's for
one that computes none. Without ``@`` it is at the start. Seconds are written ``3``, ``3s`` or ``250ms``.

>>> faults = parse("drop:push.reply=0.05;pause:replica2,3s@step=20")
>>> faults
(Drop(kind='push.reply', probability=0.05), Pause(role='replica2', seconds=3.0, when=AtStep(step=20)))
>>> in_words(faults)
'drop:push.reply=0.05; pause:replica2,3s@step=20'
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from squall.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AtTime:
    """At this time [seconds from the start]."""

    seconds: float

    def __str__(self) -> str:
        return f"@t={_number(self.seconds)}"


@dataclass(frozen=True, slots=True)
class AtStep:
    """When the role begins its `step`-th minibatch, counted from 0."""

    step: int

    def __str__(self) -> str:
        return f"@step={self.step}"


@dataclass(frozen=True, slots=True)
class Chance:
    """With this probability before each minibatch of the role."""

    probability: float

    def __str__(self) -> str:
        return f"@p={_number(self.probability)}"


When: TypeAlias = AtTime | AtStep | Chance


@dataclass(frozen=True, slots=True)
class Kill:
    """The role dies; `role` without a number stands for all of its kind. It starts again after `restart` s.

    None: as the cluster's own rule says (`squall.Restarts`); in virtual time it stays dead.
    """

    role: str
    when: When
    restart: float | None = None

    def __str__(self) -> str:
        again = "" if self.restart is None else f",restart={_seconds_text(self.restart)}"
        return f"kill:{self.role}{again}{self.when}"


@dataclass(frozen=True, slots=True)
class Pause:
    """The role stands still for so long [seconds]."""

    role: str
    seconds: float
    when: When

    def __str__(self) -> str:
        return f"pause:{self.role},{_seconds_text(self.seconds)}{self.when}"


@dataclass(frozen=True, slots=True)
class Drop:
    """A message of this kind is lost with this probability."""

    kind: str
    probability: float

    def __str__(self) -> str:
        return f"drop:{self.kind}={_number(self.probability)}"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A message of this kind arrives twice with this probability."""

    kind: str
    probability: float

    def __str__(self) -> str:
        return f"dup:{self.kind}={_number(self.probability)}"


@dataclass(frozen=True, slots=True)
class Delay:
    """Every message takes between ``seconds - spread`` and ``seconds + spread``."""

    seconds: float
    spread: float = 0.0

    def __str__(self) -> str:
        spread = f"+-{_seconds_text(self.spread)}" if self.spread else ""
        return f"delay={_seconds_text(self.seconds)}{spread}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between two roles for so long [seconds]."""

    one: str
    other: str
    seconds: float
    when: AtTime

    def __str__(self) -> str:
        return f"cut:{self.one}|{self.other},{_seconds_text(self.seconds)}{self.when}"


Fault: TypeAlias = Kill | Pause | Drop | Duplicate | Delay | Cut

KINDS = {
    f"{kind}{reply}"
    for kind in ("push", "fetch", "ask", "refuse", "hold", "release", "inquire")
    for reply in ("", ".reply")
} | {
    "goodbye",
    "recall",
    "resume",
    "returned",
    "*",
}
_DIGITS = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


def parse(text: str) -> tuple[Fault, ...]:
    """Read a list of faults.

    Raises:
        ConfigError: says which fault is not understood, at which character, what was expected there, and what is.

    >>> parse("kill:replica1@time=2")
    Traceback (most recent call last):
    ...
    squall.errors.ConfigError: the fault 'kill:replica1@time=2', character 15: expected t=, step= or p=, but got 'time=2'.
    """
    return tuple(_Reader(part.strip()).fault() for part in text.split(";") if part.strip())


def faults_of(told: str | Sequence[Fault], subject: str) -> tuple[Fault, ...]:
    """What a user has given, as text or as values.

    Raises:
        ConfigError: neither; `subject` names what it was given as.
    """
    if isinstance(told, str):
        return parse(told)
    faults = tuple(fault for fault in told if isinstance(fault, Fault)) if isinstance(told, Sequence) else ()
    if not isinstance(told, Sequence) or len(faults) < len(told):
        raise ConfigError(subject=subject, expected="a text of faults, or a sequence of them", got=repr(told))
    return faults


def in_words(faults: Iterable[Fault]) -> str:
    """The text that `parse` reads as these faults."""
    return "; ".join(map(str, faults))


def is_named(name: str, role: str) -> bool:
    """Whether a role's name is the one that a fault says, or of the kind that it says.

    >>> is_named("replica2", "replica"), is_named("replica2", "replica2"), is_named("replica21", "replica2")
    (True, True, False)
    """
    return name == role or name.rstrip("0123456789") == role


def expect_roles(
    faults: Iterable[Fault], *, replicas: int, shards: int, has_evaluator: bool, where: str
) -> None:
    """Refuse what would befall a role that a run does not have.

    Args:
        where: what the faults were given as, for errors.

    Raises:
        ConfigError: names the fault and the role.

    >>> expect_roles(parse("kill:replica9@step=5"), replicas=2, shards=1, has_evaluator=False, where="Job(chaos=)")
    Traceback (most recent call last):
    ...
    squall.errors.ConfigError: the fault 'kill:replica9@step=5' in Job(chaos=): expected a role of the run: replica0 to replica1, shard0, coordinator, but got 'replica9'.
    """
    counts = {"replica": replicas, "shard": shards}
    for fault in faults:
        for role in (getattr(fault, name) for name in ("role", "one", "other") if hasattr(fault, name)):
            kind, number = role.rstrip("0123456789"), role.lstrip("abcdefghijklmnopqrstuvwxyz")
            is_there = role == "coordinator" or (role == "evaluator" and has_evaluator)
            if not is_there and not (kind in counts and int(number or 0) < counts[kind]):
                numbered = [
                    f"{kind}0 to {kind}{count - 1}" if count > 1 else f"{kind}0"
                    for kind, count in counts.items()
                ]
                others = "coordinator or evaluator" if has_evaluator else "coordinator"
                raise ConfigError(
                    subject=f"the fault '{fault}' in {where}",
                    expected=f"a role of the run: {', '.join(numbered)}, {others}",
                    got=repr(role),
                    remedy="Give test=, and there is one." if role == "evaluator" else "",
                )


def role_of(name: str) -> str:
    """A process by the name that faults give it: all of a replica's are one role.

    >>> role_of("replica2.0"), role_of("shard1")
    ('replica2', 'shard1')
    """
    return name.partition(".")[0]


class _Reader:
    """Reads one fault from the left; knows where it is when something is not as it should be."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def fault(self) -> Fault:
        name = self._take(r"[a-z]+", "kill, pause, drop, dup, delay or cut")
        read: dict[str, Callable[[], Fault]] = {
            "kill": self._kill,
            "pause": self._pause,
            "drop": lambda: Drop(*self._message()),
            "dup": lambda: Duplicate(*self._message()),
            "delay": self._delay,
            "cut": self._cut,
        }
        if name not in read:
            self._at = 0
            raise self._misread("kill, pause, drop, dup, delay or cut")
        found = read[name]()
        if self._at < len(self._text):
            raise self._misread("its end")
        return found

    def _kill(self) -> Kill:
        self._sign(":")
        role = self._role()
        restart = None
        if self._is_next(","):
            self._take(r"restart=", "restart=, as in kill:replica1,restart=1s@t=2")
            restart = self._seconds()
        return Kill(role, self._when(), restart)

    def _pause(self) -> Pause:
        self._sign(":")
        role = self._role()
        self._sign(",", "a comma and how long, as in pause:replica2,3s@step=20")
        seconds = self._seconds()
        return Pause(role, seconds, self._when())

    def _message(self) -> tuple[str, float]:
        self._sign(":")
        before = self._at
        kind = self._take(r"[a-z.]+|\*", "a kind of message")
        if kind not in KINDS:
            self._at = before
            raise self._misread(f"one of {', '.join(sorted(KINDS))}")
        self._sign("=")
        return kind, self._probability()

    def _delay(self) -> Delay:
        self._sign("=")
        amount, unit = self._amount()
        seconds, spread = _in_seconds(amount, unit), 0.0
        if self._is_next("+-"):
            amount, own = self._amount()
            spread = _in_seconds(amount, own or unit)
        return Delay(seconds, spread)

    def _cut(self) -> Cut:
        self._sign(":")
        one = self._role()
        self._sign("|", "'|' and another role, as in cut:replica2|shard0,5s@t=1")
        other = self._role()
        self._sign(",", "a comma and how long, as in cut:replica2|shard0,5s@t=1")
        seconds = self._seconds()
        before = self._at
        when = self._when()
        if not isinstance(when, AtTime):
            self._at = before
            raise self._misread("@t=, for a cut has no minibatches of its own")
        return Cut(one, other, seconds, when)

    # Parts ----------------------------------------------------------------------------------------------

    def _role(self) -> str:
        expected = "replica, shard (all of them, or with a number), coordinator or evaluator"
        return self._take(r"(?:replica|shard)\d*|coordinator|evaluator", expected)

    def _when(self) -> When:
        if not self._is_next("@"):
            return AtTime(0.0)
        match self._take(r"(?:t|step|p)=", "t=, step= or p="):
            case "t=":
                return AtTime(self._seconds())
            case "step=":
                return AtStep(int(self._take(r"\d+(?![\d.])", "a whole number of minibatches")))
            case _:
                return Chance(self._probability())

    def _seconds(self) -> float:
        return _in_seconds(*self._amount())

    def _amount(self) -> tuple[str, str]:
        text = self._take(rf"{_DIGITS}(?:ms|s)?", "seconds, as in 3, 3s or 250ms")
        number = text.rstrip("ms")
        return number, text[len(number) :]

    def _probability(self) -> float:
        before = self._at
        value = float(self._take(_DIGITS, "a probability from 0 to 1"))
        if value > 1:
            self._at = before
            raise self._misread("a probability from 0 to 1")
        return value

    def _sign(self, sign: str, expected: str = "") -> None:
        if not self._is_next(sign):
            raise self._misread(expected or repr(sign))

    def _is_next(self, sign: str) -> bool:
        is_there = self._text.startswith(sign, self._at)
        self._at += len(sign) * is_there
        return is_there

    def _take(self, pattern: str, expected: str) -> str:
        found = re.compile(pattern).match(self._text, self._at)
        if found is None:
            raise self._misread(expected)
        self._at = found.end()
        return found.group()

    def _misread(self, expected: str) -> ConfigError:
        rest = self._text[self._at :]
        return ConfigError(
            subject=f"the fault {self._text!r}, character {self._at + 1}",
            expected=expected,
            got=repr(rest) if rest else "nothing more",
        )


def _in_seconds(amount: str, unit: str) -> float:
    return float(amount) / (1000 if unit == "ms" else 1)


def _seconds_text(seconds: float) -> str:
    return f"{_number(seconds)}s"


def _number(value: float) -> str:
    """Digits that read back as the same number."""
    return repr(float(value)).removesuffix(".0")
