"""Tests of squall.cluster.simulated: runs without gradients, against runs with them, and their cost.

Faults planted by hand, each seen to fail a test: a minibatch of one example more · a fetch not counted as traffic · one
counted for each push · a model written all the same · `keep_best` accepted · `resume` accepted · a loss of 0.0 instead of
none · the roles of many replicas in every line · all members asked whether the start may begin · all leases looked at for
the end · the whole line met for each lease · a place taken anew by everyone.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import squall
from squall.training.recorder import MOST_ROLES_KEPT

BATCH = 4


def job(replicas: int = 3, num_examples: int = 90, **changes: Any) -> squall.Job:
    x = torch.randn(num_examples, 5, generator=torch.Generator().manual_seed(0))
    made = squall.Job(
        nn.Linear(5, 3),
        (x, x[:, 0].long() % 3),
        batch_size=BATCH,
        replicas=replicas,
        shards=2,
        progress=False,
    )
    return replace(made, **changes)


def modelled(**settings: Any) -> squall.Simulated:
    return squall.Simulated(compute="modelled", **settings)


@pytest.mark.parametrize(
    "strategy",
    [
        squall.Downpour(warm_start=3),
        squall.Downpour(overlap=True),
        squall.Downpour(n_push=3, n_fetch=3),
        squall.Downpour(max_staleness=2),
    ],
    ids=["warm start", "overlap", "every three", "bound"],
)
def test_a_modelled_run_has_the_ledger_traffic_and_time_of_the_same_run_with_gradients(
    strategy: squall.Downpour,
) -> None:
    settings: dict[str, Any] = {
        "seed": 5,
        "speeds": (20.0, 7.0, 1.0),
        "faults": "kill:replica1,restart=1@step=6; drop:push=0.05; delay=5ms+-4ms",
        "links": squall.Link(0.01, 1e5),
    }
    real, other = (
        squall.fit(job(strategy=strategy, epochs=2), cluster=squall.Simulated(compute=compute, **settings))
        for compute in ("real", "modelled")
    )
    assert len(real.ledger()) > 2 * 40 / strategy.n_push
    np.testing.assert_array_equal(other.ledger(), real.ledger())
    assert other.traffic() == real.traffic()
    assert other.metrics["virtual_s"] == real.metrics["virtual_s"]


def test_traffic_is_a_slice_for_each_push_and_for_each_fetch() -> None:
    """18 numbers on each slice's two halves of 9; a fetch at first, then after every third of nine pushes."""
    strategy = squall.Downpour(n_fetch=3)
    run = squall.fit(job(replicas=1, num_examples=9 * BATCH, strategy=strategy), cluster=modelled())
    traffic = run.traffic()
    for shard in ("shard0", "shard1"):
        assert traffic["replica0.0", shard][0] == 9 * 9 * 4
        assert traffic[shard, "replica0.0"][0] == (1 + 3) * 9 * 4


def test_a_modelled_run_knows_no_loss_and_has_no_model() -> None:
    x = torch.zeros(10, 5)
    run = squall.fit(job(test=(x, x[:, 0].long()), epochs=4), cluster=modelled())

    assert run.metrics["why"] == "epochs"
    assert run.metrics["train_loss"] is None
    assert "test_loss" not in run.metrics
    assert [told for told in run.history if told["event"] in ("Evaluated", "Checkpointed")] == []
    assert not list(run.path.rglob("*.safetensors"))
    for refused in (run.state_dict, lambda: run.model, lambda: run.predict(x)):
        with pytest.raises(squall.ConfigError, match=r'only the protocol ran\. Use compute="real"'):
            refused()
    with pytest.raises(squall.ConfigError, match="only the protocol ran"):
        _ = squall.load(run.path, model=nn.Linear(5, 3)).model


@pytest.mark.parametrize("asked", [{"keep_best": "accuracy"}, {"record": True}])
def test_what_needs_gradients_is_refused_before_anything_is_made(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(squall.ConfigError, match=f"no {next(iter(asked))}"):
        squall.fit(job(**asked), cluster=modelled(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_gradients_is_not_resumed_without(tmp_path: Path) -> None:
    squall.fit(job(epochs=1), cluster=squall.InProcess(), out=tmp_path / "run")
    with pytest.raises(squall.ConfigError, match="resume"):
        squall.fit(job(epochs=2), cluster=modelled(), out=tmp_path / "run", resume=True)


def test_another_word_for_what_is_computed_is_refused() -> None:
    with pytest.raises(squall.ConfigError, match="'real' or 'modelled'"):
        squall.Simulated(compute="made up")


@pytest.mark.parametrize(("replicas", "are_kept"), [(2, True), (MOST_ROLES_KEPT + 1, False)])
def test_a_line_of_progress_says_what_each_role_did_while_they_are_few(replicas: int, are_kept: bool) -> None:
    run = squall.fit(job(replicas=replicas, epochs=4), cluster=modelled())
    kept = [told for told in run.history if told["event"] == "Progress"]
    assert kept
    assert all(bool(told["roles"]) is are_kept for told in kept)


@pytest.mark.parametrize("strategy", [squall.Downpour(), squall.Downpour(max_staleness=20, warm_start=10)])
def test_the_work_for_one_push_does_not_grow_with_the_replicas(strategy: squall.Downpour) -> None:
    _calls_per_push(10, strategy)  # what is done once in a process
    few, many = (_calls_per_push(count, strategy) for count in (40, 240))
    assert many <= few


def _calls_per_push(replicas: int, strategy: squall.Downpour) -> float:
    """Function calls, Python's and C's, of a whole run: what a clock would tell less exactly."""
    num_calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal num_calls
        num_calls += event.endswith("call")

    pushes = 4 * replicas
    made = job(replicas=replicas, num_examples=pushes, batch_size=1, shards=1, strategy=strategy)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        # So fast that no second passes: what the clock asks of each replica is not meant here.
        squall.fit(made, cluster=modelled(speeds=(1e5,), links=squall.Link(0.0)))
    finally:
        sys.setprofile(before)
    return num_calls / pushes


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shards", [1, 4])
def test_ten_thousand_replicas_take_one_process_under_a_minute_and_two_gigabytes(shards: int) -> None:
    from benchmarks.simulated.scale import measured

    told = measured(shards)

    assert told["pushes_settled"] == 40_000 * shards
    assert told["processor_s"] < 60.0
    assert told["peak_MB"] < 2000
