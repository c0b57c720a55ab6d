"""Models and runs at the edges of what is usual, on real processes: thousands of tiny tensors, one that is nearly all of
the model, very many steps. A model that fills the machine is in `test_start_memory`.
"""

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Progress
from tests.processes.helpers import job, processes
from tests.processes.test_memory import own_pss

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


class Tiny(nn.Module):
    """5,000 tensors of four elements each, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(20, 4)
        self.scales = nn.ParameterList(torch.ones(4) for _ in range(5_000))
        self.leave = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(x)
        for scale in self.scales:
            hidden = hidden * scale
        return self.leave(hidden)


def lopsided() -> nn.Module:
    """One tensor with 95 % of the bytes."""
    return nn.Sequential(nn.Linear(20, 20_000), nn.ReLU(), nn.Linear(20_000, 1, bias=False), nn.Linear(1, 2))


@pytest.mark.parametrize("make", [lambda: Tiny(), lopsided], ids=["tiny", "lopsided"])
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_bytes_are_shared_out_evenly_in_one_exchange_a_step_and_shard(
    local: Local, local_tcp: Local, tmp_path: Path, transport: str, make: Callable[[], nn.Module]
) -> None:
    cluster, steps, shards = (local if transport == "shared" else local_tcp), 60, 3

    run = squall.fit(
        job(cluster, steps=steps, shards=shards, out=tmp_path / "run"),
        model=make,
        strategy=squall.Downpour(rule=squall.Sgd(learning_rate=1e-4)),
        threads=1,
    )

    traffic = run.traffic()
    pushed, messages = [], []
    for shard in range(shards):
        to_it = [traffic[f"replica{replica}.0", f"shard{shard}"] for replica in (0, 1)]
        pushed.append(sum(num_bytes for num_bytes, _ in to_it))
        messages.append(sum(count for _, count in to_it))
    mean = statistics.mean(pushed)
    assert max(abs(own - mean) for own in pushed) <= 0.1 * mean
    assert set(run.ledger()["outcome"].tolist()) == {"applied"}
    most = steps + 2 * 2  # each replica's first fetch, and one more if it joins later than the other
    assert all(steps + 2 <= count <= most for count in messages), "a push and its fetch are one message"


def weight(pid: int) -> tuple[int, int, int]:
    """Own memory [bytes], descriptors and threads of a process."""
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return own_pss(pid), len(os.listdir(f"/proc/{pid}/fd")), threads


def test_a_hundred_thousand_steps_leave_memory_descriptors_and_threads_as_they_were(
    local: Local, tmp_path: Path
) -> None:
    steps, out = 100_000, tmp_path / "run"
    handle = squall.start(job(local, steps=steps, epochs=None, out=out, threads=1))
    seen: list[dict[str, tuple[int, int, int]]] = []
    for event in handle.events():
        if isinstance(event, Progress) and event.minibatches >= (0.2, 0.9)[min(len(seen), 1)] * steps:
            if len(seen) == 2:
                continue
            pids = processes(out) | {"launcher": os.getpid()}
            seen.append({name: weight(pid) for name, pid in pids.items()})
    run = handle.result(600)

    assert run.metrics["why"] == "steps"
    early, late = seen
    for name, (bytes_early, *others_early) in early.items():
        bytes_late, *others_late = late[name]
        assert others_late == others_early, name
        # The launcher keeps the history of a run, and the ledger is read at the end.
        assert bytes_late <= 1.02 * bytes_early + (4 << 20), name
