"""One run in the calling thread: a `World`, with real tensors or without any, and the run around it."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from squall.blocks import BlockSet
from squall.cluster.accounts import Accounts
from squall.cluster.arithmetic import TensorArithmetic
from squall.cluster.protocol_only import ProtocolOnly
from squall.cluster.survival import Survival
from squall.cluster.world import COORDINATOR, NO_REPLICA, Pace, World
from squall.coordinator.events import Closed, CoordinatorEffect, Cut, Diverging, Found, Report
from squall.coordinator.machine import CoordinatorMachine
from squall.coordinator.recovery import Inheritance
from squall.errors import DivergedError, NoReplicaError
from squall.faults import Fault, Kill, Pause
from squall.observe.events import Disturbed, Evaluated, Joined, Left, Recovered
from squall.replica.downpour import downpour
from squall.shard.events import Save
from squall.shard.machine import ShardMachine
from squall.training.durability import mode_of
from squall.training.execution import Ending, Execution


class OneThread:
    """Carries out one `Execution` in this thread.

    Args:
        pace, faults, seed: of the `World`.
        is_modelled: compute no gradient; the protocol alone runs.
    """

    def __init__(
        self,
        execution: Execution,
        *,
        pace: Pace,
        faults: Sequence[Fault] = (),
        seed: int,
        is_modelled: bool = False,
    ) -> None:
        self._execution = execution
        self._prepared = prepared = execution.prepared
        self._accounts = accounts = Accounts(execution)
        self._tensors = None if is_modelled else TensorArithmetic(execution, accounts)
        self._diverging: Diverging | None = None
        self._epoch = 0  # of the coordinator
        is_evaluated = prepared.evaluation is not None and not is_modelled
        self._evaluator = prepared.whole() if is_evaluated else None
        layout = prepared.layout
        slices = [tuple(spec.slice for spec in layout.slices_of(shard)) for shard in range(layout.num_shards)]
        shards = [
            ShardMachine(
                shard=shard,
                incarnation=accounts.lives[shard],
                books=tuple(prepared.books[number].copy() for number in slices[shard]),
            )
            for shard in range(layout.num_shards)
        ]
        mode = mode_of(prepared.job.durability)
        self._survival = None if mode is None else Survival(mode, accounts, self._tensors, shards)
        self._world = World(
            directs=self._coordinator(),
            shards=shards,
            slices=slices,
            num_replicas=prepared.job.replicas,
            loop=lambda: downpour(prepared.loop),
            arithmetic=self._tensors or ProtocolOnly(prepared.minibatches, accounts),
            tell=self._tell,
            pace=pace,
            sizes=accounts.size_of,
            faults=faults,
            seed=seed,
            struck=self._struck,
            come_back=None if self._survival is None else self._come_back,
            follow=self._coordinator,
        )

    def _coordinator(self, inheritance: Inheritance | None = None) -> CoordinatorMachine:
        prepared = self._prepared
        return CoordinatorMachine(
            plan=prepared.plan,
            num_replicas=prepared.job.replicas,
            num_shards=prepared.layout.num_shards,
            settled=BlockSet(prepared.settled.entries()),  # of its own: it goes on from there
            max_staleness=prepared.job.strategy.max_staleness,
            rhythm=prepared.rhythm,
            inheritance=inheritance,
        )

    def virtual_now(self) -> float:
        """Seconds of virtual time since the run began."""
        return self._prepared.time_s + self._world.now

    def run(self) -> Ending:
        try:
            with garbage_left() if self._tensors is None else nullcontext():
                why = self._world.run(may_go_on=self._may_go_on)
            if self._diverging is not None:
                raise _diverged(self._execution, self._diverging)
            told = "no replica is left: every one was killed"
            lost = NoReplicaError(reason=told) if why == NO_REPLICA else None
            settled = self._world.directs.settled
            checkpoint = "" if self._tensors is None else self._save(self._tensors, settled)
        finally:
            self._accounts.close()
            if self._tensors is not None:
                self._tensors.close()
        return Ending(
            why=why,
            checkpoint=checkpoint,
            buffers={} if self._tensors is None else self._tensors.buffers(settled),
            traffic=self._accounts.total_traffic(),
            minibatches=settled.num_minibatches,
            error=lost,
        )

    def _save(self, tensors: TensorArithmetic, settled: BlockSet) -> str:
        """Write the checkpoint at the end of a run, and return its name."""
        name = self._execution.checkpoints.new_name()
        for shard, machine in enumerate(self._world.shards):
            for effect in machine.handle(Save(name=name)):
                tensors.store(shard, effect)
        buffers = tensors.buffers(settled)
        self._execution.checkpoints.reached(name, settled.blocks(), buffers, self._execution.now())
        return name

    def _struck(self, virtual: float, role: str, fault: Kill | Pause, what: str) -> None:
        recorder, now = self._execution.recorder, self._execution.now()
        recorder.happened(Disturbed(time_s=now, role=role, what=what, fault=str(fault)))
        if what == "kill" and not role.startswith("replica"):  # of replicas the coordinator tells
            life = (
                self._accounts.lives[int(role.removeprefix("shard"))] if role != COORDINATOR else self._epoch
            )
            why = f"was killed, as the chaos '{fault}' says"
            recorder.happened(Left(time_s=now, role=role, why=why, incarnation=life))
        if what == "kill" and role == COORDINATOR:
            self._epoch += 1
            self._execution.checkpoints.give_up()

    def _come_back(self, index: int, dead: ShardMachine) -> ShardMachine:
        assert self._survival is not None
        back = self._survival.come_back(index, dead)
        told = Joined(time_s=self._execution.now(), role=f"shard{index}", incarnation=back.incarnation)
        self._execution.recorder.happened(told)
        return back

    def _may_go_on(self) -> str | None:
        now = self._execution.now()
        if self._survival is not None:
            self._survival.tick(self._world.now, self._world.shards)
        self._execution.recorder.tick(now)
        self._execution.seal()
        done = self._execution.recorder.meter.minibatches
        if (name := self._execution.checkpoints.due(done)) is not None:
            self._world.take_checkpoint(name)
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
                    loss_sum=None if self._tensors is None else report.loss_sum,
                    staleness=report.staleness,
                )
                if self._tensors is not None and self._evaluator is not None and recorder.is_evaluation_due():
                    self._evaluate(self._tensors, self._evaluator)
            case Found(blocks=blocks):
                for block in blocks:
                    recorder.found(now, block=block)
            case Cut(name=name, settled=settled) if self._tensors is not None:
                buffers = self._tensors.buffers(BlockSet.union(settled))
                self._execution.checkpoints.reached(name, settled, buffers, now)
            case Report(event=event):
                recorder.happened(replace(event, time_s=now))
                if isinstance(event, Recovered):
                    self._execution.checkpoints.lost(event.role)
            case Diverging():
                self._diverging = self._diverging or effect

    def _evaluate(self, tensors: TensorArithmetic, evaluator: nn.Module) -> None:
        evaluation = self._prepared.evaluation
        assert evaluation is not None
        recorder = self._execution.recorder
        progress = recorder.progress(self._execution.now())
        versions = tuple(
            book.version for shard in self._world.shards for _, book in sorted(shard.books.items())
        )
        values = evaluation.of_slices(evaluator, tensors.vectors(), tensors.buffers())
        if self._execution.best is not None:
            self._execution.best.offer(values, evaluator, progress.minibatches)
        recorder.happened(
            Evaluated(
                time_s=self._execution.now(),
                epoch=progress.epoch,
                minibatches=progress.minibatches,
                metrics=values,
                versions=versions,
            )
        )


def _diverged(execution: Execution, told: Diverging) -> DivergedError:
    tensors = execution.prepared.layout.space.tensors
    tensor = tensors[told.tensor].name if isinstance(told.tensor, int) else told.tensor
    return DivergedError(tensor=tensor, step=str(told.block), what=told.what)


@contextmanager
def garbage_left() -> Iterator[None]:
    """Do not look for garbage meanwhile: among millions of small objects that takes long, and the protocol's own
    are freed without."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def threads_set(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
