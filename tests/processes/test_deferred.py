"""A model that nobody has whole, trained by `fit` in processes: what each of them takes while it trains, seen from outside.

Faults planted by hand, each seen to fail a test here: the whole model made by a worker · by a shard.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cluster.local import Local
from tests.processes.helpers import processes
from tests.processes.test_failures import follow

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux tells of memory"),
]
PARTITIONS, EXAMPLES = 4, 8
MB = 1_000_000


class Wide(nn.Module):
    """Linear layers with batch norm at the end: so many of width times width parameters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.norm, self.out = nn.BatchNorm1d(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(self.norm(x))  # type: ignore[no-any-return]


def memory(pid: int) -> dict[str, int]:
    """Bytes: resident in proportion (PSS), and the largest resident set so far; both without what is mapped of files."""
    told = Path(f"/proc/{pid}/smaps_rollup").read_text() + Path(f"/proc/{pid}/status").read_text()
    kib = {
        name: int(value) for name, value in re.findall(r"^(Pss|Pss_File|VmHWM|RssFile):\s+(\d+)", told, re.M)
    }
    return {"pss": 1024 * (kib["Pss"] - kib["Pss_File"]), "peak": 1024 * (kib["VmHWM"] - kib["RssFile"])}


def measured(
    local: Local, out: Path, width: int, layers: int, how: str, steps: int
) -> dict[str, dict[str, int]]:
    """What each process takes when so many steps are done, the launcher apart."""
    model = squall.deferred(lambda: Wide(width, layers))
    x = torch.randn(4 * EXAMPLES, width, generator=torch.Generator().manual_seed(1))
    plan = squall.plan(model, x[:EXAMPLES], partitions=PARTITIONS, how=how)
    handle = squall.start(
        model,
        (x, (x[:, 0] > 0).long()),
        partitions=plan,
        shards=PARTITIONS,
        replicas=1,
        batch_size=EXAMPLES,
        steps=1_000_000,
        strategy=squall.Downpour(rule=squall.Sgd(learning_rate=1e-3)),
        cluster=local,
        out=out,
        progress=False,
        threads=1,
    )
    follow(handle, steps)
    names = [name for name in processes(out) if name.startswith(("replica", "shard"))]
    found = {name: memory(processes(out)[name]) for name in names}
    handle.stop()
    run = handle.result(300)
    assert run.metrics["minibatches"] >= steps
    assert all(torch.isfinite(value).all() for value in run.state_dict().values())
    return found


def check_memory(
    local: Local, out: Path, width: int, layers: int, how: str, slack: int, steps: int = 3
) -> None:
    """Count what the model takes: more than the same processes with a tiny one."""
    model, largest = width * width * 4 * layers, width * width * 4
    training = 2 * model  # parameters and gradients
    small = measured(local, out / "small", 8, layers, how, steps)
    large = measured(local, out / "large", width, layers, how, steps)
    assert set(small) == set(large)
    assert len(large) == 2 * PARTITIONS
    for name, taken in large.items():
        grown = {key: taken[key] - small[name][key] for key in taken}
        assert grown["pss"] < 0.45 * training, (name, grown)
        # Resident are, shared with a shard or not: two buffers and a gradient of the share, and what is its own.
        assert grown["peak"] < 5 * model / PARTITIONS + largest + slack, (name, grown)


def test_no_worker_and_no_shard_has_more_than_its_share(local: Local, tmp_path: Path) -> None:
    check_memory(local, tmp_path, width=3000, layers=6, how="vertical", slack=25 * MB)  # 216 MB


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", ["vertical", "horizontal"])
def test_two_gigabytes_are_trained_with_no_process_above_its_share(
    local: Local, tmp_path: Path, how: str
) -> None:
    check_memory(local, tmp_path, width=5600, layers=16, how=how, slack=150 * MB)
