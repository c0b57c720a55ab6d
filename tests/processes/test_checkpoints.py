"""Checkpoints of runs that go on, in real processes: one cut, whoever stands still, and enough after SIGKILL of all.

Planted faults, each seen to fail a test here: shards that admit new blocks in a hold · nothing cleared away.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import squall
from squall.cluster.local import Local
from squall.model.install import assemble
from squall.model.layout import Layout
from squall.observe.events import Checkpointed
from squall.training.checkpoint import Checkpoint, newest_checkpoint, read_checkpoint, relaid
from squall.training.fit import Handle
from tests.processes.helpers import applied_counts, is_alive, job, kill, processes, wait_until

pytestmark = pytest.mark.processes


def next_checkpoint(handle: Handle) -> Checkpointed:
    for event in handle.events():
        if isinstance(event, Checkpointed):
            return event
    raise AssertionError("the run ended without another checkpoint")


def by_name(layout: Layout, checkpoint_states: object) -> dict[str, Tensor]:
    """Parameters and rule state by tensor, wherever they lie."""
    states = list(checkpoint_states)  # type: ignore[call-overload]
    found = assemble(layout, [state.params for state in states])
    for slot in sorted(states[0].slots):
        named = assemble(layout, [state.slots[slot] for state in states])
        found |= {f"{slot} of {name}": value for name, value in named.items()}
    return found


def assert_one_cut(checkpoint: Checkpoint) -> None:
    assert len({book.settled.entries() for book in checkpoint.books}) == 1
    assert {book.minibatches for book in checkpoint.books} == {checkpoint.minibatches}


def test_a_checkpoint_beside_a_paused_replica_is_one_cut_that_fits_any_cluster(
    local: Local, tmp_path: Path
) -> None:
    settings = {
        "strategy": squall.Downpour(rule=squall.Adam(learning_rate=0.001)),
        "shards": 3,
        "epochs": 200,
        "checkpoint_every": 1.0,
    }
    out = tmp_path / "run"
    handle = squall.start(job(local, replicas=3, out=out, **settings))
    next_checkpoint(handle)
    pid = processes(out)["replica1.0"]
    kill(pid, signal.SIGSTOP)
    told = [next_checkpoint(handle) for _ in range(3)]
    kill(pid, signal.SIGCONT)
    handle.stop()
    handle.result(20)

    assert len(list((out / "checkpoints").iterdir())) == 2
    checkpoints = sorted((out / "checkpoints").iterdir())
    assert_one_cut(read_checkpoint(checkpoints[0]))
    assert [event.minibatches for event in told] == sorted({event.minibatches for event in told})
    checkpoint = newest_checkpoint(out / "checkpoints")
    expected = by_name(checkpoint.layout, checkpoint.states)
    for shards in (1, 3, 5):
        layout = Layout.balanced(checkpoint.layout.space, shards)
        states, _ = relaid(checkpoint, layout)
        got = by_name(layout, states)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    shutil.rmtree(checkpoints[1])
    run = squall.fit(job(local, replicas=2, out=out, **(settings | {"shards": 5, "epochs": 12})), resume=True)
    assert run.metrics["why"] == "epochs"


PROGRAM = """
import sys
import squall
from tests.processes.helpers import job
squall.fit(job(squall.Local(), epochs=10_000, checkpoint_every=0.5, out=sys.argv[1]))
"""


def test_a_run_all_of_whose_processes_are_killed_resumes_from_its_last_checkpoint(
    local: Local, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)])
    try:
        wait_until(lambda: len(list(out.glob("checkpoints/*/manifest.json"))) == 2, 40, "two checkpoints")
        pids = processes(out)
    finally:
        program.kill()
        program.wait()
    for name, pid in pids.items():
        if name != "zygote" and is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), 10, "the end of all roles")
    checkpoint = newest_checkpoint(out / "checkpoints")
    assert_one_cut(checkpoint)
    epochs = checkpoint.minibatches // 40 + 2

    run = squall.fit(job(local, epochs=epochs, replicas=3, shards=1, out=out), resume=True)

    assert run.metrics["why"] == "epochs"
    ledger = run.ledger()
    counts = applied_counts(run)
    for row in ledger[ledger["outcome"] == "rolled_back"]:
        counts[int(row["slice"]), int(row["epoch"]) * 1_000_000 + int(row["first"])] -= 1
    # It may have been further than the epochs that are asked for now: what was rolled back of those stays undone.
    places = {place: count for (number, place), count in counts.items() if number == 0 and count}
    assert places == {epoch * 1_000_000 + position: 1 for epoch in range(epochs) for position in range(40)}
