"""Keeps one shard's state on disk while it serves: a log of what was applied, and a snapshot now and then.

Files of one shard, by generation::

    000001.log   000002.snapshot  000002.log   000003.snapshot ...

A snapshot is the state at the moment when the log of its number begins. It is copied at once, written by a thread, and
read back; until it is whole, the older snapshot with both logs is the state, and it stays until the next one is whole.
With `Interval` there are snapshots only. What cannot be written is told, and tried again; training goes on meanwhile.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from squall.errors import CorruptError
from squall.observe.files import sync_directory
from squall.rules.apply import SliceState
from squall.shard.background import Background
from squall.shard.books import SliceBook
from squall.shard.commits import FORMAT, HEADS, Commit, LogHead, PushCommit, RefuseCommit
from squall.shard.events import Record
from squall.shard.frames import write_frame
from squall.shard.recovery import Recovered
from squall.shard.snapshot import Place, write_snapshot
from squall.shard.store import copied
from squall.wire.bulk import bytes_of

LEAST_LOG_BYTES = 16 << 20
MOST_LOG_COMMITS = 3000
"""A log is not longer, in updates: each is done again when the shard comes back, which takes time whatever its size."""
AGAIN_S = 10.0

Mode: TypeAlias = float | str
"""Seconds between snapshots, or "ack": nothing is answered before it is on disk."""


@dataclass(slots=True)
class _Applied:
    """An update that has run and is not written down yet."""

    absent: tuple[int, ...]
    gradients: Sequence[Tensor]
    records: list[Record]
    time_s: float = 0.0


class Keeper:
    """Writes down what one shard does.

    Args:
        place: the shard's folder, which exists.
        mode: what is promised.
        incarnation: of the shard.
        found: what it goes on from; its states and books are the shard's own, and are only read here.
        before_snapshot: called at each; what must not be older than a snapshot is written out there.
        now: seconds.

    Attributes:
        lost: why what was promised does not hold at the moment; empty if it does.
    """

    def __init__(
        self,
        place: Place,
        mode: Mode,
        *,
        incarnation: int,
        found: Recovered,
        before_snapshot: Callable[[], None],
        now: float,
    ) -> None:
        self.lost = self._told = ""
        self._place = place
        self._interval_s = None if isinstance(mode, str) else mode
        self._incarnation = incarnation
        self._states: Sequence[SliceState] = found.states
        self._books: Sequence[SliceBook] = found.books
        self._before_snapshot = before_snapshot
        self._number = self._kept = found.number
        self._generation = found.generation
        self._whole = found.snapshot
        self._background = Background("snapshots")
        self._writing: tuple[int, int] | None = None  # generation, and commits that it holds
        self._due = now + (self._interval_s or 0.0)
        self._pending: _Applied | None = None
        self._log: int | None = None
        self._log_bytes = 0
        self._begun = found.number - found.log_commits  # what another restart would begin from
        self._most_log_bytes = max(LEAST_LOG_BYTES, 2 * sum(map(_num_bytes, found.states)))
        self._is_synced = True
        if self._interval_s is None:
            with self._said(now):
                self._next_generation()
                self._log_bytes += found.log_bytes  # what another restart would have to do again

    def news(self) -> str | None:
        """`lost`, if it has changed since the last time; else None."""
        if bool(self.lost) == bool(self._told):
            return None
        self._told = self.lost
        return self.lost

    def fileno(self) -> int:
        return self._background.fileno()

    # What the shard does --------------------------------------------------------------------------------

    def applied(self, absent: tuple[int, ...], gradients: Sequence[Tensor]) -> None:
        """An update has run over some slices; a `record` for each follows, and then `commit`."""
        self._pending = _Applied(absent, gradients, [])

    def record(self, record: Record, time_s: float) -> None:
        """A row of the ledger, of what was applied or refused for good."""
        if record.sender is None:
            self._number += 1
            self._write(RefuseCommit(number=self._number, block=record.block), (), time_s)
        elif self._pending is not None:
            self._pending.records.append(record)
            self._pending.time_s = time_s

    def commit(self) -> None:
        """Write down the update that has run, if there is one; its gradients are not looked at any more."""
        done, self._pending = self._pending, None
        if done is None or not done.records:
            return
        self._number += 1
        commit = PushCommit(
            number=self._number,
            incarnation=self._incarnation,
            time_s=done.time_s,
            absent=done.absent,
            records=tuple(done.records),
        )
        self._write(commit, done.gradients, done.time_s)

    def _write(self, commit: Commit, gradients: Sequence[Tensor], now: float) -> None:
        if self._log is None:
            return
        with self._said(now):
            payload = [bytes_of(gradient) for gradient in gradients]
            self._is_synced = False
            self._log_bytes += write_frame(self._log, HEADS.encode(commit), payload)

    def sync(self, now: float) -> None:
        """Bring all commits to disk: what they answer may be said now."""
        self.commit()
        if self._log is not None and not self._is_synced:
            with self._said(now):
                os.fdatasync(self._log)
            self._is_synced = True

    # Snapshots ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed: begin a snapshot, if one is due."""
        if self._writing is not None or now < self._due:
            return
        has_news = self._number > self._kept
        if self._interval_s is not None:
            is_due = has_news
            self._due = now + self._interval_s
        else:
            is_long = self._number - self._begun > MOST_LOG_COMMITS or self._log_bytes > self._most_log_bytes
            is_due = bool(self.lost) or is_long
        if is_due:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Copy the state now; it is written while training goes on, and a new log takes what comes."""
        self.sync(now)
        with self._said(now):
            self._before_snapshot()
            self._next_generation()
            place, generation, number = self._place, self._generation, self._number
            states, books = [copied(state) for state in self._states], [book.copy() for book in self._books]
            self._writing, self._begun = (generation, number), number
            self._background.start(
                str(generation), lambda: write_snapshot(place, generation, states, books, number)
            )

    def written(self, now: float) -> None:
        """A snapshot has been written, or could not be; call it when readable."""
        for _, error in self._background.finished():
            assert self._writing is not None
            (generation, number), self._writing = self._writing, None
            with self._said(now):
                if error is not None:
                    raise error
                self._remove_below(self._whole)
                self._whole, self._kept, self.lost = generation, number, ""

    def _remove_below(self, generation: int) -> None:
        """What is older than the newest whole snapshot but one is not needed any more."""
        for kind in ("snapshot", "log"):
            for old in self._place.generations(kind):
                if old < generation:
                    self._place.path(old, kind).unlink()

    def _next_generation(self) -> None:
        self._generation += 1
        if self._interval_s is not None:
            return
        self._close_log()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._log = os.open(self._place.path(self._generation, "log"), flags, 0o644)
        head = LogHead(
            format=FORMAT,
            shard=self._place.shard,
            schema=self._place.schema,
            incarnation=self._incarnation,
            begin=self._number,
        )
        self._log_bytes = write_frame(self._log, HEADS.encode(head))
        os.fdatasync(self._log)
        sync_directory(self._place.folder)

    # What goes wrong ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _said(self, now: float) -> Iterator[None]:
        """What cannot be written does not end the run: it is told, and tried again after a while."""
        try:
            yield
        except (OSError, CorruptError) as error:
            self.lost = str(error)
            self._due = now + AGAIN_S
            self._close_log()  # what is in it stays good, up to a frame that is torn

    def _close_log(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            with contextlib.suppress(OSError):
                os.close(log)

    def close(self) -> None:
        """The run is over, and its checkpoint written: wait for the thread, and remove all files."""
        self._background.close()
        self._close_log()
        with contextlib.suppress(OSError):
            clear(self._place.folder)


def clear(folder: Path) -> None:
    """Remove a shard's snapshots and logs, which belong to a start of the run that is over."""
    for path in folder.iterdir():
        path.unlink()


def _num_bytes(state: SliceState) -> int:
    return state.params.nbytes + sum(slot.nbytes for slot in state.slots.values())
