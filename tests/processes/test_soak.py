"""Half an hour of work with a failure every twenty seconds: nothing grows, and the sums are exact.

``SQUALL_SOAK_S`` has it last another number of seconds. What was measured is printed (``-s``), a line for each failure.
"""

import os
import random
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Disturbed, Progress
from tests.conftest import beside
from tests.processes.helpers import is_alive, processes
from tests.processes.test_shards import assert_exact, integer_job, total

pytestmark = [pytest.mark.processes, pytest.mark.nightly]
MIB = 1 << 20
EVERY_S = 20.0
DURATION_S = float(os.environ.get("SQUALL_SOAK_S", "1800"))
STRUCK = ("kill:replica0", "kill:replica1", "kill:replica2", "kill:shard0", "kill:shard1", "kill:coordinator")
PAUSED = ("replica0", "replica", "shard0", "shard1", "coordinator", "evaluator")


@dataclass(frozen=True)
class Held:
    """What all processes of a run hold at one moment, the launcher's included.

    Shared memory is counted once, and pages of files, such as libraries, not at all: each process's share of these grows when
    another one that has them ends, be it of this run or not.
    """

    time_s: float
    pss: dict[str, int]
    descriptors: dict[str, int]
    threads: dict[str, int]
    names: int  # in /dev/shm


def held(time_s: float, path: Path) -> Held:
    pids = {"launcher": os.getpid()} | {name: pid for name, pid in processes(path).items() if is_alive(pid)}
    return Held(
        time_s=time_s,
        pss={name: _pss(pid) for name, pid in pids.items()},
        descriptors={name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
        threads={name: _kib(f"/proc/{pid}/status", "Threads") for name, pid in pids.items()},
        names=len(os.listdir("/dev/shm")),
    )


def _pss(pid: int) -> int:
    return sum(_kib(f"/proc/{pid}/smaps_rollup", name) for name in ("Pss_Anon", "Pss_Shmem")) * 1024


def _kib(path: str, name: str) -> int:
    (found,) = re.findall(rf"^{name}:\s+(\d+)", Path(path).read_text(), re.MULTILINE)
    return int(found)


def slow_total(model: nn.Module, batch: Any) -> torch.Tensor:
    """Leaves the processors to others."""
    time.sleep(0.03)
    return total(model, batch)


def faults(duration_s: float) -> str:
    draw = random.Random(0)
    texts = []
    for number in range(1, int(duration_s / EVERY_S)):
        fault = draw.choice(STRUCK) if draw.random() < 0.75 else f"pause:{draw.choice(PAUSED)},700ms"
        texts.append(f"{fault}@t={number * EVERY_S:g}")
    return "; ".join(texts)


@pytest.mark.timeout(int(DURATION_S) + 300)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_nothing_grows_however_often_something_fails(local: Local, tmp_path: Path, transport: str) -> None:
    path = tmp_path / "run"
    cluster = beside(local, transport=transport, restarts=squall.Restarts(most=5, first_s=0.1))
    before = len(os.listdir("/dev/shm"))
    job = integer_job(
        cluster,
        blocks=1_000_000,
        replicas=3,
        threads=1,
        step=slow_total,
        test=(torch.zeros(8, 1), torch.zeros(8, 1)),
        evaluate_every=0.0005,
        checkpoint_every=0.005,
        chaos=faults(DURATION_S),
        time_s=DURATION_S,
        out=path,
    )
    handle = squall.start(job)
    samples: list[Held] = []
    struck = 0
    for event in handle.events():
        struck += isinstance(event, Disturbed) and event.what != "go on"
        if isinstance(event, Progress) and event.time_s >= EVERY_S * (len(samples) + 0.8):
            try:
                now = held(event.time_s, path)
            except (FileNotFoundError, ProcessLookupError):
                continue  # a role has ended just now: the next time
            samples.append(now)
            sums = [sum(each.values()) for each in (now.pss, now.descriptors, now.threads)]
            print(f"{now.time_s:6.0f} s: {sums[0] / MIB:7.1f} MiB, {sums[1]} descriptors, {sums[2]} threads, "
                  f"{now.names} names; {event.minibatches} minibatches, {struck} struck", flush=True)  # fmt: skip
    run = handle.result(60)
    print({key: value for key, value in run.metrics.items() if key != "unkept"})

    assert run.metrics["why"] == "time"
    assert_exact(run)
    assert struck >= len(samples) - 3
    early, late = samples[len(samples) // 6 : len(samples) // 2], samples[-(len(samples) // 4) :]
    for what, factor, slack in (("pss", 1.05, 2 * MIB), ("descriptors", 1, 0), ("threads", 1, 0)):
        for name in late[-1].pss:
            most, now = max(_of(early, what, name)), statistics.median(_of(late, what, name))
            print(f"{name}: {what} {most:g} at most, then {now:g}")
            assert now <= factor * most + slack, f"{name} has {what} {now:g}, and had {most:g} at most"
    assert len(os.listdir("/dev/shm")) <= before
    assert not any(is_alive(pid) for name, pid in processes(path).items() if name != "zygote")


def _of(samples: list[Held], what: str, name: str) -> list[int]:
    return [getattr(each, what)[name] for each in samples if name in getattr(each, what)]
