"""Roles that die, stand still or raise, in real processes: the run goes on, or ends with one clear cause.

Faults planted by hand, each seen to fail a test here: the text of an exception that is none of ours left in the log · a second
failure not told · told as the cause · the same line of two replicas told twice · a second failure that is fatal taken for one
that is not.
"""

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import squall
from squall.cli.explain import explain
from squall.cluster.course import Course
from squall.cluster.local import Local
from squall.observe.events import Event, Left, Progress, Redone
from squall.training.fit import Handle
from tests.conftest import beside
from tests.processes.helpers import applied_counts, data, is_alive, job, kill, network, processes

pytestmark = pytest.mark.processes


def follow(handle: Handle, minibatches: int) -> list[Event]:
    """Take events until so many minibatches are done."""
    seen: list[Event] = []
    for event in handle.events():
        seen.append(event)
        if isinstance(event, Progress) and event.minibatches >= minibatches:
            return seen
    raise AssertionError(f"{handle.result(1)} ended before {minibatches} minibatches: {seen[-1:]}")


def assert_every_block_once(run: squall.Run, epochs: int, slices: int) -> None:
    counts = applied_counts(run)
    assert set(counts.values()) == {1}
    per_epoch = 40
    expected = {
        (s, e * 1_000_000 + p) for s in range(slices) for e in range(epochs) for p in range(per_epoch)
    }
    assert set(counts) == expected


def test_a_killed_and_a_paused_replica_of_four_cost_no_block(local: Local, tmp_path: Path) -> None:
    """B18, B21: kill -9 of one, SIGSTOP and SIGCONT of another; the ledger says what was redone."""
    epochs = 60
    handle = squall.start(job(local, replicas=4, epochs=epochs, out=tmp_path / "run"))
    follow(handle, 200)
    pids = processes(tmp_path / "run")
    kill(pids["replica2.0"], signal.SIGKILL)
    kill(pids["replica1.0"], signal.SIGSTOP)
    resume = threading.Timer(1.0, kill, (pids["replica1.0"], signal.SIGCONT))
    resume.start()

    rest = list(handle.events())
    redone = [event for event in rest if isinstance(event, Redone)]
    run = handle.result(30)

    resume.join()
    assert [event.role for event in rest if isinstance(event, Left)] == ["replica2.0"]
    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, epochs, slices=2)
    assert any("replica2" in event.why for event in redone)
    ledger = run.ledger()
    again = ledger[(ledger["attempt"] > 1) & np.isin(ledger["outcome"], ["applied", "repeated"])]
    assert len(np.unique(again["block"])) == run.metrics["blocks_redone"] >= 1
    assert not any(is_alive(pid) for name, pid in pids.items() if name != "zygote")


def test_a_replica_that_stays_paused_does_not_hold_the_run_up(local: Local, tmp_path: Path) -> None:
    handle = squall.start(job(local, replicas=2, epochs=40, out=tmp_path / "run"))
    follow(handle, 100)
    pid = processes(tmp_path / "run")["replica1.0"]
    kill(pid, signal.SIGSTOP)

    run = handle.result(40)

    assert_every_block_once(run, 40, slices=2)
    assert not is_alive(pid)


def test_when_every_replica_is_gone_the_run_says_so_and_can_be_resumed(local: Local, tmp_path: Path) -> None:
    settings = {"replicas": 2, "epochs": 100, "out": tmp_path / "run"}
    handle = squall.start(job(beside(local, restarts=None), **settings))
    follow(handle, 100)
    for name, pid in processes(tmp_path / "run").items():
        if name.startswith("replica"):
            kill(pid, signal.SIGKILL)

    with pytest.raises(squall.NoReplicaError, match=r"no replica is left: replica\d.0 was killed by SIGKILL"):
        handle.result(20)

    run = squall.fit(job(local, **settings), resume=True)
    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, 100, slices=2)


def test_a_killed_shard_ends_the_run_with_its_name(local: Local, tmp_path: Path) -> None:
    handle = squall.start(job(local, epochs=10_000, out=tmp_path / "run"))
    follow(handle, 50)
    pids = processes(tmp_path / "run")
    kill(pids["shard1"], signal.SIGKILL)

    with pytest.raises(squall.LostError, match="shard1 was killed by SIGKILL"):
        handle.result(20)

    assert not any(is_alive(pid) for name, pid in pids.items() if name != "zygote")


def is_first_to(flag: str) -> bool:
    """Whether no other process has claimed this file before."""
    try:
        Path(flag).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class RaisesOnOne(torch.nn.Module):
    """Raises in the 7th forward of a process, but only in the first process that gets there."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.inner, self.flag, self.calls = network(), flag, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 7 and is_first_to(self.flag):
            raise ValueError("seven is too many")
        return self.inner(x)  # type: ignore[no-any-return]


def test_an_exception_in_the_users_model_ends_the_run_and_is_told_once(local: Local, tmp_path: Path) -> None:
    """B14"""
    model = RaisesOnOne(str(tmp_path / "flag"))
    with pytest.raises(squall.UserCodeError) as raised:
        squall.fit(
            model, data(), batch_size=16, epochs=50, progress=False, cluster=local, out=tmp_path / "run"
        )

    error = raised.value
    assert error.error == "ValueError: seven is too many"
    assert error.role in ("replica0.0", "replica1.0")
    assert error.step.startswith("epoch 0, position")
    assert "test_failures.py" in error.line
    assert "in forward" in error.line
    assert not any(is_alive(pid) for name, pid in processes(tmp_path / "run").items() if name != "zygote")


def test_stop_leaves_a_run_that_resumes_to_the_same_blocks(local: Local, tmp_path: Path) -> None:
    settings = {"replicas": 2, "epochs": 60, "out": tmp_path / "run"}
    handle = squall.start(job(local, **settings))
    follow(handle, 300)
    handle.stop()
    stopped = handle.result(20)
    assert stopped.metrics["why"] == "stopped"

    run = squall.fit(job(local, **settings), resume=True)

    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, 60, slices=2)


def fails_on_the_shards(done: int) -> float:
    """A learning rate, which shards compute."""
    if done > 20:
        raise LookupError("no rate for so many")
    return 0.01


def test_what_a_role_raises_is_told_though_it_is_none_of_ours(local: Local, tmp_path: Path) -> None:
    rule = squall.Sgd(learning_rate=fails_on_the_shards)
    told = r"shard0 exited with 1: LookupError: no rate for so many \(File .*test_failures.py.*\), and the run cannot"
    with pytest.raises(squall.LostError, match=told):
        squall.fit(job(local, shards=1, epochs=20, strategy=squall.Downpour(rule=rule), out=tmp_path / "run"))
    assert "Traceback" in (tmp_path / "run" / "logs" / "shard0.log").read_text()


def role_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


def network_that_one_replica_cannot_run() -> torch.nn.Module:
    """Made in each process; in one of them, what is not the user's is broken."""
    if role_name() == "replica1.0":
        from squall.replica.runner import Outbox

        def send_if_due(self: Outbox, now: float) -> None:
            raise OSError("no such device")

        Outbox.send_if_due = send_if_due  # type: ignore[method-assign]
    return network()


def test_a_replica_that_raises_what_is_not_the_users_is_lost_with_its_text(local: Local) -> None:
    settings = {"replicas": 2, "epochs": 3, "progress": False, "cluster": local, "threads": 1}
    handle = squall.start(network_that_one_replica_cannot_run, data(), batch_size=16, **settings)
    (left,) = [event for event in handle.events() if isinstance(event, Left) and "exited" in event.why]
    assert handle.result(30).metrics["why"] == "epochs"
    assert left.role == "replica1.0"
    assert left.why.startswith("exited with 1: OSError: no such device (File ")


class RaisesItsName(torch.nn.Module):
    """Raises in every replica at its first minibatch, and in each something else."""

    def __init__(self, *, is_same: bool) -> None:
        super().__init__()
        self.inner, self.is_same = network(), is_same

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)  # until the other one has begun
        raise ValueError("each says this" if self.is_same else f"{role_name()} says this")


@pytest.mark.parametrize("is_same", [False, True])
def test_a_second_failure_is_kept_beside_the_first_which_is_the_cause(
    is_same: bool, local: Local, tmp_path: Path
) -> None:
    with pytest.raises(squall.UserCodeError) as raised:
        squall.fit(
            RaisesItsName(is_same=is_same), data(), progress=False, cluster=local, out=tmp_path / "run"
        )

    told = explain(tmp_path / "run")
    assert told.cause == str(raised.value)
    others = [words for words in told.also if "says this" in words]
    assert len(others) == (0 if is_same else 1)
    if not is_same:
        (second,) = {"replica0.0", "replica1.0"} - {raised.value.role}
        assert others[0].startswith(f"{second} at epoch 0")


def test_what_fails_after_the_cause_may_be_fatal_where_the_cause_was_not() -> None:
    first, second = squall.RunError(reason="first"), squall.LostError(reason="second")
    also: list[squall.SquallError] = []
    course = Course(also.append)
    course.fail(first)
    assert not course.is_fatal
    course.fail(second, is_fatal=True)
    course.fail(squall.LostError(reason="second"))
    assert (course.error, course.errors, course.is_fatal) == (first, [first, second], True)
    assert also == [second]
