"""What the coordinator's decider is told, and what it wants done."""

from typing import TypeAlias

from squall.blocks import Block
from squall.nouns import Noun
from squall.observe.events import Joined as JoinedRun
from squall.observe.events import Left as LeftRun
from squall.observe.events import Recovered, Redone
from squall.observe.events import Refused as RefusedBlock
from squall.wire.messages import (
    Ask,
    Books,
    Diverged,
    Finished,
    Goodbye,
    Held,
    Hold,
    Inquire,
    Lease,
    Leave,
    Recall,
    Refuse,
    Refused,
    Release,
    Released,
    Resume,
    Returned,
)

PROCESS_GONE = "its process is gone"
"""Why a replica is lost whose connection has ended: as much as the coordinator can know."""

# Events: each carries `now`, seconds on the run's clock -------------------------------------------------


class Joined(Noun, frozen=True, kw_only=True):
    """A replica's connection is open."""

    now: float
    replica: int
    incarnation: int


class FromReplica(Noun, frozen=True, kw_only=True):
    """A replica's message arrived."""

    now: float
    replica: int
    incarnation: int
    message: Ask | Goodbye | Resume


class FromShard(Noun, frozen=True, kw_only=True):
    """A shard's message arrived."""

    now: float
    shard: int
    message: Refused | Diverged | Returned | Held | Released | Books


class Lost(Noun, frozen=True, kw_only=True):
    """A replica's connection has ended without a goodbye."""

    now: float
    replica: int
    incarnation: int
    why: str


class ShardLost(Noun, frozen=True, kw_only=True):
    """A shard's connection has ended; it may be started anew."""

    now: float
    shard: int


class Tick(Noun, frozen=True, kw_only=True):
    """Time has passed."""

    now: float


class Stop(Noun, frozen=True, kw_only=True):
    """End the stage now, with what is acknowledged."""

    now: float
    why: str


class Checkpoint(Noun, frozen=True, kw_only=True):
    """Take a checkpoint of this name as soon as may be."""

    now: float
    name: str


class Copied(Noun, frozen=True, kw_only=True):
    """What goes with the cut that was reached has been copied; answers `Cut`, by its number."""

    now: float
    request: int


CoordinatorEvent: TypeAlias = (
    Joined | FromReplica | FromShard | Lost | ShardLost | Tick | Stop | Checkpoint | Copied
)


# Effects ------------------------------------------------------------------------------------------------


class ToReplica(Noun, frozen=True, kw_only=True):
    """Send a message to a replica."""

    replica: int
    incarnation: int
    message: Lease | Leave | Recall


class ToShard(Noun, frozen=True, kw_only=True):
    """Send a message to a shard."""

    shard: int
    message: Refuse | Hold | Release | Inquire


class Closed(Noun, frozen=True, kw_only=True):
    """A block is done: every slice has it. Told once for each block."""

    replica: int
    report: Finished


class Found(Noun, frozen=True, kw_only=True):
    """Every slice has these blocks, of which nobody was told, and nobody is left who could report them."""

    blocks: tuple[Block, ...]


class Cut(Noun, frozen=True, kw_only=True):
    """Every slice has settled just these ranges, and takes no more until a `Copied` of this number has come."""

    request: int
    name: str
    settled: tuple[Block, ...]


class Report(Noun, frozen=True, kw_only=True):
    """Something that a person may want to know."""

    event: JoinedRun | LeftRun | Redone | RefusedBlock | Recovered


class Diverging(Noun, frozen=True, kw_only=True):
    """The run makes no sense any more: `what` of `tensor` (a name, or a number in the parameter space)."""

    what: str
    tensor: str | int
    block: Block


class Ended(Noun, frozen=True, kw_only=True):
    """Every replica has left or is given up: nothing more will be pushed."""

    why: str


CoordinatorEffect: TypeAlias = ToReplica | ToShard | Closed | Found | Cut | Report | Diverging | Ended
