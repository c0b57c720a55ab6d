"""Tests of squall.recipes.mnist: two replicas of two workers each learn, and the files are those that were asked for.

The nightly test takes the published files, or such as have their form, from the directory in ``SQUALL_MNIST``.
"""

import gzip
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import squall
from squall.cluster.local import Local
from squall.data import digits
from squall.errors import ConfigError
from squall.recipes.mnist import mnist, network


def write(path: Path, values: np.ndarray) -> None:
    """An idx file of bytes, gzipped."""
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def folder_of(path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, count in (("train", 30), ("t10k-odd", 10)):
        write(path / f"{name}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 28, 28)))
        write(path / f"{name}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    return path


def test_it_learns_from_the_first_images_and_is_tested_on_files_of_their_own(tmp_path: Path) -> None:
    job = mnist(str(folder_of(tmp_path)), images=20)
    assert (job.replicas, job.num_partitions, job.shards) == (2, 2, 2)
    images, labels = job.train
    assert images.shape == (20, 28, 28)
    assert 0.9 < images.max() <= 1.0
    assert labels.tolist() == [number % 10 for number in range(20)]
    assert job.test[0].shape == (10, 28, 28)
    assert network()(images[:3]).shape == (3, 10)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--set data=DIR"):
        mnist()
    with pytest.raises(ConfigError, match=r"expected one file train\*images-idx\*, but got none"):
        mnist(str(tmp_path))


@pytest.mark.processes
def test_two_replicas_of_two_workers_and_two_shards_learn_to_read_digits(
    local: Local, tmp_path: Path
) -> None:
    (x, y), (test_x, test_y) = (part.batch(np.arange(part.num_examples)) for part in digits())
    recipe = mnist(str(folder_of(tmp_path)))
    job = replace(
        recipe,
        strategy=replace(recipe.strategy, warm_start=20),
        train=(x[:1500].view(-1, 28, 28), y[:1500]),
        test=(test_x.view(-1, 28, 28), test_y),
        cluster=local,
        progress=False,
        epochs=2,
    )
    run = squall.fit(job)
    assert run.metrics["test_accuracy"] >= 0.85
    assert set(run.ledger()["partition"].tolist()) == {0, 1}
    assert set(run.ledger()["replica"].tolist()) == {0, 1}


@pytest.mark.nightly
@pytest.mark.skipif("SQUALL_MNIST" not in os.environ, reason="SQUALL_MNIST names no directory with the files")
def test_of_unseen_digits_at_least_98_in_100_are_read() -> None:
    run = squall.fit(replace(mnist(os.environ["SQUALL_MNIST"]), progress=False))
    assert run.metrics["test_accuracy"] >= 0.98
