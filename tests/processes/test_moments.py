"""Any process killed or stopped at any moment, from the first to the last: no hang, and every block in the model once.

Moments are drawn from a seed. A few in each run of the suite; three hundred of roles, and thirty of launchers, by night.
"""

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import squall
from squall.cli.explain import explain
from squall.cluster.local import Local
from squall.observe.events import Disturbed, Joined, Left
from tests.conftest import beside
from tests.processes.helpers import is_alive, job, processes, wait_until

pytestmark = [pytest.mark.processes]
EPOCHS, PER_EPOCH = 30, 40
LAST_S = 2.5
"""How long moments are drawn from; runs that end sooner are spared the rest."""


def faults_at_random(seed: int, moments: int) -> str:
    draw = random.Random(seed)
    faults = []
    for _ in range(moments):
        role = draw.choice(["replica0", "replica1", "replica2", "replica", "shard0", "shard1", "evaluator"])
        at = f"@t={draw.uniform(0.0, LAST_S):.3f}"
        is_killed = draw.random() < 0.6 and not role.startswith("shard")
        pause = f"pause:{role},{draw.choice([1, 20, 200, 700])}ms"
        faults.append((f"kill:{role}" if is_killed else pause) + at)
    return "; ".join(faults)


def net_counts(run: squall.Run) -> Counter[tuple[int, int, int]]:
    """How often each slice has each minibatch (slice, epoch, position), what was rolled back taken off."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for row in run.ledger():
        sign = {"applied": 1, "rolled_back": -1}.get(str(row["outcome"]), 0)
        first = int(row["first"])
        for position in range(first, first + int(row["minibatches"])):
            counts[int(row["slice"]), int(row["epoch"]), position] += sign
    return counts


def assert_each_minibatch_once(run: squall.Run, epochs: int) -> None:
    expected = {(s, e, p) for s in range(2) for e in range(epochs) for p in range(PER_EPOCH)}
    counts = net_counts(run)
    assert {place: count for place, count in counts.items() if count != 1} == {}
    assert set(counts) == expected


def suffer(cluster: Any, out: Path, seed: int, moments: int) -> int:
    """Run through so many moments; return how many struck."""
    chaos = faults_at_random(seed, moments)
    handle = squall.start(
        job(cluster, replicas=3, threads=1, epochs=EPOCHS, test=job(cluster).train, chaos=chaos, out=out)
    )
    seen = list(handle.events())
    run = handle.result(60)
    assert run.metrics["why"] == "epochs", chaos
    assert_each_minibatch_once(run, EPOCHS)
    joined = {(e.role, e.incarnation) for e in seen if isinstance(e, Joined)}
    pushed = {(f"replica{row['replica']}.0", int(row["incarnation"])) for row in run.ledger()}
    assert pushed <= joined
    lives = Counter((e.role, e.incarnation) for e in seen if isinstance(e, Left))
    assert max(lives.values(), default=1) == 1, "a death is told once"
    assert not any(is_alive(pid) for name, pid in processes(out).items() if name != "zygote")
    return sum(isinstance(event, Disturbed) and event.what != "go on" for event in seen)


def hardy(local: Local) -> Local:
    return beside(local, restarts=squall.Restarts(most=1000, first_s=0.0, factor=1.0))


def test_roles_that_are_struck_at_random_moments_cost_no_block(local: Local, tmp_path: Path) -> None:
    assert suffer(hardy(local), tmp_path / "run", seed=1, moments=12) >= 6


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_three_hundred_moments_cost_no_block(local: Local, tmp_path: Path, transport: str) -> None:
    cluster = hardy(local)
    cluster.transport = transport
    struck, seed = 0, 1000
    while struck < 150:
        struck += suffer(cluster, tmp_path / f"run{seed}", seed, moments=20)
        seed += 1


PROGRAM = """
import sys
import squall
from tests.processes.helpers import job
squall.fit(job(squall.Local(), threads=1, epochs=10_000, checkpoint_every=0.5, out=sys.argv[1]))
"""


def kill_launcher(local: Local, out: Path, seed: int) -> None:
    """Stop it for a moment and kill it at another; go on from what is left; every minibatch is there once."""
    draw = random.Random(seed)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(out)])
    try:
        wait_until(lambda: list(out.glob("checkpoints/*/manifest.json")) != [], 60, "a checkpoint")
        pids = processes(out)
        program.send_signal(signal.SIGSTOP)
        _let_pass(program, draw.uniform(0.0, 0.3))
        program.send_signal(signal.SIGCONT)
        _let_pass(program, draw.uniform(0.0, 0.5))
    finally:
        program.kill()
        program.wait()
    wait_until(lambda: not any(map(is_alive, pids.values())), 10, "the end of all roles")
    durable = explain(out).durable
    assert durable is not None
    epochs = durable.minibatches // PER_EPOCH + 2
    run = squall.fit(job(local, threads=1, epochs=epochs, out=out), resume=True)
    assert run.metrics["why"] == "epochs"
    assert_each_minibatch_once(run, epochs)


def _let_pass(program: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait for the program to end, in vain."""
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(seconds)


def test_a_launcher_that_is_stopped_and_then_killed_leaves_a_run_that_goes_on(
    local: Local, tmp_path: Path
) -> None:
    kill_launcher(local, tmp_path / "run", seed=3)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_thirty_launchers_killed_at_random_moments_leave_runs_that_go_on(
    local: Local, tmp_path: Path
) -> None:
    for seed in range(30):
        kill_launcher(local, tmp_path / f"run{seed}", seed)
