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
    """Examples per second between two points of a run in steady state, by what its shards wrote down.

    From the time by which every replica has had `warm` blocks applied, to the last time at which none of them was
    done. Both ends are times of rows, so that the rows after the first make up the time between.

    Args:
        ledger: of a run; of its slices the first one counts, since a block has a row on each.
        warm: blocks of each replica that are left out, at least 1.

    Raises:
        RunError: a replica has no more than `warm` blocks.
    """
    applied = (ledger["outcome"] == str(Outcome.APPLIED)) & (
        ledger["slice"] == ledger["slice"].min(initial=0)
    )
    rows = ledger[applied]
    starts, stops = [], []
    for replica in np.unique(rows["replica"]):
        own = np.flatnonzero(rows["replica"] == replica)
        if len(own) <= warm:
            raise RunError(
                reason=f"replica {replica} had {len(own)} blocks applied, too few for a rate after {warm}"
            )
        starts.append(own[warm - 1])
        stops.append(own[-1])
    if not starts:
        raise RunError(reason="nothing was applied, so there is no rate")
    start, stop = max(starts), min(stops)
    seconds = float(rows["time_s"][stop] - rows["time_s"][start])
    if stop <= start or seconds <= 0:
        raise RunError(
            reason=f"the replicas hardly worked at the same time: no rate after {warm} blocks each"
        )
    return float(rows["examples"][start + 1 : stop + 1].sum()) / seconds
