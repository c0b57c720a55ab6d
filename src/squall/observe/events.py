"""What a run tells while it runs: a handful of frozen events, and each as one JSON-able record.

`handle.events()` yields them, the live view draws them, ``metrics.jsonl`` keeps them. All times are
seconds since the run began, on the clock of the run's host; virtual seconds in a simulation.
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeAlias

from squall.blocks import Block
from squall.nouns import Noun

RoleState: TypeAlias = Literal["starting", "working", "waiting", "lost", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Traffic of the last few seconds from one role to another.

    Attributes:
        sender, receiver: names, as in ``"replica0.1"``, ``"shard0"``, ``"evaluator"``.
        bytes_per_second: in this direction only.
    """

    sender: str
    receiver: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """How one role is doing.

    Attributes:
        name: as in ``"replica0.1"`` or ``"shard0"``.
        state: "lost" went without a word, "left" said so.
        minibatches: that it has finished since it started; 0 for roles that train nothing.
    """

    name: str
    state: RoleState
    minibatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the run stands; comes several times a second.

    Attributes:
        time_s: when.
        stage, epoch: of the newest block that is done.
        minibatches: done so far, over all replicas and stages.
        total_minibatches: at which the run ends; None if it ends by time or not by itself.
        train_loss: mean over the minibatches of the last seconds; None before the first.
        examples_per_second, pushes_per_second: over the last seconds.
        staleness: mean over the pushes of the last seconds; None before the first [updates].
        links: traffic between roles.
        roles: everyone who belongs to the run.
        waits: who has waited for what for more than five seconds, as sentences.
        blocks_redone: blocks handed out again so far, or in earlier parts of the run; in the last one of a run, as the
            ledger has them.
    """

    time_s: float
    stage: int
    epoch: int
    minibatches: int
    total_minibatches: int | None = None
    train_loss: float | None = None
    examples_per_second: float = 0.0
    pushes_per_second: float = 0.0
    staleness: float | None = None
    links: tuple[Link, ...] = ()
    roles: tuple[RoleStatus, ...] = ()
    waits: tuple[str, ...] = ()
    blocks_redone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The test set was measured at one version of each slice.

    Attributes:
        time_s: when the measurement was done.
        epoch, minibatches: where training stood when the parameters were fetched.
        metrics: name to value, as in ``{"test_loss": 0.1, "test_accuracy": 0.97}``.
        versions: of the slices that were measured, in the order of slices [updates].
    """

    time_s: float
    epoch: int
    minibatches: int
    metrics: Mapping[str, float]
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A role is there and may be given work; `incarnation` counts its starts."""

    time_s: float
    role: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A role is gone before the end of the run; `why` is a phrase, as in ``"killed by signal 9"``.

    Attributes:
        incarnation: which of its lives has ended, from 0.
    """

    time_s: float
    role: str
    why: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """A block was handed out again.

    Attributes:
        time_s: when.
        block: which.
        attempt: the how-many-th time this is, from 2.
        replica: who has it now.
        why: what became of the attempt before.
    """

    time_s: float
    block: Block
    attempt: int
    replica: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A block will never be applied; its examples are left out of this epoch."""

    time_s: float
    block: Block
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """A checkpoint is complete on disk at `path`, holding `minibatches` of work."""

    time_s: float
    path: str
    minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A shard that was killed serves again.

    Attributes:
        time_s: when.
        role: as in ``"shard0"``; its end was told as `Left`.
        incarnation: which start of it this is.
        lost: work that it came back without, and that is done again [minibatches].
    """

    time_s: float
    role: str
    incarnation: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkept:
    """What a shard applies cannot be kept on disk at the moment, and would not survive its end.

    Attributes:
        time_s: since when.
        role: as in ``"shard0"``.
        why: as in ``"[Errno 28] No space left on device"``; empty: it is kept again.
    """

    time_s: float
    role: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A role has not answered those who wait for it, for more than five seconds; or the wait is over.

    Attributes:
        time_s: when.
        role: as in ``"shard0"``.
        seconds: how long it has been waited for by then.
        waiting: who said so first, as in ``("replica0.0",)``; empty: nobody waits any more.
    """

    time_s: float
    role: str
    seconds: float
    waiting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbed:
    """Chaos that the job asked for has struck a role.

    Attributes:
        time_s: when.
        role: as faults name it, as in ``"replica2"``.
        what: "kill", "stop" (it stands still) or "go on" (it does no longer).
        fault: which, in the fault language.
    """

    time_s: float
    role: str
    what: str
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoFailed:
    """Something failed after the failure that the run ends with, which `Ended` tells; or because of it."""

    time_s: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over; nothing follows.

    Attributes:
        time_s: when.
        why: a phrase, as in ``"all steps are done"`` or ``"diverged"``.
        error: what went wrong, as text; None if nothing did.
    """

    time_s: float
    why: str
    error: str | None = None


Event: TypeAlias = (
    Progress
    | Evaluated
    | Joined
    | Left
    | Redone
    | Refused
    | Checkpointed
    | Recovered
    | Unkept
    | Silent
    | Disturbed
    | AlsoFailed
    | Ended
)


def as_record(event: Event) -> dict[str, Any]:
    """Turn an event into plain dicts, lists, numbers and strings, its class's name under ``"event"``.

    A number that is not finite becomes None, since JSON has no word for it.

    >>> as_record(Evaluated(time_s=2.0, epoch=1, minibatches=30, metrics={"test_loss": float("nan")}))
    {'event': 'Evaluated', 'time_s': 2.0, 'epoch': 1, 'minibatches': 30, 'metrics': {'test_loss': None}, 'versions': []}
    """
    return {"event": type(event).__name__, **_plain(event)}


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | str():
            return value
        # NumPy's scalars are numbers too, but json does not know them.
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(name): _plain(entry) for name, entry in value.items()}
        case tuple() | list():
            return [_plain(entry) for entry in value]
    if isinstance(value, Noun):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"an event may hold numbers, text and records of them, but got {type(value).__name__}")
