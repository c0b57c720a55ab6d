"""Tests of squall.data.values: numbers of a file as inputs and targets.

Faults planted, each caught: uint8 not scaled; int8 scaled; targets scaled; the range checked on one side only;
classes off by one; whole floats kept as float32; -0.5 rounded to a label; (n, 1) kept in two dimensions; rows
counted from 0 in texts; labels beyond 2**53 accepted.
"""

from typing import Any

import numpy as np
import pytest

from squall.data.values import Values, to_inputs, to_targets
from squall.errors import DataError


def values(array: Any, rows: list[int] | None = None) -> Values:
    return Values(array=np.asarray(array), file="FILE", rows=rows)


def test_bytes_become_pixels_between_0_and_1() -> None:
    found = to_inputs(values(np.arange(256, dtype=np.uint8)))

    assert found.dtype == np.float32
    assert np.array_equal(found, (np.arange(256) / 255).astype(np.float32))


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "<f2", ">f4", "<f8"])
def test_other_numbers_become_float32_as_they_are(dtype: str) -> None:
    found = to_inputs(values(np.array([[0, 1], [1, 0]], dtype)))

    assert found.dtype == np.float32
    assert found.dtype.isnative
    assert found.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e39, -1e39])
def test_an_input_that_is_not_finite_in_float32_is_refused_with_row_and_column(wrong: float) -> None:
    array = np.zeros((3, 4))
    array[1, 2] = wrong

    with pytest.raises(
        DataError, match=rf"FILE, row 2 \(index 1\), column 3: .* but got {wrong}".replace("+", r"\+")
    ):
        to_inputs(values(array))
    with pytest.raises(DataError, match=r"FILE, row 8, column 3"):
        to_inputs(values(array, rows=[7, 8, 9]))


@pytest.mark.parametrize("signalling", [0x7FA00000, 0xFFA00000])
def test_a_signalling_nan_is_refused_without_a_warning(signalling: int) -> None:
    array = np.array([[0, signalling], [0, 0]], np.uint32).view(np.float32)
    for convert in (to_inputs, lambda targets: to_targets(targets, None)):
        with pytest.raises(DataError, match=r"row 1 .*column 2"):
            convert(values(array))


@pytest.mark.parametrize("array", [[3, 0], [3.0, 0.0], np.array([[3], [0]], np.uint8), [[[3.0]], [[0.0]]]])
def test_whole_numbers_become_labels(array: Any) -> None:
    found = to_targets(values(array), classes=4)

    assert found.dtype == np.int64
    assert found.tolist() == [3, 0]


def test_negative_whole_numbers_are_labels_if_no_classes_are_given() -> None:
    assert to_targets(values([-1.0, 1.0]), None).tolist() == [-1, 1]


@pytest.mark.parametrize("array", [[0.5, 1.0], [1e20, 1.0], np.array([2**63, 1], np.uint64)])
def test_other_targets_become_float32(array: Any) -> None:
    found = to_targets(values(array), None)

    assert found.dtype == np.float32
    assert found.tolist() == np.asarray(array, np.float32).tolist()


def test_several_targets_a_row_stay_as_they_are_and_only_images_are_scaled() -> None:
    one_hot = np.eye(3, dtype=np.uint8)
    image = np.full((2, 2, 2), 255, np.uint8)

    assert to_targets(values(one_hot), None).tolist() == np.eye(3).tolist()
    assert to_targets(values(image), None).max() == 1
    assert to_targets(values(one_hot), None).dtype == np.float32


@pytest.mark.parametrize(
    ("array", "got"),
    [
        ([0, 1, 3], "3"),
        ([0, 1, -1], "-1"),
        ([0, 1, 1.5], "1.5"),
        ([0.0, 1.0, -0.5], "-0.5"),
        ([0.0, 1.0, 1e20], "1e\\+20"),
        (np.array([0, 1, 255], np.uint8), "255"),
    ],
)
def test_what_is_no_label_of_the_classes_is_refused_by_row(array: Any, got: str) -> None:
    with pytest.raises(
        DataError, match=rf"row 3 \(index 2\): expected a class label in 0\.\.2, but got {got}\."
    ):
        to_targets(values(array), classes=3)


def test_a_bool_out_of_range_is_refused_too() -> None:
    with pytest.raises(DataError, match=r"row 2 .* but got True"):
        to_targets(values([False, True]), classes=1)


def test_classes_need_one_target_a_row() -> None:
    with pytest.raises(DataError, match="expected one class label, but got 2 numbers"):
        to_targets(values(np.zeros((3, 2))), classes=2)


def test_a_target_that_is_not_finite_is_refused_by_row() -> None:
    with pytest.raises(DataError, match=r"row 6: expected a finite number.*got nan"):
        to_targets(values([1.0, np.nan], rows=[5, 6]), None)
