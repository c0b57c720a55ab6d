"""Tests of squall.replica.part: what several partitions have of a minibatch, as one replica's.

Whole runs are in tests/training/test_cutting.py.

Faults planted by hand, each seen to fail a test here or there: the verdict of the first partition alone · what the first
partition lacks taken for absent · the norm of the first partition alone.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from squall.data.minibatches import Minibatches
from squall.data.source import as_source
from squall.model.layout import Layout
from squall.model.objective import Objective
from squall.model.parameters import ParameterSpace
from squall.replica.compute import Task
from squall.replica.downpour import Compute
from squall.replica.part import PartGradient, PartResult, computed_of, factor_of

WISH = Compute(epoch=0, position=1, is_first=True, is_last=True, local_step=False, minibatches=0)


def task() -> Task:
    model = nn.Linear(2, 1)
    source = as_source((torch.zeros(6, 2), torch.zeros(6)), 4).source
    return Task(
        model=model,
        objective=Objective(loss="mse", step=None),
        minibatches=Minibatches(source, 4, seed=0),
        layout=Layout.balanced(ParameterSpace.of(model), 1),
        local=None,
        seed=0,
        clip_norm=1.0,
    )


def test_a_minibatch_is_what_all_partitions_have_of_it() -> None:
    results = [
        PartResult(loss=0.5, norm=0.0),
        PartResult(loss=0.25, norm=0.0),
        PartResult(loss=0.0, norm=0.0),
    ]
    gradients = [
        PartGradient(absent=(1, 2, 3, 4)),
        PartGradient(absent=(0, 2, 4), not_finite="b"),
        PartGradient(absent=(0, 1, 2, 3), not_finite="c"),
    ]
    computed = computed_of(task(), WISH, results, gradients)
    assert (computed.loss, computed.examples) == (0.75, 2)
    assert computed.absent == (2,), "of the others some partition has a gradient"
    assert computed.not_finite == "b"
    assert computed.scale == 1.0


def test_a_gradient_is_clipped_by_its_norm_over_all_partitions() -> None:
    results = [PartResult(loss=0.0, norm=3.0), PartResult(loss=0.0, norm=4.0)]
    assert factor_of(task(), results) == pytest.approx(1 / 5, rel=1e-6)
    assert factor_of(replace(task(), clip_norm=6.0), results) == 1.0
    assert factor_of(replace(task(), clip_norm=None), results) == 1.0
