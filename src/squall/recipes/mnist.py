"""A small convolutional network learns MNIST from two replicas, each cut over two workers, and two shards.

The data are not part of Squall: ``--set data=DIR`` says where the four idx files lie, as they are published, gzipped or not.
From the first 20,000 images, five epochs, 98 to 99 % of the test images are right.
"""

from pathlib import Path

import numpy as np
from torch import Tensor, nn

import squall
from squall.errors import ConfigError

BATCH_SIZE = 32


def mnist(data: str = "", images: int = 20_000, test: str = "t10k") -> squall.Job:
    """Downpour SGD with Adagrad; each replica's layers are cut by feature maps.

    Args:
        data: a directory with the training and test images and labels.
        images: how many of the training images are learned from, the first ones.
        test: how the names of the test files begin.
    """
    if not data:
        raise ConfigError(
            subject="the recipe mnist",
            expected="the directory of the idx files",
            got="none",
            remedy="Say --set data=DIR, where train-images-idx3-ubyte.gz and the others lie.",
        )
    x, y = _read(Path(data), "train")
    return squall.Job(
        network,
        (x[:images], y[:images]),
        test=_read(Path(data), test),
        strategy=squall.Downpour(warm_start=100, rule=squall.Adagrad(learning_rate=0.02)),
        replicas=2,
        partitions=2,
        shards=2,
        batch_size=BATCH_SIZE,
        epochs=5,
        threads=1,
    )


def network() -> nn.Module:
    """Two convolutions with pooling, and two linear layers."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _read(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images of shape (n, 28, 28), from 0 to 1, and labels."""
    source = squall.data.read(_file(folder, name, "images"), targets=_file(folder, name, "labels"))
    images, labels = source.batch(np.arange(source.num_examples))
    return images.view(-1, 28, 28), labels


def _file(folder: Path, name: str, kind: str) -> Path:
    found = sorted(folder.glob(f"{name}*{kind}-idx*"))
    if len(found) != 1:
        raise ConfigError(
            subject=f"{kind} of MNIST in {folder}",
            expected=f"one file {name}*{kind}-idx*",
            got=", ".join(path.name for path in found) or "none",
        )
    return found[0]
