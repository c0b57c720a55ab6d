"""Shards that are killed, in real processes: they come back with what was promised, and the run goes on.

Kills are of single processes by their id, out of the run's own `processes.json`.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Disturbed, Event, Left, Progress, Recovered, Unkept
from squall.observe.ledger import read_ledger
from tests.processes.helpers import is_alive, kill, processes, wait_until

pytestmark = pytest.mark.processes

SIZES = (37, 5, 201)


class Ones(nn.Module):
    """Its loss's gradient is one, everywhere and always."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.stack([vector.sum() for vector in model.parameters()]).sum()


def integer_job(cluster: Any, *, blocks: int, **settings: Any) -> squall.Job:
    """Every push takes one from every element; so values count pushes, exactly."""
    data = (torch.zeros(blocks, 1), torch.zeros(blocks, 1))
    usual = {
        "replicas": 2,
        "shards": 2,
        "batch_size": 1,
        "progress": False,
        "durability": "ack",
        "step": total,
    }
    strategy = squall.Downpour(rule=squall.Sgd(learning_rate=1.0))
    return squall.Job(Ones(), data, strategy=strategy, cluster=cluster, **(usual | settings))


def applied_once(run: squall.Run) -> int:
    """How many blocks there are; the ledger says that each was applied once to each slice."""
    ledger = run.ledger()
    sums = set()
    for number in np.unique(ledger["slice"]):
        own = ledger[ledger["slice"] == number]
        applied = np.bincount(own[own["outcome"] == "applied"]["first"])
        taken_back = np.bincount(own[own["outcome"] == "rolled_back"]["first"], minlength=len(applied))
        left = applied - taken_back
        assert set(left.tolist()) <= {0, 1}
        sums.add(int(left.sum()))
    (done,) = sums
    return done


def assert_exact(run: squall.Run, blocks: int | None = None) -> None:
    """Values, ledger and versions all say that each block was applied once to each slice; so many, if that is known."""
    done = applied_once(run)
    assert blocks is None or done == blocks
    for vector in run.model.parameters():
        assert vector.tolist() == [-float(done)] * vector.numel()


def has_done(minibatches: int) -> Any:
    return lambda event: isinstance(event, Progress) and event.minibatches >= minibatches


def kill_shard(path: Path, name: str) -> int:
    """Kill a shard, and return the process that is no more."""
    pid = processes(path)[name]
    kill(pid, signal.SIGKILL)
    return pid


def until(events: Iterator[Event], done: Any) -> list[Event]:
    """Take events, to the first that is the one that is waited for."""
    seen = []
    for event in events:
        seen.append(event)
        if done(event):
            return seen
    raise AssertionError("ended before")


def is_back(event: Event) -> bool:
    return isinstance(event, Recovered)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_sums_are_exact_whenever_shards_are_killed(transport: str, tmp_path: Path) -> None:
    """B25, and the integers of "exactly once": with "ack", what was acknowledged is there."""
    path = tmp_path / "run"
    handle = squall.start(integer_job(Local(transport=transport), blocks=100_000, out=path))
    events = handle.events()
    until(events, has_done(60))
    for number in range(3):
        pid = kill_shard(path, f"shard{number % 2}")
        seen = until(events, is_back)
        (left,) = [event for event in seen if isinstance(event, Left)]
        assert seen[-1].time_s - left.time_s < 5, (
            "by the run's own clock, from its death to its serving again"
        )
        wait_until(lambda gone=pid: not is_alive(gone), 5, "the end of what was killed")
    handle.stop()
    rest = list(events)
    run = handle.result(30)

    assert run.metrics["why"] == "stopped"
    assert (run.metrics["shards_recovered"], run.metrics["minibatches_rolled_back"]) == (3, 0)
    assert not [event for event in rest if isinstance(event, Left)], "replicas wait, and stay"
    assert_exact(run)
    assert set(np.unique(run.ledger()["shard_incarnation"])) == {0, 1, 2}
    assert not any(is_alive(pid) for name, pid in processes(path).items() if name != "zygote")
    assert not list((path / "shards").rglob("*.*")), "what only a restart needs is gone"


def test_a_shard_that_comes_back_from_a_snapshot_has_lost_work_done_again(tmp_path: Path) -> None:
    """B25: the loss is what was applied since the last snapshot, and the ledger says which."""
    blocks, path = 6000, tmp_path / "run"
    job = integer_job(Local(), blocks=blocks, out=path, durability=squall.Interval(0.2))
    handle = squall.start(job)
    events = handle.events()
    seen: list[Event] = []
    for number in range(1, 4):  # one of them may come right behind a snapshot, and lose nothing
        for event in events:
            seen.append(event)
            if has_done(200 * number)(event) and any((path / "shards" / "shard0").glob("*.snapshot")):
                break
        kill_shard(path, "shard0")
        for event in events:
            seen.append(event)
            if is_back(event):
                break
    seen += events
    run = handle.result(30)

    backs = [event for event in seen if isinstance(event, Recovered)]
    lost = sum(back.lost for back in backs)
    assert run.metrics["why"] == "epochs"
    assert len(backs) == 3
    assert run.metrics["minibatches_rolled_back"] == lost > 0
    assert_exact(run, blocks)
    assert run.metrics["blocks_redone"] >= max(back.lost for back in backs)  # a block may be lost twice


def test_a_shard_that_is_killed_before_it_wrote_anything_begins_as_the_run_did(tmp_path: Path) -> None:
    blocks, path = 1500, tmp_path / "run"
    handle = squall.start(integer_job(Local(), blocks=blocks, out=path, durability=squall.Interval(3600)))
    events = handle.events()
    until(events, has_done(1))
    wait_until(lambda: len(read_ledger(path / "ledger", "shard1-*")) >= 40, 20, "rows of what will be lost")
    kill_shard(path, "shard1")
    run = handle.result(60)

    assert run.metrics["minibatches_rolled_back"] >= 40
    assert_exact(run, blocks)
    ledger = run.ledger()
    taken_back = ledger[ledger["outcome"] == "rolled_back"]
    assert set(taken_back["shard"]) == {1}
    assert len(taken_back) >= 40


def test_without_durability_a_killed_shard_ends_the_run(tmp_path: Path) -> None:
    handle = squall.start(integer_job(Local(), blocks=5000, out=tmp_path / "run", durability="none"))
    until(handle.events(), has_done(20))
    kill_shard(tmp_path / "run", "shard0")

    with pytest.raises(squall.LostError, match="shard0 was killed by SIGKILL, and the run cannot go on"):
        handle.result(20)


def test_where_the_disk_takes_no_more_training_goes_on_and_says_so(tmp_path: Path) -> None:
    """A folder that is gone stands for a disk that cannot be written to: root may write anywhere."""
    blocks, path = 1500, tmp_path / "run"
    handle = squall.start(integer_job(Local(), blocks=blocks, out=path, durability=squall.Interval(0.2)))
    events = handle.events()
    until(events, has_done(20))
    (path / "shards" / "shard0").rename(path / "elsewhere")
    until(events, lambda event: isinstance(event, Unkept))
    run = handle.result(60)

    assert run.metrics["why"] == "epochs"
    (told,) = run.metrics["unkept"]
    assert told.startswith("shard0: ")
    assert_exact(run, blocks)


def troubles(blocks: int, transport: str) -> str:
    """Twenty-four kills of shards, some thirty of replicas; over TCP lost messages and cuts besides."""
    faults = [f"kill:shard{number % 2}@step={number * blocks // 26}" for number in range(1, 25)]
    faults.append(f"kill:replica@p={30 / blocks}")
    if transport == "tcp":
        kinds = {"push": 200, "push.reply": 200, "fetch": 5, "fetch.reply": 5, "ask": 20, "ask.reply": 20}
        faults += [f"drop:{kind}={count / blocks}" for kind, count in kinds.items()]
        ends = ("replica0|shard0", "replica1|shard", "replica|coordinator", "shard1|coordinator")
        faults += [
            f"cut:{ends[number % 4]},{150 * (1 + number % 3)}ms@t={5 * number}" for number in range(1, 40)
        ]
    return "; ".join(faults)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_hundred_thousand_pushes_are_exact_whatever_happens(tmp_path: Path, transport: str) -> None:
    """Over TCP requests and replies are lost, what was answered is sent again, and lines are cut; both under kills."""
    blocks = int(os.environ.get("SQUALL_PUSHES", "100000"))
    cluster = Local(transport=transport, restarts=squall.Restarts(most=1000, first_s=0.05, factor=1.0))
    job = integer_job(cluster, blocks=blocks, out=tmp_path / "run", replicas=3, threads=1)
    seen = [
        event
        for event in squall.start(replace(job, chaos=troubles(blocks, transport))).events()
        if isinstance(event, Disturbed | Recovered)
    ]
    run = squall.load(tmp_path / "run", Ones())

    strikes = Counter(event.role.rstrip("0123456789") for event in seen if isinstance(event, Disturbed))
    away = [
        min(
            e.time_s
            for e in seen
            if isinstance(e, Recovered) and e.role == kill.role and e.time_s > kill.time_s
        )
        - kill.time_s
        for kill in seen
        if isinstance(kill, Disturbed) and kill.role.startswith("shard")
    ]
    print(
        f"{transport}: {dict(strikes)}, shards away {np.median(away):.2f} s (median), {max(away):.2f} s at most"
    )
    print({name: value for name, value in run.metrics.items() if value})
    assert run.metrics["why"] == "epochs"
    assert_exact(run, blocks)
    assert strikes["shard"] == 24
    assert strikes["replica"] >= 10
    assert run.metrics["minibatches_rolled_back"] == 0
    assert transport == "shared" or run.metrics["blocks_repeated"] >= 20
    assert np.median(away) < 2
