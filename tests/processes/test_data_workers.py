"""Data workers of replicas in real processes: nothing changes but who loads, and their deaths are a replica's.

Faults planted by hand, each seen to fail a test: leases are not told to the loader (then one worker loads all, when
asked) · the generators are not put back after a batch · a DataLoader's `num_workers` is not taken · a minibatch that
only workers can load is looked at in the launcher · an error names the worker instead of the replica.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import squall
from squall.cluster.local import Local
from squall.training.prepare import prepare
from tests.processes.helpers import NUM_EXAMPLES, data, is_alive, job, kill, processes, wait_until
from tests.processes.test_failures import assert_every_block_once, follow

pytestmark = pytest.mark.processes

ROWS = data()


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Examples with noise of all three generators; says in a file which process loaded which."""

    def __init__(self, told: Path | None = None, raises_at: int = -1) -> None:
        self.told, self.raises_at = told, raises_at

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.raises_at:
            raise ValueError(f"image {index} is torn")
        if self.told is not None:
            info = get_worker_info()
            with self.told.open("a") as file:
                file.write(f"{os.getppid()} {os.getpid()} {info.id if info else None}\n")
        x, y = ROWS
        return x[index] * random.random() + float(np.random.rand()) + 0.1 * torch.randn(20), y[index]


def noisy_network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Dropout(0.3), nn.Linear(50, 2))


def augmented(cluster: Any, train: Any, **settings: Any) -> squall.Job:
    usual = {"replicas": 1, "batch_size": 16, "progress": False, "cluster": cluster, "steps": 24}
    return squall.Job(noisy_network, train, **(usual | settings))


def test_results_are_the_same_to_the_last_bit_whoever_loads(local: Local, tmp_path: Path) -> None:
    told = tmp_path / "told"
    runs = [
        squall.fit(augmented(local, Augmented())),
        squall.fit(augmented(local, Augmented(told), data_workers=2, threads=2)),
        squall.fit(augmented(squall.InProcess(), DataLoader(Augmented(), batch_size=16, num_workers=2))),
        squall.fit(augmented(local, Augmented(), data_workers=1, device="cpu:0")),
    ]

    expected = runs[0].state_dict()
    for run in runs[1:]:
        assert all(torch.equal(expected[name], value) for name, value in run.state_dict().items())
    lines = [line.split() for line in told.read_text().splitlines()]
    loaded = {(parent, pid): number for parent, pid, number in lines if number != "None"}
    assert sorted(loaded.values()) == ["0", "1"]
    assert sum(number == "None" for _, _, number in lines) == 16, "the one minibatch that is looked at first"


def test_what_the_users_dataset_raises_in_a_worker_is_told_as_ever(local: Local) -> None:
    with pytest.raises(squall.UserCodeError) as raised:
        squall.fit(augmented(local, Augmented(raises_at=300), shuffle=False, data_workers=2))

    error = raised.value
    assert error.error == "ValueError: image 300 is torn"
    assert (error.role, error.step) == ("replica0.0", "epoch 0, position 18")
    assert "test_data_workers.py" in error.line
    assert "in __getitem__" in error.line


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.nightly
def test_a_killed_data_worker_ends_its_replica_and_the_run_goes_on(local: Local, tmp_path: Path) -> None:
    epochs = 30
    handle = squall.start(job(local, replicas=2, epochs=epochs, data_workers=2, out=tmp_path / "run"))
    follow(handle, 100)
    pids = processes(tmp_path / "run")
    workers = {name: children(pids[name]) for name in ("replica0.0", "replica1.0")}
    assert [len(own) for own in workers.values()] == [2, 2]
    kill(workers["replica1.0"][0], signal.SIGKILL)

    run = handle.result(50)

    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, epochs, slices=2)
    log = (tmp_path / "run" / "logs" / "replica1.0.log").read_text()
    assert "data worker 0 of replica1.0 was killed by signal 9" in log
    for own in workers.values():
        wait_until(lambda own=own: not any(is_alive(pid) for pid in own), 5, "the data workers to end")  # type: ignore[misc]


def test_a_loaders_workers_are_taken_and_the_jobs_own_number_wins() -> None:
    def loader(num: int) -> DataLoader[Any]:
        return DataLoader(Augmented(), batch_size=16, num_workers=num, worker_init_fn=print)

    for own, theirs, expected in ((0, 2, 2), (1, 2, 1), (1, 0, 1), (0, 0, 0)):
        workers = prepare(augmented(None, loader(theirs), data_workers=own)).workers
        assert (workers.num, workers.init) == (expected, print)
        assert isinstance(workers.dataset, Augmented)


def test_data_that_only_workers_can_load_is_not_looked_at_before() -> None:
    loader = DataLoader(Augmented(raises_at=3), batch_size=16, num_workers=1, worker_init_fn=print)

    assert prepare(augmented(None, loader, shuffle=False)).workers.num == 1
    with pytest.raises(squall.UserCodeError, match="image 3 is torn"):
        prepare(augmented(None, Augmented(raises_at=3), shuffle=False, data_workers=1))


@pytest.mark.parametrize("number", [-1, 1.5, True, None])
def test_a_number_of_data_workers_is_a_whole_number_from_zero(number: Any) -> None:
    with pytest.raises(
        squall.ConfigError, match=r"Job\(data_workers=\): expected a whole number of at least 0"
    ):
        squall.Job(noisy_network, ROWS, data_workers=number)
