"""What a shard's decider is told, and what it wants done."""

from typing import TypeAlias

from squall.blocks import Block
from squall.nouns import Noun
from squall.shard.books import SliceBook
from squall.wire.messages import (
    Diverged,
    Fetch,
    Fetched,
    Held,
    Hold,
    Outcome,
    Push,
    Pushed,
    Refuse,
    Refused,
    Release,
    Released,
    Returned,
)

EVERY_PARTITION = -1
"""In a `Worker`: one that fetches the slices of all partitions, and pushes nothing."""


class Worker(Noun, frozen=True, kw_only=True):
    """The process that runs one partition of one replica, in its `incarnation`-th life."""

    replica: int
    partition: int
    incarnation: int

    @property
    def place(self) -> tuple[int, int]:
        return self.replica, self.partition

    def beside(self, partition: int) -> "Worker":
        """The worker of another partition in the same life of the same replica."""
        if partition == self.partition:
            return self
        return Worker(replica=self.replica, partition=partition, incarnation=self.incarnation)


# Events -----------------------------------------------------------------------------------------------


class Attach(Noun, frozen=True, kw_only=True):
    """A worker's buffers are mapped and its connection is open; an earlier life of it is over."""

    worker: Worker


class Detach(Noun, frozen=True, kw_only=True):
    """A worker's connection has ended."""

    worker: Worker


class FromWorker(Noun, frozen=True, kw_only=True):
    """A worker's request arrived."""

    sender: Worker
    message: Fetch | Push


class FromCoordinator(Noun, frozen=True, kw_only=True):
    """The coordinator's request arrived."""

    message: Refuse | Hold | Release


class ComeBack(Noun, frozen=True, kw_only=True):
    """This is a later start of the shard within a run: its books are what survived."""


class Applied(Noun, frozen=True, kw_only=True):
    """The update rule ran over every slice of the pending `Apply`, and all are finite."""


class NotFinite(Noun, frozen=True, kw_only=True):
    """The update rule ran, and left this tensor (by number in the parameter space) not finite."""

    tensor: int


class Save(Noun, frozen=True, kw_only=True):
    """Write all slices to the checkpoint of this name."""

    name: str


class Close(Noun, frozen=True, kw_only=True):
    """The run is over: answer nobody any more."""


ShardEvent: TypeAlias = (
    Attach | Detach | FromWorker | FromCoordinator | ComeBack | Applied | NotFinite | Save | Close
)


# Effects ----------------------------------------------------------------------------------------------


class Apply(Noun, frozen=True, kw_only=True):
    """Run the update rule on these slices with the sender's gradient buffer; answer with an event.

    The new values are written through into the sender's parameter buffer `push.into`, unless it is None.
    """

    sender: Worker
    push: Push
    slices: tuple[int, ...]


class WriteOut(Noun, frozen=True, kw_only=True):
    """Copy these slices as they are now into the worker's parameter buffer `into`."""

    to: Worker
    slices: tuple[int, ...]
    into: int


class Answer(Noun, frozen=True, kw_only=True):
    """Send a reply to a worker."""

    to: Worker
    message: Fetched | Pushed


class Tell(Noun, frozen=True, kw_only=True):
    """Send a message to the coordinator."""

    message: Refused | Diverged | Returned | Held | Released


class Record(Noun, frozen=True, kw_only=True):
    """Write one row of the ledger.

    Attributes:
        sender: whose push it was; None for a block that the coordinator settled.
        version: of the slice, after the push was settled [updates].
        staleness: version before applying, less `based_on` [updates].
    """

    sender: Worker | None
    slice: int
    block: Block
    attempt: int
    minibatches: int
    examples: int
    based_on: int
    version: int
    staleness: int
    outcome: Outcome


class Store(Noun, frozen=True, kw_only=True):
    """Write the slices and these books to the checkpoint `name`."""

    name: str
    books: tuple[SliceBook, ...]


ShardEffect: TypeAlias = Apply | WriteOut | Answer | Tell | Record | Store
