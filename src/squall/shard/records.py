"""A shard's records as rows of the ledger."""

from pathlib import Path

from squall.observe.ledger import LedgerRow, block_id
from squall.shard.events import Record


def ledger_file(shard: int, incarnation: int) -> str:
    """The name of the file that one start of a shard writes its rows to."""
    return f"shard{shard}-{incarnation}.ledger"


def first_incarnation(ledger: Path, shard: int) -> int:
    """The number of a shard's first start in this start of the run: above all that it ever had.

    >>> first_incarnation(Path("no such directory"), 0)
    0
    """
    prefix = f"shard{shard}-"
    numbers = (path.stem.removeprefix(prefix) for path in ledger.glob(f"{prefix}*.ledger"))
    return max((int(number) + 1 for number in numbers if number.isdigit()), default=0)


def ledger_row(shard: int, shard_incarnation: int, record: Record, time_s: float) -> LedgerRow:
    """The row of a record; `time_s` is seconds since the run began."""
    block, sender = record.block, record.sender
    return LedgerRow(
        shard=shard,
        slice=record.slice,
        partition=0 if sender is None else sender.partition,
        shard_incarnation=shard_incarnation,
        replica=-1 if sender is None else sender.replica,
        incarnation=-1 if sender is None else sender.incarnation,
        attempt=record.attempt,
        block=block_id(block.stage, block.epoch, block.first),
        stage=block.stage,
        epoch=block.epoch,
        first=block.first,
        minibatches=record.minibatches,
        examples=record.examples,
        based_on=record.based_on,
        version=record.version,
        staleness=record.staleness,
        outcome=record.outcome.value,
        time_s=time_s,
    )
