"""Gradients that are not finite: refused, quarantined, or the end of the run, in real processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.events import Left, Refused
from tests.processes.helpers import NUM_EXAMPLES, data, network

pytestmark = pytest.mark.processes


def test_a_block_that_nobody_can_compute_is_refused_and_listed(local: Local) -> None:
    """B44"""
    x, y = data()
    x[7, 3] = float("nan")
    handle = squall.start(
        network,
        (x, y),
        batch_size=16,
        epochs=5,
        replicas=2,
        shards=2,
        cluster=local,
        threads=1,
        shuffle=False,
    )

    refused = [event for event in handle.events() if isinstance(event, Refused)]
    run = handle.result(30)

    assert [(event.block.epoch, event.block.first) for event in refused] == [(epoch, 0) for epoch in range(5)]
    assert run.metrics["blocks_refused"] == 5
    assert all("'0." in event.why for event in refused)
    ledger = run.ledger()
    applied = ledger[ledger["outcome"] == "applied"]
    assert len(applied) == 2 * 5 * (NUM_EXAMPLES // 16 - 1)
    assert len(ledger[ledger["outcome"] == "refused"]) == 2 * 5
    assert all(torch.isfinite(value).all() for value in run.state_dict().values())


class Sick(nn.Module):
    """Not finite in one process only: the first that claims the flag."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.inner, self.flag, self.is_sick = network(), flag, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_sick is None:
            try:
                Path(self.flag).touch(exist_ok=False)
                self.is_sick = True
            except FileExistsError:
                self.is_sick = False
        out = self.inner(x)
        return out * float("nan") if self.is_sick else out


def test_a_replica_that_keeps_sending_what_is_not_finite_is_quarantined(local: Local, tmp_path: Path) -> None:
    handle = squall.start(
        Sick(str(tmp_path / "flag")), data(), batch_size=16, epochs=5, replicas=3, cluster=local, threads=1
    )

    left = [event for event in handle.events() if isinstance(event, Left)]
    run = handle.result(30)

    (gone,) = [event for event in left if "quarantined" in event.why]
    sick = int(gone.role.removeprefix("replica").split(".")[0])
    ledger = run.ledger()
    applied = ledger[ledger["outcome"] == "applied"]
    assert sick not in set(applied["replica"].tolist())
    assert len(np.unique(applied["block"])) == 5 * 40
    assert run.metrics["blocks_refused"] == 0


def test_a_learning_rate_that_blows_up_ends_the_run_naming_tensor_and_step(
    local: Local, tmp_path: Path
) -> None:
    with pytest.raises(
        squall.DivergedError,
        match=r"diverged: the (update|gradient) of '.*(weight|bias)' not finite at epoch \d+, position",
    ):
        squall.fit(
            network,
            data(),
            batch_size=16,
            epochs=500,
            strategy=squall.Downpour(rule=squall.Sgd(learning_rate=1e38)),
            cluster=local,
            threads=1,
            progress=False,
            out=tmp_path / "run",
        )
