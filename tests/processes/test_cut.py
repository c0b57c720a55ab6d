"""Replicas of two and three workers in real processes: equal to plain PyTorch, and dead or alive as a whole.

Faults planted by hand, each seen to fail a test here, by its time-out: a lead that does not mind a lost worker · answers of
shards to colleagues heard for one line only · a lead that is not told, or takes it for its own, that a colleague's shard is back ·
a colleague that does not listen to the shard that is back.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import squall
from squall.cluster.local import Local
from squall.observe.events import Evaluated, Left
from tests.processes.helpers import applied_counts, is_alive, job, kill, processes, wait_until
from tests.processes.test_failures import follow
from tests.processes.test_shards import applied_once, has_done, is_back, kill_shard, until
from tests.training import test_cutting as cut

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("settings", "norm"),
    [({"partitions": 2, "shards": 2}, True), ({"partitions": 3, "microbatches": 4, "clip_norm": 0.3}, False)],
    ids=["two, batch norm", "three, microbatches, clipped"],
)
def test_twenty_steps_in_processes_are_those_of_plain_pytorch(
    local: Local, settings: dict[str, Any], norm: bool
) -> None:
    model = cut.network(norm=norm)
    x, y = cut.data()

    run = squall.fit(cut.job(model, cluster=local, test=(x, y), **settings))

    expected, _ = cut.plain(model, clip_norm=settings.get("clip_norm"))
    assert cut.furthest(run, expected) < 1e-8
    with torch.no_grad():
        assert torch.allclose(run.predict(x), expected.eval()(x), atol=1e-8)
        loss = torch.nn.functional.cross_entropy(expected(x), y).item()
    assert run.metrics["test_loss"] == pytest.approx(loss, abs=1e-8)
    workers = {name for name in processes(run.path) if name.startswith("replica")}
    assert workers == {f"replica0.{partition}" for partition in range(settings["partitions"])}


def test_each_worker_talks_to_the_shards_with_its_own_parameters_and_to_its_colleagues(local: Local) -> None:
    model = cut.network()
    run = squall.fit(cut.job(model, cluster=local, partitions=2))
    in_one_thread = squall.fit(cut.job(model, partitions=2))
    traffic, expected = run.traffic(), in_one_thread.traffic()
    assert {link for link in traffic if "coordinator" not in link} == set(expected)
    for link, (num_bytes, _) in expected.items():
        assert num_bytes <= traffic[link][0] < num_bytes * 1.05 + 10_000, (
            "tensors, and small messages beside them"
        )


@pytest.mark.parametrize(
    "strategy", [{"overlap": True}, {"n_fetch": 4, "n_push": 2}], ids=["overlap", "rhythm"]
)
def test_two_replicas_of_two_workers_apply_every_block_once(local: Local, strategy: dict[str, Any]) -> None:
    run = squall.fit(job(local, partitions=2, epochs=3, strategy=squall.Downpour(**strategy)))
    counts = applied_counts(run)
    assert set(counts.values()) == {1}
    slices = {int(number) for number in run.ledger()["slice"]}
    assert len(counts) == len(slices) * 3 * 40
    assert {int(number) for number in run.ledger()["partition"]} == {0, 1}


@pytest.mark.parametrize("victim", ["replica1.1", "replica1.0"])
def test_a_worker_that_is_killed_takes_its_replica_along_and_no_block(
    local: Local, tmp_path: Path, victim: str
) -> None:
    epochs = 8
    handle = squall.start(job(local, partitions=2, epochs=epochs, out=tmp_path / "run"))
    follow(handle, 60)
    pids = processes(tmp_path / "run")
    kill(pids[victim], signal.SIGKILL)
    gone = [pids["replica1.0"], pids["replica1.1"]]
    wait_until(lambda: not any(map(is_alive, gone)), 5.0, "both workers of the replica to end")

    left = {event.role for event in handle.events() if isinstance(event, Left)}
    run = handle.result(60)

    assert left == {"replica1.0", "replica1.1"}
    assert run.metrics["why"] == "epochs"
    counts = applied_counts(run)
    assert set(counts.values()) == {1}
    assert len(counts) == len(set(run.ledger()["slice"].tolist())) * epochs * 40


def test_the_only_replica_comes_back_whole_when_a_worker_of_it_is_killed(
    local: Local, tmp_path: Path
) -> None:
    handle = squall.start(job(local, replicas=1, partitions=3, epochs=4, out=tmp_path / "run"))
    follow(handle, 20)
    before = processes(tmp_path / "run")
    kill(before["replica0.2"], signal.SIGKILL)
    run = handle.result(60)

    after = processes(tmp_path / "run")
    assert all(before[f"replica0.{p}"] != after[f"replica0.{p}"] for p in range(3))
    counts = applied_counts(run)
    assert set(counts.values()) == {1}
    assert len(counts) == len(set(run.ledger()["slice"].tolist())) * 4 * 40


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum(dim=1).mean()


def counting_job(cluster: Any, blocks: int, *, overlap: bool = False, **settings: Any) -> squall.Job:
    """Every push takes 4 from each element of the first bias, and 1 from those of the second; so values count pushes."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Linear(8, 4))
    for layer in model:
        torch.nn.init.zeros_(layer.bias)
        torch.nn.init.ones_(layer.weight).requires_grad_(False)
    data = (torch.zeros(2 * blocks, 1), torch.zeros(2 * blocks, 4))
    strategy = squall.Downpour(rule=squall.Sgd(learning_rate=1.0), overlap=overlap)
    usual = {"replicas": 2, "partitions": 2, "batch_size": 2, "progress": False}
    return squall.Job(model, data, total, strategy=strategy, cluster=cluster, **(usual | settings))


def assert_counted(run: squall.Run, blocks: int) -> None:
    """Values and ledger say that each of so many blocks was applied once to each slice."""
    assert run.metrics["why"] == "epochs"
    assert applied_once(run) == blocks
    first, second = run.model
    assert first.bias.tolist() == [-4.0 * blocks] * 8
    assert second.bias.tolist() == [-1.0 * blocks] * 4


@pytest.mark.parametrize(
    ("durability", "overlap", "shards"),
    [("ack", False, 2), ("ack", True, 3), (squall.Interval(0.2), False, 3), (squall.Interval(0.2), True, 2)],
    ids=["ack", "ack, overlap, a shard of both", "interval, a shard of both", "interval, overlap"],
)
def test_sums_of_a_cut_model_are_exact_whenever_shards_are_killed(
    local: Local, tmp_path: Path, durability: Any, overlap: bool, shards: int
) -> None:
    """Each partition sends again what was not acknowledged, and each block counts once on each slice."""
    blocks, path = 1400, tmp_path / "run"
    settings = {"shards": shards, "durability": durability, "out": path}
    handle = squall.start(counting_job(local, blocks, overlap=overlap, **settings))
    events = handle.events()
    for number in range(4):
        until(events, has_done(60 + 250 * number))
        if not number:
            before = processes(path)
        kill_shard(path, f"shard{number % shards}")
        until(events, is_back)
    seen = list(events)
    run = handle.result(60)

    assert run.metrics["shards_recovered"] == 4
    assert durability != "ack" or run.metrics["minibatches_rolled_back"] == 0
    assert not [event for event in seen if isinstance(event, Left)], "replicas wait, and stay"
    after = processes(path)
    assert all(after[name] == pid for name, pid in before.items() if name.startswith("replica"))
    assert {(int(row["shard"]), int(row["partition"])) for row in run.ledger()} == (
        {(0, 0), (1, 1)} if shards == 2 else {(0, 0), (1, 0), (1, 1), (2, 1)}
    )
    assert_counted(run, blocks)


def test_cut_models_over_tcp_are_refused_by_name(local_tcp: Local) -> None:
    with pytest.raises(squall.ConfigError, match="TCP"):
        squall.fit(job(local_tcp, partitions=2))


def test_a_cut_model_is_evaluated_while_it_trains(local: Local, tmp_path: Path) -> None:
    x, y = cut.data()
    handle = squall.start(
        cut.job(
            cut.network(),
            cluster=local,
            partitions=2,
            steps=60,
            test=(x, y),
            evaluate_every=1.0,
            out=tmp_path / "run",
        )
    )
    seen = [event for event in handle.events() if isinstance(event, Evaluated)]
    handle.result(60)
    while_it_trained = [event.versions for event in seen if event.versions]
    assert while_it_trained
    slices = {row["slice"] for row in json.loads((tmp_path / "run" / "job.json").read_text())["layout"]}
    assert {len(versions) for versions in while_it_trained} == {len(slices)}
