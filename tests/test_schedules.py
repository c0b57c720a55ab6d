"""Schedules, against torch.optim.lr_scheduler stepped once per minibatch.

Planted faults, each seen to fail a test here: the change one minibatch early and late; gamma added up; half of the
cosine's period; a cosine that rises again; a line that goes on; a warm-up that begins at zero; a schedule inside
that waits for the warm-up's end; the settings told in another order; `True` taken as a count; an overflow raised.
"""

import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import squall
from squall.errors import ConfigError
from squall.rules.sgd import Sgd
from squall.schedules import Schedule, cosine, linear, step, warmup

SchedulerOf = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def rates_of(rate: float, scheduler_of: SchedulerOf, minibatches: int) -> list[float]:
    """What torch's scheduler makes of a rate in a plain loop."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = scheduler_of(optimizer)
    rates = []
    for _ in range(minibatches):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    rising = lr_scheduler.LinearLR(optimizer, 1 / 12, 1.0, 11)
    return lr_scheduler.ChainedScheduler([rising, lr_scheduler.StepLR(optimizer, 7, 0.5)])


@pytest.mark.parametrize(
    ("schedule", "rate", "scheduler_of"),
    [
        (step(0.3, every=7, gamma=0.1), 0.3, lambda o: lr_scheduler.StepLR(o, 7, 0.1)),
        (step(0.3, every=1, gamma=1.1), 0.3, lambda o: lr_scheduler.StepLR(o, 1, 1.1)),
        (cosine(0.3, total=39), 0.3, lambda o: lr_scheduler.CosineAnnealingLR(o, 39)),
        (cosine(0.3, total=60, final=0.01), 0.3, lambda o: lr_scheduler.CosineAnnealingLR(o, 60, 0.01)),
        (linear(0.3, 0.06, total=20), 0.3, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, 20)),
        (linear(0.03, 0.3, total=50), 0.3, lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 50)),
        (warmup(0.3, 12), 0.3, lambda o: lr_scheduler.LinearLR(o, 1 / 12, 1.0, 11)),
        (warmup(step(0.3, every=7, gamma=0.5), 12), 0.3, chained),
    ],
)
def test_a_schedule_is_torchs(schedule: Schedule, rate: float, scheduler_of: SchedulerOf) -> None:
    expected = rates_of(rate, scheduler_of, 40)

    assert [schedule(minibatches) for minibatches in range(40)] == pytest.approx(
        expected, rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize(
    ("schedule", "final"),
    [(cosine(1.0, 10), 0.0), (cosine(1.0, 10, 0.25), 0.25), (linear(0.7, 0.1, 10), 0.1)],
)
def test_at_the_end_and_after_it_the_final_rate_holds(schedule: Schedule, final: float) -> None:
    assert [schedule(minibatches) for minibatches in (10, 11, 20, 10**12)] == [final] * 4
    assert schedule(9) > final


def test_a_warm_up_begins_with_a_part_and_lets_the_schedule_inside_count_from_the_start() -> None:
    schedule = warmup(lambda minibatches: float(minibatches + 1), 2)

    assert [schedule(minibatches) for minibatches in range(4)] == [0.5, 2, 3, 4]
    assert warmup(0.5, 1)(0) == 0.5


SCHEDULES = [step(0.5, 3, 0.1), cosine(0.5, 9, 0.1), linear(0.1, 0.5, 9), warmup(cosine(0.5, 9), 4)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_a_value_that_tells_how_to_make_it(schedule: Schedule) -> None:
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(pickle.loads(pickle.dumps(schedule))) == hash(schedule)
    names = {"step": step, "cosine": cosine, "linear": linear, "warmup": warmup}
    assert eval(repr(schedule), names) == schedule
    with pytest.raises(FrozenInstanceError):
        schedule.total = 1  # type: ignore[attr-defined]


def test_schedules_with_other_settings_are_not_equal() -> None:
    assert len({repr(schedule) for schedule in SCHEDULES}) == len(set(SCHEDULES)) == 4
    assert cosine(0.5, 9) != cosine(0.5, 9, 0.1)


def test_a_rule_with_a_schedule_asks_it_and_tells_it() -> None:
    rule = Sgd(learning_rate=step(0.5, every=10, gamma=0.5))

    assert (rule.rate_at(9), rule.rate_at(10)) == (0.5, 0.25)
    assert rule.describe()["learning_rate"] == "step(learning_rate=0.5, every=10, gamma=0.5)"


def halving(minibatches: int) -> float:
    return 0.5**minibatches


def test_a_function_in_a_warm_up_is_told_by_its_name() -> None:
    assert repr(warmup(halving, 3)) == "warmup(schedule=halving, minibatches=3)"


def test_a_rate_that_grows_without_end_is_refused_and_named() -> None:
    with pytest.raises(ConfigError, match=r"step\(learning_rate=1\.0, every=1, gamma=2\.0\) of Sgd.*got inf"):
        Sgd(learning_rate=step(1.0, every=1, gamma=2.0)).rate_at(5000)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("step(learning_rate=)", lambda value: step(value, 1, 0.5)),
        ("step(gamma=)", lambda value: step(0.1, 1, value)),
        ("cosine(learning_rate=)", lambda value: cosine(value, 1)),
        ("cosine(final=)", lambda value: cosine(0.1, 1, value)),
        ("linear(start=)", lambda value: linear(value, 0.1, 1)),
        ("linear(final=)", lambda value: linear(0.1, value, 1)),
        ("warmup(schedule=)", lambda value: warmup(value, 1)),
    ],
)
def test_what_is_no_rate_is_refused_by_name(name: str, make: Callable[[Any], Schedule], value: Any) -> None:
    with pytest.raises(ConfigError, match="expected a finite number of at least 0") as caught:
        make(value)
    assert (caught.value.subject, caught.value.got) == (f"squall.schedules.{name}", repr(value))


@pytest.mark.parametrize("value", [0, -1, 1.5, 10.0, "10", None, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("step(every=)", lambda value: step(0.1, value, 0.5)),
        ("cosine(total=)", lambda value: cosine(0.1, value)),
        ("linear(total=)", lambda value: linear(0.1, 0.2, value)),
        ("warmup(minibatches=)", lambda value: warmup(0.1, value)),
    ],
)
def test_what_is_no_count_is_refused_by_name(name: str, make: Callable[[Any], Schedule], value: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number of minibatches of at least 1") as caught:
        make(value)
    assert (caught.value.subject, caught.value.got) == (f"squall.schedules.{name}", repr(value))


def test_schedules_are_there_under_the_packages_name() -> None:
    assert squall.schedules.cosine is cosine
