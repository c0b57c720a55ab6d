"""Shards that are killed, in real processes: they come back with what was promised, and the run goes on.

Kills are of single processes by their id, out of the run's own `processes.json`.
"""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Event, Left, Progress, Recovered
from squall.training.fit import Handle
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
    usual = {"replicas": 2, "shards": 2, "batch_size": 1, "progress": False, "durability": "ack"}
    strategy = squall.Downpour(rule=squall.Sgd(learning_rate=1.0))
    return squall.Job(Ones(), data, step=total, strategy=strategy, cluster=cluster, **(usual | settings))


def assert_exact(run: squall.Run, blocks: int) -> None:
    """Values, ledger and versions all say that each block was applied once to each slice."""
    for vector in run.model.parameters():
        assert vector.tolist() == [-float(blocks)] * vector.numel()
    ledger = run.ledger()
    slices = np.unique(ledger["slice"])
    for number in slices:
        own = ledger[ledger["slice"] == number]
        applied = np.bincount(own[own["outcome"] == "applied"]["first"], minlength=blocks)
        taken_back = np.bincount(own[own["outcome"] == "rolled_back"]["first"], minlength=blocks)
        assert (applied - taken_back == 1).all()


def seen_until(handle: Handle, done: Any) -> Iterator[Event]:
    for event in handle.events():
        yield event
        if done(event):
            return
    raise AssertionError(f"ended before: {handle.result(5)}")


def has_done(minibatches: int) -> Any:
    return lambda event: isinstance(event, Progress) and event.minibatches >= minibatches


def kill_shard(path: Path, name: str) -> float:
    """Kill it, and return how long it took until it was back [seconds]."""
    before = processes(path)[name]
    kill(before, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: processes(path)[name] != before, 10, f"{name} to be started again")
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_sums_are_exact_whenever_shards_are_killed(transport: str, tmp_path: Path) -> None:
    """B25, and the integers of "exactly once": with "ack", what was acknowledged is there."""
    blocks, path = 3000, tmp_path / "run"
    handle = squall.start(integer_job(Local(transport=transport), blocks=blocks, out=path))
    list(seen_until(handle, has_done(100)))
    for number in range(4):
        kill_shard(path, f"shard{number % 2}")
        list(seen_until(handle, lambda event: isinstance(event, Recovered)))
        list(seen_until(handle, has_done(100)))
    rest = list(handle.events())
    run = handle.result(30)

    assert run.metrics["why"] == "epochs"
    assert run.metrics["shards_recovered"] == 4
    assert run.metrics["minibatches_rolled_back"] == 0
    assert not [event for event in rest if isinstance(event, Left)]
    assert_exact(run, blocks)
    assert set(np.unique(run.ledger()["shard_incarnation"])) == {0, 1, 2}
    assert not any(is_alive(pid) for pid in processes(path).values())
