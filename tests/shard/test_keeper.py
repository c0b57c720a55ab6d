"""A shard's snapshots and logs, on real files: whatever is torn or altered, what comes back is a state that was.

The oracle is a list of the shard's states after each commit, kept in memory by plain copies.

Faults planted here by hand, each seen to fail a test: commits that a later life did not have read again · a refused block
not settled again · absent tensors forgotten · a snapshot without its end taken for whole · minibatches not restored · the
older snapshot removed with the first newer one · a log gone on with after a frame that was torn · a promise that holds
again not told · a snapshot that shares memory with the shard · frames
whose checksum, or whose size, is not looked at · updates in the log of an earlier life not counted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from squall.blocks import Block, Outcome
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace
from squall.rules.adam import Adam
from squall.rules.apply import SliceState, apply_
from squall.shard import keeper
from squall.shard.books import SliceBook
from squall.shard.events import Record, Worker
from squall.shard.keeper import Keeper, Mode
from squall.shard.recovery import Recovered, recover
from squall.shard.snapshot import Place
from squall.shard.store import copied

RULE = Adam(learning_rate=0.1)
SPACE = ParameterSpace.of(
    nn.ParameterList(
        [
            nn.Parameter(torch.zeros(3)),
            nn.Parameter(torch.zeros(2)),
            nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        ]
    )
)
LAYOUT = Layout.balanced(SPACE, num_shards=1)
WORKER = Worker(replica=0, partition=0, incarnation=0)
State = tuple[object, ...]


def new_states() -> tuple[list[SliceState], list[SliceBook]]:
    states = [
        SliceState.create(spec, torch.zeros(spec.size, dtype=getattr(torch, spec.dtype)), RULE)
        for spec in LAYOUT.slices
    ]
    return states, [SliceBook.new(spec.slice, spec.partition) for spec in LAYOUT.slices]


def seen(states: list[SliceState], books: list[SliceBook]) -> State:
    """Everything that a shard is, as plain data."""
    return tuple(
        (
            state.params.tolist(),
            {name: slot.tolist() for name, slot in state.slots.items()},
            state.steps.tolist(),
            state.minibatches,
            book.version,
            book.minibatches,
            book.settled.entries(),
            book.refused.entries(),
        )
        for state, book in zip(states, books, strict=True)
    )


class Shard:
    """A shard without its server: it applies, and has its keeper write down what a server would.

    Attributes:
        history: what it was after each commit; the first as it began.
    """

    def __init__(self, folder: Path, mode: Mode = "ack", *, found: Recovered | None = None) -> None:
        self.place = Place(folder=folder, shard=0, schema=SPACE.schema_hash)
        states, books = new_states()
        self.found = found or Recovered(states=states, books=books)
        self.states, self.books = self.found.states, self.found.books
        self.history: list[State] = [seen(self.states, self.books)]
        self.incarnation = 0 if found is None else 1
        self.keeper = Keeper(
            self.place,
            mode,
            incarnation=self.incarnation,
            found=self.found,
            before_snapshot=lambda: None,
            now=0.0,
        )
        self._positions = self.books[0].settled.num_minibatches

    def push(self, *, absent: tuple[int, ...] = (), slices: tuple[int, ...] = (0, 1)) -> None:
        block = Block(0, 0, self._positions, self._positions + 1)
        self._positions += 1
        generator = torch.Generator().manual_seed(self._positions)
        gradients = []
        for number in slices:
            state = self.states[number]
            gradients.append(
                torch.randn(state.spec.size, generator=generator, dtype=torch.float64).to(state.params.dtype)
            )
            assert apply_(state, RULE, gradients[-1], absent=frozenset(absent), minibatches=1) is None
        self.keeper.applied(absent, gradients)
        for number in slices:
            book = self.books[number]
            book.take(block, 1)
            self.keeper.record(self._record(book, block, Outcome.APPLIED, WORKER), 0.5)
        self.keeper.sync(0.0)
        self.history.append(seen(self.states, self.books))

    def refuse(self) -> None:
        block = Block(0, 0, self._positions, self._positions + 2)
        self._positions += 2
        for book in self.books:
            for part in book.refuse(block):
                self.keeper.record(self._record(book, part, Outcome.REFUSED, None), 0.5)
        self.keeper.sync(0.0)
        self.history += [seen(self.states, self.books)] * len(self.books)

    def _record(self, book: SliceBook, block: Block, outcome: Outcome, sender: Worker | None) -> Record:
        return Record(
            sender=sender,
            slice=book.slice,
            block=block,
            attempt=1,
            minibatches=block.num_minibatches,
            examples=8,
            based_on=0,
            version=book.version,
            staleness=0,
            outcome=outcome,
        )

    def snapshot(self) -> None:
        """Have one written, and wait until it is."""
        self.keeper._begin(0.0)
        self.keeper.written(0.0)
        assert not self.keeper.lost


def back(folder: Path) -> Recovered:
    states, books = new_states()
    return recover(Place(folder=folder, shard=0, schema=SPACE.schema_hash), states, books, RULE)


def damaged(path: Path) -> Iterator[tuple[str, bytes]]:
    """Every prefix of a file, and the file with every byte altered."""
    whole = path.read_bytes()
    for length in range(len(whole)):
        yield f"cut at {length}", whole[:length]
    for at in range(len(whole)):
        yield f"altered at {at}", whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    shard = Shard(tmp_path)
    yield shard
    shard.keeper._background.close()


def test_what_comes_back_is_what_was_there_to_the_bit(shard: Shard, tmp_path: Path) -> None:
    shard.push()
    shard.push(absent=(1,))
    shard.push(slices=(1,))
    shard.refuse()
    shard.push(slices=(0,))

    found = back(tmp_path)

    assert seen(found.states, found.books) == shard.history[-1]
    assert not found.damage
    assert [(row.slice, row.version) for row in found.rows] == [
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
        (1, 3),
        (0, 3),
    ]


def test_a_log_torn_or_altered_at_any_byte_gives_the_commits_before_it(shard: Shard, tmp_path: Path) -> None:
    for _ in range(3):
        shard.push()
    log = tmp_path / "000001.log"
    for what, content in damaged(log):
        log.write_bytes(content)

        found = back(tmp_path)

        assert seen(found.states, found.books) == shard.history[found.number], what
        assert found.damage or found.number < 3, what


def test_a_torn_log_loses_only_what_lies_in_the_tear(shard: Shard, tmp_path: Path) -> None:
    log = tmp_path / "000001.log"
    ends = []
    for _ in range(3):
        shard.push()
        ends.append(log.stat().st_size)
    whole = log.read_bytes()
    for length in range(len(whole) + 1):
        log.write_bytes(whole[:length])

        assert back(tmp_path).number == sum(end <= length for end in ends)


def test_a_snapshot_torn_or_altered_at_any_byte_is_passed_over_and_nothing_is_lost(
    shard: Shard, tmp_path: Path
) -> None:
    shard.push()
    shard.snapshot()
    shard.push()
    snapshot = tmp_path / "000002.snapshot"
    for what, content in damaged(snapshot):
        snapshot.write_bytes(content)

        found = back(tmp_path)

        assert seen(found.states, found.books) == shard.history[2], what
        assert "000002.snapshot" in found.damage[0], what


def test_older_files_stay_until_a_second_newer_snapshot_is_whole(shard: Shard, tmp_path: Path) -> None:
    shard.push()
    shard.snapshot()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000001.log", "000002.log", "000002.snapshot"]
    shard.push()
    shard.snapshot()

    names = ["000002.log", "000002.snapshot", "000003.log", "000003.snapshot"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert seen(back(tmp_path).states, back(tmp_path).books) == shard.history[2]


def test_a_log_of_many_small_updates_is_followed_by_a_snapshot_in_every_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes they have: a shard is away for as long as it takes to do them again."""
    monkeypatch.setattr(keeper, "MOST_LOG_COMMITS", 7)
    found, generations = None, []
    for pushes in (5, 4, 7, 1):
        shard = Shard(tmp_path, found=found)
        for _ in range(pushes):
            shard.push()
        shard.keeper.tick(1.0)
        if shard.keeper._writing is not None:
            shard.keeper.written(1.0)
        shard.keeper._background.close()
        found = back(tmp_path)
        generations.append((found.snapshot, found.log_commits))
    assert generations == [(0, 5), (3, 0), (3, 7), (6, 0)]


def test_a_snapshot_that_is_being_written_changes_nothing(shard: Shard, tmp_path: Path) -> None:
    shard.push()
    shard.snapshot()
    shard.push()
    (tmp_path / "000003.part").write_bytes(b"half of it")
    (tmp_path / "000002.snapshot").unlink()  # as if it had not been replaced yet

    assert seen(back(tmp_path).states, back(tmp_path).books) == shard.history[2]


def test_a_later_life_has_the_word_over_what_it_did_not_have(shard: Shard, tmp_path: Path) -> None:
    for _ in range(3):
        shard.push()
    log = tmp_path / "000001.log"
    whole = log.read_bytes()
    log.write_bytes(whole[:-1])
    second = Shard(tmp_path, found=back(tmp_path))
    assert second.history[0] == shard.history[2]
    second.refuse()
    second.push()
    log.write_bytes(whole)  # what could not be read can be read again

    found = back(tmp_path)

    assert seen(found.states, found.books) == second.history[-1]
    second.keeper._background.close()


def test_lives_go_on_from_each_other(shard: Shard, tmp_path: Path) -> None:
    shard.push()
    expected = shard.history[-1]
    for _ in range(4):
        life = Shard(tmp_path, found=back(tmp_path))
        assert life.history[0] == expected
        life.push()
        life.push(slices=(0,))
        expected = life.history[-1]
        life.keeper._background.close()


def test_an_interval_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    shard = Shard(tmp_path, 2.0)
    shard.push()
    shard.keeper.tick(1.9)
    assert not list(tmp_path.iterdir())
    shard.keeper.tick(2.0)
    shard.push()
    shard.keeper.written(2.1)

    found = back(tmp_path)

    assert seen(found.states, found.books) == shard.history[1]
    shard.keeper.tick(3.9)
    shard.keeper.tick(4.0)
    shard.keeper.written(4.1)
    assert seen(back(tmp_path).states, back(tmp_path).books) == shard.history[2]
    shard.keeper.tick(6.0)  # nothing was applied since
    assert shard.keeper._writing is None
    shard.keeper.close()
    assert not list(tmp_path.iterdir())


def test_where_it_cannot_be_written_training_goes_on_and_what_was_there_stays(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.push()
    monkeypatch.setattr("squall.shard.keeper.write_frame", full_after(20))
    shard.push()
    shard.push()

    assert shard.keeper.news() == "[Errno 28] No space left on device"
    assert shard.keeper.news() is None
    assert seen(back(tmp_path).states, back(tmp_path).books) == shard.history[1]
    monkeypatch.undo()
    shard.keeper.tick(10.4)
    assert shard.keeper.lost
    shard.keeper.tick(10.5)
    shard.keeper.written(10.6)
    shard.push()
    assert shard.keeper.news() == ""
    assert seen(back(tmp_path).states, back(tmp_path).books) == shard.history[4]


def full_after(num_bytes: int) -> Callable[..., int]:
    """A disk that takes the beginning of a frame."""

    def write(fd: int, head: bytes, payload: object = ()) -> int:
        import os

        os.write(fd, head[:num_bytes])
        raise OSError(28, "No space left on device")

    return write


def test_a_snapshot_that_cannot_be_written_leaves_the_older_one(
    shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.push()
    shard.snapshot()
    shard.push()
    monkeypatch.setattr("squall.shard.snapshot.write_frame", full_after(20))
    shard.keeper._begin(0.0)
    shard.keeper.written(0.0)
    shard.push()

    assert shard.keeper.lost
    assert not list(tmp_path.glob("*.part"))
    found = back(tmp_path)
    assert found.snapshot == 2
    assert seen(found.states, found.books) == shard.history[2]  # the log that went on was closed


def test_files_of_another_model_or_shard_are_not_read(shard: Shard, tmp_path: Path) -> None:
    shard.push()
    shard.snapshot()
    states, books = new_states()

    for place in (
        Place(folder=tmp_path, shard=1, schema=SPACE.schema_hash),
        Place(folder=tmp_path, shard=0, schema="another"),
    ):
        found = recover(place, [copied(state) for state in states], books, RULE)
        assert (found.number, found.snapshot, len(found.damage)) == (0, 0, 3)
