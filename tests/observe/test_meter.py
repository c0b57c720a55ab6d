"""Tests of squall.observe.meter: rates of streams whose rate is known by construction.

Faults planted here by hand, each seen to fail a test: rates since the run began · reports of the window forgotten by
age alone · loss as a mean of blocks instead of minibatches · the total counted over the window · time before the window
counted after a pause · staleness per report instead of per push · work of before a resume counted as speed.
"""

import math

import pytest

from squall.observe.events import Progress, RoleStatus
from squall.observe.meter import FEWEST_REPORTS, WINDOW_S, ProgressMeter


def at(meter: ProgressMeter, now: float) -> Progress:
    return meter.progress(now, stage=0, epoch=0)


def feed(meter: ProgressMeter, *, start: float, stop: float, every: float, loss: float = 1.0) -> None:
    for count in range(1, round((stop - start) / every) + 1):
        meter.add(start + count * every, minibatches=2, examples=20, loss_sum=2 * loss)


def test_before_the_first_report_nothing_is_known() -> None:
    progress = at(ProgressMeter(now=0.0), 1.0)
    assert (progress.minibatches, progress.train_loss, progress.staleness) == (0, None, None)
    assert (progress.examples_per_second, progress.pushes_per_second) == (0.0, 0.0)


def test_rates_are_those_of_the_last_seconds_and_the_total_is_of_the_whole_run() -> None:
    meter = ProgressMeter(now=0.0)
    feed(meter, start=0.0, stop=20.0, every=0.1)
    feed(meter, start=20.0, stop=30.0, every=0.5)

    progress = at(meter, 30.0)

    assert progress.examples_per_second == pytest.approx(20 / 0.5)
    assert progress.pushes_per_second == pytest.approx(1 / 0.5)
    assert progress.minibatches == 2 * (200 + 20)


def test_a_slow_run_has_a_steady_rate_although_nothing_came_for_a_window() -> None:
    meter = ProgressMeter(now=0.0)
    feed(meter, start=0.0, stop=400.0, every=20.0)

    assert at(meter, 400.0).examples_per_second == pytest.approx(1.0)
    assert at(meter, 410.0).examples_per_second == pytest.approx(1.0, rel=0.1)


def test_rates_fall_toward_zero_when_nothing_comes_any_more() -> None:
    meter = ProgressMeter(now=0.0)
    feed(meter, start=0.0, stop=10.0, every=0.01)

    rates = [at(meter, now).examples_per_second for now in (10.0, 15.0, 30.0, 1000.0)]

    assert rates[0] == pytest.approx(2000.0)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1.0


def test_a_pause_weighs_on_the_rate_for_one_window_at_most() -> None:
    meter = ProgressMeter(now=0.0)
    feed(meter, start=0.0, stop=10.0, every=0.1)
    feed(meter, start=1000.0, stop=1000.0 + WINDOW_S, every=0.1)
    assert at(meter, 1000.0 + WINDOW_S).examples_per_second == pytest.approx(200.0)


def test_the_loss_is_a_mean_over_minibatches_and_forgets_what_is_not_finite() -> None:
    meter = ProgressMeter(now=0.0)
    meter.add(0.1, minibatches=1, examples=1, loss_sum=4.0)
    meter.add(0.2, minibatches=3, examples=3, loss_sum=3.0)
    assert at(meter, 0.2).train_loss == pytest.approx(7 / 4)

    meter.add(0.3, minibatches=1, examples=1, loss_sum=math.nan)
    assert math.isnan(at(meter, 0.3).train_loss or 0.0)

    feed(meter, start=1.0, stop=10.0, every=0.1, loss=0.5)
    assert at(meter, 10.0).train_loss == pytest.approx(0.5)


def test_staleness_is_a_mean_over_pushes() -> None:
    meter = ProgressMeter(now=0.0)
    meter.add(0.1, minibatches=1, examples=1, loss_sum=0.0, staleness=[0, 0, 0])
    meter.add(0.2, minibatches=1, examples=1, loss_sum=0.0, staleness=[4])
    meter.add(0.3, minibatches=1, examples=1, loss_sum=0.0)
    assert at(meter, 0.3).staleness == pytest.approx(1.0)


def test_a_resumed_run_counts_on_but_its_rates_begin_anew() -> None:
    meter = ProgressMeter(now=100.0, minibatches=1000)
    meter.add(102.0, minibatches=2, examples=20, loss_sum=1.0)

    progress = at(meter, 102.0)

    assert (progress.minibatches, progress.examples_per_second) == (1002, 10.0)


def test_the_window_holds_no_more_than_it_must() -> None:
    meter = ProgressMeter(now=0.0)
    feed(meter, start=0.0, stop=100.0, every=0.1)
    at(meter, 1000.0)
    assert len(meter._reports) == FEWEST_REPORTS


def test_what_the_meter_cannot_know_is_passed_through() -> None:
    roles = (RoleStatus(name="shard0", state="working"),)
    progress = ProgressMeter(now=0.0).progress(
        2.0, stage=1, epoch=3, total_minibatches=7, roles=roles, waits=("a waits for b",)
    )
    assert (progress.time_s, progress.stage, progress.epoch, progress.total_minibatches) == (2.0, 1, 3, 7)
    assert (progress.roles, progress.waits) == (roles, ("a waits for b",))
