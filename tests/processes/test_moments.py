"""Any process killed or stopped at any moment, from the first to the last: no hang, and every block in the model once.

Moments are drawn from a seed: of replicas, shards, the coordinator and the evaluator, several in the same moment now and
then. A few in each run of the suite; three hundred of roles, and thirty of launchers, by night.
"""

import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import squall
from squall.cli.explain import explain
from squall.cluster.local import Local
from squall.observe.events import Disturbed, Joined, Left, Recovered
from squall.replica.downpour import MOST_AHEAD
from tests.conftest import beside
from tests.processes.helpers import is_alive, job, processes, wait_until

pytestmark = [pytest.mark.processes]
EPOCHS, PER_EPOCH = 30, 40
LAST_S = 2.5
"""How long those moments are drawn from that are not of minibatches; runs that end sooner are spared the rest."""


ROLES = (
    "replica0",
    "replica1",
    "replica2",
    "replica",
    "shard0",
    "shard1",
    "shard",
    "coordinator",
    "evaluator",
)


def faults_at_random(seed: int, moments: int) -> str:
    draw = random.Random(seed)
    faults = []
    at = ""
    for _ in range(moments):
        role = draw.choice(ROLES)
        if not at or draw.random() < 0.85:  # else in the moment of the one before
            of_all = 3 if role.startswith("replica") else 1
            step = f"@step={draw.randrange(EPOCHS * PER_EPOCH * 9 // 10 // of_all)}"
            at = step if draw.random() < 0.6 else f"@t={draw.uniform(0.0, LAST_S):.3f}"
        pause = f"pause:{role},{draw.choice([1, 20, 200, 700])}ms"
        faults.append((f"kill:{role}" if draw.random() < 0.6 else pause) + at)
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
    # Places with none are of a run that got further before it was killed: what it lost was rolled back.
    kept = {place: count for place, count in net_counts(run).items() if count != 0}
    assert {place: count for place, count in kept.items() if count != 1} == {}
    assert set(kept) == expected


@dataclass
class Suffered:
    """What came of some moments.

    Attributes:
        strikes: kills and stops that struck, by role; several of one role in one moment are one.
        shards_away, replicas_away: seconds from a kill until the shard served, and the replica worked, again.
        redone, rolled_back: minibatches that were done twice, and that shards lost.
    """

    strikes: Counter[str] = field(default_factory=Counter)
    shards_away: list[float] = field(default_factory=list)
    replicas_away: list[float] = field(default_factory=list)
    redone: int = 0
    rolled_back: int = 0

    @property
    def struck(self) -> int:
        return self.strikes.total()

    def __str__(self) -> str:
        away = [
            f"{np.median(all_):.2f} s away (median; {max(all_):.2f} at most, {len(all_)} times)"
            for all_ in (self.shards_away, self.replicas_away)
            if all_
        ]
        told = ", ".join(f"{role} {count}" for role, count in sorted(self.strikes.items()))
        return f"{self.struck} struck ({told}); shards and replicas {', '.join(away)}; {self.redone} blocks redone"


def suffer(cluster: Any, out: Path, seed: int, moments: int, suffered: Suffered) -> None:
    """Run through so many moments, and judge the run."""
    chaos = faults_at_random(seed, moments)
    settings = {"replicas": 3, "threads": 1, "epochs": EPOCHS, "durability": "ack"}
    handle = squall.start(job(cluster, **settings, test=job(cluster).train, chaos=chaos, out=out))
    seen = list(handle.events())
    run = handle.result(60)
    assert run.metrics["why"] == "epochs", chaos
    assert_each_minibatch_once(run, EPOCHS)
    assert run.metrics["minibatches_rolled_back"] == 0, "what was acknowledged is kept"
    joined = {(e.role, e.incarnation) for e in seen if isinstance(e, Joined)}
    pushed = {(f"replica{row['replica']}.0", int(row["incarnation"])) for row in run.ledger()}
    assert pushed <= joined
    lives = Counter((e.role, e.incarnation) for e in seen if isinstance(e, Left))
    assert max(lives.values(), default=1) == 1, "a death is told once"
    assert not any(is_alive(pid) for name, pid in processes(out).items() if name != "zygote")
    struck = [event for event in seen if isinstance(event, Disturbed) and event.what != "go on"]
    strikes = list({(event.role, event.time_s): event for event in struck}.values())
    kills = [event for event in strikes if event.what == "kill"]
    redone = int(run.metrics["blocks_redone"])
    held = sum(MOST_AHEAD * (1 if event.role.startswith("replica") else 3) for event in strikes)
    assert redone <= held, "what the struck one held, or all three did"
    suffered.strikes.update(event.role for event in strikes)
    suffered.redone += redone
    suffered.shards_away += _away(
        kills, "shard", [(e.role, e.time_s) for e in seen if isinstance(e, Recovered)]
    )
    rows = run.ledger()
    firsts = {(int(row["replica"]), int(row["incarnation"])): float(row["time_s"]) for row in rows[::-1]}
    worked = [(f"replica{replica}", time_s) for (replica, _), time_s in firsts.items()]
    suffered.replicas_away += _away(kills, "replica", worked)


def _away(kills: list[Disturbed], kind: str, back: list[tuple[str, float]]) -> list[float]:
    """From each kill of such roles to the role's next return; of those that came back."""
    waits = []
    for kill in kills:
        if kill.role.startswith(kind):
            after = [
                time_s - kill.time_s for role, time_s in back if role == kill.role and time_s > kill.time_s
            ]
            waits.extend([min(after)] if after else [])
    return waits


def hardy(local: Local) -> Local:
    return beside(local, restarts=squall.Restarts(most=1000, first_s=0.0, factor=1.0))


def test_roles_that_are_struck_at_random_moments_cost_no_block(local: Local, tmp_path: Path) -> None:
    suffered = Suffered()
    suffer(hardy(local), tmp_path / "run", seed=1, moments=12, suffered=suffered)
    assert suffered.struck >= 6


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_three_hundred_moments_cost_no_block(local: Local, tmp_path: Path, transport: str) -> None:
    cluster = hardy(local)
    cluster.transport = transport
    suffered, seed = Suffered(), 1000
    while suffered.struck < 150:
        suffer(cluster, tmp_path / f"run{seed}", seed, 20, suffered)
        print(f"seed {seed}: {suffered}", flush=True)
        seed += 1
    assert np.median(suffered.shards_away) < 2.0
    assert np.median(suffered.replicas_away) < 4.0


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
