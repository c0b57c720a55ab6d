"""Tests of docs/from-pytorch.md: its programs are taken from the page and run.

Faults planted here by hand, each seen to fail a test: another rate on one side · `schedules.cosine` with another total ·
the clipping left out of the plain loop · `seed_for` left out of the sampler · its epoch not counted · the mean in place of the sum of four
gradients · a misspelt argument in a recipe · a program of the page without a name.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import squall
from squall.cli import training
from squall.cli.app import app

PAGE = (Path(__file__).parents[1] / "docs" / "from-pytorch.md").read_text()
PROGRAMS = dict(re.findall(r"^`([\w]+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
ALONE = "replicas=1,\n    cluster=squall.InProcess(),\n    threads=1,\n    progress=False,"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's programs, which is the current one and on the path."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    here = {name.removesuffix(".py") for name in PROGRAMS}
    yield tmp_path
    for name in here:
        sys.modules.pop(name, None)


def ran(text: str, name: str) -> dict[str, Any]:
    """What a program leaves behind when it is run in this process."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)  # as a user would run it
    return names


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_every_program_of_the_page_has_a_name() -> None:
    assert len(PROGRAMS) == PAGE.count("```python\n") == 8


@pytest.mark.usefixtures("folder")
def test_one_replica_equals_the_plain_loop_of_the_page() -> None:
    ((old, new),) = re.findall(r"^```diff\n-(.*)\n\+(.*)\n```$", PAGE, re.MULTILINE)
    assert old in PROGRAMS["plain.py"]
    loop = "from squall_order import SquallOrder\n" + PROGRAMS["plain.py"].replace(old, new)
    assert "replicas=2," in PROGRAMS["with_squall.py"]
    alone = PROGRAMS["with_squall.py"].replace("replicas=2,", ALONE)

    expected, run = ran(loop, "plain.py")["model"], ran(alone, "with_squall.py")["run"]

    assert difference(run.state_dict(), expected.state_dict()) < 1e-6


@pytest.mark.usefixtures("folder")
def test_the_plain_loop_learns_as_it_stands() -> None:
    assert ran(PROGRAMS["plain.py"], "plain.py")["accuracy"] > 0.9


@pytest.mark.processes
def test_the_program_with_squall_runs_as_it_stands(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "with_squall.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) > 0.9
    assert (folder / "runs" / "from-pytorch" / "best.safetensors").exists()


def test_its_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def calling_thread() -> Iterator[squall.InProcess]:
        yield squall.InProcess()

    monkeypatch.setattr(training, "Local", calling_thread)
    (folder / "runs").mkdir()
    commands = re.findall(r"`squall ((?:train|export) [^`]*\.(?:py|safetensors)[^`]*)`", PAGE)
    assert len(commands) == 3
    for command in commands:
        one_thread = ["--set", "threads=1"] if command.startswith("train") else []
        result = CliRunner().invoke(app, [*command.split(), *one_thread])
        assert result.exit_code == 0, f"{command}: {result.stderr}"
    assert squall.load(folder / "runs" / "ddp").metrics["test_accuracy"] > 0.9
    assert squall.load(folder / "runs" / "lit").metrics["test_accuracy"] > 0.9
    assert (folder / "model.safetensors").exists()


def test_lightnings_program_is_python_and_the_page_says_that_it_is_not_run() -> None:
    compile(PROGRAMS["lit.py"], "lit.py", "exec")
    assert "**This program is not run here**" in PAGE


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_distributed_program_runs_on_two_processes(folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "ddp.py"], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.9
    assert (folder / "model.pt").exists()


# What the page says of gradients that are accumulated ----------------------------------------------------


def accumulating(optimizer: torch.optim.Optimizer, model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two epochs of ten minibatches; the sum of four gradients is one update, also of what is left at the end."""
    for epoch in range(2):
        order = torch.from_numpy(squall.data.order(len(x), 0, epoch)).split(8)
        for position, chosen in enumerate(order):
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            if position % 4 == 3 or position == len(order) - 1:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adagrad", "sgd without local steps"])
def test_four_pushed_as_one_are_the_sum_of_four_gradients_at_one_point(kind: str) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(80, 5), nn.Linear(5, 2)
    y = (x.sum(dim=1) > 0).long()
    rule = squall.Adagrad(learning_rate=0.1) if kind == "adagrad" else squall.Sgd(learning_rate=0.1)
    local = None if kind == "adagrad" else squall.Sgd(learning_rate=0.0)
    run = squall.fit(
        model, (x, y), replicas=1, batch_size=8, epochs=2, cluster=squall.InProcess(), threads=1, progress=False,
        strategy=squall.Downpour(n_fetch=4, n_push=4, rule=rule, local=local),
    )  # fmt: skip
    of = torch.optim.Adagrad if kind == "adagrad" else torch.optim.SGD
    accumulating(of(model.parameters(), lr=0.1), model, x, y)
    assert difference(run.state_dict(), model.state_dict()) < 1e-6


def test_a_resumed_run_may_have_another_rate_and_no_other_kind_of_rule(tmp_path: Path) -> None:
    data = torch.randn(64, 3), torch.randint(2, (64,))
    model = nn.Linear(3, 2)

    def fit(rule: Any, epochs: int, *, resume: bool) -> squall.Run:
        return squall.fit(
            model, data, replicas=1, batch_size=8, epochs=epochs, out=tmp_path / "run", resume=resume,
            strategy=squall.Downpour(rule=rule), cluster=squall.InProcess(), threads=1, progress=False,
        )  # fmt: skip

    fit(squall.Adagrad(learning_rate=0.1), 1, resume=False)
    assert fit(squall.Adagrad(learning_rate=0.01), 2, resume=True).metrics["minibatches"] == 16
    with pytest.raises(squall.ConfigError, match="rule"):
        fit(squall.Sgd(learning_rate=0.01), 3, resume=True)
