"""Tests of squall.recipes.digits: what the main job promises.

Faults planted here by hand, each seen to fail a test: a learning rate of 0.0003 · one epoch · one shard · a warm start
of 0 · the training set as test set.
"""

from dataclasses import replace

import numpy as np
import pytest

import squall
from squall.observe.tally import summarise
from squall.recipes.digits import digits, network

LEAST_ACCURACY = 0.93


def run_of(seed: int, cluster: object) -> squall.Run:
    return squall.fit(replace(digits(), seed=seed, cluster=cluster, progress=False))


def test_it_is_downpour_with_several_replicas_two_shards_adagrad_and_a_warm_start_that_is_long_enough_to_measure() -> (
    None
):
    job = digits()
    assert job.replicas >= 2
    assert job.shards == 2
    assert isinstance(job.strategy.rule, squall.Adagrad)
    assert job.strategy.warm_start >= 16


def test_the_network_is_784_256_10() -> None:
    assert [tuple(value.shape) for value in network().state_dict().values()] == [
        (256, 784),
        (256,),
        (10, 256),
        (10,),
    ]


def test_no_digit_that_is_measured_on_is_learned_from() -> None:
    job = digits()
    train, test = (
        {row.tobytes() for row in source.batch(np.arange(source.num_examples))[0].numpy()}
        for source in (job.train, job.test)
    )
    assert len(test) == 1_000
    assert not train & test


def test_it_reaches_its_accuracy_with_its_own_seed_and_uses_every_replica() -> None:
    run = run_of(0, squall.InProcess())

    assert run.metrics["test_accuracy"] >= LEAST_ACCURACY
    times = run.metrics["times_one_replica"]  # which a busy machine leaves out
    assert times is None or 0 < times <= 2
    assert len(summarise(run.ledger()).replicas) == digits().replicas


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 9))
def test_it_reaches_its_accuracy_with_other_seeds_in_processes(seed: int) -> None:
    assert run_of(seed, squall.Local()).metrics["test_accuracy"] >= LEAST_ACCURACY
