"""What became of a run, told from what it left: who died when and why, what was kept, done again and lost, and the one cause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from squall.blocks import Block
from squall.observe.ledger import Ledger, Outcome
from squall.observe.tally import blocks_redone
from squall.observe.units import human_seconds, one_line

State: TypeAlias = Literal["done", "stopped", "failed", "cut off", "going on"]
FINISHED = ("steps", "epochs", "time", "no better")
GONE = "the launcher ended without a word: it was killed, or its machine went down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A role that was gone before the end.

    Attributes:
        role, incarnation: which life of whom.
        time_s: when.
        why: a phrase.
        back_s: when its next life joined; None: it did not come back.
    """

    role: str
    incarnation: int
    time_s: float
    why: str
    back_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Somebody did not answer for long, and others waited.

    Attributes:
        role: who.
        since_s: when they began to wait.
        seconds: how long; None: it was not over when the run ended.
    """

    role: str
    since_s: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """The newest checkpoint from which the run can go on.

    Attributes:
        path: of it, within the run directory.
        minibatches: that every slice of it holds.
        damaged: newer ones, that cannot be read.
    """

    path: str
    minibatches: int
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What became of a run.

    Attributes:
        state: "cut off" is one whose launcher ended without a word.
        why: a word or two, as the run itself says.
        cause: the one that it failed for; None if it did not.
        also: what failed after that, or because of it.
        after_s: when its last sign came [seconds of its clock].
        minibatches, total: done on every slice; at which the run ends, if that is known.
        last: the block that was applied last, as words; "" without any.
        durable: what a resumed run goes on from; None: nothing.
        lost: minibatches done that are in no checkpoint, and are done again by a resumed run.
        redone, repeated: see `squall.observe.tally.blocks_redone`; pushes that came again, and changed nothing.
        rolled_back: minibatches that earlier lives of the run had done, and that were lost with them.
        refused: blocks that are left out for good, and why.
        deaths: in order.
        waits: for roles that did not answer, in order.
        resumed: how often the run was resumed.
    """

    state: State
    why: str
    cause: str | None
    after_s: float
    minibatches: int
    total: int | None
    last: str
    durable: Durable | None
    lost: int
    redone: int
    repeated: int
    rolled_back: int
    also: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    deaths: tuple[Death, ...] = ()
    waits: tuple[Wait, ...] = ()
    resumed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a run left in its directory.

    Attributes:
        history: the records of metrics.jsonl, of all its lives.
        ledger: whole.
        slices: how many the model has.
        durable: see `Story`.
        is_going_on: its processes are there.
        resumed: how often it was resumed, as the newest life says.
    """

    history: Sequence[Mapping[str, Any]]
    ledger: Ledger
    slices: int
    durable: Durable | None = None
    is_going_on: bool = False
    resumed: int = 0


def tell(left: Left) -> Story:
    """Make a story of what a run left."""
    life = newest_life(left.history)
    ended = next((record for record in reversed(life) if record["event"] == "Ended"), None)
    done = minibatches_done(left.ledger, left.slices)
    progress = [record for record in life if record["event"] == "Progress"]
    state, why, cause = _ending(ended, left.is_going_on)
    kept = 0 if left.durable is None else left.durable.minibatches
    return Story(
        state=state,
        why=why,
        cause=cause,
        after_s=max((float(record["time_s"]) for record in life), default=0.0),
        minibatches=done,
        total=progress[-1]["total_minibatches"] if progress else None,
        last=_last_block(left.ledger),
        durable=left.durable,
        lost=max(0, done - kept),
        redone=blocks_redone(left.ledger),
        repeated=int((left.ledger["outcome"] == str(Outcome.REPEATED)).sum()),
        rolled_back=_rolled_back(left.ledger),
        also=tuple(one_line(str(record["error"])) for record in life if record["event"] == "AlsoFailed"),
        refused=tuple(_refused(life)),
        deaths=tuple(_deaths(life)),
        waits=tuple(_waits(life)),
        resumed=left.resumed,
    )


def newest_life(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records since the run was begun or resumed the last time.

    A life ends with `Ended`; one that was cut off ends where a role joins as its first incarnation again.

    >>> first = [{"event": "Joined", "role": "replica0.0", "incarnation": n} for n in (0, 1)]
    >>> len(newest_life(first)), len(newest_life([*first, *first])), len(newest_life([*first, {"event": "Ended"}]))
    (2, 2, 3)
    """
    life: list[Mapping[str, Any]] = []
    joined: set[str] = set()
    for record in history:
        is_first = record["event"] == "Joined" and not record["incarnation"]
        if (life and life[-1]["event"] == "Ended") or (is_first and record["role"] in joined):
            life, joined = [], set()
        if is_first:
            joined.add(record["role"])
        life.append(record)
    return life


def minibatches_done(ledger: Ledger, slices: int) -> int:
    """Minibatches that every slice has applied and not lost again."""
    applied = ledger["outcome"] == str(Outcome.APPLIED)
    lost = ledger["outcome"] == str(Outcome.ROLLED_BACK)
    counts = [
        int(ledger["minibatches"][applied & (ledger["slice"] == number)].sum())
        - int(ledger["minibatches"][lost & (ledger["slice"] == number)].sum())
        for number in range(slices)
    ]
    return min(counts, default=0)


def _ending(ended: Mapping[str, Any] | None, is_going_on: bool) -> tuple[State, str, str | None]:
    if ended is None:
        return ("going on", "it goes on", None) if is_going_on else ("cut off", "cut off", GONE)
    why = str(ended["why"])
    if ended["error"] is not None:
        return "failed", why, one_line(str(ended["error"]))
    return ("done" if why in FINISHED else "stopped"), why, None


def _last_block(ledger: Ledger) -> str:
    applied = ledger[ledger["outcome"] == str(Outcome.APPLIED)]
    if not len(applied):
        return ""
    row = applied[int(np.argmax(applied["time_s"]))]
    first = int(row["first"])
    block = Block(int(row["stage"]), int(row["epoch"]), first, first + int(row["minibatches"]))
    return f"{block}, by replica {int(row['replica'])}, at {human_seconds(float(row['time_s']))}"


def _rolled_back(ledger: Ledger) -> int:
    rows = ledger[ledger["outcome"] == str(Outcome.ROLLED_BACK)]
    return max(
        (int(rows["minibatches"][rows["slice"] == number].sum()) for number in np.unique(rows["slice"])),
        default=0,
    )


def _refused(life: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{Block(**record['block'])}: {record['why']}" for record in life if record["event"] == "Refused"]


def _deaths(life: Sequence[Mapping[str, Any]]) -> list[Death]:
    back = {
        (record["role"], record["incarnation"] - 1): float(record["time_s"])
        for record in life
        if record["event"] == "Joined"
    }
    return [
        Death(
            role=record["role"],
            incarnation=record.get("incarnation", 0),
            time_s=float(record["time_s"]),
            why=one_line(record["why"]),
            back_s=back.get((record["role"], record.get("incarnation", 0))),
        )
        for record in life
        if record["event"] == "Left" and record["why"] not in FINISHED
    ]


def _waits(life: Sequence[Mapping[str, Any]]) -> list[Wait]:
    waits: dict[str, Wait] = {}  # that are not over
    told: list[Wait] = []
    for record in life:
        if record["event"] != "Silent":
            continue
        role, seconds = record["role"], float(record["seconds"])
        if record["waiting"]:
            waits.setdefault(role, Wait(role=role, since_s=float(record["time_s"]) - seconds))
        elif (wait := waits.pop(role, None)) is not None:
            told.append(replace(wait, seconds=float(record["time_s"]) - wait.since_s))
    return sorted((*told, *waits.values()), key=lambda wait: wait.since_s)
