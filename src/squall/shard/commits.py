"""What a shard writes down of its state: the heads of the frames in its snapshots and logs.

A **commit** is one change of the shard's slices: a push that was applied, or a block that was settled as refused.
Commits are counted from the start of the run; a snapshot says how many it holds, a log how many came before it, and
each commit its own number, so that a gap is seen.
"""

from typing import Any, TypeAlias

import msgspec

from squall.blocks import Block
from squall.errors import RemoteProtocolError
from squall.nouns import Noun
from squall.shard.events import Record
from squall.wire.codec import Codec

FORMAT = 1


class LogHead(Noun, frozen=True, kw_only=True, tag=1):
    """First in a log.

    Attributes:
        schema: hash of the parameter space.
        incarnation: of the shard that writes it.
        begin: commits before its first. Whatever older logs hold beyond that did not survive, and does not count.
    """

    format: int
    shard: int
    schema: str
    incarnation: int
    begin: int


class PushCommit(Noun, frozen=True, kw_only=True, tag=2):
    """A push, as it was applied; the payload is its gradient, slice after slice in the order of `records`.

    Attributes:
        incarnation: of the shard that applied it.
        time_s: as in the ledger.
        absent: tensors without a gradient.
        records: one for each slice that it was applied to.
    """

    number: int
    incarnation: int
    time_s: float
    absent: tuple[int, ...]
    records: tuple[Record, ...]


class RefuseCommit(Noun, frozen=True, kw_only=True, tag=3):
    """A block that is settled as refused, wherever a slice had not applied it."""

    number: int
    block: Block


class BookEntry(Noun, frozen=True, kw_only=True):
    """A slice's book: see `squall.shard.books.SliceBook`. Its vectors follow: values, slots by name, steps."""

    slice: int
    partition: int
    version: int
    minibatches: int
    settled: tuple[tuple[int, int, int, int], ...]
    refused: tuple[tuple[int, int, int, int], ...]
    slots: tuple[str, ...]


class SnapshotHead(Noun, frozen=True, kw_only=True, tag=4):
    """First in a snapshot: all books.

    Attributes:
        number: commits that it holds.
    """

    format: int
    shard: int
    schema: str
    number: int
    books: tuple[BookEntry, ...]


class VectorHead(Noun, frozen=True, kw_only=True, tag=5):
    """One vector of a slice, which is the payload."""

    slice: int
    name: str


class SnapshotEnd(Noun, frozen=True, kw_only=True, tag=6):
    """Last in a snapshot, which is whole if this is there."""

    vectors: int


Commit: TypeAlias = PushCommit | RefuseCommit
HEADS = Codec(LogHead, PushCommit, RefuseCommit, SnapshotHead, VectorHead, SnapshotEnd)


def decoded(head: bytes) -> Any:
    """The noun in a frame's head; None if it is none of these."""
    try:
        return HEADS.decode(head)
    except (RemoteProtocolError, msgspec.MsgspecError, ValueError):
        return None
