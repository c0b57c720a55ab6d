"""Tests of squall.bench.figure, session and quiet: what is written down, and what is warned of.

Faults planted here by hand, each seen to fail a test: the ratio of medians instead of the median of ratios · an upper bound judged as
a lower one · a toy that meets its target · idle time counted as busy · the load average judged after our own work ·
the warning of after the figure left out.
"""

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from squall.bench import quiet, session
from squall.bench.figure import Ratio, Report, Settings, ratio_of, series_of
from squall.bench.quiet import Quiet, listen
from squall.bench.session import keep

ROUNDS = [{"a": 1.0, "b": 1.0}, {"a": 8.0, "b": 2.0}, {"a": 3.0, "b": 9.0}]


def test_a_ratio_is_taken_within_each_round() -> None:
    ratio = ratio_of(ROUNDS, "a", "b")

    assert ratio.values == (1.0, 4.0, pytest.approx(1 / 3))
    assert ratio.median == 1.0, "the ratio of the medians would be 1.5"


@pytest.mark.parametrize(
    ("ratio", "met"),
    [
        (Ratio(values=(1.0,)), None),
        (Ratio(values=(1.0,), target=1.0), True),
        (Ratio(values=(0.9, 0.99, 7.0), target=1.0), False),
        (Ratio(values=(1.2,), target=1.3, at_most=True), True),
        (Ratio(values=(1.4,), target=1.3, at_most=True), False),
    ],
)
def test_a_target_is_a_bound_of_the_median(ratio: Ratio, met: bool | None) -> None:
    assert ratio.is_met is met


def test_the_json_holds_every_value_beside_the_median_and_toys_meet_no_target() -> None:
    report = Report(
        series=series_of(ROUNDS, ["a"], "s"),
        ratios={"a / b": ratio_of(ROUNDS, "a", "b", target=0.5)},
        notes=("n",),
    )

    told = json.loads(json.dumps(report.as_json()))

    assert told["series"]["a"] == {"unit": "s", "median": 3.0, "values": [1.0, 8.0, 3.0]}
    assert told["ratios"]["a / b"]["met"] is True
    assert told["ratios"]["a / b"]["highest"] == 4.0
    assert report.as_json(judged=False)["ratios"]["a / b"]["met"] is None


def test_others_are_heard_in_the_time_that_cores_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 5000 300 0 0 0 0 0\ncpu0 1 1 1 1\n")
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(quiet.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(quiet.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(
        quiet.time, "sleep", lambda seconds: stat.write_text("cpu  250 0 150 9000 900 10 90 0 0 0\n") and None
    )

    heard = listen(is_first=False, stat=stat)

    assert heard == Quiet(cores_taken=1.5, load=None)
    assert "1.50 cores" in heard.warning


def test_a_system_that_does_not_tell_is_not_warned_of(tmp_path: Path) -> None:
    assert listen(is_first=False, sample_s=0, stat=tmp_path / "none") == Quiet(cores_taken=None, load=None)
    assert not Quiet(cores_taken=None, load=None).warning
    assert "load average" in Quiet(cores_taken=0.0, load=4.0).warning


def test_figures_are_kept_by_day_and_name_and_toys_apart(tmp_path: Path) -> None:
    told = {"figure": "small", "at": "2026-01-02T03:04:05Z", "quick": False, "ratios": {}}

    path = keep(told, tmp_path / "new")
    toy = keep(told | {"quick": True}, tmp_path / "new")

    assert (path.name, toy.name) == ("2026-01-02-small.json", "2026-01-02-small-quick.json")
    assert json.loads(path.read_text()) == told


def test_a_figure_stands_beside_what_the_machine_was_and_whether_it_was_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Figure:
        def measure(self, settings: Settings, place: object) -> Report:
            return Report(series=series_of(ROUNDS, ["a"], "s"), ratios={})

    heard = iter(
        [
            Quiet(cores_taken=0.0, load=0.1),
            Quiet(cores_taken=0.0, load=None),
            Quiet(cores_taken=2.0, load=None),
        ]
    )
    monkeypatch.setattr(session, "figure", lambda name: Figure())
    monkeypatch.setattr(session, "listen", lambda **settings: next(heard))
    monkeypatch.setattr(session, "environment", lambda: {"facts": 1})
    monkeypatch.setattr(session, "open_place", lambda: nullcontext())

    first, second = session.figures(["x", "y"], Settings(rounds=3))

    assert (first["figure"], first["quiet"]["warning"], first["environment"]) == ("x", "", {"facts": 1})
    assert "2.00 cores" in second["quiet"]["warning"]


def test_what_has_no_number_is_null_in_json_and_never_wins() -> None:
    rounds = [{"a": math.inf, "b": 1.0}, {"a": math.inf, "b": math.inf}, {"a": 2.0, "b": math.inf}]
    report = Report(series=series_of(rounds, ["a"], "s"), ratios={"x": ratio_of(rounds, "a", "b")})

    told = json.loads(json.dumps(report.as_json(), allow_nan=False))

    assert told["series"]["a"]["values"] == [None, None, 2.0]
    assert told["ratios"]["x"]["values"] == [None, 0.0, 0.0]
