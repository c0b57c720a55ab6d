"""What of a shard survives its process: coming back, and keeping what is done from then on.

A shard comes back from files of its own (`squall.shard.recovery`), puts right what the ledger says of it, and goes on
with a `Keeper`. In the ledger, what the files hold and no row tells is told now, and what rows tell and the files do not
hold is taken back ("rolled_back").
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from squall.observe.ledger import Ledger, LedgerWriter, read_ledger, rows_to_take_back, state_made
from squall.rules.apply import SliceState
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule
from squall.shard.books import SliceBook
from squall.shard.keeper import clear
from squall.shard.recovery import Recovered, recover
from squall.shard.snapshot import Place


def open_place(directory: Path, shard: int, schema: str, *, is_back: bool) -> Place:
    """A shard's folder in a run's directory; emptied, unless the shard comes back.

    Args:
        schema: hash of the parameter space.
    """
    folder = directory / "shards" / f"shard{shard}"
    folder.mkdir(parents=True, exist_ok=True)
    if not is_back:
        clear(folder)
    return Place(folder=folder, shard=shard, schema=schema)


def come_back(
    place: Place,
    states: Sequence[SliceState],
    books: Sequence[SliceBook],
    rule: Rule | RulePerTensor,
) -> Recovered:
    """Find what has survived, and say so in the shard's log.

    Args:
        states, books: as the run began. Taken over.
    """
    found = recover(place, states, books, rule)
    for what in found.damage:
        print(f"passed over what is damaged: {what}", flush=True)
    base = f"snapshot {found.snapshot}" if found.snapshot else "the start of the run"
    print(f"came back from {base} and {len(found.rows)} updates of slices in logs", flush=True)
    return found


def put_right(ledger: Path, shard: int, found: Recovered, writer: LedgerWriter, time_s: float) -> None:
    """Have the ledger tell just what has survived.

    Args:
        ledger: the directory.
        writer: of the file of the shard's new start.
        time_s: now.
    """
    versions = {book.slice: book.version for book in found.books}
    beyond = dict(versions)  # what logs hold, and what was lost, are later states
    for row in found.rows:
        beyond[row.slice] = min(beyond[row.slice], row.version - 1)

    def choice(rows: Ledger) -> NDArray[np.bool_]:
        is_later: NDArray[np.bool_] = ~np.isin(rows["slice"], list(beyond))
        for number, version in beyond.items():
            is_later |= (rows["slice"] == number) & (rows["version"] > version)
        is_later &= rows["shard"] == shard
        return is_later

    own = read_ledger(ledger, f"shard{shard}-*", "rolled-back-*", choice=choice)
    told = {state_made(row) for row in own[own["outcome"] == "applied"]}
    for row in found.rows:
        if (row.slice, row.shard_incarnation, row.version) not in told:
            writer.append(row)
    for row in rows_to_take_back(own, versions, time_s):
        writer.append(row)
    writer.flush()
