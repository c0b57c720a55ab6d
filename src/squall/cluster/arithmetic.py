"""Real tensors, in ordinary memory, for every role of a `World`."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from squall.blocks import BlockSet
from squall.cluster.accounts import Accounts
from squall.partition.cut import Cut
from squall.partition.engine import Message
from squall.replica.compute import ReplicaCompute
from squall.replica.downpour import Compute, Computed
from squall.replica.part import CutReplica, PartCompute
from squall.rules.apply import SliceState
from squall.shard.events import Applied, Apply, NotFinite, Record, Store, Worker, WriteOut
from squall.shard.store import shard_file, write_slices
from squall.shard.tensors import PushRecorder, ShardTensors, WorkerMemory
from squall.training.execution import Execution


class TensorArithmetic:
    """Real tensors for every role of a `World`, in ordinary memory."""

    def __init__(self, execution: Execution, accounts: Accounts) -> None:
        self._execution = execution
        self._accounts = accounts
        self._prepared = prepared = execution.prepared
        directory = execution.directory
        self._shards: list[ShardTensors] = []
        self._recorders: list[PushRecorder] = []
        self._computes: dict[Worker, ReplicaCompute | CutReplica] = {}
        self._models: dict[int, nn.Module] = {}
        self._left_buffers: dict[int, Tensor] = {}
        for shard in range(prepared.layout.num_shards):
            numbers = [spec.slice for spec in prepared.layout.slices_of(shard)]
            recorder = None
            if prepared.job.record:
                versions = {number: prepared.books[number].version for number in numbers}
                sizes = {number: prepared.layout.slices[number].num_master_bytes for number in numbers}
                recorder = PushRecorder(directory.pushes, versions, sizes)
                self._recorders.append(recorder)
            self._shards.append(
                ShardTensors(states=prepared.states_of(shard), rule=prepared.rule, recorder=recorder)
            )
        prepared.first.let_go()

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()

    def vectors(self) -> list[Tensor]:
        """The slices' values as they are, in order; not copies."""
        held = {number: state.params for shard in self._shards for number, state in shard.states.items()}
        return [held[number] for number in sorted(held)]

    def buffers(self, settled: BlockSet | None = None) -> dict[str, Tensor]:
        """The models' buffers as one set: the newest, or as of a checkpoint with these positions."""
        return self._prepared.buffers_at(list(self._left_buffers.values()), settled)

    def states_kept(self, shard: int) -> list[SliceState]:
        """A shard's slices as they are, in memory of their own."""
        return self._shards[shard].states_kept()

    def put_back(self, shard: int, states: Sequence[SliceState], versions: Mapping[int, int]) -> None:
        """A shard goes on from an earlier state."""
        self._shards[shard].put_back(states, versions)

    # What a World asks for -----------------------------------------------------------------------------

    def attach(self, worker: Worker) -> None:
        model = self._prepared.replicate()
        left = torch.zeros(self._prepared.buffers.num_bytes, dtype=torch.uint8)
        self._prepared.buffers.join(model, list(self._left_buffers.values()), left)
        self._models[worker.replica] = model
        self._left_buffers[worker.replica] = left
        cut = self._prepared.cut
        self._computes[worker] = self._whole(worker, model) if cut is None else self._cut(worker, model, cut)

    def _whole(self, worker: Worker, model: nn.Module) -> ReplicaCompute:
        memory = self._memory_of(worker)
        return ReplicaCompute(
            name=_name(worker),
            task=self._prepared.task(model),
            gradients=[list(gradient.values()) for gradient in memory.gradients],
            buffers=[list(buffer.values()) for buffer in memory.buffers],
        )

    def _cut(self, lead: Worker, model: nn.Module, cut: Cut) -> CutReplica:
        """All workers of a cut replica; its model's buffers are theirs together."""
        task = self._prepared.task(model)
        parts = []
        for partition in range(cut.partitions):
            worker = lead.beside(partition)
            memory = self._memory_of(worker)
            part = PartCompute(
                name=_name(worker),
                task=task,
                partition=partition,
                gradients=memory.gradients,
                buffers=memory.buffers,
                left=dict(model.named_buffers()),
            )
            parts.append(part)

        def count(message: Message) -> None:
            self._accounts.moved(
                lead.beside(message.sender), lead.beside(message.receiver), message.num_bytes
            )

        return CutReplica(task, parts, count)

    def _memory_of(self, worker: Worker) -> WorkerMemory:
        """Vectors for the slices of one worker's partition, which shards are told of."""
        specs = [spec for spec in self._prepared.layout.slices if spec.partition == worker.partition]

        def fresh() -> dict[int, Tensor]:
            return {spec.slice: torch.zeros(spec.size, dtype=getattr(torch, spec.dtype)) for spec in specs}

        memory = WorkerMemory(
            gradients=[fresh() for _ in range(self._prepared.loop.num_gradients)],
            buffers=(fresh(), fresh()),
        )
        for shard in self._shards:
            shard.attach(worker, memory)
        return memory

    def compute(self, worker: Worker, wish: Compute) -> Computed:
        computed = self._computes[worker].compute(wish)
        if wish.is_last:
            model, left = self._models[worker.replica], self._left_buffers[worker.replica]
            self._prepared.buffers.write(model, left, after=(wish.epoch, wish.position))
        return computed

    def swap(self, worker: Worker, buffer: int) -> None:
        self._computes[worker].swap(buffer)

    def apply(self, shard: int, effect: Apply) -> Applied | NotFinite:
        self._accounts.applied(shard, effect)
        return self._shards[shard].apply(effect)

    def write_out(self, shard: int, effect: WriteOut) -> None:
        self._accounts.written_out(shard, effect)
        self._shards[shard].write_out(effect)

    def record(self, shard: int, row: Record, now: float) -> None:
        self._accounts.record(shard, row)

    def store(self, shard: int, effect: Store) -> None:
        folder = self._execution.directory.checkpoints / effect.name
        folder.mkdir(parents=True, exist_ok=True)
        if effect.books:
            write_slices(folder / shard_file(shard), list(self._shards[shard].states.values()), effect.books)
        self._accounts.flush(shard)
        for recorder in self._recorders:
            recorder.flush()
        self._execution.checkpoints.saved(effect.name, f"shard{shard}")


def _name(worker: Worker) -> str:
    return f"replica{worker.replica}.{worker.partition}"
