"""Batch norm with one replica and with four: evaluation uses one merged set of running statistics."""

import statistics
from dataclasses import replace
from typing import Any

from torch import nn

import squall
from benchmarks.simulated.common import SPEED, rounded, run, save

SEEDS = (0, 1, 2, 3, 4)
COUNTS = (1, 4)
EPOCHS = 6


def network() -> nn.Module:
    """Convolution, batch norm, dense layer, batch norm."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 12 * 12, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def job() -> squall.Job:
    train, test = squall.data.digits()
    return squall.Job(
        network,
        train,
        test=test,
        batch_size=32,
        epochs=EPOCHS,
        evaluate_every=1e9,
        strategy=squall.Downpour(rule=squall.Adagrad(learning_rate=0.02), warm_start=32),
    )


def accuracies(count: int, seeds: tuple[int, ...] = SEEDS, **changes: Any) -> list[float]:
    """Of the merged model on the test set, by seed."""
    runs = [
        run(
            replace(job(), **changes),
            replicas=count,
            seed=seed,
            cluster=squall.Simulated(seed=seed, speeds=(SPEED,)),
        )
        for seed in seeds
    ]
    return [float(ran.metrics["test_accuracy"]) for ran in runs]


def buffers() -> dict[str, Any]:
    rows = []
    for count in COUNTS:
        found = accuracies(count)
        rows.append(
            {
                "replicas": count,
                "accuracies": [rounded(value, 4) for value in found],
                "mean": rounded(statistics.mean(found), 4),
            }
        )
    return save("buffers", rows, epochs=EPOCHS)
