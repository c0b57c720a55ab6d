"""What a shard's decider is told, and what it wants done."""

from dataclasses import dataclass
from typing import TypeAlias

from squall.blocks import Block
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
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The process that runs one partition of one replica, in its `incarnation`-th life."""

    replica: int
    partition: int
    incarnation: int

    @property
    def place(self) -> tuple[int, int]:
        return self.replica, self.partition


# Events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """A worker's buffers are mapped and its connection is open; an earlier life of it is over."""

    worker: Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """A worker's connection has ended."""

    worker: Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """A worker's request arrived."""

    sender: Worker
    message: Fetch | Push


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCoordinator:
    """The coordinator's request arrived."""

    message: Refuse | Hold | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The update rule ran over every slice of the pending `Apply`, and all are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """The update rule ran, and left this tensor (by number in the parameter space) not finite."""

    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write all slices to the checkpoint of this name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The run is over: answer nobody any more."""


ShardEvent: TypeAlias = Attach | Detach | FromWorker | FromCoordinator | Applied | NotFinite | Save | Close


# Effects ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Run the update rule on these slices with the sender's gradient buffer; answer with an event.

    The new values are written through into the sender's parameter buffer `push.into`, unless it is None.
    """

    sender: Worker
    push: Push
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOut:
    """Copy these slices as they are now into the worker's parameter buffer `into`."""

    to: Worker
    slices: tuple[int, ...]
    into: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Send a reply to a worker."""

    to: Worker
    message: Fetched | Pushed


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a message to the coordinator."""

    message: Refused | Diverged | Held | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Write the slices and these books to the checkpoint `name`."""

    name: str
    books: tuple[SliceBook, ...]


ShardEffect: TypeAlias = Apply | WriteOut | Answer | Tell | Record | Store
