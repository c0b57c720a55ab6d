"""A shard's own snapshot: values, rule state and books of all its slices, in one file that says itself if it is whole.

It is for the shard's restart, beside a log of what came after; checkpoints are another thing (`squall.shard.store`).
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from squall.blocks import BlockSet
from squall.errors import MISFITS, CorruptError
from squall.observe.files import sync_directory
from squall.rules.apply import SliceState
from squall.shard.books import SliceBook
from squall.shard.commits import FORMAT, HEADS, BookEntry, SnapshotEnd, SnapshotHead, VectorHead, decoded
from squall.shard.frames import Frames, write_frame
from squall.wire.bulk import bytes_of

PARAMS, STEPS, SLOT = "params", "steps", "slot."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where snapshots and logs of a shard lie, and whose they are."""

    folder: Path
    shard: int
    schema: str

    def path(self, generation: int, kind: str) -> Path:
        """The file of a kind, "snapshot" or "log"."""
        return self.folder / f"{generation:06d}.{kind}"

    def generations(self, kind: str) -> list[int]:
        """Numbers of the files of a kind, ascending."""
        found = (path.stem for path in self.folder.glob(f"*.{kind}"))
        return sorted(int(stem) for stem in found if stem.isdigit())


def write_snapshot(
    place: Place,
    generation: int,
    states: Sequence[SliceState],
    books: Sequence[SliceBook],
    number: int,
) -> None:
    """Write slices with their books; the file is there whole, on disk and read back, or not at all.

    Raises:
        OSError: it cannot be written; older snapshots are as they were.
        CorruptError: what was read back is not what was written.
    """
    path = place.path(generation, "snapshot")
    temporary = path.with_suffix(".part")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write(fd, place, states, books, number)
            os.fsync(fd)
        finally:
            os.close(fd)
        _verify(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _write(
    fd: int, place: Place, states: Sequence[SliceState], books: Sequence[SliceBook], number: int
) -> None:
    by_slice = {state.spec.slice: state for state in states}
    entries = tuple(_entry(book, by_slice[book.slice]) for book in books)
    head = SnapshotHead(format=FORMAT, shard=place.shard, schema=place.schema, number=number, books=entries)
    write_frame(fd, HEADS.encode(head))
    vectors = 0
    for entry in entries:
        for name, vector in _vectors(by_slice[entry.slice]):
            write_frame(fd, HEADS.encode(VectorHead(slice=entry.slice, name=name)), [vector])
            vectors += 1
    write_frame(fd, HEADS.encode(SnapshotEnd(vectors=vectors)))


def _vectors(state: SliceState) -> Iterator[tuple[str, memoryview]]:
    yield PARAMS, bytes_of(state.params)
    for name in sorted(state.slots):
        yield SLOT + name, bytes_of(state.slots[name])
    yield STEPS, state.steps.data


def _entry(book: SliceBook, state: SliceState) -> BookEntry:
    return BookEntry(
        slice=book.slice,
        partition=book.partition,
        version=book.version,
        minibatches=book.minibatches,
        settled=book.settled.entries(),
        refused=book.refused.entries(),
        slots=tuple(sorted(state.slots)),
    )


def _verify(path: Path) -> None:
    frames = Frames(path)
    last = None
    for head, _ in frames:
        last = head
    if frames.damage or not isinstance(decoded(last or b""), SnapshotEnd):
        raise CorruptError(
            subject=str(path), expected="what was just written", got=frames.damage or "less than that"
        )


def read_snapshot(
    place: Place, generation: int, like: Sequence[SliceState]
) -> tuple[list[SliceState], list[SliceBook], int]:
    """Read what `write_snapshot` wrote, every byte of it checked.

    Args:
        like: states of the same slices under the same rule.

    Returns:
        slices, books, and how many commits they hold.

    Raises:
        CorruptError: the file is torn, altered, or another's; named.
    """
    path = place.path(generation, "snapshot")
    try:
        head, vectors = _read(path)
        if (head.format, head.shard, head.schema) != (FORMAT, place.shard, place.schema):
            raise ValueError(f"format {head.format} of shard {head.shard} and model {head.schema:.12}")
        states = [_state(one, entry, vectors) for one, entry in zip(like, head.books, strict=True)]
    except (OSError, *MISFITS) as error:
        raise CorruptError(
            subject=str(path),
            expected=f"a whole snapshot of shard {place.shard}",
            got=f"{type(error).__name__}: {error}",
        ) from error
    return states, [_book(entry) for entry in head.books], head.number


def _read(path: Path) -> tuple[SnapshotHead, dict[tuple[int, str], bytearray]]:
    frames = Frames(path)
    nouns, vectors = [], {}
    for raw, payload in frames:
        noun = decoded(raw)
        nouns.append(noun)
        if isinstance(noun, VectorHead):
            vectors[noun.slice, noun.name] = payload
    if frames.damage:
        raise ValueError(frames.damage)
    if not nouns or not isinstance(nouns[0], SnapshotHead) or nouns[-1] != SnapshotEnd(vectors=len(vectors)):
        raise ValueError("it has no beginning or no end")
    return nouns[0], vectors


def _state(like: SliceState, entry: BookEntry, vectors: Mapping[tuple[int, str], bytearray]) -> SliceState:
    spec = like.spec
    if entry.slice != spec.slice or entry.slots != tuple(sorted(like.slots)):
        raise ValueError(f"slice {entry.slice} with {entry.slots}")

    def vector(name: str, form: Tensor) -> Tensor:
        raw = vectors[spec.slice, name]
        if len(raw) != form.nbytes:
            raise ValueError(f"{len(raw)} bytes of {name} for slice {spec.slice}")
        return torch.frombuffer(raw, dtype=form.dtype) if raw else form.clone()

    return SliceState(
        spec=spec,
        params=vector(PARAMS, like.params),
        slots={name: vector(SLOT + name, like.slots[name]) for name in like.slots},
        steps=np.frombuffer(vectors[spec.slice, STEPS], dtype=np.int64),
        minibatches=entry.minibatches,
    )


def _book(entry: BookEntry) -> SliceBook:
    return SliceBook(
        slice=entry.slice,
        partition=entry.partition,
        version=entry.version,
        minibatches=entry.minibatches,
        settled=BlockSet(entry.settled),
        refused=BlockSet(entry.refused),
    )
