"""Tests of squall.doctor.examination and the command: what it prints, and how it ends.

Faults planted here by hand, each seen to fail a test: exit code 0 when training is impossible · advice of what is bad only ·
a role that ended with 1 taken for one that ran · the zygote left running.
"""

import json
import os
from dataclasses import replace

import psutil
import pytest
from typer.testing import CliRunner

from squall.cli.app import app
from squall.cluster.zygote import Exit
from squall.doctor import examination
from squall.doctor.examination import Examination, examine
from squall.doctor.judge import judge
from squall.errors import RunError
from tests.doctor.test_judge import FAST, FINE


def examined(zygote: float | str = 1.0) -> Examination:
    return Examination(facts=FINE, speeds=FAST, findings=judge(FINE, FAST, zygote))


@pytest.mark.processes
def test_this_machine_can_train_and_nothing_is_left_running() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    found = examine()

    assert found.is_possible, found.lines()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert json.loads(json.dumps(found.as_json()))["ok"] is True


@pytest.mark.parametrize(("zygote", "code"), [(1.0, 0), ("it died.", 1)])
def test_the_command_ends_with_1_if_training_is_impossible(
    zygote: float | str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("squall.cli.doctor.examine", lambda: examined(zygote))

    plain, as_json = CliRunner().invoke(app, ["doctor"]), CliRunner().invoke(app, ["doctor", "--json"])

    assert (plain.exit_code, as_json.exit_code) == (code, code)
    assert ("cannot train" in plain.stdout) == (code == 1)
    told = json.loads(as_json.stdout.splitlines()[-1])
    assert told["ok"] == (code == 0)
    assert {finding["verdict"] for finding in told["findings"]} == ({"ok"} if code == 0 else {"ok", "bad"})


def test_advice_stands_below_its_finding() -> None:
    facts = replace(FINE, load=5.0)
    lines = Examination(facts=facts, speeds=None, findings=judge(facts, FAST, 1.0)).lines()

    at = next(number for number, line in enumerate(lines) if line.startswith("look"))
    assert "load" in lines[at]
    assert "mean little" in lines[at + 1]


class Zygote:
    """One that cannot start, or forks a role that ends with this code."""

    def __init__(self, code: int | None) -> None:
        self.code, self.is_closed = code, False
        self.news = os.eventfd(1)

    def wait_ready(self, timeout_s: float) -> None:
        if self.code is None:
            raise RunError(reason="it was killed by signal 9")

    def spawn(self, name: str, target: str) -> None:
        pass

    def fileno(self) -> int:
        return self.news

    def exits(self) -> list[Exit]:
        assert self.code is not None
        return [Exit(name="doctor", pid=1, returncode=self.code)]

    def close(self) -> None:
        self.is_closed = True
        os.close(self.news)


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "it was killed by signal 9"), (1, "The process that it forked ended with [1].")],
)
def test_a_process_that_cannot_start_or_fails_is_told_and_closed(code: int | None, words: str) -> None:
    zygote = Zygote(code)

    assert examination._forked(zygote, 0.0) == words  # type: ignore[arg-type]
    assert zygote.is_closed


def test_one_that_forks_is_told_by_its_seconds() -> None:
    assert isinstance(examination._forked(Zygote(0), 0.0), float)  # type: ignore[arg-type]
