"""libsvm (svmlight) files: ``label index:value index:value ...``, one example a line, indices from 1.

A row becomes dense, because torch computes with dense rows: its width is the largest index of the file, or
the `width` that is asked for (a test file often lacks the last columns of its training file). Text after ``#``
is a comment. Indices may come in any order, but not twice.

Source: Chang and Lin, "LIBSVM: a library for support vector machines", README, section "Data format".
"""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from squall.data.content import Content, one_line, text_lines
from squall.data.values import Found, Values
from squall.errors import DataError

_MAX_DENSE_BYTES = 1 << 30
_MAX_DIGITS = 18
_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(slots=True)
class _Rows:
    """What has been parsed: a label and a line a row, and row, column and value of each entry."""

    labels: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


def read_libsvm(content: Content, width: int | None, signs_are_classes: bool = False) -> Found:
    """Read a libsvm file as dense float32 inputs, shape (n, width), and its labels, float64, shape (n,).

    `signs_are_classes`: labels that are all -1 or +1, as is the custom of two classes, become 0 and 1.

    Raises:
        DataError: a label or value is no finite number, an index is no integer from 1 or comes twice in a row
            (names the row); the largest index is above `width`; or the dense rows would take more than 1 GiB.
    """
    rows = _Rows()
    for number, line in enumerate(text_lines(content), start=1):
        fields = line.partition("#")[0].encode().split()
        if fields:
            _add_row(content, rows, number, fields)
        elif "#" not in line:
            raise content.refusal(
                place=f"row {number}", expected="a label", got="an empty line", remedy="Drop it."
            )
    if not rows.labels:
        raise content.refusal(expected="rows of data", got="comments only")
    inputs = Values(array=_dense(content, rows, width), file=content.name, rows=rows.lines)
    labels = np.array(rows.labels)
    if signs_are_classes and set(rows.labels) == {-1.0, 1.0}:
        labels = (labels + 1) / 2
    return Found(inputs=inputs, targets=Values(array=labels, file=content.name, rows=rows.lines))


def _add_row(content: Content, rows: _Rows, number: int, fields: list[bytes]) -> None:
    label, entries = fields[0], fields[1:]
    if not _is_finite(label):
        raise content.refusal(
            place=f"row {number}",
            expected="a finite number as its label",
            got=_shown(label),
            remedy="One number a row: map names and lists of labels to numbers first.",
        )
    pairs = [entry.split(b":") for entry in entries]
    if not _are_sound(pairs):
        raise _entry_refusal(content, number, entries)
    columns = [int(index) - 1 for index, _ in pairs]
    if len(set(columns)) != len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise content.refusal(
            place=f"row {number}",
            expected="each index once",
            got=f"index {twice + 1} twice",
            remedy="Correct that row.",
        )
    rows.labels.append(float(label))
    rows.lines.append(number)
    rows.counts.append(len(columns))
    rows.columns += columns
    rows.values += [float(value) for _, value in pairs]


def _are_sound(pairs: list[list[bytes]]) -> bool:
    return all(len(pair) == 2 and _is_index(pair[0]) and _is_finite(pair[1]) for pair in pairs)


def _entry_refusal(content: Content, number: int, entries: list[bytes]) -> DataError:
    wrong = next(entry for entry in entries if not _are_sound([entry.split(b":")]))
    return content.refusal(
        place=f"row {number}",
        expected="index:value with an index from 1 and a finite number",
        got=_shown(wrong),
        remedy="Correct that row; add 1 to every index of a file that counts from 0.",
    )


@lru_cache(maxsize=1 << 16)  # indices and values repeat from row to row
def _is_index(text: bytes) -> bool:
    return text.isdigit() and len(text) <= _MAX_DIGITS and int(text) >= 1


@lru_cache(maxsize=1 << 16)
def _is_finite(text: bytes) -> bool:
    return _NUMBER.fullmatch(text) is not None and abs(float(text)) <= _FLOAT32_MAX


def _shown(text: bytes) -> str:
    return repr(one_line(text.decode(), limit=40))


def _dense(content: Content, rows: _Rows, width: int | None) -> NDArray[np.float32]:
    largest = max(rows.columns, default=-1) + 1
    if largest == 0:
        raise content.refusal(expected="index:value entries", got="labels only")
    if width is not None and width < largest:
        raise content.refusal(
            expected=f"indices up to width={width}",
            got=f"index {largest}",
            remedy="Raise width or leave it out.",
        )
    shape = len(rows.labels), width or largest
    if math.prod(shape) * 4 > _MAX_DENSE_BYTES:
        raise content.refusal(
            expected="rows that take at most 1 GiB when dense",
            got=f"{shape[0]} rows x {shape[1]} columns",
            remedy="Write a Dataset that makes rows dense one by one, or drop rare columns.",
        )
    dense = np.zeros(shape, np.float32)
    dense[np.repeat(np.arange(shape[0]), rows.counts), rows.columns] = rows.values
    return dense
