"""Chaos on real processes: what a job is asked to suffer strikes, is told, and costs no block.

Faults planted here by hand, each seen to fail a test: a kill told and not sent · `restart=` of a fault not heard of · chance
drawn from something else than the run's seed.
"""

from pathlib import Path
from typing import Any

import numpy as np
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


def test_messages_that_are_lost_over_tcp_are_asked_for_again_and_cost_no_block(
    local: Local, tmp_path: Path
) -> None:
    """The connection breaks with the message: a push is repeated, and a replica whose line to the coordinator is gone
    comes back."""
    cluster = beside(local, transport="tcp", restarts=squall.Restarts(most=100, first_s=0.0))
    chaos = "drop:push=0.02; drop:push.reply=0.03; drop:fetch.reply=0.1; drop:ask=0.01; drop:ask.reply=0.01"
    run, seen = suffered(cluster, chaos, tmp_path / "run", epochs=12)

    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, 12, slices=2)
    assert run.metrics["blocks_repeated"] >= 1  # pushes whose answer was lost
    assert any(isinstance(event, Joined) and event.incarnation for event in seen)


def test_delays_and_cuts_over_tcp_hold_up_what_they_say(local: Local, tmp_path: Path) -> None:
    cluster = beside(local, transport="tcp")
    chaos = "delay=25ms+-5ms; cut:replica0|shard,1s@t=2.5"
    run, _ = suffered(cluster, chaos, tmp_path / "run", replicas=2, time_s=4.2, epochs=1000)

    rows = run.ledger()
    rows = rows[(rows["outcome"] == "applied") & (rows["slice"] == 0)]
    times = {replica: rows[rows["replica"] == replica]["time_s"] for replica in (0, 1)}
    # A push is there and back in 40 ms at least, and what left before the cut has arrived 30 ms after it at last.
    assert all((np.diff(of_one) > 0.035).all() for of_one in times.values())
    assert (times[0] < 2.5).any()
    assert not ((times[0] > 2.54) & (times[0] < 3.49)).any()
    assert ((times[1] > 2.54) & (times[1] < 3.49)).sum() >= 3
    assert (times[0] > 3.5).any()
