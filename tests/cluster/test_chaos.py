"""Tests of squall.cluster.chaos: which signal goes to whom when.

Faults planted here by hand, each seen to fail a test: a chance drawn once for several minibatches · one fault of a kind
striking only its first role · a pause that a kill does not end · a step struck again · the run's steps taken for a
replica's own · a shorter pause that ends a longer one · the end leaving a role standing still.
"""

import random
from collections.abc import Callable

import pytest

from squall.cluster.chaos import Chaos, Strike, expect_kinds, expect_modelled
from squall.errors import ConfigError
from squall.faults import parse

ROLES = ["shard0", "shard1", "coordinator", "replica0", "replica1", "replica2", "evaluator"]


def never(number: int, role: str, place: int) -> float:
    return 1.0


def seeded(seed: int) -> Callable[[int, str, int], float]:
    return lambda number, role, place: random.Random(f"{seed}/{number}/{role}/{place}").random()


def told(strikes: list[Strike]) -> list[tuple[str, str]]:
    return [(strike.role, strike.what) for strike in strikes]


def test_a_time_strikes_once_and_each_role_that_it_means() -> None:
    chaos = Chaos(parse("kill:replica@t=2"), ROLES, never)
    assert told(chaos.due(1.9, {})) == []
    assert told(chaos.due(2.3, {})) == [("replica0", "kill"), ("replica1", "kill"), ("replica2", "kill")]
    assert chaos.is_over
    assert told(chaos.due(99.0, {})) == []


def test_a_step_is_the_replicas_own_and_the_runs_for_who_computes_nothing() -> None:
    chaos = Chaos(parse("kill:replica1@step=10; kill:shard1@step=30"), ROLES, never)
    assert told(chaos.due(0.0, {"replica0": 19, "replica1": 9})) == []
    assert told(chaos.due(0.0, {"replica0": 19, "replica1": 10})) == [("replica1", "kill")]
    assert told(chaos.due(0.0, {"replica0": 20, "replica1": 10})) == [("shard1", "kill")]
    assert chaos.is_over


def test_a_pause_ends_after_its_seconds_and_two_that_overlap_end_with_the_later() -> None:
    chaos = Chaos(parse("pause:shard,3s@t=1; pause:shard0,1s@t=3.5"), ROLES, never)
    times = [0.5, 1.0, 2.0, 3.5, 3.9, 4.0, 4.4, 4.5]
    assert {now: told(strikes) for now in times if (strikes := chaos.due(now, {}))} == {
        1.0: [("shard0", "stop"), ("shard1", "stop")],
        3.5: [("shard0", "stop")],
        4.0: [("shard1", "go on")],
        4.5: [("shard0", "go on")],
    }


def test_a_shorter_pause_within_a_longer_one_does_not_end_it() -> None:
    chaos = Chaos(parse("pause:shard0,9s@t=1; pause:shard0,1s@t=2"), ROLES, never)
    times = [1.0, 2.0, 3.0, 9.9, 10.0]
    assert [told(chaos.due(now, {})) for now in times] == [
        [("shard0", "stop")],
        [("shard0", "stop")],
        [],
        [],
        [("shard0", "go on")],
    ]


def test_a_kill_ends_a_pause() -> None:
    chaos = Chaos(parse("pause:replica0,9s@t=1; kill:replica0@t=2"), ROLES, never)
    chaos.due(1.0, {})
    assert told(chaos.due(2.0, {})) == [("replica0", "kill")]
    assert told(chaos.due(20.0, {})) == []


def test_at_the_end_whoever_stands_still_goes_on_and_nothing_else_happens() -> None:
    chaos = Chaos(parse("pause:replica0,9s@t=1; kill:replica1@t=2"), ROLES, never)
    chaos.due(1.0, {})
    assert told(chaos.calm()) == [("replica0", "go on")]
    assert told(chaos.due(20.0, {})) == []
    assert chaos.is_over


def test_chance_strikes_at_the_same_minibatches_however_often_it_is_asked() -> None:
    """Against a loop that looks at each minibatch by itself; the share of those struck is the probability."""
    faults = parse("kill:replica@p=0.02; pause:shard1,0s@p=0.01")
    one_by_one, in_jumps = (Chaos(faults, ROLES, seeded(5)) for _ in range(2))
    draw = random.Random(0)
    struck, place = [], 0
    for step in range(1, 3001):
        kills = [s for s in one_by_one.due(0.0, {"replica0": step}) if s.role == "replica0"]
        struck += [step - 1] * len(kills)
    expected = [step for step in range(3000) if seeded(5)(0, "replica0", step) < 0.02]
    assert struck == expected
    assert 35 < len(struck) < 90
    while place < 3000:
        before, place = place, min(3000, place + draw.randrange(1, 40))
        kills = [s for s in in_jumps.due(0.0, {"replica0": place}) if s.role == "replica0"]
        assert bool(kills) == any(before <= step < place for step in expected)


def test_what_cannot_be_done_to_processes_is_refused_by_name() -> None:
    expect_kinds(parse("kill:shard0@t=1; pause:evaluator,1s"), "squall.Local", is_tcp=False)
    expect_kinds(parse("delay=1; drop:push=0.5; cut:replica|shard,1s"), "squall.Local", is_tcp=True)
    with pytest.raises(ConfigError, match=r"the fault 'dup:push=0.5' under squall.Local: .* arrives twice"):
        expect_kinds(parse("dup:push=0.5"), "squall.Local", is_tcp=True)
    for text, what in (
        ("delay=1s", "delayed"),
        ("drop:ask=0.5", "lost"),
        ("cut:replica|shard,1s@t=0", "held up"),
    ):
        with pytest.raises(ConfigError, match=rf"can be {what}, but got shared memory"):
            expect_kinds(parse(text), "squall.Local", is_tcp=False)


@pytest.mark.parametrize("text", ["kill:evaluator@t=1", "pause:evaluator,1s", "cut:evaluator|shard0,1s"])
def test_what_virtual_time_has_no_answer_to_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"the fault '{text.split('@')[0].replace('|', '.')}"):
        expect_modelled(parse(text), "squall.Simulated")
