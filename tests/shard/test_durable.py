"""Tests of squall.shard.durable: what a shard that comes back writes into its ledger.

Faults planted, each caught: rows told that are there · rows of what was lost passed over · a row taken back twice · all rows kept
in memory.
"""

import tracemalloc
from pathlib import Path

import pytest

from squall.observe.ledger import LedgerRow, LedgerWriter, read_ledger
from squall.shard.books import SliceBook
from squall.shard.durable import put_right
from squall.shard.recovery import Recovered

MIB = 1 << 20


def applied(version: int, *, slice_: int = 0, outcome: str = "applied") -> LedgerRow:
    zeros = dict.fromkeys(LedgerRow._fields, 0)
    told = {"slice": slice_, "first": version - 1, "version": version, "time_s": float(version)}
    return LedgerRow(**{**zeros, **told, "outcome": outcome})  # type: ignore[arg-type]


def back_with(version: int, rows: list[LedgerRow]) -> Recovered:
    """Came back with so many updates of slice 0, and none of slice 1, of which logs hold some."""
    books = [SliceBook.new(number, 0) for number in (0, 1)]
    books[0].version = version
    return Recovered(states=[], books=books, rows=rows)


def put_right_after(folder: Path, before: list[LedgerRow], found: Recovered) -> list[tuple[int, int, str]]:
    """(slice, version, outcome) of what is written."""
    with LedgerWriter(folder / "shard0-0.ledger") as writer:
        for row in before:
            writer.append(row)
    with LedgerWriter(folder / "shard0-1.ledger") as writer:
        put_right(folder, 0, found, writer, time_s=99.0)
    rows = read_ledger(folder, "shard0-1")
    return [(int(row["slice"]), int(row["version"]), str(row["outcome"])) for row in rows]


def test_what_logs_hold_is_told_unless_it_was_and_what_was_lost_is_taken_back_once(tmp_path: Path) -> None:
    before = [applied(version) for version in (1, 2, 3, 4, 6, 7)]
    before += [applied(7, outcome="rolled_back"), applied(1, slice_=1)]
    found = back_with(5, [applied(version) for version in (4, 5)])

    written = put_right_after(tmp_path, before, found)

    assert sorted(written) == [(0, 5, "applied"), (0, 6, "rolled_back"), (1, 1, "rolled_back")]


@pytest.mark.parametrize("num_rows", [1_000, 60_000])
def test_it_takes_no_more_memory_when_much_has_been_done(tmp_path: Path, num_rows: int) -> None:
    before = [applied(version) for version in range(1, num_rows + 1)]
    with LedgerWriter(tmp_path / "shard0-0.ledger") as writer:
        for row in before:
            writer.append(row)
    found = back_with(num_rows, before[-100:])
    with LedgerWriter(tmp_path / "shard0-1.ledger") as writer:
        tracemalloc.start()
        put_right(tmp_path, 0, found, writer, time_s=99.0)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(read_ledger(tmp_path, "shard0-1")) == 0
    assert most < 8 * MIB
