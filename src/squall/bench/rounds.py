"""Measuring sides alternately, and throughput from a ledger."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from squall.bench.figure import Round
from squall.errors import RunError
from squall.observe.ledger import Ledger, Outcome

Side = Callable[[], Mapping[str, float]]
"""Measures something once; returns its values by name."""


def alternate(sides: Sequence[Side], rounds: int) -> list[Round]:
    """Measure every side once in each round, in turn; every other round goes backwards.

    So what changes slowly (heat, another program) meets all sides alike.

    >>> order = []
    >>> sides = [lambda: order.append("a") or {"a": 1.0}, lambda: order.append("b") or {"b": 2.0}]
    >>> alternate(sides, 2), order
    ([{'a': 1.0, 'b': 2.0}, {'b': 2.0, 'a': 1.0}], ['a', 'b', 'b', 'a'])
    """
    done: list[Round] = []
    for number in range(rounds):
        values: dict[str, float] = {}
        for side in sides if number % 2 == 0 else reversed(sides):
            values.update(side())
        done.append(values)
    return done


def steady_rate(ledger: Ledger, *, warm: int) -> float:
    """Examples per second in a run's steady state, by what its shards wrote down.

    That is from the time by which every replica has had `warm` blocks applied, to the last time at which none of them
    was done. In it, each replica's speed is what it had applied between its first and its last row, over the time
    between them, so that no part of a block is counted or lost at the ends; the sum over replicas is the run's.

    Args:
        ledger: of a run; of its slices the first one counts, since a block has a row on each.
        warm: blocks of each replica that are left out, at least 1.

    Raises:
        RunError: a replica has fewer than two rows in that time.
    """
    applied = (ledger["outcome"] == str(Outcome.APPLIED)) & (
        ledger["slice"] == ledger["slice"].min(initial=0)
    )
    rows = ledger[applied]
    by_replica = [rows[rows["replica"] == replica] for replica in np.unique(rows["replica"])]
    if not by_replica or min(map(len, by_replica)) <= warm:
        raise RunError(reason=f"a replica had no more than {warm} blocks applied, too few for a rate")
    start = max(own["time_s"][warm - 1] for own in by_replica)
    stop = min(own["time_s"][-1] for own in by_replica)
    return sum(_rate_within(own, start, stop) for own in by_replica)


def _rate_within(rows: Ledger, start: float, stop: float) -> float:
    """One replica's examples per second from its first row in that time to its last."""
    inside = rows[(rows["time_s"] >= start) & (rows["time_s"] <= stop)]
    seconds = float(inside["time_s"][-1] - inside["time_s"][0]) if len(inside) else 0.0
    if seconds <= 0:
        raise RunError(reason="the replicas hardly worked at the same time, so there is no rate")
    return float(inside["examples"][1:].sum()) / seconds
