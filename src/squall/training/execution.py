"""What a cluster is asked to do, and what it answers: the border between a run and where it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

import torch
from torch import Tensor, nn

from squall.model.buffers import set_buffers
from squall.model.install import assemble
from squall.model.objective import measure
from squall.observe.ledger import LedgerRow, block_id
from squall.shard.machine import Record
from squall.training.directory import RunDirectory
from squall.training.prepare import Prepared
from squall.training.recorder import Recorder

Traffic = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One run, ready to be carried out.

    Attributes:
        prepared: what to run.
        directory: where the roles leave their files.
        recorder: whom to tell.
        checkpoint: name of the checkpoint to write at the end.
        may_go_on: asked often; a text says why the run should stop.
        began: on this host's monotonic clock, the moment that counts as second 0 of the run.
    """

    prepared: Prepared
    directory: RunDirectory
    recorder: Recorder
    checkpoint: str
    may_go_on: Callable[[], str | None]
    began: float

    def now(self) -> float:
        """Seconds since the run began."""
        return monotonic() - self.began


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an execution ended. The slices lie in the checkpoint by then, without its manifest.

    Attributes:
        why: a word: "steps", "epochs", "time", or what `may_go_on` said.
        buffers: one merged set; empty if no replica left any.
        traffic: what went from whom to whom: (bytes, messages).
        minibatches: settled on every slice, from the run's beginning.
    """

    why: str
    buffers: Mapping[str, Tensor]
    traffic: Traffic
    minibatches: int


class Cluster(Protocol):
    """Where runs are carried out; a value."""

    def run(self, execution: Execution) -> Ending:
        """Carry out a run to its end.

        Raises:
            RunError: it could not finish; nothing of it is left running.
        """
        ...


def ledger_row(shard: int, shard_incarnation: int, row: Record, time_s: float) -> LedgerRow:
    """A shard's record as the ledger has it."""
    block = row.block
    return LedgerRow(
        shard=shard,
        slice=row.slice,
        partition=0 if row.sender is None else row.sender.partition,
        shard_incarnation=shard_incarnation,
        replica=-1 if row.sender is None else row.sender.replica,
        incarnation=-1 if row.sender is None else row.sender.incarnation,
        attempt=row.attempt,
        block=block_id(block.stage, block.epoch, block.first),
        stage=block.stage,
        epoch=block.epoch,
        first=block.first,
        minibatches=row.minibatches,
        examples=row.examples,
        based_on=row.based_on,
        version=row.version,
        staleness=row.staleness,
        outcome=row.outcome.value,
        time_s=time_s,
    )


def evaluate_slices(
    prepared: Prepared, model: nn.Module, vectors: Sequence[Tensor], buffers: Mapping[str, Tensor]
) -> dict[str, float]:
    """Measure the test set with these slices' values (shape (S,) each) and buffers; `model` is written."""
    assert prepared.test is not None
    with torch.no_grad():
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, value in assemble(prepared.layout, vectors).items():
            parameters[name].copy_(value)
        set_buffers(model, dict(buffers))
    return evaluate_model(prepared, model)


def evaluate_model(prepared: Prepared, model: nn.Module) -> dict[str, float]:
    """Measure the test set with a model: names as in ``{"test_loss": 0.1, "test_accuracy": 0.97}``."""
    test = prepared.test
    assert test is not None
    batches = (test.load(0, position) for position in range(test.num_minibatches))
    values = measure(model, prepared.objective, dict(prepared.metrics), batches)
    return {f"test_{name}": value for name, value in values.items()}


@dataclass
class TrafficCount:
    """Counts what goes from whom to whom."""

    links: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, sender: str, receiver: str, num_bytes: int, messages: int = 1) -> None:
        link = self.links.setdefault((sender, receiver), [0, 0])
        link[0] += num_bytes
        link[1] += messages

    def total(self) -> Traffic:
        return {link: (num_bytes, messages) for link, (num_bytes, messages) in sorted(self.links.items())}
