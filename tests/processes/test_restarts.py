"""Replicas that die are started again, on real processes: they join, work, and are told apart from their past lives.

Faults planted here by hand, each seen to fail a test: the old incarnation told to the shards · or to the coordinator · deaths
counted over the run · one that left in order started again · processes.json not written anew.
"""

import os
import signal
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Event, Joined, Left, Progress
from squall.training.fit import Handle
from tests.conftest import beside
from tests.processes.helpers import is_alive, job, kill, processes, wait_until
from tests.processes.test_failures import follow, is_first_to

pytestmark = pytest.mark.processes
ONCE_IN_A_ROW = squall.Restarts(most=1, first_s=0.05)


def lives(events: list[Event], role: str) -> list[int]:
    return [event.incarnation for event in events if isinstance(event, Joined) and event.role == role]


def until_it_works(handle: Handle, role: str, seen: list[Event]) -> None:
    """Take events until a role has finished a block since the last time it joined."""
    before: dict[str, int] = {}
    for event in handle.events():
        seen.append(event)
        if isinstance(event, Joined) and event.role == role:
            before.clear()
        if isinstance(event, Progress):
            done = {status.name: status.minibatches for status in event.roles}[role]
            if done > before.setdefault(role, done):
                return
    raise AssertionError(f"{role} did not work again")


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_killed_replica_comes_back_as_another_incarnation_and_works(
    local: Local, tmp_path: Path, transport: str
) -> None:
    """B18, B22: three times the same replica, number 0; each time it works again within four seconds (median)."""
    cluster = beside(local, transport=transport, restarts=ONCE_IN_A_ROW)
    handle = squall.start(job(cluster, replicas=3, epochs=10_000, out=tmp_path / "run"))
    seen = follow(handle, 50)
    until_it_works(handle, "replica0.0", seen)
    waited = []
    for life in range(3):
        pid = processes(tmp_path / "run")["replica0.0"]
        killed = next(event.time_s for event in reversed(seen) if isinstance(event, Progress))
        kill(pid, signal.SIGKILL)
        wait_until(lambda was=pid: processes(tmp_path / "run")["replica0.0"] != was, 20, "a new process")
        until_it_works(handle, "replica0.0", seen)
        waited.append(seen[-1].time_s - killed)
        assert lives(seen, "replica0.0") == list(range(life + 2))
    handle.stop()
    seen += list(handle.events())
    run = handle.result(20)

    assert statistics.median(waited) < 4.0
    assert [e.incarnation for e in seen if isinstance(e, Left) and e.role == "replica0.0"] == [0, 1, 2]
    rows = run.ledger()
    applied = rows[(rows["outcome"] == "applied") & (rows["replica"] == 0)]
    assert set(applied["incarnation"].tolist()) == {0, 1, 2, 3}
    for number in np.unique(applied["slice"]):
        of_slice = applied[applied["slice"] == number]
        order = np.argsort(of_slice["version"])
        assert (np.diff(of_slice["incarnation"][order]) >= 0).all()
    counts = {(int(row["slice"]), int(row["block"])) for row in rows[rows["outcome"] == "applied"]}
    assert len(counts) == (rows["outcome"] == "applied").sum()


def test_one_replica_that_is_killed_trains_as_if_it_had_not_been(local: Local, tmp_path: Path) -> None:
    """Its block is redone from the very parameters: the run equals a plain loop, bit for bit."""
    x = torch.randn(512, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = x.sum(dim=1, keepdim=True)
    flag = tmp_path / "flag"

    class DiesOnce(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(8, 1, dtype=torch.float64), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 20 and is_first_to(str(flag)):
                os.kill(os.getpid(), signal.SIGKILL)
            return self.inner(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = DiesOnce()
    run = squall.fit(
        model,
        (x, y),
        loss="mse",
        strategy=squall.Downpour(rule=squall.Sgd(learning_rate=0.05)),
        replicas=1,
        threads=1,
        batch_size=16,
        epochs=2,
        cluster=local,
        progress=False,
        out=tmp_path / "run",
    )

    torch.manual_seed(0)
    plain = nn.Linear(8, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for epoch in range(2):
        order = squall.data.order(512, seed=0, epoch=epoch)
        for first in range(0, 512, 16):
            chosen = torch.as_tensor(order[first : first + 16])
            optimizer.zero_grad()
            nn.functional.mse_loss(plain(x[chosen]), y[chosen]).backward()
            optimizer.step()
    assert flag.exists()
    assert {int(row["incarnation"]) for row in run.ledger()} == {0, 1}
    for name, value in plain.state_dict().items():
        assert torch.equal(run.state_dict()[f"inner.{name}"], value)


class DiesAlways(nn.Module):
    """Is killed in each forward after so many minibatches of the whole run."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.inner, self.at = nn.Linear(20, 2), at
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if int(self.calls) > self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)  # type: ignore[no-any-return]


def test_replicas_that_die_again_and_again_are_given_up_and_the_run_ends_with_the_cause(
    local: Local, tmp_path: Path
) -> None:
    """B23. The buffer that counts is taken over by whoever joins, so that each life ends at once."""
    cluster = beside(local, restarts=squall.Restarts(most=2, first_s=0.0))
    with pytest.raises(squall.NoReplicaError) as caught:
        squall.fit(
            job(cluster, replicas=2, epochs=100, out=tmp_path / "run"), model=DiesAlways(20), progress=False
        )

    told = "was killed by SIGKILL 3 times in a row without finishing a block, and is not started again"
    assert str(caught.value).count(told) == 2
    rows = squall.load(tmp_path / "run", DiesAlways(10**9)).ledger()
    assert set(rows["incarnation"].tolist()) == {0}
    assert list((tmp_path / "run" / "checkpoints").glob("*/manifest.json"))


def have_it_leave(handle: Handle, path: Path, role: str) -> None:
    """Tell a role to leave: its process ends within the grace that is promised, however late its events are read."""
    pid = processes(path)[role]
    kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_alive(pid), 5.0, f"the end of {role}")
    assert any(isinstance(event, Left) and event.role == role for event in handle.events())


def test_a_replica_that_is_told_to_leave_does_so_in_order_and_is_not_started_again(
    local: Local, tmp_path: Path
) -> None:
    """While it works: what it has pushed is acknowledged, its unfinished block is redone."""
    handle = squall.start(job(local, replicas=2, epochs=10_000, out=tmp_path / "run"))
    seen = follow(handle, 50)
    have_it_leave(handle, tmp_path / "run", "replica1.0")
    seen += follow(handle, 600)  # long enough to be started again, if anybody meant to
    handle.stop()
    seen += list(handle.events())
    rows = handle.result(20).ledger()

    assert lives(seen, "replica1.0") == [0]
    assert [event for event in seen if isinstance(event, Joined) and event.incarnation] == []
    counts = {(int(row["slice"]), int(row["block"])) for row in rows[rows["outcome"] == "applied"]}
    assert len(counts) == (rows["outcome"] == "applied").sum()


def test_a_replica_that_waits_for_work_leaves_at_once_when_it_is_told_to(
    local: Local, tmp_path: Path
) -> None:
    """During a warm start all but one replica wait, with nothing that would wake them."""
    strategy = squall.Downpour(warm_start=100_000)
    handle = squall.start(job(local, replicas=2, epochs=10_000, strategy=strategy, out=tmp_path / "run"))
    follow(handle, 20)
    have_it_leave(handle, tmp_path / "run", "replica1.0")
    handle.stop()
    assert handle.result(20).metrics["why"] == "stopped"
