"""The ledger: one row for each push that a slice settled, so that what was lost can be counted.

Each role that settles pushes appends to a file of its own, ``<name>.ledger``: one JSON line that says what
the rows are, then the rows as raw little-endian bytes. A reader puts all files of a directory together.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from squall.blocks import Outcome as Outcome
from squall.closes import Closes
from squall.errors import CorruptError
from squall.observe.files import write_whole

SUFFIX = ".ledger"
BUFFERED_ROWS = 256
READ_ROWS = 8192

Ledger: TypeAlias = NDArray[np.void]
Choice: TypeAlias = Callable[[Ledger], NDArray[np.bool_]]
"""Which of some rows are wanted: one bool for each."""


class LedgerRow(NamedTuple):
    """One row; the fields are the ledger's columns, in their order.

    Attributes:
        shard, slice, partition: where it was settled; `slice` counts over all shards of the run.
        shard_incarnation: which start of the shard.
        replica, incarnation: whose push it was, and which start of it; -1 if the coordinator settled it.
        attempt: the how-many-th time that the block was handed out, from 1.
        block: the block's number, unique in the run: see `block_id`.
        stage, epoch, first: the block's name; `first` is its first position in the epoch's order.
        minibatches, examples: how much of each the push stands for.
        based_on: the oldest version of the slice that the gradient was computed from [updates].
        version: of the slice after the push was settled [updates].
        staleness: version before settling, less `based_on` [updates].
        outcome: one of `Outcome`.
        time_s: since the run began, on the clock of the run's host; virtual in a simulation [seconds].
    """

    shard: int
    slice: int
    partition: int
    shard_incarnation: int
    replica: int
    incarnation: int
    attempt: int
    block: int
    stage: int
    epoch: int
    first: int
    minibatches: int
    examples: int
    based_on: int
    version: int
    staleness: int
    outcome: str
    time_s: float


_FORMATS = {"outcome": "<U12", "time_s": "<f8"}
LEDGER_DTYPE: np.dtype[np.void] = np.dtype([(name, _FORMATS.get(name, "<i8")) for name in LedgerRow._fields])

_HEADER = json.dumps({"format": "squall-ledger", "version": 1, "dtype": LEDGER_DTYPE.descr}).encode() + b"\n"
_NUM_COLUMNS = len(LedgerRow._fields)
_OUTCOME_AT = LedgerRow._fields.index("outcome")
_OUTCOMES = frozenset(str(outcome) for outcome in Outcome)


_STAGE_BITS, _EPOCH_BITS, _FIRST_BITS = 11, 20, 32


def block_id(stage: int, epoch: int, first: int) -> int:
    """Number a block: no two blocks of one run that differ in an argument share a number.

    The three are packed into the 63 positive bits of an int64, stage highest, so that numbers of
    one run sort as the blocks do. For a batch method `epoch` is the evaluation and `first` the portion group.

    Args:
        stage: below 2,048.
        epoch: below 1,048,576.
        first: position of the block's first minibatch, below 4,294,967,296.

    Raises:
        ValueError: an argument is negative or too large to be packed.

    >>> block_id(0, 0, 7), block_id(0, 1, 7), block_id(1, 0, 0) > block_id(0, 1_000_000, 7)
    (7, 4294967303, True)
    """
    if stage >> _STAGE_BITS or epoch >> _EPOCH_BITS or first >> _FIRST_BITS:
        raise ValueError(
            f"a block's number needs 0 <= stage < 2**{_STAGE_BITS}, 0 <= epoch < 2**{_EPOCH_BITS} and "
            f"0 <= first < 2**{_FIRST_BITS}, but got stage={stage}, epoch={epoch}, first={first}"
        )
    return (stage << _EPOCH_BITS | epoch) << _FIRST_BITS | first


class LedgerWriter(Closes):
    """Appends rows to one file; the only writer of that file.

    Rows gather in memory and go out `BUFFERED_ROWS` at a time. A row survives the death of this process
    from the next `flush` on, so flush before an acknowledgement that promises so, and whenever there is time.
    A file that is there already is continued: a row torn by an earlier death is cut off first.

    Args:
        path: the file, whose name must end in ``.ledger``; its directory must exist.

    Raises:
        ValueError: the name ends otherwise, so that no reader would find it.
        CorruptError: the file is there and is no ledger of this version.

    >>> import tempfile
    >>> columns = dict.fromkeys(LedgerRow._fields, 0) | {"outcome": Outcome.APPLIED, "time_s": 0.5}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with LedgerWriter(Path(directory) / "shard0.ledger") as writer:
    ...         writer.append(LedgerRow(**columns))
    ...     read_ledger(Path(directory))["outcome"].tolist()
    ['applied']
    """

    def __init__(self, path: Path) -> None:
        if path.suffix != SUFFIX:
            raise ValueError(f"a ledger's file needs the ending {SUFFIX!r}, but got {path.name!r}")
        self._rows = np.zeros(BUFFERED_ROWS, LEDGER_DTYPE)
        self._num_rows = 0
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            self._start_at_a_whole_row(path)
        except BaseException:
            self._file.close()
            raise

    def _start_at_a_whole_row(self, path: Path) -> None:
        with path.open("rb") as file:
            start = file.read(len(_HEADER))
        size = os.fstat(self._file.fileno()).st_size
        _check_header(path, start)
        if len(start) < len(_HEADER):
            self._file.truncate(0)
            write_whole(self._file, _HEADER)
        else:
            self._file.truncate(size - (size - len(_HEADER)) % LEDGER_DTYPE.itemsize)

    def append(self, row: LedgerRow | tuple[Any, ...]) -> None:
        """Add one row: a `LedgerRow`, or (faster) a plain tuple of its fields in their order.

        Raises:
            ValueError: the outcome is not one of `Outcome`, or the tuple has another length.
        """
        # NumPy would cut a longer word to the width of the column without a sound.
        if len(row) != _NUM_COLUMNS or row[_OUTCOME_AT] not in _OUTCOMES:
            raise ValueError(
                f"a row needs {_NUM_COLUMNS} fields and one of {sorted(_OUTCOMES)}, but got {row!r}"
            )
        self._rows[self._num_rows] = row
        self._num_rows += 1
        if self._num_rows == BUFFERED_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand all rows so far to the operating system."""
        write_whole(self._file, self._rows[: self._num_rows].tobytes())
        self._num_rows = 0

    def close(self) -> None:
        """Flush and close; closing again does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def read_ledger(directory: Path, *patterns: str, choice: Choice | None = None) -> Ledger:
    """Read all ``*.ledger`` files of a directory into one array, in the order of time.

    Args:
        patterns: of names, without the ending; none given: all files.
        choice: of rows; None: all. It takes no more memory than for these, however many there are.

    Rows of one time are ordered by shard, slice and version. A torn last row, left by a writer that died
    or is still writing, is left out. No file, or no directory: an empty array.

    Returns:
        a structured array of `LEDGER_DTYPE`, shape (rows,), sorted by (time_s, shard, slice, version).

    Raises:
        CorruptError: a file has a foreign or altered header, or a row whose outcome does not exist.
    """
    paths = {path for pattern in patterns or ("*",) for path in directory.glob(pattern + SUFFIX)}
    parts = [piece for path in sorted(paths) for piece in _pieces(path, choice)]
    rows = np.concatenate(parts) if parts else np.zeros(0, LEDGER_DTYPE)
    return rows[np.lexsort((rows["version"], rows["slice"], rows["shard"], rows["time_s"]))]


def state_made(row: Any) -> tuple[int, int, int]:
    """Which state of a slice an applied row made: (slice, start of its shard, version)."""
    return int(row["slice"]), int(row["shard_incarnation"]), int(row["version"])


def rows_to_take_back(ledger: Ledger, versions: Mapping[int, int], time_s: float) -> Iterator[LedgerRow]:
    """Rows that say "rolled_back" of all that was applied beyond some versions, and was not taken back before.

    Args:
        versions: by slice, the version that is left of it.
        time_s: when it was found out.
    """
    before = {state_made(row) for row in ledger[ledger["outcome"] == "rolled_back"]}
    for row in ledger[ledger["outcome"] == "applied"]:
        if row["version"] > versions.get(int(row["slice"]), 0) and state_made(row) not in before:
            told = {name: row[name].item() for name in LedgerRow._fields}
            yield LedgerRow(**told | {"outcome": "rolled_back", "time_s": time_s})


def _pieces(path: Path, choice: Choice | None) -> Iterator[Ledger]:
    """The rows of a file that are wanted, some at a time."""
    with path.open("rb") as file:
        _check_header(path, file.read(len(_HEADER)))
        num_read = 0
        while content := file.read(READ_ROWS * LEDGER_DTYPE.itemsize):
            rows = np.frombuffer(content, LEDGER_DTYPE, count=len(content) // LEDGER_DTYPE.itemsize)
            _check_outcomes(path, rows, num_read)
            yield rows if choice is None else rows[choice(rows)]
            num_read += len(rows)


def _check_outcomes(path: Path, rows: Ledger, first: int) -> None:
    known = np.zeros(len(rows), bool)
    for outcome in Outcome:
        known |= rows["outcome"] == str(outcome)
    if not known.all():
        raise CorruptError(
            subject=str(path),
            expected=f"an outcome out of {', '.join(sorted(_OUTCOMES))} in each row",
            got=f"other bytes in row {first + int(np.argmin(known))}",
            remedy="The file was altered: restore it from a copy, or take it out of the directory.",
        )


def _check_header(path: Path, start: bytes) -> None:
    """Accept the header, or a beginning of it that a dying writer left; refuse anything else."""
    if not _HEADER.startswith(start):
        line = start.splitlines()[0] if start.splitlines() else b""
        raise CorruptError(
            subject=str(path),
            expected=f"the first line {_HEADER[:60].decode()}...",
            got=repr(line[:60]),
            remedy="It is no ledger, or one of another version of Squall: move it out of the directory.",
        )
