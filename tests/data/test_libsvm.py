"""Tests of squall.data.libsvm: sparse rows made dense.

Faults planted, each caught: indices taken from 0; a repeated index summed; nan and inf accepted; the width one
short; an index beyond the width wrapped; rows numbered without comments; the dense limit removed; 1_0 accepted
as 10; -1 and +1 mapped without classes=2; splitting at a no-break space.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from squall.data import read
from squall.errors import ConfigError
from tests.data.files import gzipped, refusal, write

GOOD = "+1 1:0.5 3:-2\n-1 2:1e-3\n+1\n-1 3:7 1:4 # unsorted\n"
DENSE = [[0.5, 0, -2], [0, 1e-3, 0], [0, 0, 0], [4, 0, 7]]


def tree(*args: Any, **options: Any) -> Any:
    return read(*args, **options).tree


@pytest.mark.parametrize("wrap", [bytes, gzipped])
def test_rows_become_dense(tmp_path: Path, wrap: type[bytes]) -> None:
    inputs, targets = tree(write(tmp_path, wrap(GOOD.encode())))

    assert inputs.dtype == np.float32
    assert np.array_equal(inputs, np.array(DENSE, np.float32))
    assert targets.tolist() == [1, -1, 1, -1]
    assert targets.dtype == np.int64


def test_a_given_width_adds_empty_columns(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)

    assert tree(file, width=5)[0].tolist() == np.pad(np.array(DENSE, np.float32), ((0, 0), (0, 2))).tolist()
    assert "indices up to width=2, but got index 3" in refusal(file, width=2)


def test_plus_and_minus_one_become_classes_if_there_are_two(tmp_path: Path) -> None:
    assert tree(write(tmp_path, GOOD), classes=2)[1].tolist() == [1, 0, 1, 0]
    assert "row 2: expected a class label in 0..2, but got -1" in refusal(write(tmp_path, GOOD), classes=3)
    assert tree(write(tmp_path, "0 1:1\n1 1:2\n"), classes=2)[1].tolist() == [0, 1]


def test_a_label_out_of_range_is_refused_by_its_line(tmp_path: Path) -> None:
    assert "row 3: " in refusal(write(tmp_path, "0 1:1\n# a comment\n5 1:1\n"), classes=3)


def test_labels_that_are_no_whole_numbers_stay_float32(tmp_path: Path) -> None:
    targets = tree(write(tmp_path, "0.5 1:1\n1 1:2\n"))[1]
    assert (targets.dtype, targets.tolist()) == (np.float32, [0.5, 1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1 0:1", "'0:1'"),
        ("1 -1:1", "'-1:1'"),
        ("1 2:1 2:1", "index 2 twice"),
        ("1 2:1 02:5", "index 2 twice"),
        ("1 2:abc", "'2:abc'"),
        ("1 2:", "'2:'"),
        ("1 :2", "':2'"),
        ("1 2", "'2'"),
        ("1 2:3:4", "'2:3:4'"),
        ("1 2:nan", "'2:nan'"),
        ("1 2:inf", "'2:inf'"),
        ("1 2:1e39", "'2:1e39'"),
        ("1 2:1_0", "'2:1_0'"),
        ("1 1_0:1", "'1_0:1'"),
        ("1 2:0x1", "'2:0x1'"),
        ("1 1.5:2", "'1.5:2'"),
        ("1 99999999999999999999:2", "'99999999999999999999:2'"),
        ("1 2:1\u00a03:1", "expected index:value"),
        ("1 qid:3 1:1", "'qid:3'"),
        ("x 2:1", "label, but got 'x'"),
        ("nan 2:1", "label, but got 'nan'"),
        ("1,2 3:1", "label, but got '1,2'"),
        ("", "a label, but got an empty line"),
    ],
)
def test_a_wrong_row_is_refused_by_its_line(tmp_path: Path, row: str, message: str) -> None:
    told = refusal(write(tmp_path, f"1 1:1\n# a comment\n{row}\n1 1:1\n"))
    assert "row 3: " in told
    assert message in told


@pytest.mark.parametrize("row", ["1 999999999999999999:1", "1 300000000:1\n1 1:1"])
def test_rows_too_large_when_dense_are_refused(tmp_path: Path, row: str) -> None:
    assert "at most 1 GiB" in refusal(write(tmp_path, row))


def test_files_without_entries_are_refused(tmp_path: Path) -> None:
    # What makes these look like libsvm is a comment.
    assert "labels only" in refusal(write(tmp_path, "#old 1:2\n1\n0 # 1:2\n"))
    assert "comments only" in refusal(write(tmp_path, "#old 2:3\n"))


def test_libsvm_targets_are_refused_with_the_way_on(tmp_path: Path) -> None:
    x, y = write(tmp_path, "1,2\n", "x"), write(tmp_path, "1 1:2\n", "y")
    assert "Give it as inputs" in refusal(x, y)


def test_a_width_is_for_libsvm_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="width=3: expected a libsvm file, but got CSV"):
        read(write(tmp_path, "1,2\n"), width=3)
    with pytest.raises(ConfigError, match="width >= 1"):
        read(write(tmp_path, GOOD), width=0)
