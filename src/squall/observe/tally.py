"""What a ledger adds up to: staleness, work done, work done again, and speed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from squall.observe.ledger import Ledger, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTally:
    """What one replica contributed, counted on the run's first slice.

    Attributes:
        replica: its index.
        blocks: pushes of it that were applied.
        minibatches, examples: what these pushes stood for.
        staleness_mean: of these pushes [updates].
    """

    replica: int
    blocks: int
    minibatches: int
    examples: int
    staleness_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSummary:
    """What a whole ledger says; `summarise` makes it. A block counts once, however many slices it has.

    Attributes:
        rows: rows of the ledger.
        applied: blocks that were applied somewhere.
        redone: see `blocks_redone`.
        repeated: blocks of which a push came again and changed nothing.
        refused: blocks that some slice will never apply.
        not_finite: blocks of which a push was turned away because it was not finite.
        rolled_back: blocks that a shard lost with its newest state.
        staleness_mean, staleness_variance: over all applied pushes of all slices; NaN without any [updates].
        samples_per_second: see `samples_per_second`.
        replicas: one entry for each replica with an applied push, by index.
    """

    rows: int
    applied: int
    redone: int
    repeated: int
    refused: int
    not_finite: int
    rolled_back: int
    staleness_mean: float
    staleness_variance: float
    samples_per_second: float
    replicas: tuple[ReplicaTally, ...]


def summarise(ledger: Ledger) -> LedgerSummary:
    """Add a ledger up.

    >>> from squall.observe.ledger import LEDGER_DTYPE
    >>> rows = np.zeros(3, LEDGER_DTYPE)
    >>> rows["outcome"], rows["block"], rows["attempt"] = "applied", [1, 2, 3], [1, 2, 1]
    >>> summary = summarise(rows)
    >>> summary.applied, summary.redone, summary.staleness_mean
    (3, 1, 0.0)
    """
    applied = _with_outcome(ledger, Outcome.APPLIED)
    staleness = applied["staleness"]
    return LedgerSummary(
        rows=len(ledger),
        applied=_num_blocks(applied),
        redone=blocks_redone(ledger),
        repeated=_num_blocks(_with_outcome(ledger, Outcome.REPEATED)),
        refused=_num_blocks(_with_outcome(ledger, Outcome.REFUSED)),
        not_finite=_num_blocks(_with_outcome(ledger, Outcome.NOT_FINITE)),
        rolled_back=_num_blocks(_with_outcome(ledger, Outcome.ROLLED_BACK)),
        staleness_mean=float(staleness.mean()) if len(staleness) else float("nan"),
        staleness_variance=float(staleness.var()) if len(staleness) else float("nan"),
        samples_per_second=samples_per_second(ledger),
        replicas=_tallies(_with_outcome(_first_slice(ledger), Outcome.APPLIED)),
    )


def blocks_redone(ledger: Ledger) -> int:
    """Blocks that were handed out more than once and pushed; begun before or not, and needed or not."""
    pushed = np.isin(ledger["outcome"], [str(Outcome.APPLIED), str(Outcome.REPEATED)])
    return _num_blocks(ledger[pushed & (ledger["attempt"] > 1)])


def times_one_replica(ledger: Ledger, *, warm_start: int, replicas: int) -> float | None:
    """Speed of all replicas over that of one, which works alone in the warm start.

    The first minibatches of a process are slow, so the first half of the warm start is left out. None where the measure
    would not be sound: without two replicas; with fewer than `FEWEST_BLOCKS` blocks before or after the warm start's end;
    where the mean time between two of them is not known to a tenth; or where it comes to more than there are replicas.

    Args:
        warm_start: its blocks, on each slice.
    """
    applied = _with_outcome(_first_slice(ledger), Outcome.APPLIED)
    applied = applied[np.argsort(applied["time_s"], kind="stable")]
    alone, together = applied[warm_start // 2 : warm_start], applied[warm_start:]
    if replicas < 2 or not (_is_steady(alone) and _is_steady(together)):
        return None
    times = samples_per_second(together) / samples_per_second(alone)
    return times if times <= replicas else None


FEWEST_BLOCKS = 16
LARGEST_ERROR = 0.1


def _is_steady(applied: Ledger) -> bool:
    """Whether the time between two blocks has a mean worth speaking of: its standard error is a tenth of it at most."""
    if len(applied) < FEWEST_BLOCKS:
        return False
    between = np.diff(applied["time_s"])
    mean = float(between.mean())
    return mean > 0 and float(between.std()) <= LARGEST_ERROR * mean * len(between) ** 0.5


def samples_per_second(ledger: Ledger) -> float:
    """Speed of a run: examples applied over the time from the first to the last applied push.

    Counted on one slice, since each slice has each block. What came at the first moment only starts the clock:
    its examples were computed before. What a shard lost and did again counts once. If all came in one moment, it is
    measured from the run's beginning; 0.0 without any.

    Returns:
        examples per second of the ledger's clock.
    """
    rows = _first_slice(ledger)
    applied = _with_outcome(rows, Outcome.APPLIED)
    if not len(applied):
        return 0.0
    times = applied["time_s"]
    start, stop = float(times.min()), float(times.max())
    counted = applied[times > start] if start < stop else applied
    lost = int(_with_outcome(rows, Outcome.ROLLED_BACK)["examples"].sum())
    examples = max(int(counted["examples"].sum()) - lost, 0)
    duration_s = stop - start if start < stop else stop
    return examples / duration_s if duration_s > 0 else 0.0


def _with_outcome(ledger: Ledger, outcome: Outcome) -> Ledger:
    chosen: Ledger = ledger[ledger["outcome"] == str(outcome)]
    return chosen


def _num_blocks(rows: Ledger) -> int:
    return len(np.unique(rows["block"]))


def _first_slice(ledger: Ledger) -> Ledger:
    """The rows of the lowest (shard, slice) that applied anything: every block passes there once."""
    applied = _with_outcome(ledger, Outcome.APPLIED)
    if not len(applied):
        return ledger[:0]
    shard, slice_ = min(set(zip(applied["shard"].tolist(), applied["slice"].tolist(), strict=True)))
    where: NDArray[np.bool_] = (ledger["shard"] == shard) & (ledger["slice"] == slice_)
    return ledger[where]


def _tallies(applied: Ledger) -> tuple[ReplicaTally, ...]:
    if not len(applied):
        return ()
    rows = applied[np.argsort(applied["replica"], kind="stable")]
    replicas, firsts, counts = np.unique(rows["replica"], return_index=True, return_counts=True)
    sums = {
        name: np.add.reduceat(rows[name], firsts).tolist()
        for name in ("minibatches", "examples", "staleness")
    }
    return tuple(
        ReplicaTally(
            replica=replica,
            blocks=blocks,
            minibatches=sums["minibatches"][at],
            examples=sums["examples"][at],
            staleness_mean=sums["staleness"][at] / blocks,
        )
        for at, (replica, blocks) in enumerate(zip(replicas.tolist(), counts.tolist(), strict=True))
    )
