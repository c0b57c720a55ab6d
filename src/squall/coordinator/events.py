"""What the coordinator's decider is told, and what it wants done."""

from dataclasses import dataclass
from typing import TypeAlias

from squall.blocks import Block
from squall.observe.events import Joined as JoinedRun
from squall.observe.events import Left as LeftRun
from squall.observe.events import Redone
from squall.observe.events import Refused as RefusedBlock
from squall.wire.messages import (
    Ask,
    Diverged,
    Finished,
    Goodbye,
    Held,
    Hold,
    Lease,
    Leave,
    Recall,
    Refuse,
    Refused,
    Release,
    Released,
)

# Events: each carries `now`, seconds on the run's clock -------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A replica's connection is open."""

    now: float
    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FromReplica:
    """A replica's message arrived."""

    now: float
    replica: int
    incarnation: int
    message: Ask | Goodbye


@dataclass(frozen=True, slots=True, kw_only=True)
class FromShard:
    """A shard's message arrived."""

    now: float
    shard: int
    message: Refused | Diverged | Held | Released


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A replica's connection has ended without a goodbye."""

    now: float
    replica: int
    incarnation: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the stage now, with what is acknowledged."""

    now: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Take a checkpoint of this name as soon as may be."""

    now: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What goes with the cut that was reached has been copied; answers `Cut`, by its number."""

    now: float
    request: int


CoordinatorEvent: TypeAlias = Joined | FromReplica | FromShard | Lost | Tick | Stop | Checkpoint | Copied


# Effects ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToReplica:
    """Send a message to a replica."""

    replica: int
    incarnation: int
    message: Lease | Leave | Recall


@dataclass(frozen=True, slots=True, kw_only=True)
class ToShard:
    """Send a message to a shard."""

    shard: int
    message: Refuse | Hold | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A block is done: every slice has it. Told once for each block."""

    replica: int
    report: Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Every slice has settled just these ranges, and takes no more until a `Copied` of this number has come."""

    request: int
    name: str
    settled: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something that a person may want to know."""

    event: JoinedRun | LeftRun | Redone | RefusedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverging:
    """The run makes no sense any more: `what` of `tensor` (a name, or a number in the parameter space)."""

    what: str
    tensor: str | int
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Every replica has left or is given up: nothing more will be pushed."""

    why: str


CoordinatorEffect: TypeAlias = ToReplica | ToShard | Closed | Cut | Report | Diverging | Ended
