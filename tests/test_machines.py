"""Tests of squall.machines with a machine of two phases.

Faults planted, each caught: an illegal event told to the story · the story unbounded · the effects of `drive` carried
out in reverse · results handed over before the other effects · the key of a message taken from its envelope.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import pytest

from squall.errors import LocalProtocolError
from squall.machines import STORY_LENGTH, IllegalEventError, Machine, drive, key_of


@dataclass(frozen=True)
class Coin:
    value: int


@dataclass(frozen=True)
class Push:
    pass


@dataclass(frozen=True)
class Envelope:
    message: Coin | Push


class Phase(Enum):
    LOCKED = "locked"
    OPEN = "open"


class Turnstile(Machine):
    TABLE: ClassVar[Mapping[tuple[Enum, type], str]] = {
        (Phase.LOCKED, Coin): "_coin",
        (Phase.OPEN, Coin): "_coin",
        (Phase.OPEN, Push): "_push",
    }

    def __init__(self) -> None:
        super().__init__(Phase.LOCKED)
        self.coins = 0

    def _coin(self, event: Envelope) -> tuple[str, ...]:
        self.phase = Phase.OPEN
        self.coins += 1
        return ("unlock", "ring")

    def _push(self, event: Push) -> tuple[str, ...]:
        self.phase = Phase.LOCKED
        return ("lock",)


def test_the_table_says_which_method_takes_an_event() -> None:
    turnstile = Turnstile()

    assert turnstile.handle(Envelope(Coin(1))) == ("unlock", "ring")
    assert turnstile.handle(Push()) == ("lock",)

    assert list(turnstile.story) == [(Phase.LOCKED, Envelope(Coin(1))), (Phase.OPEN, Push())]


def test_an_event_that_the_table_lacks_is_refused_and_changes_nothing() -> None:
    turnstile = Turnstile()

    with pytest.raises(IllegalEventError, match="Turnstile in phase LOCKED cannot take Push"):
        turnstile.handle(Push())

    assert (turnstile.phase, turnstile.coins, list(turnstile.story)) == (Phase.LOCKED, 0, [])
    assert issubclass(IllegalEventError, LocalProtocolError)


def test_an_event_with_a_message_is_listed_under_the_message() -> None:
    assert key_of(Envelope(Push())) is Push
    assert key_of(Push()) is Push


def test_the_story_keeps_the_newest_events() -> None:
    turnstile = Turnstile()
    for value in range(STORY_LENGTH + 5):
        turnstile.handle(Coin(value))

    assert len(turnstile.story) == STORY_LENGTH
    assert turnstile.story[-1][1] == Coin(STORY_LENGTH + 4)


def test_driving_carries_out_all_effects_before_it_hands_over_what_came_of_them() -> None:
    turnstile = Turnstile()
    done: list[str] = []
    seen: list[tuple[object, tuple[str, ...]]] = []

    def carry_out(effect: str) -> Push | None:
        done.append(effect)
        return Push() if effect == "unlock" else None

    drive(turnstile, Coin(1), carry_out, lambda machine, event, effects: seen.append((event, effects)))

    assert done == ["unlock", "ring", "lock"]
    assert seen == [(Coin(1), ("unlock", "ring")), (Push(), ("lock",))]
