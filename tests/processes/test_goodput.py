"""What is left of a run's speed when something is killed every ten seconds: at least nine tenths.

Two runs of one job, of as many seconds, alternately: nothing happens to one of them. ``SQUALL_GOODPUT_S`` has each last
another number of seconds.
"""

import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Disturbed
from tests.conftest import beside
from tests.processes.test_shards import assert_exact, integer_job, total

pytestmark = [pytest.mark.processes, pytest.mark.nightly]
EVERY_S = 10.0
EACH_S = float(os.environ.get("SQUALL_GOODPUT_S", "60"))
ROUNDS = 2


def slow_total(model: nn.Module, batch: Any) -> torch.Tensor:
    """A minibatch that takes its time and no processor, so that four replicas are not bounded by those of a machine."""
    time.sleep(0.05)
    return total(model, batch)


def rate(cluster: Local, out: Path, chaos: str) -> float:
    """Minibatches that were done once, each second."""
    job = integer_job(
        cluster,
        blocks=500_000,
        replicas=4,
        shards=2,
        threads=1,
        step=slow_total,
        chaos=chaos,
        time_s=EACH_S,
        out=out,
    )
    handle = squall.start(job)
    kills = sum(isinstance(event, Disturbed) for event in handle.events())
    run = handle.result(60)
    assert_exact(run)
    assert kills >= chaos.count("kill") - 1
    rows = run.ledger()
    times = rows[(rows["outcome"] == "applied") & (rows["slice"] == 0)]["time_s"]
    return float(len(times) / (EACH_S - times.min()))


@pytest.mark.timeout(int(2 * ROUNDS * (EACH_S + 30)))
def test_goodput_with_a_kill_every_ten_seconds(local: Local, tmp_path: Path) -> None:
    cluster = beside(local, restarts=squall.Restarts())
    roles = itertools.cycle(
        ["replica0", "shard0", "replica1", "coordinator", "replica2", "shard1", "replica3"]
    )
    times = itertools.takewhile(lambda at_s: at_s < EACH_S, itertools.count(EVERY_S / 2, EVERY_S))
    chaos = "; ".join(f"kill:{role}@t={at_s:g}" for role, at_s in zip(roles, times, strict=False))
    shares = []
    for number in range(ROUNDS):
        calm = rate(cluster, tmp_path / f"calm{number}", "")
        stormy = rate(cluster, tmp_path / f"stormy{number}", chaos)
        shares.append(stormy / calm)
        print(f"{calm:.1f} minibatches a second, {stormy:.1f} with {chaos}: {shares[-1]:.3f}", flush=True)
    assert statistics.median(shares) >= 0.9
