"""Tests of squall.doctor.examination and the command: what it prints, and how it ends.

Faults planted here by hand, each seen to fail a test: exit code 0 when training is impossible · findings without their advice
· a role that ended with 1 taken for one that ran · the zygote left running.
"""

import json
from dataclasses import replace

import psutil
import pytest
from typer.testing import CliRunner

from squall.cli.app import app
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
    """One that cannot start."""

    def wait_ready(self, timeout_s: float) -> None:
        raise RunError(reason="it was killed by signal 9")

    def close(self) -> None:
        self.is_closed = True


def test_a_process_that_cannot_start_is_told_and_closed() -> None:
    zygote = Zygote()

    told = examination._forked(zygote, 0.0)  # type: ignore[arg-type]

    assert told == "it was killed by signal 9"
    assert zygote.is_closed
