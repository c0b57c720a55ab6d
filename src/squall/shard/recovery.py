"""What a shard that comes back has: its newest whole snapshot, and every commit that its logs hold since.

Damage is never read: a frame that is torn or altered ends its log there, and a snapshot that is not whole is passed
over for an older one. Both are named. What is found is a state that the shard has been in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from squall.errors import CorruptError
from squall.observe.ledger import LedgerRow
from squall.rules.apply import SliceState, apply_
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule
from squall.shard.books import SliceBook
from squall.shard.commits import FORMAT, Commit, LogHead, PushCommit, RefuseCommit, decoded
from squall.shard.frames import Frames
from squall.shard.records import ledger_row
from squall.shard.snapshot import Place, read_snapshot


@dataclass(kw_only=True)
class Recovered:
    """The state that a shard goes on from.

    Attributes:
        states, books: its slices; at first as the run began.
        number: commits that they hold.
        generation: the highest that any file has; 0 if there is none.
        snapshot: the generation of the snapshot that was read; 0 if there was none.
        log_bytes, log_commits: what logs hold since.
        rows: of the ledger, for each commit that was read from a log.
        damage: what was passed over, in words.
    """

    states: list[SliceState]
    books: list[SliceBook]
    number: int = 0
    generation: int = 0
    snapshot: int = 0
    log_bytes: int = 0
    log_commits: int = 0
    rows: list[LedgerRow] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)


def recover(
    place: Place,
    states: Sequence[SliceState],
    books: Sequence[SliceBook],
    rule: Rule | RulePerTensor,
) -> Recovered:
    """Find the newest state that the files of a shard hold.

    Args:
        states, books: as the run began: what the oldest log counts from. Taken over, and written.
    """
    found = Recovered(states=list(states), books=list(books))
    snapshots, logs = place.generations("snapshot"), place.generations("log")
    found.generation = max((*snapshots, *logs), default=0)
    for generation in reversed(snapshots):
        try:
            found.states, found.books, found.number = read_snapshot(place, generation, states)
        except CorruptError as error:
            found.damage.append(str(error))
            continue
        found.snapshot = generation
        break
    replay = _Replay(place, found, rule)
    for generation in logs:
        if generation >= found.snapshot:
            replay.log(generation)
    replay.finish()
    return found


class _Replay:
    """Does again what logs hold, in two passes: which commits count, then these."""

    def __init__(self, place: Place, found: Recovered, rule: Rule | RulePerTensor) -> None:
        self._place = place
        self._found = found
        self._rule = rule
        self._states = {state.spec.slice: state for state in found.states}
        self._books = {book.slice: book for book in found.books}
        self._logs: list[tuple[int, int]] = []  # generation, commits before its first

    def log(self, generation: int) -> None:
        """Take up a log, if its head can be read."""
        path = self._place.path(generation, "log")
        frames = Frames(path)
        try:
            head = next((decoded(raw) for raw, _ in frames), None)
        except OSError as error:
            self._found.damage.append(f"{self._place.path(generation, 'log').name}: {error}")
            return
        mine = (FORMAT, self._place.shard, self._place.schema)
        if isinstance(head, LogHead) and (head.format, head.shard, head.schema) == mine:
            self._logs.append((generation, head.begin))
        else:
            self._found.damage.append(
                frames.damage or f"{self._place.path(generation, 'log').name}: it has no head"
            )

    def finish(self) -> None:
        for at, (generation, _) in enumerate(self._logs):
            # A later life, which went on from fewer commits, has the word.
            bound = min((begin for _, begin in self._logs[at + 1 :]), default=None)
            self._do_again(generation, bound)

    def _do_again(self, generation: int, bound: int | None) -> None:
        found = self._found
        path = self._place.path(generation, "log")
        frames = Frames(path)
        for commit, payload in _commits(frames):
            if bound is not None and commit.number > bound:
                break
            if commit.number != found.number + 1:
                found.damage.append(f"{path.name}: it lacks commit {found.number + 1}")
                break
            if isinstance(commit, PushCommit):
                self._apply(commit, payload)
            else:
                for book in found.books:
                    book.refuse(commit.block)
            found.number = commit.number
            found.log_commits += 1
        found.log_bytes += path.stat().st_size
        if frames.damage:
            found.damage.append(frames.damage)

    def _apply(self, commit: PushCommit, payload: bytearray) -> None:
        at = 0
        for record in commit.records:
            state, book = self._states[record.slice], self._books[record.slice]
            gradient, at = _gradient(state, payload, at)
            bad = apply_(
                state,
                self._rule,
                gradient,
                absent=frozenset(commit.absent),
                minibatches=record.minibatches,
            )
            book.take(record.block, record.minibatches)
            if bad is not None or book.version != record.version:
                raise CorruptError(
                    subject=f"commit {commit.number} of shard {self._place.shard}",
                    expected=f"version {record.version} of slice {record.slice}, as it was before",
                    got=f"version {book.version}" if bad is None else f"tensor {bad} not finite",
                )
            self._found.rows.append(ledger_row(self._place.shard, commit.incarnation, record, commit.time_s))


def _commits(frames: Frames) -> Iterator[tuple[Commit, bytearray]]:
    for raw, payload in frames:
        noun = decoded(raw)
        if isinstance(noun, PushCommit | RefuseCommit):
            yield noun, payload


def _gradient(state: SliceState, payload: bytearray, at: int) -> tuple[Tensor, int]:
    dtype: torch.dtype = getattr(torch, state.spec.dtype)
    stop = at + state.spec.size * dtype.itemsize
    # In memory of its own: what lies behind another slice need not be aligned.
    return torch.frombuffer(bytearray(payload[at:stop]), dtype=dtype), stop
