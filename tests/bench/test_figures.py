"""Tests of squall.bench.figures and workers: every figure works, with toys, and says what it must. No speeds are judged.

Faults planted here by hand, each seen to fail a test: a figure missing from the catalogue · a side left out of a round ·
a worker's error swallowed.
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

import squall
from squall.bench.catalogue import NAMES, chosen, described, figure
from squall.bench.figure import Settings
from squall.bench.learning import downpour, lesson
from squall.bench.nets import speech_net
from squall.bench.place import Place, open_place
from squall.bench.sides import Work, ceiling
from squall.cli.app import app
from squall.errors import ConfigError, RunError

# Figure -> what it must compare, by a part of the name, and the target.
MUST: dict[str, dict[str, float | None]] = {
    "start": {"first push - import alone": 1.0},
    "exchange": {"shared step / bare": 1.3, "raw / TCP fetch": 0.85, "raw / TCP push": 0.85},
    "small": {
        "one replica, n = 1 / plain loop": None,
        "two replicas, n = 1 / plain loop": 1.2,
        "two replicas, n = 10 / plain loop": 1.8,
    },
    "speech-one": {"one replica / plain loop": 0.9, "one replica, overlap / plain loop": 0.95},
    "cut": {
        "two by maps / one worker": 1.65,
        "two by tiles / one worker": 1.65,
        "two in line / one worker": None,
        "one partition / plain loop": 0.97,
        "two by maps / plain loop": None,
        "deep: two in line / deep: one worker": 1.4,
        "deep: two in line / deep: torch's pipeline": 1.0,
        "unshared: two by tiles / unshared: one worker": 1.6,
    },
    "speech-two": {
        "two replicas / plain loop": None,
        "ceiling / plain loop": None,
        "two replicas / ceiling": 0.9,
        "two replicas / data parallel": 1.05,
        "two replicas / plain loop, two threads": None,
    },
    "slow-replica": {"two replicas / data parallel": 2.2},
    "durability": {
        "small: interval / none": 0.95,
        "small: ack / none": None,
        "speech: interval / none": 0.95,
        "speech: ack / none": None,
    },
    "traffic": {"pushed, relays / run.traffic()": 0.02, "fetched x 2 / fetched with n = 1": 0.05},
    "time-to-loss": {
        "digits: plain loop / Downpour, n = 1": None,
        "digits: plain loop, two threads / Downpour, n = 10, overlap": None,
    },
}
# They start whole programs, or two threads a process, which is slow where cores are shared.
TAKES_LONG = ("start", "speech-one", "speech-two", "time-to-loss")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with open_place() as opened:
        yield opened


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in TAKES_LONG else name for name in NAMES]
)
def test_a_figure_works_with_toys_and_says_what_it_must(name: str, place: Place) -> None:
    told = figure(name).measure(Settings(rounds=1, quick=True), place).as_json()

    values = [
        value for one in (*told["series"].values(), *told["ratios"].values()) for value in one["values"]
    ]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    for part, target in MUST[name].items():
        found = [one["target"] for key, one in told["ratios"].items() if part in key]
        assert found, f"{part} in {list(told['ratios'])}"
        assert set(found) == {target}
    if name == "traffic":
        # What is counted outside does not depend on how busy the machine is.
        assert max(one["highest"] for key, one in told["ratios"].items() if "run.traffic" in key) < 0.02


@pytest.mark.processes
def test_the_terms_of_the_ceiling_are_measured_by_two_processes_at_once(place: Place) -> None:
    work = Work(net=speech_net(quick=True), batch_size=4, steps=2, warm=1)

    told = ceiling(place.workers, work, "x: ")

    assert set(told) == {
        f"x: {name}" for name in ("step_s", "copy_s", "copy_and_check_s", "fetch_s", "ceiling")
    }
    assert all(value > 0 for value in told.values())
    assert told["x: ceiling"] < 2


@pytest.mark.processes
def test_two_replicas_learn_until_the_loss_is_reached_and_stop(place: Place, tmp_path: Path) -> None:
    task = lesson("digits", quick=True)

    seconds, reached = downpour(
        place.cluster, task, tmp_path, seed=0, rule="Adagrad", rate=0.03, every=2, overlap=True
    )

    assert reached
    assert seconds > 0
    assert squall.load(tmp_path / "run").metrics["minibatches"] < task.epochs * 63


@pytest.mark.processes
def test_a_run_that_diverges_or_takes_too_long_does_not_reach_the_loss(place: Place, tmp_path: Path) -> None:
    task = dataclasses.replace(lesson("digits", quick=True), target=0.0)

    def learned(folder: str, rate: float, limit_s: float) -> tuple[float, bool]:
        way: dict[str, Any] = {"rule": "Sgd", "rate": rate, "every": 1, "overlap": False}
        (tmp_path / folder).mkdir()
        return downpour(place.cluster, task, tmp_path / folder, seed=0, limit_s=limit_s, **way)

    assert learned("diverged", rate=1e30, limit_s=math.inf) == (math.inf, False)
    assert not learned("slow", rate=0.01, limit_s=0.0)[1]
    assert squall.load(tmp_path / "slow" / "run").metrics["minibatches"] < task.epochs * 63


def failing(settings: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("as it was told to")


def pid_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), **settings}


def waiting(settings: dict[str, Any]) -> dict[str, Any]:
    return {"read": os.read(settings["peer"], 1).decode()}


@pytest.mark.processes
def test_workers_return_what_their_functions_do_each_from_a_process_of_its_own(place: Place) -> None:
    told = place.workers.run(pid_of, [{"x": 1}, {"x": 2}])

    assert [one["x"] for one in told] == [1, 2]
    assert len({one["pid"] for one in told} | {os.getpid()}) == 3
    assert not any(psutil.pid_exists(one["pid"]) for one in told)


@pytest.mark.processes
def test_a_worker_that_fails_is_told_with_what_it_printed(place: Place) -> None:
    with pytest.raises(RunError, match="as it was told to"):
        place.workers.run(failing, [{}])


@pytest.mark.processes
def test_workers_that_take_too_long_are_ended(place: Place) -> None:
    team = place.workers.start(waiting, [{}, {}])

    with pytest.raises(RunError, match="in time"):
        team.results(patience_s=0.1)

    assert not any(psutil.pid_exists(role.pid) for role in team.roles)


def test_the_catalogue_is_what_there_is() -> None:
    folder = Path(__file__).parents[2] / "src" / "squall" / "bench" / "figures"
    there = {path.stem.replace("_", "-") for path in folder.glob("*.py")} - {"--init--"}

    assert set(NAMES) == there == set(MUST)
    assert all(len(words) > 20 for words in described().values())
    assert chosen([]) == list(NAMES)
    with pytest.raises(ConfigError, match="--list"):
        chosen(["smal"])


def test_the_command_refuses_what_is_not_there_before_it_measures() -> None:
    wrong = CliRunner().invoke(app, ["bench", "smal"])
    missing = CliRunner().invoke(app, ["bench", "time-to-loss", "--data", "no/such/file"])
    listed = CliRunner().invoke(app, ["bench", "--list"])

    assert (wrong.exit_code, missing.exit_code, listed.exit_code) == (2, 2, 0)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(NAMES)
