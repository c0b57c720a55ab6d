"""Tests of squall.recipes.speech: the paper's sizes, frames that are the same each time, and something to learn.

Faults planted here by hand, each seen to fail a test: three hidden layers · ReLU for sigmoid · frames without a seed ·
labels drawn at random · test frames taken from the training set.
"""

from dataclasses import replace

import torch
from torch import nn

import squall
from squall.recipes.speech import BATCH_SIZE, frames, network, small, speech
from squall.training.recipe import find


def test_the_network_is_the_papers() -> None:
    with torch.device("meta"):
        layers = network()

    assert [tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear)] == [
        (2560, 440),
        (2560, 2560),
        (2560, 2560),
        (2560, 2560),
        (8192, 2560),
    ]
    assert sum(isinstance(layer, nn.Sigmoid) for layer in layers) == 4
    assert sum(parameter.numel() for parameter in layers.parameters()) == 41_777_152
    assert BATCH_SIZE == 128


def test_frames_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    (x, y), (again, its) = (frames(50, inputs=20, classes=9, seed=3) for _ in range(2))
    other, _ = frames(50, inputs=20, classes=9, seed=4)

    assert torch.equal(x, again)
    assert torch.equal(y, its)
    assert not torch.equal(x, other)
    assert set(y.tolist()) <= set(range(9))


def test_frames_that_are_measured_on_are_not_learned_from() -> None:
    job = speech(inputs=10, hidden=4, layers=1, classes=3, train_frames=60, test_frames=30)

    (train, _), (test, _) = job.train, job.test
    assert (len(train), len(test)) == (60, 30)
    assert not {tuple(row) for row in train.tolist()} & {tuple(row) for row in test.tolist()}


def test_held_out_frames_are_learned_far_better_than_by_guessing_the_commonest_class() -> None:
    job = small()
    run = squall.fit(replace(job, cluster=squall.InProcess(), progress=False))

    _, labels = job.test
    commonest = labels.bincount().max().item() / len(labels)
    assert run.metrics["test_accuracy"] > 2 * commonest


def test_it_is_found_by_its_name_and_changed_by_settings() -> None:
    job = find("speech:small", [("steps", "50"), ("replicas", "1")])

    assert (job.steps, job.replicas) == (50, 1)
