"""Batch norm over several replicas: one merged set of running statistics, as good as that of one replica.

Faults planted by hand, each seen to fail a test: no merged set at all · the sum of the replicas' statistics.
"""

import statistics

import pytest
import torch
from torch import nn

import squall


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def accuracy(replicas: int, seed: int, epochs: int) -> tuple[float, squall.Run]:
    train, test = squall.data.digits()
    run = squall.fit(
        normalised,
        train,
        test=test,
        replicas=replicas,
        seed=seed,
        epochs=epochs,
        batch_size=32,
        evaluate_every=1e9,
        strategy=squall.Downpour(rule=squall.Adagrad(learning_rate=0.02), warm_start=32),
        cluster=squall.Simulated(seed=seed),
        threads=1,
        progress=False,
    )
    return float(run.metrics["test_accuracy"]), run


def test_four_replicas_leave_statistics_of_the_data_themselves() -> None:
    """The merged means and variances are those of the trained first layer over the training set, within noise."""
    found, run = accuracy(replicas=4, seed=0, epochs=2)
    train, _ = squall.data.digits()
    with torch.no_grad():
        hidden = run.model[0](torch.as_tensor(train.tree[0]))  # type: ignore[index, attr-defined]
    state = run.state_dict()
    off = (state["1.running_mean"] - hidden.mean(dim=0)).abs() / hidden.std(dim=0)
    assert off.max() < 0.3
    ratio = state["1.running_var"] / hidden.var(dim=0)
    assert ratio.min() > 0.6
    assert ratio.max() < 1.6
    assert found > 0.88


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_four_replicas_are_within_a_point_of_one_over_five_seeds() -> None:
    means = [
        statistics.mean(accuracy(replicas, seed, epochs=6)[0] for seed in range(5)) for replicas in (1, 4)
    ]
    assert abs(means[1] - means[0]) < 0.01, means
