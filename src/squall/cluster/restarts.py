"""Whether a role that has died is started again, and when: a rule, and the book that is kept by it. No clock here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from squall.errors import ConfigError
from squall.keywords import named


@named
@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often, and how soon, a role that has died is started again.

    A role that works in between may die as often as it likes: machines do. One that dies again and again without
    having done anything is given up.

    Args:
        most: deaths in a row, without work in between, of which each is followed by another start; 0: none is.
        first_s: from the first of them to the next start [seconds].
        factor: how much longer it takes after each further one.
        longest_s: no pause is longer [seconds].

    Raises:
        ConfigError: a number makes no sense.

    >>> [Restarts().pause_s(deaths) for deaths in (1, 2, 3)]
    [0.1, 0.3, 0.9]
    """

    most: int = 5
    first_s: float = 0.1
    factor: float = 3.0
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.most, int) or isinstance(self.most, bool) or self.most < 0:
            raise _wrong("most", "a whole number of at least 0", self.most)
        for name, least in (("first_s", 0.0), ("factor", 1.0), ("longest_s", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise _wrong(name, f"a number of at least {least:g}", value)

    def pause_s(self, deaths: int) -> float:
        """How long to wait after so many deaths in a row, 1 or more [seconds]."""
        pause = self.first_s
        for _ in range(deaths - 1):
            if pause >= self.longest_s:
                break
            pause *= self.factor
        return min(round(pause, 6), self.longest_s)


NEVER = Restarts(most=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """A role is to be started again.

    Attributes:
        role: its name.
        incarnation: of its next life.
        at_s: when, by the clock that the book was told.
        deaths: in a row, without work in between.
    """

    role: str
    incarnation: int
    at_s: float
    deaths: int


@dataclass(slots=True)
class _Life:
    deaths: int = 0  # since it last worked
    is_given_up: bool = False


@dataclass(slots=True)
class RestartBook:
    """Who died how often since it last worked, and who is to be started when.

    >>> book = RestartBook(Restarts(most=1, first_s=0.5))
    >>> again = book.died("replica1.0", incarnation=0, now=10.0)
    >>> again.incarnation, again.at_s, book.due(10.4), [one.role for one in book.due(10.5)]
    (1, 10.5, [], ['replica1.0'])
    >>> book.died("replica1.0", incarnation=1, now=11.0) is None, book.is_given_up("replica1.0")
    (True, True)
    """

    rule: Restarts
    _lives: dict[str, _Life] = field(default_factory=dict)
    _waiting: dict[str, Again] = field(default_factory=dict)

    def died(self, role: str, *, incarnation: int, now: float, after_s: float | None = None) -> Again | None:
        """A role has died in this incarnation: when it starts again; None if it is given up.

        Args:
            after_s: start it after just so long, whatever the rule says; its death does not count.
        """
        life = self._lives.setdefault(role, _Life())
        if after_s is None:
            life.deaths += 1
            if life.deaths > self.rule.most:
                life.is_given_up = True
                return None
            after_s = self.rule.pause_s(life.deaths)
        again = Again(role=role, incarnation=incarnation + 1, at_s=now + after_s, deaths=life.deaths)
        self._waiting[role] = again
        return again

    def worked(self, role: str) -> None:
        """A role has done something since its last start: its earlier deaths are forgiven."""
        if role in self._lives:
            self._lives[role].deaths = 0

    def due(self, now: float) -> list[Again]:
        """Who is to be started now, each told once."""
        due = sorted(
            (again for again in self._waiting.values() if again.at_s <= now), key=lambda a: (a.at_s, a.role)
        )
        for again in due:
            del self._waiting[again.role]
        return due

    def is_given_up(self, role: str) -> bool:
        return role in self._lives and self._lives[role].is_given_up

    def is_awaited(self, role: str) -> bool:
        """Whether it is dead and will be started."""
        return role in self._waiting

    def forget(self, roles: Iterable[str]) -> None:
        """Do not start these any more, the run is about to end."""
        for role in roles:
            self._waiting.pop(role, None)

    def waits(self, now: float) -> tuple[str, ...]:
        """The same in words, for people."""
        return tuple(
            f"{again.role} is started again in {max(0.0, again.at_s - now):.0f} s, for the "
            f"{_ordinal(again.incarnation)} time"
            for again in self._waiting.values()
        )


def _ordinal(number: int) -> str:
    """
    >>> [_ordinal(number) for number in (1, 2, 3, 4, 11, 12, 21, 112)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '21st', '112th']
    """
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def _wrong(name: str, expected: str, got: object) -> ConfigError:
    return ConfigError(subject=f"Restarts({name}=)", expected=expected, got=repr(got))
