"""What tests with real processes share: a small job, and a look at what is running."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import squall

NUM_EXAMPLES = 640


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_EXAMPLES, 20, generator=generator)
    return x, (x[:, :10].sum(dim=1) > 0).long()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 2))


def job(cluster: Any, **settings: Any) -> squall.Job:
    """A job of many short minibatches; settings as of `squall.Job`."""
    usual = {"replicas": 2, "shards": 2, "batch_size": 16, "progress": False, "cluster": cluster}
    return squall.Job(network, data(), **(usual | settings))


def processes(path: Path) -> dict[str, int]:
    """The run's roles: name to pid."""
    return {row["name"]: row["pid"] for row in json.loads((path / "processes.json").read_text())}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look until it holds; fail, saying what was waited for, if it does not in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"waited {timeout_s} s in vain for {what}")
        time.sleep(0.01)


def left_open() -> tuple[list[str], int, int]:
    """Shared memory, descriptors and threads that there are."""
    gc.collect()  # what a run's parts refer to in a circle, mappings of its buffers among it, goes with that at the latest
    return sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), threading.active_count()


def kill(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)


def applied_counts(run: squall.Run) -> dict[tuple[int, int], int]:
    """(slice, position in the whole run) to how often it was applied."""
    rows = run.ledger()
    counts: dict[tuple[int, int], int] = {}
    for row in rows[rows["outcome"] == "applied"]:
        for position in range(int(row["first"]), int(row["first"]) + int(row["minibatches"])):
            key = (int(row["slice"]), int(row["epoch"]) * 1_000_000 + position)
            counts[key] = counts.get(key, 0) + 1
    return counts
