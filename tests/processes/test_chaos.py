"""Chaos on real processes: what a job is asked to suffer strikes, is told, and costs no block.

Faults planted here by hand, each seen to fail a test: a pause that nobody ends · a kill told and not sent · `restart=` of a
fault not heard of · another seed than the run's · chaos that goes on while the run is being saved.
"""

from pathlib import Path
from typing import Any

import pytest

import squall
from squall.cluster.local import Local
from squall.observe.events import Disturbed, Event, Joined, Left
from tests.conftest import beside
from tests.processes.helpers import job
from tests.processes.test_failures import assert_every_block_once

pytestmark = pytest.mark.processes


def suffered(cluster: Any, chaos: str, out: Path, **settings: Any) -> tuple[squall.Run, list[Event]]:
    handle = squall.start(job(cluster, chaos=chaos, out=out, **({"replicas": 3, "epochs": 60} | settings)))
    seen = list(handle.events())
    return handle.result(30), seen


def test_kills_and_pauses_strike_when_they_are_to_and_cost_no_block(local: Local, tmp_path: Path) -> None:
    chaos = "kill:replica1@step=60; pause:replica2,300ms@step=30; pause:shard0,200ms@step=400; kill:evaluator@t=0.2"
    run, seen = suffered(local, chaos, tmp_path / "run", test=job(local).train)

    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, 60, slices=2)
    struck = [(event.role, event.what) for event in seen if isinstance(event, Disturbed)]
    assert sorted(struck) == [
        ("evaluator", "kill"),
        ("replica1", "kill"),
        ("replica2", "go on"),
        ("replica2", "stop"),
        ("shard0", "go on"),
        ("shard0", "stop"),
    ]
    assert [e.incarnation for e in seen if isinstance(e, Joined) and e.role == "replica1.0"] == [0, 1]
    rows = run.ledger()
    of_one = rows[(rows["replica"] == 1) & (rows["incarnation"] == 0) & (rows["slice"] == 0)]
    assert 60 <= of_one["minibatches"].sum() < 400


def test_the_same_seed_kills_at_the_same_minibatch_and_a_stated_restart_holds(
    local: Local, tmp_path: Path
) -> None:
    cluster = beside(local, restarts=None)
    lives = []
    for attempt in range(2):
        chaos = "kill:replica0,restart=100ms@p=0.01"
        run, seen = suffered(
            cluster, chaos, tmp_path / f"run{attempt}", replicas=1, threads=1, epochs=10, seed=7
        )
        assert_every_block_once(run, 10, slices=2)
        left = [event.time_s for event in seen if isinstance(event, Left)]
        back = [event.time_s for event in seen if isinstance(event, Joined) and event.incarnation]
        assert len(left) == len(back) >= 1
        assert all(again - gone > 0.09 for gone, again in zip(left, back, strict=True))
        lives.append([e.fault for e in seen if isinstance(e, Disturbed)])
    assert lives[0] == lives[1]


def test_chaos_that_a_cluster_cannot_have_is_refused_before_anything_starts(
    local: Local, tmp_path: Path
) -> None:
    with pytest.raises(squall.ConfigError, match="but got shared memory"):
        squall.fit(job(local, chaos="delay=50ms", out=tmp_path / "run"))
    with pytest.raises(squall.ConfigError, match=r"Job\(chaos=\) under squall.InProcess"):
        squall.fit(job(squall.InProcess(), chaos="kill:replica0"))
    with pytest.raises(squall.ConfigError, match="the fault 'kill:replica0@when=1', character 15"):
        job(local, chaos="kill:replica0@when=1")
