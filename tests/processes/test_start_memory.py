"""How many copies of a model a run holds at most, from its start to its end, over the launcher and all roles.

The exchange with the one replica takes three (two parameter buffers, a gradient), the shard one and one for each slot of
the rule. What the shard takes its values from is gone when the exchange is made; a replica that has to call the model
function holds what that returns until its first fetch. So one more at a time is all that there may be.

Faults planted by hand, each seen to fail a test here: the launcher keeps what it sent the shards · and what it packed that
from · its model keeps its values · the pickler holds itself · the launcher waits for no shard · a shard says that it has
its slices before it does · the replica's model comes with values · the last checkpoint is copied first.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import squall
from squall.cluster import starting
from squall.cluster.first import Taken
from squall.cluster.local import Local
from tests.processes.helpers import data
from tests.processes.weighing import Weighing, family, weigh

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="Linux tells of memory"),
]
EXCHANGE = 3
LARGEST = 0.5
"""Of a model of two equal matrices: while backward has the gradient of one, or the copy of one is made."""


def heavy(num_bytes: float) -> nn.Module:
    """Two matrices of half as many bytes each, and little else."""
    width = int((num_bytes / 8) ** 0.5)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(2)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(0.1)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), *layers, nn.Linear(width, 2))


def peak(
    model: nn.Module | Callable[[], nn.Module], cluster: Local, out: Path, slots: int, **settings: object
) -> Weighing:
    rule = squall.Adagrad(learning_rate=1e-4) if slots else squall.Sgd(learning_rate=1e-3)
    with Weighing() as weighing:
        run = squall.fit(
            model,
            data(),
            strategy=squall.Downpour(rule=rule),
            replicas=1,
            shards=1,
            batch_size=4,
            threads=1,
            progress=False,
            cluster=cluster,
            out=out,
            **({"steps": 3} | settings),  # type: ignore[arg-type]
        )
    assert run.metrics["minibatches"] == ({"steps": 3} | settings)["steps"]
    return weighing


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["function", "instance", "resumed"])
def test_of_a_model_there_are_few_copies_at_any_time(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(starting, "BIG_BYTES", 0)
    size, slots = 160e6, 1
    base = peak(lambda: heavy(1e4), local, tmp_path / "small", slots).peak
    model = (lambda: heavy(size)) if how == "function" else heavy(size)
    settings = {}
    if how == "resumed":
        peak(model, local, tmp_path / "run", slots)
        settings = {"steps": 6, "resume": True}

    weighing = peak(model, local, tmp_path / "run", slots, **settings)

    own, held = (0, 1.0) if how == "function" else (1, LARGEST)  # by whoever gave it; by the replica
    most = EXCHANGE + 1 + slots + own + held
    grown = (weighing.peak - base) / size
    print(f"{how}: grown by {grown:.2f}, {weighing.told(size, 'the model')}")
    assert grown <= most + 0.35, weighing.told(size, "the model")


@pytest.mark.parametrize("resume", [False, True])
def test_shards_have_let_go_of_what_they_begin_from_when_all_else_is_started(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    seen: list[dict[int, int]] = []

    class Seen(Taken):
        def wait(self) -> None:
            super().wait()
            mapped: dict[int, int] = {}
            for pid in set(family(os.getpid())) - {os.getpid()}:
                weigh(pid, mapped)
            seen.append(mapped)

    model, out = heavy(80e6), tmp_path / "run"
    if resume:
        peak(model, local, out, 1)
    monkeypatch.setattr(starting, "BIG_BYTES", 0)
    monkeypatch.setattr(starting, "Taken", Seen)

    peak(model, local, out, 1, steps=6, resume=resume)

    assert seen == [{}]


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slots", [0, 1], ids=["sgd", "adagrad"])
def test_a_model_of_three_gigabytes_trains_with_one_replica_in_few_copies(
    local: Local, tmp_path: Path, slots: int
) -> None:
    size = 3e9

    weighing = peak(lambda: heavy(size), local, tmp_path / "run", slots)

    print(weighing.told(size, "the model"))
    most = EXCHANGE + 1 + slots + 1
    assert weighing.peak <= most * size + 0.8e9, weighing.told(size, "the model")
