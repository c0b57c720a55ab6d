"""Runs that are stopped, resumed, or resumed from a checkpoint older than their ledger.

Faults planted by hand, each seen to fail a test here: a finished run started again · Ctrl-C without the way on · the way on told
of a failed run of which nothing is kept.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import squall
from squall.observe.events import Ended, Event, Progress
from squall.training.checkpoint import newest_checkpoint
from squall.training.execution import Ending, Execution
from squall.training.fit import StopRequest, carry_out
from tests.processes.helpers import applied_counts, data, job


def stopped(out: Path, minibatches: int, **settings: object) -> squall.Run:
    handle = squall.start(job(squall.InProcess(), out=out, threads=1, **settings))
    for event in handle.events():
        if isinstance(event, Progress) and event.minibatches >= minibatches:
            handle.stop()
    return handle.result(60)


def test_a_stopped_run_of_one_replica_resumes_to_the_same_parameters(tmp_path: Path) -> None:
    whole = squall.fit(job(squall.InProcess(), replicas=1, epochs=8, threads=1, out=tmp_path / "whole"))
    assert stopped(tmp_path / "run", 30, replicas=1, epochs=8).metrics["why"] == "stopped"

    run = squall.fit(
        job(squall.InProcess(), replicas=1, epochs=8, threads=1, out=tmp_path / "run"), resume=True
    )

    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in run.state_dict().items())
    assert set(applied_counts(run).values()) == {1}
    assert run.metrics["minibatches"] == 8 * 40


def test_batch_norm_resumes_with_its_statistics(tmp_path: Path) -> None:
    """B28"""
    x, y = data()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2))
    settings = {
        "replicas": 1,
        "threads": 1,
        "cluster": squall.InProcess(),
        "batch_size": 16,
        "progress": False,
    }
    whole = squall.fit(model, (x, y), epochs=4, out=tmp_path / "whole", **settings)
    squall.fit(model, (x, y), epochs=2, out=tmp_path / "run", **settings)

    run = squall.fit(model, (x, y), epochs=4, out=tmp_path / "run", resume=True, **settings)

    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in run.state_dict().items())


def counting(out: Path, **settings: object) -> squall.Run:
    """A run with batch norm, which counts its minibatches."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2))
    usual = {"threads": 1, "batch_size": 16, "progress": False, "cluster": squall.InProcess()}
    return squall.fit(model, data(), out=out, **(usual | settings))


def test_a_replica_that_starts_again_begins_with_the_buffers_that_were_left(tmp_path: Path) -> None:
    """B40"""
    cluster = squall.Simulated(faults="kill:replica0,restart=0.5@step=25")
    run = counting(tmp_path / "run", replicas=1, epochs=1, cluster=cluster)
    assert run.state_dict()["0.num_batches_tracked"].item() == 40


@pytest.mark.parametrize("replicas", [1, 3])
def test_buffers_are_there_again_with_another_number_of_replicas(tmp_path: Path, replicas: int) -> None:
    first = counting(tmp_path / "run", replicas=2, epochs=4).state_dict()["0.num_batches_tracked"].item()
    run = counting(tmp_path / "run", replicas=replicas, epochs=5, resume=True)
    assert first >= 80
    assert run.state_dict()["0.num_batches_tracked"].item() >= first + 40 // replicas


def test_buffers_survive_a_resumed_run_that_is_stopped_before_its_first_push(tmp_path: Path) -> None:
    settings = {"replicas": 1, "epochs": 1, "out": tmp_path / "run"}
    before = counting(**settings).state_dict()
    counting(**(settings | {"time_s": 1e-9, "epochs": None, "resume": True}))
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert torch.equal(checkpoint.buffers["0.running_mean"], before["0.running_mean"])


def test_of_a_damaged_newest_checkpoint_is_warned_and_the_one_before_it_is_taken(tmp_path: Path) -> None:
    settings = {"replicas": 1, "epochs": 2, "threads": 1, "checkpoint_every": 0.5, "out": tmp_path / "run"}
    expected = squall.fit(job(squall.InProcess(), **settings)).state_dict()
    before, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    (newest / "shard1.safetensors").unlink()

    with pytest.warns(UserWarning, match=rf"{newest.name}/shard1.safetensors.*goes on from .*{before.name}"):
        run = squall.fit(job(squall.InProcess(), **settings), resume=True)

    assert all(torch.equal(value, expected[name]) for name, value in run.state_dict().items())


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_resumes_with_another_number_of_shards(tmp_path: Path, shards: int) -> None:
    """B29"""
    whole = squall.fit(job(squall.InProcess(), replicas=1, epochs=6, threads=1, out=tmp_path / "whole"))
    squall.fit(job(squall.InProcess(), replicas=1, epochs=3, threads=1, out=tmp_path / "run"))

    run = squall.fit(
        job(squall.InProcess(), replicas=1, epochs=6, threads=1, shards=shards, out=tmp_path / "run"),
        resume=True,
    )

    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in run.state_dict().items())


def test_what_an_older_checkpoint_does_not_hold_is_rolled_back_in_the_ledger_and_done_again(
    tmp_path: Path,
) -> None:
    settings = {"replicas": 2, "threads": 1, "record": True, "out": tmp_path / "run"}
    squall.fit(job(squall.InProcess(), epochs=2, **settings))
    squall.fit(job(squall.InProcess(), epochs=4, **settings), resume=True)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])

    run = squall.fit(job(squall.InProcess(), epochs=4, **settings), resume=True)

    ledger = run.ledger()
    lost = ledger[ledger["outcome"] == "rolled_back"]
    assert len(lost) == 2 * 2 * 40
    assert set(lost["epoch"].tolist()) == {2, 3}
    counts = applied_counts(run)
    assert {count for (_, position), count in counts.items() if position < 2_000_000} == {1}
    assert {count for (_, position), count in counts.items() if position >= 2_000_000} == {2}
    pushes = np.fromfile(tmp_path / "run" / "pushes" / "slice0.bin", dtype="<f4")
    assert len(pushes) % (4 * 40) == 0
    assert run.metrics["minibatches"] == 4 * 40


@pytest.mark.parametrize("kind", ["in process", pytest.param("local", marks=pytest.mark.processes)])
def test_a_run_that_is_stopped_before_its_first_push_resumes_as_well(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """B12: Ctrl-C while the roles start; with a warm start, whose speed is measured, and a test set."""
    cluster = squall.InProcess() if kind == "in process" else request.getfixturevalue("local")
    settings = {
        "epochs": 2,
        "test": data(),
        "threads": 1,
        "strategy": squall.Downpour(warm_start=8),
        "out": tmp_path / "run",
    }
    stop = StopRequest()
    stop.request("interrupted")

    run = carry_out(job(cluster, **settings), cluster=cluster, resume=False, publish=print, stop=stop)

    assert run.metrics["why"] == "interrupted"
    assert len(run.ledger()) == run.metrics["minibatches"] == 0
    again = squall.fit(job(cluster, **settings), resume=True)
    assert again.metrics["why"] == "epochs"
    assert set(applied_counts(again).values()) == {1}


class Nowhere:
    """A cluster that nothing may be run on."""

    is_modelled = False

    def expect(self, job: squall.Job) -> None:
        """Anything."""

    def run(self, execution: Execution) -> Ending:
        raise AssertionError("it was finished")


def test_a_finished_run_stays_as_it_is_and_says_how_to_train_on(tmp_path: Path) -> None:
    settings = {"replicas": 1, "threads": 1, "out": tmp_path / "run"}
    run = squall.fit(job(squall.InProcess(), epochs=2, **settings))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}

    handle = squall.start(job(Nowhere(), epochs=2, **settings), resume=True)
    (told,) = list(handle.events())
    again = handle.result(10)

    assert isinstance(told, Ended)
    assert told.why == (
        "it was finished before: epochs. More trains on: "
        f"squall.fit(..., epochs=4, out={str(tmp_path / 'run')!r}, resume=True)."
    )
    assert again.metrics == run.metrics
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()} == before
    assert (
        squall.fit(job(squall.InProcess(), epochs=4, **settings), resume=True).metrics["minibatches"] == 160
    )


class Interrupts:
    """A logger that presses Ctrl-C, or asks the program to end."""

    def __init__(self, number: signal.Signals) -> None:
        self.number: signal.Signals | None = number

    def log(self, event: Event) -> None:
        if isinstance(event, Progress) and self.number is not None:
            os.kill(os.getpid(), self.number)
            self.number = None

    def close(self) -> None: ...


def test_ctrl_c_in_a_script_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"threads": 1, "epochs": 1000, "out": tmp_path / "run"}
    told = f"go on with squall.fit(..., out={str(tmp_path / 'run')!r}, resume=True)"

    with pytest.raises(KeyboardInterrupt) as raised:
        squall.fit(job(squall.InProcess(), loggers=(Interrupts(signal.SIGINT),), **settings))
    assert str(raised.value) == told
    again = job(squall.InProcess(), loggers=(Interrupts(signal.SIGTERM),), **settings)
    with pytest.raises(SystemExit):
        squall.fit(replace(again, progress=True), resume=True)
    assert capsys.readouterr().err.splitlines()[-1] == f"squall: {told}"


def test_a_run_that_failed_says_in_a_script_how_to_go_on_if_something_is_kept(tmp_path: Path) -> None:
    class Fails(Nowhere):
        def run(self, execution: Execution) -> Ending:
            raise squall.LostError(reason="gone")

    settings = {"threads": 1, "out": tmp_path / "run"}
    with pytest.raises(squall.LostError) as raised:
        squall.fit(job(Fails(), epochs=1, threads=1, out=tmp_path / "nothing"))
    assert not hasattr(raised.value, "__notes__")
    squall.fit(job(squall.InProcess(), epochs=1, **settings))
    with pytest.raises(squall.LostError) as raised:
        squall.fit(job(Fails(), epochs=2, **settings), resume=True)
    (note,) = raised.value.__notes__
    assert (
        note
        == f"What is kept can be gone on with: squall.fit(..., out={str(tmp_path / 'run')!r}, resume=True)."
    )


def test_resuming_with_other_data_is_refused(tmp_path: Path) -> None:
    squall.fit(job(squall.InProcess(), epochs=1, threads=1, out=tmp_path / "run"))
    with pytest.raises(squall.ConfigError, match="batch_size: expected 16, as the run began, but got 8"):
        squall.fit(job(squall.InProcess(), epochs=2, batch_size=8, out=tmp_path / "run"), resume=True)


def test_an_altered_checkpoint_is_named_and_not_loaded(tmp_path: Path) -> None:
    """B26, B36"""
    squall.fit(job(squall.InProcess(), epochs=1, threads=1, out=tmp_path / "run"))
    (file,) = (tmp_path / "run" / "checkpoints").glob("*/shard0.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(squall.CorruptError, match=r"shard0.safetensors"):
        squall.fit(job(squall.InProcess(), epochs=2, out=tmp_path / "run"), resume=True)
