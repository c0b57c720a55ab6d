"""Tests of squall.data.table: CSV and its relatives.

Faults planted, each caught: row numbers without the header; any first row with text taken for a header; the
target column not taken out; a mix of numbers and names mapped to places; the counting column of a table without
header dropped; rows of unequal length padded; 1_000 read as 1000; quotes left in names; splitting at a no-break
space; a counts header believed although its counts are wrong.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squall.data import read
from squall.errors import DataError
from tests.data.files import gzipped, refusal, write


def tree(*args: Any, **options: Any) -> Any:
    return read(*args, **options).tree


@pytest.mark.parametrize("wrap", [bytes, gzipped])
@pytest.mark.parametrize(
    "text",
    [
        "1.5,2,0\n-3,4e1,1\n",
        "1.5,2,0\r\n-3,4e1,1\r\n",
        "1.5,2,0\n-3,4e1,1",
        "1.5\t2\t0\n-3\t4e1\t1\n\n",
        "1.5;2;0\n-3;4e1;1\n",
        "  1.5 2   0\n-3\t4e1 1 \n",
        "a,b,c\n1.5,2,0\n-3,4e1,1\n",
        '"a","b","c"\n"1.5",2,0\n-3,"4e1",1\n',
        "\ufeffa,b,c\n1.5,2,0\n-3,4e1,1\n",
        "2,2,no,yes\n1.5,2,0\n-3,4e1,1\n",
        '"","b","c","d"\n"1",1.5,2,0\n"2",-3,4e1,1\n',
        ",b,c,d\n0,1.5,2,0\n1,-3,4e1,1\n",
        "1.5, 2, 0\n-3, 4e1, 1\n",
    ],
)
def test_separators_headers_and_row_numbers_are_seen_through(
    tmp_path: Path, text: str, wrap: type[bytes]
) -> None:
    inputs, targets = tree(write(tmp_path, wrap(text.encode())))

    assert inputs.tolist() == [[1.5, 2], [-3, 40]]
    assert targets.tolist() == [0, 1]
    assert (inputs.dtype, targets.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize(("column", "target"), [(0, 1), (1, 20), (2, 3), (-1, 3), (-3, 1)])
def test_any_column_can_be_the_target(tmp_path: Path, column: int, target: int) -> None:
    inputs, targets = tree(write(tmp_path, "1,20,3\n"), target_column=column)

    assert targets.tolist() == [target]
    assert sorted([*inputs[0].tolist(), target]) == [1, 3, 20]


def test_no_target_column_leaves_inputs_alone(tmp_path: Path) -> None:
    assert tree(write(tmp_path, "1,2\n3,4\n"), target_column=None).tolist() == [[1, 2], [3, 4]]


def test_names_in_the_target_column_become_classes_in_sorted_order(tmp_path: Path) -> None:
    inputs, targets = tree(write(tmp_path, 'x,kind\n1,cat\n2,"ant"\n3, cat\n4,dog\n'), classes=3)

    assert targets.tolist() == [1, 0, 1, 2]
    assert inputs.tolist() == [[1], [2], [3], [4]]


def test_more_names_than_classes_are_refused_by_row(tmp_path: Path) -> None:
    assert "row 3: expected a class label in 0..1, but got 2" in refusal(
        write(tmp_path, "1,a\n2,b\n3,c\n"), classes=2
    )


def test_targets_may_be_a_table_of_their_own(tmp_path: Path) -> None:
    x = write(tmp_path, "1,2\n3,4\n", "x")

    for text, expected in (
        ("0\n1\n", [0, 1]),
        ("label\n0\n1\n", [0, 1]),
        ("b\na\n", [1, 0]),
        ("0.5\n1\n", [0.5, 1]),
    ):
        inputs, targets = tree(x, write(tmp_path, text, "y"))
        assert targets.tolist() == expected
        assert inputs.tolist() == [[1, 2], [3, 4]]
    assert tree(x, write(tmp_path, "0,1\n1,0\n", "y"))[1].tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("1,2,3\n1,2\n", "row 2:", "expected 3 fields as in row 1, but got 2"),
        ("a,b,c\n1,2,3\n1,2,3,4\n", "row 3:", "expected 3 fields as in row 2, but got 4"),
        ("a,b\n1,2,3\n1,2,3\n", "row 2:", "expected 2 fields as in the header, but got 3"),
        ("3,2,no,yes\n1.5,2,0\n-3,4e1,1\n", "row 2:", "expected 4 fields as in row 1, but got 3"),
        ("1,2,3\n\n1,2,3\n", "row 2:", "but got 0"),
        ("\n1,2,3\n", "row 1:", "but got 0"),
        ("1,2,3\n1,x,3\n", "row 2, column 2:", "a number, but got 'x'"),
        ("1,x,3\n1,2,3\n", "row 1, column 2:", "a number, but got 'x'"),
        ("1,2,3\n1,,3\n", "row 2, column 2:", "an empty field"),
        (",,\n1,2,3\n", "row 1, column 1:", "an empty field"),
        ("1,2,3\n1,2,\n", "row 2, column 3:", "a number as in row 1, but got an empty field"),
        ("1,2,3\n1,2,cat\n", "row 2, column 3:", "a number as in row 1, but got 'cat'"),
        ("5,6,cat\n1,2,3\n", "row 2, column 3:", "a class name as in row 1, but got '3'"),
        ("1,2,3\n1,nan,3\n", "row 2, column 2:", "got nan"),
        ("1,2,3\n1,2,-inf\n", "row 2, column 3:", "got -inf"),
        ("1,2,3\n1,1e39,3\n", "row 2, column 2:", "got 1e+39"),
        ("1,2,3\n1,1_000,3\n", "row 2, column 2:", "got '1_000'"),
        ("1,2,3\n1,٣,3\n", "row 2, column 2:", "got '٣'"),
        ("1 2\n3\u00a04 5\n", "row 2, column 1:", "a number"),
        ('1,2,3\n1,"2,3\n', "row 2:", "quotes in pairs"),
        ("a,b,c\n", "", "a header only"),
        (" \n\n", "", "blank lines only"),
        ("Once upon a time\nthere was a fox.\n", "row 2, column 1:", "got 'there'"),
        ("1\n2\n", "", "got 1 column"),
    ],
)
def test_a_wrong_table_is_refused_with_row_and_column(
    tmp_path: Path, text: str, place: str, message: str
) -> None:
    told = refusal(write(tmp_path, text))
    assert place in told
    assert message in told


@pytest.mark.parametrize("column", [2, -3])
def test_a_target_column_that_is_not_there_is_refused(tmp_path: Path, column: int) -> None:
    assert f"column {column}, but got 2 columns" in refusal(write(tmp_path, "1,2\n"), target_column=column)


def test_a_first_column_that_counts_is_kept_if_it_has_a_name_or_no_header(tmp_path: Path) -> None:
    for text in ("1,5,0\n2,6,1\n", "id,a,b\n1,5,0\n2,6,1\n", ",a,b\n1,5,0\n3,6,1\n"):
        assert tree(write(tmp_path, text))[0].shape == (2, 2)


def test_a_label_that_is_no_class_is_refused_by_the_line_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 3: expected a class label in 0\.\.1, but got 2"):
        read(write(tmp_path, "a,b\n1,0\n1,2\n"), classes=2)
