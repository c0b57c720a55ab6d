"""Shards and coordinators that die in virtual time, with real gradients: as on real processes, only at once.

Faults planted here by hand, each seen to fail a test: an update that ran when its shard was killed left out of the books ·
tensors not put back with the books · rows not taken back · the next life under the old number · a coordinator that follows
told nothing · a role that is not there passed over.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import squall
from squall.observe.events import Checkpointed, Disturbed, Event, Joined, Left, Recovered
from tests.processes.helpers import job
from tests.processes.test_cut import assert_counted, counting_job
from tests.processes.test_shards import assert_exact, integer_job

BLOCKS = 120
LOST = "drop:push=0.02; drop:push.reply=0.03; drop:fetch.reply=0.05; drop:ask=0.02; drop:ask.reply=0.02; dup:push=0.05"


def suffered(
    chaos: str, durability: Any, *, seed: int = 0, **settings: Any
) -> tuple[squall.Run, list[Event]]:
    simulated = squall.Simulated(seed=seed, speeds=(20.0, 7.0, 20.0), apply_s=0.02)
    usual = {"blocks": BLOCKS, "replicas": 3, "durability": durability, "chaos": chaos}
    handle = squall.start(integer_job(simulated, **(usual | settings)))
    seen = list(handle.events())
    return handle.result(10), seen


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 100))]
)
@pytest.mark.parametrize("durability", ["ack", squall.Interval(0.5)], ids=["ack", "interval"])
def test_sums_are_exact_whatever_dies_in_virtual_time(durability: Any, seed: int) -> None:
    chaos = f"kill:shard@p=0.02; kill:shard1@step=30; kill:coordinator,restart=300ms@p=0.01; kill:replica,restart=200ms@p=0.02; {LOST}"
    run, seen = suffered(chaos, durability, seed=seed)

    assert run.metrics["why"] == "epochs"
    assert_exact(run, BLOCKS)
    assert run.metrics["minibatches"] == BLOCKS
    kills = Counter(event.role for event in seen if isinstance(event, Disturbed))
    assert kills["shard0"] + kills["shard1"] >= 1
    back = [event for event in seen if isinstance(event, Recovered)]
    assert run.metrics["minibatches_rolled_back"] == sum(event.lost for event in back)
    if durability == "ack":
        assert run.metrics["minibatches_rolled_back"] == 0


@pytest.mark.parametrize("durability", ["ack", squall.Interval(0.5)], ids=["ack", "interval"])
def test_sums_of_a_cut_model_are_exact_whatever_dies_in_virtual_time(durability: Any) -> None:
    chaos = f"kill:shard@p=0.02; kill:shard1@step=30; kill:replica,restart=200ms@p=0.02; {LOST}"
    simulated = squall.Simulated(speeds=(20.0, 7.0), apply_s=0.02)
    run = squall.fit(counting_job(simulated, BLOCKS, shards=3, durability=durability, chaos=chaos))

    assert run.metrics["shards_recovered"] >= 1
    assert_counted(run, BLOCKS)


def test_a_shard_that_dies_in_virtual_time_comes_back_when_its_fault_says() -> None:
    run, seen = suffered("kill:shard1,restart=1500ms@t=2", squall.Interval(10))

    (struck,) = [event for event in seen if isinstance(event, Disturbed)]
    assert (struck.role, struck.what, struck.fault) == ("shard1", "kill", "kill:shard1,restart=1.5s@t=2")
    assert struck.time_s == pytest.approx(2.0, abs=0.2)
    (left,) = [event for event in seen if isinstance(event, Left)]
    (joined,) = [event for event in seen if isinstance(event, Joined) and event.role == "shard1"]
    assert (left.role, left.incarnation, joined.incarnation) == ("shard1", 0, 1)
    assert joined.time_s - left.time_s == pytest.approx(1.5, abs=0.1)
    assert run.metrics["minibatches_rolled_back"] > 0
    rows = run.ledger()
    assert set(rows[rows["shard"] == 1]["shard_incarnation"]) == {0, 1}
    assert set(rows[rows["shard"] == 0]["shard_incarnation"]) == {0}
    assert set(rows[rows["outcome"] == "rolled_back"]["shard"]) == {1}


def test_without_durability_a_shard_that_dies_ends_the_run_in_virtual_time_too() -> None:
    with pytest.raises(squall.LostError, match="shard0 was killed, and the run cannot go on without it"):
        suffered("kill:shard0@t=1", "none")


def test_a_coordinator_dies_in_virtual_time_in_the_middle_of_checkpoints(tmp_path: Path) -> None:
    settings = {"checkpoint_every": 0.1, "out": tmp_path / "run"}
    run, seen = suffered("kill:coordinator@p=0.05", "none", **settings)

    assert_exact(run, BLOCKS)
    lives = [event.incarnation for event in seen if isinstance(event, Left) and event.role == "coordinator"]
    assert lives == list(range(len(lives)))
    assert len(lives) >= 2
    assert not [event for event in seen if isinstance(event, Joined) and event.incarnation]
    assert [event for event in seen if isinstance(event, Checkpointed)]


def test_a_run_without_gradients_has_the_same_deaths_and_the_same_ledger() -> None:
    chaos = "kill:shard@p=0.02; kill:coordinator@p=0.01"
    simulated = squall.Simulated(speeds=(20.0, 7.0), apply_s=0.02)
    made = integer_job(simulated, blocks=BLOCKS, durability=squall.Interval(0.5), chaos=chaos)
    real, other = (
        squall.fit(made, cluster=replace(simulated, compute=compute)) for compute in ("real", "modelled")
    )
    assert (real.ledger() == other.ledger()).all()
    assert other.metrics["shards_recovered"] == real.metrics["shards_recovered"] > 0


@pytest.mark.parametrize(
    ("chaos", "role"),
    [
        ("kill:replica9@step=5", "replica9"),
        ("pause:shard2,1s", "shard2"),
        ("cut:replica0|shard7,1s@t=1", "shard7"),
        ("kill:evaluator@t=1", "evaluator"),
    ],
)
@pytest.mark.parametrize("cluster", [squall.Local(transport="tcp"), squall.Simulated(), squall.InProcess()])
def test_a_fault_of_a_role_that_the_run_does_not_have_is_refused(
    cluster: Any, chaos: str, role: str, tmp_path: Path
) -> None:
    with pytest.raises(
        squall.ConfigError, match=rf"in Job\(chaos=\): expected .*replica0 to replica1.*got '{role}'"
    ):
        squall.fit(job(cluster), chaos=chaos, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_same_of_a_cluster_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(squall.ConfigError, match=r"in Simulated\(faults=\).*got 'replica2'"):
        squall.fit(job(squall.Simulated(faults="kill:replica2@t=1"), out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_links_know_a_lead_by_both_of_its_names() -> None:
    slow = squall.Link(latency_s=0.5)
    times = []
    for name in ("replica1", "replica1.0", "replica*"):
        simulated = squall.Simulated(speeds=(10.0,), jitter=0.0, links={(name, "shard*"): slow})
        times.append(squall.fit(integer_job(simulated, blocks=40, durability="none")).metrics["virtual_s"])
    assert times[0] == times[1] < times[2]
