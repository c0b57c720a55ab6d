"""All roles in the calling thread: for debugging, notebooks, and machines without more.

The roles take turns, so one forward and backward runs at a time; whose turn it is is drawn with the run's seed,
so that a run can be repeated exactly. Nothing is faster than a plain loop here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from squall.cluster.world import Pace, World
from squall.coordinator.machine import Closed, CoordinatorEffect, CoordinatorMachine, Diverging, Report
from squall.errors import DivergedError
from squall.model.randomness import random_state_kept
from squall.observe.events import Evaluated
from squall.observe.ledger import LedgerWriter
from squall.replica.compute import ReplicaCompute
from squall.replica.downpour import Compute, Computed, downpour
from squall.shard.machine import (
    Applied,
    Apply,
    NotFinite,
    Record,
    Save,
    ShardMachine,
    Store,
    Worker,
    WriteOut,
)
from squall.shard.records import ledger_row
from squall.shard.store import shard_file, write_slices
from squall.shard.tensors import PushRecorder, ShardTensors, WorkerMemory
from squall.training.execution import Ending, Execution, TrafficCount


@dataclass(frozen=True, kw_only=True)
class InProcess:
    """Run every role in the calling thread, taking turns.

    >>> InProcess()
    InProcess()
    """

    def run(self, execution: Execution) -> Ending:
        with random_state_kept(), _threads(execution.prepared.threads):
            return _Run(execution).run()


class _Run:
    """One run in this thread."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._prepared = prepared = execution.prepared
        self._arithmetic = TensorArithmetic(execution)
        self._diverging: Diverging | None = None
        self._evaluator = prepared.replicate() if prepared.evaluation is not None else None
        layout = prepared.layout
        slices = [tuple(spec.slice for spec in layout.slices_of(shard)) for shard in range(layout.num_shards)]
        self._world = World(
            directs=CoordinatorMachine(
                plan=prepared.plan,
                num_replicas=prepared.job.replicas,
                num_shards=layout.num_shards,
                settled=prepared.settled,
            ),
            shards=[
                ShardMachine(
                    shard=shard,
                    incarnation=prepared.starts,
                    books=tuple(prepared.books[number] for number in slices[shard]),
                )
                for shard in range(layout.num_shards)
            ],
            slices=slices,
            num_replicas=prepared.job.replicas,
            loop=lambda: downpour(prepared.loop),
            arithmetic=self._arithmetic,
            tell=self._tell,
            pace=Pace(jitter=0.5, tick_s=1e4, resend_s=1e9),
            seed=prepared.job.seed,
        )

    def run(self) -> Ending:
        try:
            why = self._world.run(may_go_on=self._may_go_on)
            if self._diverging is not None:
                raise _diverged(self._execution, self._diverging)
            for shard, machine in enumerate(self._world.shards):
                for effect in machine.handle(Save(name=self._execution.checkpoint)):
                    self._arithmetic.store(shard, effect)
        finally:
            self._arithmetic.close()
        return Ending(
            why=why,
            buffers=self._arithmetic.buffers(),
            traffic=self._arithmetic.traffic.total(),
            minibatches=self._prepared.settled.num_minibatches,
        )

    def _may_go_on(self) -> str | None:
        now = self._execution.now()
        self._execution.recorder.tick(now)
        limit = self._prepared.job.time_s
        if limit is not None and now - self._prepared.time_s >= limit:
            return "time"
        return self._execution.may_go_on()

    def _tell(self, virtual: float, effect: CoordinatorEffect) -> None:
        recorder, now = self._execution.recorder, self._execution.now()
        match effect:
            case Closed(replica=replica, report=report):
                recorder.closed(
                    now,
                    role=f"replica{replica}.0",
                    block=report.block,
                    examples=report.examples,
                    loss_sum=report.loss_sum,
                    staleness=report.staleness,
                )
                if self._evaluator is not None and recorder.is_evaluation_due():
                    self._evaluate()
            case Report(event=event):
                recorder.happened(replace(event, time_s=now))
            case Diverging():
                self._diverging = self._diverging or effect

    def _evaluate(self) -> None:
        evaluation = self._prepared.evaluation
        assert self._evaluator is not None
        assert evaluation is not None
        recorder = self._execution.recorder
        progress = recorder.progress(self._execution.now())
        vectors = self._arithmetic.vectors()
        versions = tuple(
            book.version for shard in self._world.shards for _, book in sorted(shard.books.items())
        )
        values = evaluation.of_slices(self._evaluator, vectors, self._arithmetic.buffers())
        recorder.happened(
            Evaluated(
                time_s=self._execution.now(),
                epoch=progress.epoch,
                minibatches=progress.minibatches,
                metrics=values,
                versions=versions,
            )
        )


class TensorArithmetic:
    """Real tensors for every role of a `World`, in ordinary memory."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._prepared = prepared = execution.prepared
        self.traffic = TrafficCount()
        directory = execution.directory
        self._shards: list[ShardTensors] = []
        self._ledgers: list[LedgerWriter] = []
        self._recorders: list[PushRecorder] = []
        self._computes: dict[Worker, ReplicaCompute] = {}
        self._models: dict[int, torch.nn.Module] = {}
        self._left_buffers: dict[int, Tensor] = {}
        for shard in range(prepared.layout.num_shards):
            numbers = [spec.slice for spec in prepared.layout.slices_of(shard)]
            recorder = None
            if prepared.job.record:
                versions = {number: prepared.books[number].version for number in numbers}
                sizes = {number: prepared.layout.slices[number].num_bytes for number in numbers}
                recorder = PushRecorder(directory.pushes, versions, sizes)
                self._recorders.append(recorder)
            states = [prepared.states[number] for number in numbers]
            self._shards.append(ShardTensors(states=states, rule=prepared.rule, recorder=recorder))
            self._ledgers.append(LedgerWriter(directory.ledger / f"shard{shard}-{prepared.starts}.ledger"))

    def close(self) -> None:
        for ledger in self._ledgers:
            ledger.close()
        for recorder in self._recorders:
            recorder.close()

    def vectors(self) -> list[Tensor]:
        """The slices' values as they are, in order; not copies."""
        held = {number: state.params for shard in self._shards for number, state in shard.states.items()}
        return [held[number] for number in sorted(held)]

    def buffers(self) -> dict[str, Tensor]:
        space = self._prepared.buffers
        sets = [space.read(memory) for memory in self._left_buffers.values()]
        return space.merge([values for values in sets if values is not None])

    # What a World asks for -----------------------------------------------------------------------------

    def attach(self, worker: Worker) -> None:
        layout = self._prepared.layout
        dtypes = [getattr(torch, spec.dtype) for spec in layout.slices]

        def fresh() -> list[Tensor]:
            return [
                torch.zeros(spec.size, dtype=dtype) for spec, dtype in zip(layout.slices, dtypes, strict=True)
            ]

        gradients, buffers = fresh(), (fresh(), fresh())
        model = self._prepared.replicate()
        name = _name(worker)
        self._computes[worker] = ReplicaCompute(
            name=name, task=self._prepared.task(model), gradients=gradients, buffers=buffers
        )
        self._models[worker.replica] = model
        self._left_buffers[worker.replica] = torch.zeros(self._prepared.buffers.num_bytes, dtype=torch.uint8)
        memory = WorkerMemory(
            gradients=dict(enumerate(gradients)), buffers=tuple(dict(enumerate(buffer)) for buffer in buffers)
        )
        for shard in self._shards:
            shard.attach(worker, memory)

    def compute(self, worker: Worker, wish: Compute) -> Computed:
        computed = self._computes[worker].compute(wish)
        if wish.is_last:
            self._prepared.buffers.write(self._models[worker.replica], self._left_buffers[worker.replica])
        return computed

    def swap(self, worker: Worker, buffer: int) -> None:
        self._computes[worker].swap(buffer)

    def apply(self, shard: int, effect: Apply) -> Applied | NotFinite:
        num_bytes = self._bytes_of(effect.slices)
        self.traffic.add(_name(effect.sender), f"shard{shard}", num_bytes)
        self.traffic.add(f"shard{shard}", _name(effect.sender), 0 if effect.push.into is None else num_bytes)
        return self._shards[shard].apply(effect)

    def write_out(self, shard: int, effect: WriteOut) -> None:
        self.traffic.add(f"shard{shard}", _name(effect.to), self._bytes_of(effect.slices))
        self._shards[shard].write_out(effect)

    def record(self, shard: int, row: Record, now: float) -> None:
        time_s = self._execution.now()
        self._ledgers[shard].append(ledger_row(shard, self._prepared.starts, row, time_s))

    def store(self, shard: int, effect: Store) -> None:
        if not effect.books:
            return
        folder = self._execution.directory.checkpoints / effect.name
        folder.mkdir(parents=True, exist_ok=True)
        write_slices(folder / shard_file(shard), list(self._shards[shard].states.values()), effect.books)

    def _bytes_of(self, slices: tuple[int, ...]) -> int:
        return sum(self._prepared.layout.slices[number].num_bytes for number in slices)


def _name(worker: Worker) -> str:
    return f"replica{worker.replica}.{worker.partition}"


def _diverged(execution: Execution, told: Diverging) -> DivergedError:
    tensors = execution.prepared.layout.space.tensors
    tensor = tensors[told.tensor].name if isinstance(told.tensor, int) else told.tensor
    return DivergedError(tensor=tensor, step=str(told.block), what=told.what)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
