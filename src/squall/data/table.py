"""CSV files: a table of numbers, one example a line; commas, tabs, semicolons or blanks separate.

- The first line is a header if no field of it is a number. A header like scikit-learn's
  (``569,30,malignant,benign``) is known by its two counts.
- A first column without a name in the header that only counts the rows (R and pandas write one) is dropped.
- The target column may hold names instead of numbers: they become 0, 1, ... in sorted order.
- Numbers are taken as they are, never scaled.
"""

import csv
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from squall.data.content import KINDS, Content, one_line, text_lines
from squall.data.values import Found, Values, refuse_not_finite
from squall.errors import DataError

_DELIMITERS = ",\t;"


def read_table(content: Content, target_column: int | None) -> Found:
    """Read a table and take one column as targets; None takes none.

    Args:
        content: an open text file.
        target_column: counted as in the file, from 0, or from the end if negative.
    Returns:
        inputs, float64, shape (n, columns), and targets, float64, shape (n,).
    Raises:
        DataError: no rows, rows of unequal length, or a field that is no finite number; names row and column.
    """
    table = _Table(content)
    num_columns = table.num_columns
    if target_column is None:
        return Found(inputs=table.inputs(table.matrix(None), None))
    if num_columns < 2 or not -num_columns <= target_column < num_columns:
        raise content.refusal(
            expected=f"a table with inputs and a target in column {target_column}",
            got=f"{num_columns} column{'s' * (num_columns > 1)}",
            remedy=f"Set target_column, or give the targets as a file of their own. {KINDS}.",
        )
    target = target_column % num_columns
    matrix = table.matrix(target)
    return Found(inputs=table.inputs(matrix, target), targets=table.values(matrix[:, target]))


def read_table_targets(content: Content) -> Values:
    """Read a table that holds targets only: one column of numbers or names, or several of numbers."""
    table = _Table(content)
    return table.values(table.matrix(0 if table.num_columns == 1 else None))


class _Table:
    """The lines of a text file as rows of fields."""

    def __init__(self, content: Content) -> None:
        self._content = content
        lines = text_lines(content)
        if not lines:
            raise content.refusal(expected="rows of numbers", got="blank lines only")
        self._delimiter = next((mark for mark in _DELIMITERS if mark in lines[0]), None)
        first = self._split(lines[0], row=1)
        self._names = first if _is_header(first, lines) else []
        has_header = bool(self._names) or self._is_counts_header(first, lines)
        self._first_row = 1 + has_header
        self._lines = lines[has_header:]
        if not self._lines:
            raise content.refusal(expected="rows of numbers", got="a header only", remedy=f"{KINDS}.")
        self.num_columns = self._width(0)
        if self.num_columns == 0:
            raise self._wrong_width(self._first_row, "a row of numbers", 0)
        self._check_widths()

    def values(self, array: NDArray[Any]) -> Values:
        rows = range(self._first_row, self._first_row + len(self._lines))
        return Values(array=array, file=self._content.name, rows=rows)

    def matrix(self, target: int | None) -> NDArray[np.float64]:
        """All columns as numbers, shape (n, columns); in the target column names become their places."""
        matrix = self._fast()
        if matrix is None:
            matrix = self._slow(target)
        refuse_not_finite(self.values(matrix))
        return matrix

    def inputs(self, matrix: NDArray[np.float64], target: int | None) -> Values:
        """The matrix without the target column, and without a nameless first one that counts rows."""
        keep = [column for column in range(self.num_columns) if column != target]
        nameless = self._names and not self._names[0] and len(keep) > 1 and keep[0] == 0
        if nameless and _counts_rows(matrix[:, 0]):
            keep = keep[1:]
        return self.values(matrix[:, keep])

    def _fast(self) -> NDArray[np.float64] | None:
        """NumPy's own parser; None where it stumbles, so that the slow way says why, or reads names."""
        if not all(map(str.isascii, self._lines)):
            return None
        try:
            return np.loadtxt(self._lines, delimiter=self._delimiter, comments=None, quotechar='"', ndmin=2)
        except ValueError:
            return None

    def _slow(self, target: int | None) -> NDArray[np.float64]:
        matrix = np.empty((len(self._lines), self.num_columns))
        names: list[str] = []
        for i in range(len(self._lines)):
            fields = self._fields(i)
            if target is not None:
                names.append(fields[target].strip())
                fields[target] = "0"
            matrix[i] = [self._number(i, column, text) for column, text in enumerate(fields)]
        if target is not None:
            matrix[:, target] = self._targets(names, target)
        return matrix

    def _targets(self, names: list[str], target: int) -> Sequence[float]:
        """Numbers if the first is one, otherwise the places of the names in sorted order."""
        are_numbers = [_parse(name) is not None for name in names]
        if all(are_numbers):
            return [float(name) for name in names]
        for i, name in enumerate(names):
            if are_numbers[i] != are_numbers[0] or not name:
                kind = "a number" if are_numbers[0] else "a class name"
                raise self._refusal(i, target, f"{kind} as in row {self._first_row}", name)
        places = {name: place for place, name in enumerate(sorted(set(names)))}
        return [places[name] for name in names]

    def _number(self, i: int, column: int, text: str) -> float:
        number = _parse(text)
        if number is None:
            raise self._refusal(i, column, "a number", text)
        return number

    def _refusal(self, i: int, column: int, expected: str, text: str) -> DataError:
        return self._content.refusal(
            place=f"row {self._first_row + i}, column {column + 1}",
            expected=expected,
            got=repr(one_line(text, limit=40)) if text.strip() else "an empty field",
            remedy=f"Correct or drop that row, or map text to numbers first. {KINDS}.",
        )

    def _is_counts_header(self, first: list[str], lines: list[str]) -> bool:
        """Rows, inputs, and a name for each class, as scikit-learn writes; both counts must agree."""
        numeric = [_parse(name) is not None for name in first]
        if len(first) < 3 or not (first[0].isdecimal() and first[1].isdecimal()) or any(numeric[2:]):
            return False
        num_fields = len(self._split(lines[1], row=2)) if len(lines) > 1 else 0
        return (str(len(lines) - 1), str(num_fields - 1)) == (first[0], first[1])

    def _check_widths(self) -> None:
        first_row, width = self._first_row, self.num_columns
        if self._names and len(self._names) != width:
            raise self._wrong_width(first_row, f"{len(self._names)} fields as in the header", width)
        for i in range(1, len(self._lines)):
            if self._width(i) != width:
                raise self._wrong_width(
                    first_row + i, f"{width} fields as in row {first_row}", self._width(i)
                )

    def _wrong_width(self, row: int, expected: str, got: int) -> DataError:
        remedy = f"Correct or drop that row. {KINDS}."
        return self._content.refusal(place=f"row {row}", expected=expected, got=str(got), remedy=remedy)

    def _width(self, i: int) -> int:
        line = self._lines[i]
        if self._delimiter is None or '"' in line or not line:
            return len(self._fields(i))
        return line.count(self._delimiter) + 1

    def _fields(self, i: int) -> list[str]:
        return self._split(self._lines[i], row=self._first_row + i)

    def _split(self, line: str, row: int) -> list[str]:
        if self._delimiter is None:
            # Blanks and tabs only: str.split() would also split at a no-break space.
            return re.findall(r"[^ \t]+", line)
        if '"' not in line:
            return line.split(self._delimiter) if line else []
        try:
            return next(csv.reader([line], delimiter=self._delimiter, strict=True))
        except csv.Error as error:
            raise self._content.refusal(
                place=f"row {row}",
                expected="quotes in pairs",
                got=one_line(str(error)),
                remedy="Correct that row.",
            ) from error


def _parse(text: str) -> float | None:
    # float() also takes digits of other scripts and 1_000, which no other reader does.
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _is_header(first: list[str], lines: list[str]) -> bool:
    """No field is a number; a single name counts only if a number follows, as it may be a class name."""
    if any(_parse(name) is not None for name in first) or not any(first):
        return False
    return len(first) > 1 or (len(lines) > 1 and _parse(lines[1].strip('"')) is not None)


def _counts_rows(column: NDArray[np.float64]) -> bool:
    counted = np.arange(len(column))
    return bool((column == counted).all() or (column == counted + 1).all())
