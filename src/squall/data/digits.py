"""5,000 handwritten digits that come with the package, for a first run without a download.

They are MNIST training images, 500 of each digit; `digits/ATTRIBUTION` says from where and under which licence.
"""

from importlib.resources import as_file, files

import numpy as np
from numpy.typing import NDArray

from squall.data.order import order
from squall.data.read import read
from squall.data.source import Source, TensorSource

_SPLIT_SEED = 0
_TEST_PER_CLASS = 100
_CLASSES = 10


def digits() -> tuple[Source, Source]:
    """A training part of 4,000 digits and a test part of 1,000, always the same.

    Both hold as many examples of each class, in mixed order.

    Returns:
        (train, test), each of (inputs, targets): float32 in [0, 1], shape (n, 784), 0 is paper; and int64 in
        0..9, shape (n,).
    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".

    >>> train, test = digits()
    >>> train.num_examples, test.num_examples, train.batch(np.array([0, 1]))[0].shape
    (4000, 1000, torch.Size([2, 784]))
    """
    folder = files("squall.data") / "digits"
    with (
        as_file(folder / "images-idx3-ubyte.gz") as images,
        as_file(folder / "labels-idx1-ubyte.gz") as labels,
    ):
        pixels, targets = read(images, labels, classes=_CLASSES).tree
    train, test = _split(targets)
    flat = pixels.reshape(len(pixels), -1)
    return TensorSource((flat[train], targets[train])), TensorSource((flat[test], targets[test]))


def _split(targets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training and the test part: drawn class by class, then mixed."""
    train, test = [], []
    for label in range(_CLASSES):
        members = np.flatnonzero(targets == label)
        drawn = members[order(len(members), _SPLIT_SEED, label)]
        test.append(drawn[:_TEST_PER_CLASS])
        train.append(drawn[_TEST_PER_CLASS:])
    return _mixed(np.concatenate(train)), _mixed(np.concatenate(test))


def _mixed(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return indices[order(len(indices), _SPLIT_SEED, _CLASSES)]
