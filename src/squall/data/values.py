"""The numbers of one file, and how they become a model's inputs or targets."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squall.errors import DataError

# Above this, a float64 no longer tells neighbouring integers apart, so that it is no class label.
_MAX_EXACT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What a reader found, as it lay in the file.

    Attributes:
        array: numbers, one example along the first dimension.
        file: the file they come from, for messages.
        rows: line of each example in a text file, from 1; None if the file is binary.
    """

    array: NDArray[Any] = field(repr=False)
    file: str
    rows: Sequence[int] | None = None

    def row(self, example: int) -> str:
        """The place of an example, as in ``"row 6"`` of a text, or ``"row 6 (index 5)"`` of an array."""
        return f"row {example + 1} (index {example})" if self.rows is None else f"row {self.rows[example]}"

    def refusal(self, example: int, *, expected: str, got: str, remedy: str, column: str = "") -> DataError:
        """The error that names the file, the row and what to do."""
        subject = f"{self.file}, {self.row(example)}{column}"
        return DataError(subject=subject, expected=expected, got=got, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The inputs of a file, and its targets if it holds them too."""

    inputs: Values
    targets: Values | None = None


def to_inputs(values: Values) -> NDArray[np.float32]:
    """Inputs as float32 of the file's own shape; uint8 is taken for pixels and scaled to [0, 1].

    Raises:
        DataError: a number is not finite, or too large for float32; names row and column.
    """
    array = values.array
    if array.dtype == np.uint8:
        scaled: NDArray[np.float32] = np.divide(array, np.float32(255), dtype=np.float32)
        return scaled
    refuse_not_finite(values)
    return array.astype(np.float32)


def to_targets(values: Values, classes: int | None) -> NDArray[Any]:
    """Targets as int64 class labels if every one is a whole number, otherwise as float32.

    Several numbers a row, shape (n, k), are not labels: they stay float32 (images as targets: as inputs do).

    Args:
        values: shape (n,), (n, 1) or (n, ...).
        classes: labels must lie in [0, classes); None allows any.
    Raises:
        DataError: a target is not finite; with `classes`, it is no label or out of range; names the row.
    """
    if values.array.size != len(values.array):
        return _several_targets(values, classes)
    flat = Values(array=values.array.reshape(-1), file=values.file, rows=values.rows)
    labels = _whole_numbers(flat)
    if classes is not None:
        return _labels_below(flat, labels, classes)
    return to_inputs(_as_float(flat)) if labels is None else labels


def _several_targets(values: Values, classes: int | None) -> NDArray[np.float32]:
    if classes is not None:
        raise values.refusal(
            0,
            expected="one class label",
            got=f"{values.array[0].size} numbers",
            remedy="Keep the labels only, or leave classes out.",
        )
    refuse_not_finite(values)
    is_image = values.array.ndim > 2
    return to_inputs(values if is_image else _as_float(values))


def _as_float(values: Values) -> Values:
    return Values(array=values.array.astype(np.float64), file=values.file, rows=values.rows)


def _whole_numbers(flat: Values) -> NDArray[np.int64] | None:
    """The targets as int64, or None if one of them is no whole number."""
    array = flat.array
    if array.dtype.kind in "bi":
        return array.astype(np.int64)
    refuse_not_finite(flat)
    if not ((np.floor(array) == array) & (np.abs(array) <= _MAX_EXACT)).all():
        return None
    return array.astype(np.int64)


def _labels_below(flat: Values, labels: NDArray[np.int64] | None, classes: int) -> NDArray[np.int64]:
    whole = np.floor(flat.array.astype(np.float64)) == flat.array
    wrong = ~whole if labels is None else (labels < 0) | (labels >= classes)
    if labels is None and whole.all():
        wrong = np.abs(flat.array) > _MAX_EXACT
    if not wrong.any():
        assert labels is not None
        return labels
    example = int(np.argmax(wrong))
    raise flat.refusal(
        example,
        expected=f"a class label in 0..{classes - 1}",
        got=_shown(flat.array[example]),
        remedy=f"Correct that row, count labels from 0, or raise classes ({int(wrong.sum())} such rows).",
    )


def refuse_not_finite(values: Values) -> None:
    """Every number is finite and float32 can hold it.

    Raises:
        DataError: one is not; names its row and column, and what stands there.
    """
    if values.array.dtype.kind in "bui":
        return
    # Written so that nan, which is above and below nothing, is wrong too.
    fine = np.abs(values.array) <= np.finfo(np.float32).max
    if fine.all():
        return
    place = tuple(int(i) for i in np.unravel_index(int(np.argmin(fine)), fine.shape))
    column = {1: "", 2: f", column {place[-1] + 1}"}.get(len(place), f", at {place[1:]}")
    raise values.refusal(
        place[0],
        column=column,
        expected="a finite number that float32 can hold",
        got=_shown(values.array[place]),
        remedy=f"Correct or drop the rows with such numbers ({int((~fine).sum())} numbers in all).",
    )


def _shown(number: np.generic) -> str:
    return str(number.item()).removesuffix(".0")
