"""Tests of squall.cli.app and what its commands do: exit codes, what is printed where, and what is never imported.

Most run a command in this process, with a recipe that trains in the calling thread; a few start the real program.

Faults planted here by hand, each seen to fail a test: exit code 1 for a wrong request · the summary printed after the
JSON line · a top-level `import torch` in the command line · an empty run directory left by a refused request · the
old figures summed up when a run is refused · `-N` taken literally · a recorded push read at its version instead of
one before · a pushed gradient added instead of subtracted in the replay · `.pt` accepted by export · a traceback
printed for a `ConfigError` · the error in the summary too · bytes behind the last push not seen · a schedule asked for the
minibatches after a push.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import squall
from squall.cli import training
from squall.cli.app import app
from tests.processes.helpers import wait_until

RECIPE = """
import torch
from torch import nn
import squall

def _job(model=lambda: nn.Linear(6, 2), **settings):
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    usual = dict(test=(x[:40], y[:40]), cluster=squall.InProcess(), batch_size=20, replicas=2, shards=2)
    return squall.Job(model, (x[40:], y[40:]), **(usual | settings))

def small():
    return _job()

def plain_sgd():
    return _job(strategy=squall.Downpour(rule=squall.Sgd(learning_rate=0.1, weight_decay=0.01)), record=True)

def adagrad():
    rule = squall.Adagrad(learning_rate=0.1, lr_decay=0.01, weight_decay=0.01, initial_accumulator_value=0.1)
    return _job(strategy=squall.Downpour(n_push=3, rule=rule), record=True)

def scheduled():
    rule = squall.Sgd(learning_rate=lambda done: 0.5 / (1 + done))
    return _job(strategy=squall.Downpour(n_push=2, rule=rule), record=True)

def by_pattern():
    rules = {"bias": squall.Adam(learning_rate=0.1), "*": squall.Momentum(learning_rate=0.01, momentum=0.8)}
    return _job(strategy=squall.Downpour(rule=squall.Rules(rules)), record=True)

def in_virtual_time():
    return _job(cluster=squall.Simulated(), epochs=9)

def untested():
    return _job(test=None)

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third is one too many")
        return self.inner(x)

def failing():
    return _job(model=Failing())

def missing_file():
    squall.data.read("no/such/file.csv")

def raising():
    return 1 / 0
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.out.splitlines()[-1]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing() -> Iterator[None]:
        yield None

    monkeypatch.setattr(training, "Local", nothing)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    return path


def squall_(*arguments: object) -> Ran:
    """Run a command in this process."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(code=result.exit_code, out=result.stdout, err=result.stderr)


def trained(recipe: Path, function: str = "small", *more: object) -> Path:
    """Train, and return the run's directory."""
    path = recipe.parent / f"run-{function}"
    assert squall_("train", f"{recipe}:{function}", "--out", path, *more).code == 0
    return path


def squall_process(*arguments: object) -> "subprocess.Popen[str]":
    """Start the program in a session of its own, out of reach of a Ctrl-C meant for the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "squall", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# What is printed, and the exit code -------------------------------------------------------------------------


def test_a_run_is_summed_up_on_standard_output_and_named(recipe: Path) -> None:
    ran = squall_("train", f"{recipe}:small", "--out", recipe.parent / "run")

    assert ran.code == 0
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in ran.out.splitlines())
    assert lines["run"] == str(recipe.parent / "run")
    assert lines["loss curve"] == str(recipe.parent / "run" / "loss.png")
    assert lines["next"] == f"squall evaluate {recipe.parent / 'run'}"
    assert "ended: epochs" in ran.err, "the live view goes to standard error"


def test_with_json_standard_output_ends_with_one_object_of_the_figures_and_the_path(recipe: Path) -> None:
    ran = squall_("train", f"{recipe}:small", "--json", "--out", recipe.parent / "run", "--set", "epochs=2")

    told = json.loads(ran.last_line)
    assert told.pop("path") == str(recipe.parent / "run")
    assert told == squall.load(recipe.parent / "run").metrics
    assert told["minibatches"] == 16
    assert "test_accuracy" in told


def test_without_out_the_run_goes_to_a_temporary_directory(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    path = Path(json.loads(squall_("train", f"{recipe}:small", "--json").last_line)["path"])

    assert path.parent == tmp_path
    assert (path / "model.safetensors").exists()


def test_an_out_that_ends_in_a_capital_n_counts_up(recipe: Path) -> None:
    out = recipe.parent / "runs" / "demo-N"
    paths = [
        json.loads(squall_("train", f"{recipe}:small", "--json", "--out", out).last_line)["path"]
        for _ in range(2)
    ]
    assert [Path(path).name for path in paths] == ["demo-1", "demo-2"]


WRONG = {
    "an unknown recipe": (["train", "nosuch"], "'nosuch'"),
    "an unknown function": (["train", "{recipe}:nosuch"], "nosuch"),
    "a file that is not there": (["train", "{recipe}x.py"], "no such file"),
    "a setting without a value": (["train", "{recipe}:small", "--set", "replicas"], "NAME=VALUE"),
    "an unknown setting": (["train", "{recipe}:small", "--set", "replica=1"], "Did you mean replicas?"),
    "a setting out of range": (["train", "{recipe}:small", "--set", "replicas=0"], "replicas"),
    "what is not built": (
        ["train", "{recipe}:small", "--set", "partitions=2", "--set", "data_workers=1"],
        "partitions",
    ),
    "data that is not there": (["train", "{recipe}:missing_file"], "no/such/file.csv"),
    "a run that is not there": (["evaluate", "{recipe}.d"], "no such directory"),
    "a ledger of nothing": (["ledger", "{recipe}.d"], "no such directory"),
    "a run to resume that is not there": (["resume", "{recipe}.d"], "no such directory"),
    "an export of nothing": (["export", "{recipe}.d", "m.safetensors"], "no such directory"),
    "an export to a pickle": (["export", "{recipe}.d", "m.pt"], ".safetensors"),
}


def test_chaos_is_suffered_and_a_run_without_replicas_is_exit_code_3(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ran = squall_("train", f"{recipe}:in_virtual_time", "--chaos", "kill:replica@step=3", "--out", str(out))
    assert (ran.code, ran.err.splitlines()[-1]) == (3, "squall: no replica is left: every one was killed")
    assert json.loads((out / "job.json").read_text())["chaos"] == "kill:replica@step=3"

    ran = squall_("train", f"{recipe}:in_virtual_time", "--chaos", "kill:replica@stop=3")
    assert ran.code == 2
    assert "the fault 'kill:replica@stop=3', character 14: expected t=, step= or p=" in ran.err


@pytest.mark.parametrize(("arguments", "names"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments: list[str], names: str, recipe: Path) -> None:
    ran = squall_(*(argument.format(recipe=recipe) for argument in arguments))

    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("squall: ")
    assert names in ran.err


@pytest.mark.parametrize("arguments", [["nosuch"], ["train"], ["train", "digits", "--nosuch"], ["resume"]])
def test_a_command_line_that_does_not_parse_is_exit_code_2(arguments: list[str]) -> None:
    assert squall_(*arguments).code == 2


def test_a_refused_request_leaves_no_directory(recipe: Path) -> None:
    out = recipe.parent / "runs" / "demo-N"
    assert squall_("train", f"{recipe}:small", "--out", out, "--set", "loss=nosuch").code == 2
    assert list(out.parent.iterdir()) == []


def test_a_directory_that_holds_a_run_is_refused_with_the_way_on_and_left_as_it_was(recipe: Path) -> None:
    path = trained(recipe)
    before = (path / "result.json").read_bytes()

    ran = squall_("train", f"{recipe}:small", "--out", path)

    assert (ran.code, ran.out) == (2, "")
    assert f"squall resume {path}" in ran.err
    assert (path / "result.json").read_bytes() == before


def test_a_recipe_that_raises_is_shown_with_its_line_and_is_a_wrong_request(recipe: Path) -> None:
    ran = squall_("train", f"{recipe}:raising")

    line = RECIPE.splitlines().index("    return 1 / 0") + 1
    assert ran.code == 2
    assert f'ZeroDivisionError: division by zero (File "{recipe}", line {line}, in raising)' in ran.err
    assert ran.err.count("Traceback (most recent call last)") == 1


def test_the_summary_leaves_the_error_to_the_line_that_tells_it(recipe: Path) -> None:
    ran = squall_("train", f"{recipe}:failing")
    assert "one too many" not in ran.out
    assert "ended: failed" in ran.err


def test_a_model_that_raises_is_shown_once_with_role_step_and_line_and_the_run_failed(recipe: Path) -> None:
    ran = squall_("train", f"{recipe}:failing", "--json", "--out", recipe.parent / "run")

    line = RECIPE.splitlines().index('            raise ValueError("the third is one too many")') + 1
    (told,) = [text for text in ran.err.splitlines() if text.startswith("squall: ")]
    assert ran.code == 1
    assert re.search(
        r"squall: replica[01]\.0 at epoch 0, position \d+: ValueError: the third is one too many", told
    )
    assert f'File "{recipe}", line {line}, in forward' in told
    assert ran.err.count("Traceback (most recent call last)") == 1
    assert json.loads(ran.last_line)["why"] == "failed"


# Runs that are over -----------------------------------------------------------------------------------------


def test_evaluate_measures_what_the_run_measured_at_its_end(recipe: Path) -> None:
    path = trained(recipe)
    told = json.loads(squall_("evaluate", path, "--json").last_line)

    metrics = squall.load(path).metrics
    assert told == {
        "test_loss": pytest.approx(metrics["test_loss"]),
        "test_accuracy": metrics["test_accuracy"],
        "path": str(path),
    }
    assert f"{metrics['test_accuracy']:.6g}" in squall_("evaluate", path).out


def test_evaluate_says_when_there_is_nothing_to_measure_on(recipe: Path) -> None:
    ran = squall_("evaluate", trained(recipe, "untested"))
    assert ran.code == 2
    assert "test set" in ran.err


def test_resume_of_a_finished_run_says_so_and_trains_on_with_more_epochs(recipe: Path) -> None:
    path = trained(recipe)

    ran = squall_("resume", path)
    assert ran.code == 0
    assert f"it was finished before: epochs. More trains on: squall resume {path} --set epochs=2." in ran.err
    assert "ended" in ran.out.splitlines()[0]

    told = json.loads(squall_("resume", path, "--set", "epochs=2", "--json").last_line)
    assert (told["minibatches"], told["resumed"]) == (16, 1)
    assert "finished before" in squall_("resume", path, "--set", "epochs=2").err


def test_a_run_of_a_script_is_told_how_to_be_used(recipe: Path) -> None:
    path = recipe.parent / "run"
    x = torch.zeros(10, 2)
    squall.fit(
        torch.nn.Linear(2, 2), (x, x), loss="mse", cluster=squall.InProcess(), progress=False, out=path
    )

    evaluated, resumed = squall_("evaluate", path), squall_("resume", path)

    assert (evaluated.code, resumed.code) == (2, 2)
    assert "squall.load(DIR, model=Net())" in evaluated.err
    assert "squall.fit(job, resume=True)" in resumed.err


def test_a_recipe_that_has_changed_is_refused(recipe: Path) -> None:
    path = trained(recipe)
    recipe.write_text(RECIPE + "\n# another\n")
    ran = squall_("evaluate", path)
    assert ran.code == 2
    assert "changed" in ran.err


def test_export_writes_the_models_state_dict(recipe: Path) -> None:
    from safetensors.torch import load_file

    path, file = trained(recipe), recipe.parent / "model.safetensors"

    assert squall_("export", path, file).code == 0

    expected = squall.load(path).state_dict()
    exported = load_file(file)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


def test_a_damaged_model_is_not_exported(recipe: Path) -> None:
    path, file = trained(recipe), recipe.parent / "model.safetensors"
    model = path / "model.safetensors"
    model.write_bytes(model.read_bytes()[:50])

    ran = squall_("export", path, file)

    assert ran.code == 1
    assert str(model) in ran.err
    assert not file.exists()


def test_resume_goes_on_after_a_run_that_was_interrupted(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe.parent / "run"
    with monkeypatch.context() as patched:
        patched.setattr("squall.training.fit.StopRequest.why", "interrupted", raising=False)
        patched.setattr("squall.training.fit.StopRequest.__init__", lambda self: None)
        assert squall_("train", f"{recipe}:small", "--out", path).code == 130
    assert squall.load(path).metrics["minibatches"] < 8

    ran = squall_("resume", path, "--json")

    assert ran.code == 0
    assert json.loads(ran.last_line)["minibatches"] == 8
    assert json.loads(ran.last_line)["why"] == "epochs"


# The ledger -------------------------------------------------------------------------------------------------


def test_ledger_adds_up_to_every_block_on_every_slice(recipe: Path) -> None:
    path = trained(recipe)
    told = json.loads(squall_("ledger", path, "--json").last_line)

    assert (told["applied"], told["path"]) == (8, str(path))
    assert [(row["slice"], row["version"], row["applied"]) for row in told["slices"]] == [
        (0, 8, 8),
        (1, 8, 8),
    ]
    assert sum(row["blocks"] for row in told["replicas"]) == 8
    assert "8 applied, 0 redone" in squall_("ledger", path).out


@pytest.mark.parametrize("function", ["plain_sgd", "adagrad", "scheduled", "by_pattern"])
def test_a_replay_in_float64_comes_to_the_runs_model(recipe: Path, function: str) -> None:
    path = trained(recipe, function, "--set", "epochs=5")
    told = json.loads(squall_("ledger", path, "--replay", "--json").last_line)

    initial = np.abs(next(iter(squall.load(path).state_dict().values())).numpy()).max()
    assert told["replay"].keys() == {"weight", "bias"}
    assert initial > 0.1, "else the next line would show little"
    assert max(told["replay"].values()) < 1e-6
    assert "max difference" in squall_("ledger", path, "--replay").out


def test_a_replay_sees_an_update_that_went_wrong(recipe: Path) -> None:
    path = trained(recipe, "plain_sgd")
    file = path / "pushes" / "slice0.bin"
    pushes = np.fromfile(file, "<f4")
    pushes[0] += 1.0
    pushes.tofile(file)

    told = json.loads(squall_("ledger", path, "--replay", "--json").last_line)

    assert max(told["replay"].values()) > 0.05


def test_a_replay_of_a_run_that_did_not_record_is_refused_with_the_way_to_record(recipe: Path) -> None:
    ran = squall_("ledger", trained(recipe), "--replay")
    assert (ran.code, ran.out) == (2, "")
    assert "--set record=True" in ran.err


def test_a_replay_of_a_scripts_schedule_is_refused(recipe: Path) -> None:
    path = recipe.parent / "run"
    x = torch.ones(10, 2)
    squall.fit(
        torch.nn.Linear(2, 2),
        (x, x),
        loss="mse",
        strategy=squall.Downpour(rule=squall.Sgd(learning_rate=lambda done: 0.1)),
        cluster=squall.InProcess(),
        record=True,
        progress=False,
        out=path,
    )
    ran = squall_("ledger", path, "--replay")
    assert ran.code == 2
    assert "schedule" in ran.err


@pytest.mark.parametrize("by", [-4, 4])
def test_pushes_that_were_cut_short_or_have_something_behind_them_are_not_replayed(
    recipe: Path, by: int
) -> None:
    path = trained(recipe, "plain_sgd")
    file = path / "pushes" / "slice1.bin"
    os.truncate(file, file.stat().st_size + by)

    ran = squall_("ledger", path, "--replay")

    assert ran.code == 1
    assert str(file) in ran.err


# The program ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["recipes"],
        ["version"],
        ["ledger", "nosuch"],
        ["bench", "--list"],
        ["bench", "nosuch"],
    ],
)
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom squall.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "False False"


def test_importing_squall_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, squall; print('torch' in sys.modules, 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_recipes_lists_what_comes_with_squall() -> None:
    assert [line.split()[0] for line in squall_("recipes").out.splitlines()] == [
        "digits",
        "fsdd",
        "mnist",
        "speech",
    ]


def test_version_says_which() -> None:
    assert squall_("version").out == f"squall {squall.__version__}\n"


@pytest.mark.processes
def test_the_process_that_roles_are_forked_from_is_started_before_this_one_imports_torch() -> None:
    code = (
        "import sys\nfrom squall.cli import training\n"
        "class Local:\n"
        "    def __enter__(self):\n        print('torch' in sys.modules)\n        raise KeyboardInterrupt\n"
        "    def __exit__(self, *exc):\n        pass\n"
        "training.Local = Local\n"
        "sys.argv = ['squall', 'train', 'digits']\n"
        "from squall.cli.app import main\nmain()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("False\n", 130)


@pytest.mark.processes
def test_ctrl_c_ends_the_program_with_130_and_leaves_a_run_that_resumes_and_sigterm_with_143(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    running = squall_process("train", "digits", "--out", path, "--set", "epochs=1000")
    try:
        _wait_for_training(running, path)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=30)
        assert running.returncode == 130
        assert out.splitlines()[-1].split(maxsplit=1) == ["next", f"squall resume {path}"]
        done = json.loads((path / "result.json").read_text())["minibatches"]

        running = squall_process("resume", path, "--json")
        _wait_for_training(running, path)
        running.send_signal(signal.SIGTERM)
        out, _ = running.communicate(timeout=30)
        assert running.returncode == 143
        assert json.loads(out.splitlines()[-1])["minibatches"] > done
    finally:
        running.kill()


def _wait_for_training(running: "subprocess.Popen[str]", path: Path) -> None:
    """Until a line of progress is kept that the file did not have when this began."""
    file = path / "metrics.jsonl"
    before = file.stat().st_size if file.exists() else 0
    wait_until(
        lambda: (file.exists() and b"Evaluated" in file.read_bytes()[before:]) or running.poll() is not None,
        50,
        "training to begin",
    )
    assert running.poll() is None, running.stderr.read() if running.stderr else ""
