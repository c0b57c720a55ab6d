"""Tests of squall.bench.learning and sides: when a loss was seen, and the ceiling.

Faults planted here by hand, each seen to fail a test: time from the start of the run · an evaluator's joining taken for a replica's ·
a good evaluation passed over · examples in another order than Squall's · a plain step left out of the ceiling.
"""

from typing import Any

import numpy as np
import pytest
import torch

import squall
from squall.bench import learning
from squall.bench.learning import lesson, plain_loop, time_to
from squall.bench.sides import ceiling_of
from squall.errors import ConfigError


def evaluated(time_s: float, loss: float) -> dict[str, Any]:
    return {"event": "Evaluated", "time_s": time_s, "metrics": {"test_loss": loss}}


def joined(time_s: float, role: str) -> dict[str, Any]:
    return {"event": "Joined", "time_s": time_s, "role": role}


def test_time_runs_from_the_first_replica_to_the_first_evaluation_that_is_good_enough() -> None:
    history = [
        joined(0.5, "evaluator"),
        joined(1.0, "replica1.0"),
        joined(2.0, "replica0.0"),
        evaluated(3.0, 0.9),
        evaluated(5.0, 0.3),
        evaluated(6.0, 0.1),
    ]

    assert time_to(history, 0.3) == (4.0, True)
    assert time_to(history, 0.05) == (5.0, False)


def test_two_replicas_that_pay_nothing_are_twice_a_plain_loop() -> None:
    assert ceiling_of(step_s=0.2, copy_and_check_s=0.0, fetch_s=0.0) == 2
    assert ceiling_of(step_s=0.2, copy_and_check_s=0.1, fetch_s=0.1) == 1


def test_the_plain_loop_is_given_the_order_and_start_that_squall_has(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(12.0).reshape(6, 2)
    source = squall.data.TensorSource((x, torch.tensor([0, 1, 0, 1, 0, 1])))
    seen: list[torch.Tensor] = []

    class Spy(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(x)
            return super().forward(x)

    task = learning.Lesson(
        model=lambda: Spy(2, 2),
        train=source,
        test=source,
        batch_size=4,
        target=0.0,
        epochs=2,
        evaluate_every=1.0,
    )
    monkeypatch.setattr(learning, "lesson", lambda: task)

    told = plain_loop({"lesson": {}, "seed": 7, "rule": "Adagrad", "rate": 0.1, "threads": 1})

    assert not told["reached"]
    expected = np.concatenate([squall.data.order(6, 7, epoch) for epoch in range(2)])
    assert torch.equal(torch.cat(seen), x[torch.from_numpy(expected)])


def test_a_data_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="four idx files"):
        lesson("fashion", ["one", "two"])
    with pytest.raises(ConfigError, match="no_such_recipe"):
        lesson("no_such_recipe")
