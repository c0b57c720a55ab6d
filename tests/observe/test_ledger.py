"""Tests of squall.observe.ledger: what is written is read, and what is not a ledger is named.

Faults planted here by hand, each seen to fail a test: two bits of `first` given to `epoch` in `block_id` ·
`flush` that keeps its rows · `close` without `flush` · no cut of a torn row when a file is continued · the
reader's row count rounded up · header compared by length only · sort by time alone · no check of outcomes on reading ·
no check of outcomes on writing · `partition` and `slice` swapped in `LedgerRow`.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import CorruptError
from squall.observe.ledger import (
    BUFFERED_ROWS,
    LEDGER_DTYPE,
    LedgerRow,
    LedgerWriter,
    Outcome,
    block_id,
    read_ledger,
)

# The columns as the public contract lists them, written out a second time on purpose.
CONTRACT = [
    "shard",
    "slice",
    "partition",
    "shard_incarnation",
    "replica",
    "incarnation",
    "attempt",
    "block",
    "stage",
    "epoch",
    "first",
    "minibatches",
    "examples",
    "based_on",
    "version",
    "staleness",
    "outcome",
    "time_s",
]


def row(
    *, time_s: float = 0.0, shard: int = 0, slice_: int = 0, version: int = 1, first: int = 0
) -> LedgerRow:
    return LedgerRow(
        shard=shard,
        slice=slice_,
        partition=0,
        shard_incarnation=0,
        replica=1,
        incarnation=0,
        attempt=1,
        block=block_id(0, 0, first),
        stage=0,
        epoch=0,
        first=first,
        minibatches=1,
        examples=64,
        based_on=version - 1,
        version=version,
        staleness=0,
        outcome=Outcome.APPLIED,
        time_s=time_s,
    )


def write(path: Path, *rows: LedgerRow) -> Path:
    with LedgerWriter(path) as writer:
        for each in rows:
            writer.append(each)
    return path


def test_the_columns_are_those_of_the_contract() -> None:
    assert list(LEDGER_DTYPE.names or ()) == CONTRACT
    kinds = {name: LEDGER_DTYPE[name].str for name in CONTRACT}
    assert kinds.pop("outcome") == "<U12"
    assert kinds.pop("time_s") == "<f8"
    assert set(kinds.values()) == {"<i8"}


def test_each_column_comes_back_as_it_was_written(tmp_path: Path) -> None:
    values = (*range(101, 117), "not_finite", 2.5)
    write(tmp_path / "shard0.ledger", LedgerRow(*values))

    read = read_ledger(tmp_path)

    assert {name: read[name].item() for name in CONTRACT} == dict(zip(CONTRACT, values, strict=True))


def test_every_outcome_fits_its_column(tmp_path: Path) -> None:
    write(tmp_path / "a.ledger", *(row()._replace(outcome=outcome) for outcome in Outcome))
    assert read_ledger(tmp_path)["outcome"].tolist() == [outcome.value for outcome in Outcome]


def test_more_rows_than_the_buffer_holds_all_arrive(tmp_path: Path) -> None:
    count = 2 * BUFFERED_ROWS + 3
    write(tmp_path / "a.ledger", *(row(time_s=float(at), first=at) for at in range(count)))
    assert read_ledger(tmp_path)["first"].tolist() == list(range(count))


def test_a_flushed_row_is_read_while_the_writer_is_open(tmp_path: Path) -> None:
    with LedgerWriter(tmp_path / "a.ledger") as writer:
        writer.append(row())
        assert len(read_ledger(tmp_path)) == 0
        writer.flush()
        assert len(read_ledger(tmp_path)) == 1


def test_files_are_put_together_in_order_of_time_shard_slice_and_version(tmp_path: Path) -> None:
    write(
        tmp_path / "a.ledger",
        row(time_s=2.0),
        row(time_s=1.0, shard=1, slice_=2),
        row(time_s=1.0, shard=1, slice_=1),
    )
    write(
        tmp_path / "b.ledger",
        row(time_s=1.0, version=9),
        row(time_s=1.0, version=8),
        row(time_s=0.5, shard=7),
    )

    read = read_ledger(tmp_path)

    keys = list(zip(*(read[name].tolist() for name in ("time_s", "shard", "slice", "version")), strict=True))
    assert keys == [
        (0.5, 7, 0, 1),
        (1.0, 0, 0, 8),
        (1.0, 0, 0, 9),
        (1.0, 1, 1, 1),
        (1.0, 1, 2, 1),
        (2.0, 0, 0, 1),
    ]


@pytest.mark.parametrize("cut", [1, LEDGER_DTYPE.itemsize - 1])
def test_a_torn_last_row_is_dropped_and_overwritten_by_the_next_writer(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "a.ledger", row(first=0), row(time_s=1.0, first=1))
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_ledger(tmp_path)["first"].tolist() == [0]

    write(path, row(time_s=2.0, first=2))

    assert read_ledger(tmp_path)["first"].tolist() == [0, 2]


@pytest.mark.parametrize("kept", [0, 1, 40])
def test_a_file_whose_writer_died_within_the_header_is_empty_and_can_be_continued(
    tmp_path: Path, kept: int
) -> None:
    path = write(tmp_path / "a.ledger")
    path.write_bytes(path.read_bytes()[:kept])
    assert len(read_ledger(tmp_path)) == 0

    write(path, row(first=5))

    assert read_ledger(tmp_path)["first"].tolist() == [5]


def test_a_directory_without_ledgers_gives_an_empty_array_of_the_right_kind(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        read = read_ledger(directory)
        assert read.shape == (0,)
        assert read.dtype == LEDGER_DTYPE


@pytest.mark.parametrize(
    ("old", "new"), [(b'"version": 1', b'"version": 2'), (b'"replica"', b'"replicb"'), (b"{", b"PK\x03\x04")]
)
def test_a_foreign_or_altered_header_is_named_and_never_read(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = write(tmp_path / "a.ledger", row())
    path.write_bytes(path.read_bytes().replace(old, new, 1))

    with pytest.raises(CorruptError, match=r"a\.ledger: expected the first line"):
        read_ledger(tmp_path)
    with pytest.raises(CorruptError, match=r"a\.ledger"):
        LedgerWriter(path)


def test_a_row_of_zeros_such_as_a_lost_disk_leaves_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ledger", row())
    path.write_bytes(path.read_bytes() + bytes(LEDGER_DTYPE.itemsize))

    with pytest.raises(CorruptError, match=r"a\.ledger.*row 1"):
        read_ledger(tmp_path)


def test_an_outcome_that_does_not_exist_is_not_written(tmp_path: Path) -> None:
    with LedgerWriter(tmp_path / "a.ledger") as writer:
        for wrong in (row()._replace(outcome="applied to nothing"), tuple(row())[:-1]):
            with pytest.raises(ValueError, match="a row needs 18 fields and one of"):
                writer.append(wrong)
    assert len(read_ledger(tmp_path)) == 0


def test_a_writer_refuses_a_name_that_no_reader_looks_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'\.ledger'"):
        LedgerWriter(tmp_path / "shard0.bin")


def near_the_ends(num_bits: int) -> st.SearchStrategy[int]:
    """Small and largest numbers: where packed fields would run into one another."""
    return st.one_of(st.integers(0, 3), st.integers(2**num_bits - 4, 2**num_bits - 1))


BLOCKS = st.tuples(near_the_ends(11), near_the_ends(20), near_the_ends(32))


@given(BLOCKS, BLOCKS)
def test_block_numbers_fit_an_int64_and_sort_as_the_blocks_do(
    one: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    for block in (one, other):
        assert 0 <= block_id(*block) <= np.iinfo(np.int64).max
    assert (block_id(*one) < block_id(*other)) is (one < other)


@pytest.mark.parametrize(
    "wrong", [(-1, 0, 0), (0, -1, 0), (0, 0, -1), (2**11, 0, 0), (0, 2**20, 0), (0, 0, 2**32)]
)
def test_a_block_that_cannot_be_numbered_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a block's number needs"):
        block_id(*wrong)
