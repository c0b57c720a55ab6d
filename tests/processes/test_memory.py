"""A shard's memory is its slice and its rule's state, measured as PSS from outside; shared buffers apart."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Progress
from tests.processes.helpers import data, processes

pytestmark = pytest.mark.processes

MIB = 1 << 20


def own_pss(pid: int) -> int:
    """Proportional set size of a process without memory shared by descriptor [bytes]."""
    total, is_shared = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_shared = "/memfd:" in line
        elif line.startswith("Pss:") and not is_shared:
            total += int(line.split()[1]) * 1024
    return total


def shard_pss(local: Local, out: Path, width: int) -> dict[str, int]:
    """Own PSS of each shard of a run in progress [bytes]."""

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 2))

    handle = squall.start(
        wide, data(), batch_size=16, epochs=100_000, shards=2, cluster=local, out=out, threads=1
    )
    for event in handle.events():
        if isinstance(event, Progress) and event.minibatches >= 20:
            break
    sizes = {name: own_pss(pid) for name, pid in processes(out).items() if name.startswith("shard")}
    handle.stop()
    handle.result(60)
    return sizes


@pytest.mark.parametrize("transport", ["shared", pytest.param("tcp", marks=pytest.mark.nightly)])
def test_a_shard_holds_its_slice_and_its_rules_state_and_no_more(
    local: Local, local_tcp: Local, tmp_path: Path, transport: str
) -> None:
    """Over TCP also a staging set and a copy for each of the two replicas that push and fetch, and no more."""
    cluster, sets = (local, 0) if transport == "shared" else (local_tcp, 4)
    width = 400_000
    parameters = 20 * width + width + 2 * width + 2
    expected = 2 * 4 * parameters / 2  # values and sum of squares, float32, of half the model

    small = shard_pss(cluster, tmp_path / "small", 10)
    large = shard_pss(cluster, tmp_path / "large", width)

    for name in small:
        grown = large[name] - small[name]
        most = 1.05 * expected * (1 + sets / 2) + 4 * MIB
        assert 0.98 * expected <= grown <= most, f"{name}: {grown / MIB:.1f} MiB"
