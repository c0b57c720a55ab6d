"""However a program is started and however it ends: runs work, Ctrl-C is clean, and nothing is left behind."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import squall
from squall.cluster.local import Local
from tests.processes.helpers import data, is_alive, job, left_open, network, processes, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

# Without a main guard, on purpose: B17.
PROGRAM = """
import sys, torch, squall
x = torch.randn(640, 20); y = (x.sum(1) > 0).long()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2))
        self.scale = lambda x: 2 * x
    def forward(self, x):
        return self.body(self.scale(x))
run = squall.fit(Net(), (x, y), loss=lambda output, target: torch.nn.functional.cross_entropy(output, target),
                 batch_size=16, shards=2, progress=False, **SETTINGS)
print("ended:", run.metrics["why"], run.metrics["minibatches"], flush=True)
"""


def program(**settings: object) -> str:
    return PROGRAM.replace("**SETTINGS", f"**{settings!r}")


def start(text: str, tmp_path: Path) -> "subprocess.Popen[str]":
    script = tmp_path / "program.py"
    script.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )


def in_run(process: "subprocess.Popen[str]", run: Path) -> dict[str, int]:
    """Wait until the run has made progress; return its processes."""

    def has_progress() -> bool:
        assert process.poll() is None, process.communicate()[1]
        metrics = run / "metrics.jsonl"
        return metrics.exists() and "Progress" in metrics.read_text()

    wait_until(has_progress, 60, "progress")
    return processes(run)


def assert_all_gone(pids: dict[str, int]) -> None:
    """Each ends when its pipe does; how soon is the machine's business."""
    wait_until(lambda: not any(map(is_alive, pids.values())), 30, f"the end of {pids}")


@pytest.mark.nightly
def test_a_script_without_a_main_guard_trains(tmp_path: Path) -> None:
    process = start(program(epochs=2), tmp_path)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out.split()) == (0, ["ended:", "epochs", "80"]), err


def test_a_program_on_standard_input_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-"], input=program(epochs=1), capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "ended: epochs 40\n", done.stderr


def test_a_model_that_cannot_be_sent_is_named_with_the_way_out(local: Local) -> None:
    """B17"""
    model = network()
    model.lock = threading.Lock()
    with pytest.raises(squall.ModelError, match=r"lock.*function that returns it"):
        squall.fit(model, data(), cluster=local, progress=False)


def test_a_function_that_returns_such_a_model_trains(local: Local) -> None:
    def make() -> object:
        model = network()
        model.lock = threading.Lock()
        return model

    run = squall.fit(make, data(), batch_size=64, cluster=local, progress=False)
    assert run.metrics["why"] == "epochs"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)],
)
def test_a_signal_to_the_launcher_leaves_a_run_that_resumes_and_no_process(
    number: signal.Signals, code: int, tmp_path: Path, local: Local
) -> None:
    """B12. A script that does not catch KeyboardInterrupt dies of SIGINT: 130 to a shell."""
    run = tmp_path / "run"
    process = start(program(epochs=100_000, out=str(run)), tmp_path)
    pids = in_run(process, run)

    process.send_signal(number)
    _, err = process.communicate(timeout=20)

    assert process.returncode == code, err
    assert_all_gone(pids)
    result = json.loads((run / "result.json").read_text())
    assert result["why"] in ("interrupted", "terminated")
    assert (run / "model.safetensors").exists()
    assert list((run / "checkpoints").glob("*/manifest.json"))


def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(program(epochs=100_000, out=str(run)), tmp_path)
    pids = in_run(process, run)

    process.kill()
    process.communicate()

    assert_all_gone(pids)


def test_nothing_is_left_in_shared_memory_or_open_after_runs(local: Local, tmp_path: Path) -> None:
    """B10"""
    squall.fit(job(local, epochs=1, out=tmp_path / "first"))
    before = left_open()
    for number in range(5):
        squall.fit(job(local, epochs=1, out=tmp_path / str(number)))
    after = left_open()
    assert after == before


def test_an_existing_run_is_refused_with_the_way_to_resume_it(local: Local, tmp_path: Path) -> None:
    squall.fit(job(local, epochs=1, out=tmp_path / "run"))
    with pytest.raises(squall.RunExistsError, match="resume=True"):
        squall.fit(job(local, epochs=1, out=tmp_path / "run"))
