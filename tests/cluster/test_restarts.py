"""Tests of squall.cluster.restarts: who is started again, when, and who is given up.

Faults planted here by hand, each seen to fail a test: deaths counted over a whole run · the pause not capped · a role
told as due twice · the incarnation not raised · one more start than `most` · a stated pause counted as a death ·
`worked` forgiving everybody.
"""

import random
from typing import Any

import pytest

from squall.cluster.restarts import NEVER, RestartBook, Restarts
from squall.errors import ConfigError


def test_pauses_grow_by_the_factor_up_to_the_longest() -> None:
    rule = Restarts(most=9, first_s=0.5, factor=2.0, longest_s=3.0)
    assert [rule.pause_s(deaths) for deaths in range(1, 7)] == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert Restarts(first_s=1.0, factor=1e9, longest_s=7.0).pause_s(10**9) == 7.0


def test_a_role_that_never_works_is_started_as_often_as_the_rule_says_and_then_given_up() -> None:
    book = RestartBook(Restarts(most=3, first_s=1.0, factor=2.0))
    now, starts = 0.0, []
    while (again := book.died("replica0.0", incarnation=len(starts), now=now)) is not None:
        starts.append((again.incarnation, again.at_s - now))
        now = again.at_s
        assert book.due(now - 0.01) == []
        assert book.due(now) == [again]
        assert book.due(now + 100.0) == []
    assert starts == [(1, 1.0), (2, 2.0), (3, 4.0)]
    assert book.is_given_up("replica0.0")


def test_a_role_that_works_in_between_is_started_for_ever() -> None:
    book = RestartBook(Restarts(most=1, first_s=0.25))
    for life in range(50):
        again = book.died("replica0.0", incarnation=life, now=float(life))
        assert again is not None
        assert again.at_s == life + 0.25
        assert book.due(life + 0.5) == [again]
        book.worked("replica0.0")


def test_roles_are_counted_each_for_itself() -> None:
    book = RestartBook(Restarts(most=1))
    assert book.died("replica0.0", incarnation=0, now=0.0) is not None
    assert book.died("shard0", incarnation=4, now=0.0) is not None
    assert book.is_awaited("replica0.0")
    assert [again.incarnation for again in book.due(10.0)] == [1, 5]
    assert not book.is_awaited("replica0.0")
    book.worked("shard0")
    assert book.died("replica0.0", incarnation=1, now=11.0) is None
    assert book.died("shard0", incarnation=5, now=11.0) is not None
    assert not book.is_given_up("shard0")


def test_a_stated_pause_is_no_death_of_the_roles_own() -> None:
    book = RestartBook(NEVER)
    again = book.died("replica2.0", incarnation=1, now=3.0, after_s=2.0)
    assert again is not None
    assert (again.incarnation, again.at_s, again.deaths) == (2, 5.0, 0)
    assert book.died("replica2.0", incarnation=2, now=6.0) is None


def test_who_waits_is_told_in_words_and_forgotten_at_the_end() -> None:
    book = RestartBook(Restarts(first_s=4.0))
    book.died("replica1.0", incarnation=1, now=10.0)
    assert book.waits(11.0) == ("replica1.0 is started again in 3 s, for the 2nd time",)
    book.died("shard0", incarnation=0, now=10.0)
    book.forget(["replica1.0"])
    assert [again.role for again in book.due(100.0)] == ["shard0"]
    assert book.waits(100.0) == ()


def test_any_sequence_of_deaths_and_work_is_as_a_plain_count_says() -> None:
    """Against a loop that keeps nothing but a number for each role."""
    for seed in range(200):
        draw = random.Random(seed)
        rule = Restarts(most=draw.randrange(4), first_s=1.0, factor=1.0)
        book, counts, lives = RestartBook(rule), dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
        for now in range(30):
            role = draw.choice("ab")
            if draw.random() < 0.3:
                book.worked(role)
                counts[role] = 0
                continue
            again = book.died(role, incarnation=lives[role], now=float(now))
            counts[role] += 1
            assert (again is not None) == (counts[role] <= rule.most)
            if again is not None:
                lives[role] += 1
                assert again.incarnation == lives[role]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"most": -1}, r"Restarts\(most=\): expected a whole number of at least 0, but got -1"),
        ({"most": True}, "whole number"),
        ({"first_s": -0.1}, r"Restarts\(first_s=\): expected a number of at least 0, but got -0.1"),
        ({"factor": 0.5}, r"Restarts\(factor=\): expected a number of at least 1"),
        ({"longest_s": float("inf")}, "longest_s"),
        ({"longest_s": float("nan")}, "longest_s"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Restarts(**settings)
