"""From a job to everything that a cluster needs to run it: all derived values, computed once."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from squall.blocks import Block, BlockSet
from squall.coordinator.work import Rhythm, WorkPlan
from squall.data.minibatches import Minibatches
from squall.data.source import Loading, as_source
from squall.errors import ConfigError, ModelError, SquallError, UserCodeError
from squall.model.buffers import BufferSpace, set_buffers
from squall.model.deferred import Deferred, ModelInParts
from squall.model.device import CPU, device_of
from squall.model.layout import Layout
from squall.model.objective import Objective, accuracy, pair
from squall.model.parameters import ParameterSpace
from squall.model.randomness import random_state_kept, seed_everything
from squall.partition.cut import Cut
from squall.replica.compute import Task
from squall.replica.data_worker import DataWorkers
from squall.replica.downpour import DownpourLoop
from squall.rules.apply import SliceState
from squall.rules.patterns import RulePerTensor, rule_per_tensor, state_form
from squall.rules.rule import Rule
from squall.shard.books import SliceBook
from squall.shard.first import first_states
from squall.slices import Cover
from squall.training.checkpoint import Checkpoint, relaid
from squall.training.cutting import cut_of, is_cut
from squall.training.evaluation import Evaluation
from squall.training.first import First, hollowed, trained
from squall.training.job import Job
from squall.training.trial import try_evaluation


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job with everything that follows from it.

    Attributes:
        model: the run's, without values of what is trained; belongs to the launcher and is never trained.
        hollow: its parameters that have none; empty if it has its values after all.
        minibatches: what is trained on.
        evaluation: what is measured, or None.
        plan: the blocks of the run.
        deferred: the model that each role makes its own share of; None: there is a whole one.
        first: what shards make their slices from.
        books: of the slices, in order, as the run starts from them.
        settled: blocks that a resumed run has already.
        identity: what decides which examples a position means.
        cut: how each replica's model is cut over workers; None: each is one.
        threads: of torch in each worker.
        workers: processes that load minibatches for each replica.
        device: where replicas compute.
        starts: how often this run has been started before.
        time_s: that the run had taken before [seconds].
    """

    job: Job
    model: nn.Module
    hollow: tuple[Tensor, ...]
    deferred: Deferred | None
    layout: Layout
    buffers: BufferSpace
    objective: Objective
    minibatches: Minibatches
    evaluation: Evaluation | None
    plan: WorkPlan
    rule: Rule | RulePerTensor
    local: Rule | None
    first: First
    books: tuple[SliceBook, ...]
    settled: BlockSet
    identity: Mapping[str, Any]
    cut: Cut | None
    threads: int
    workers: DataWorkers
    device: torch.device
    starts: int
    time_s: float

    @property
    def loop(self) -> DownpourLoop:
        strategy = self.job.strategy
        is_bounded = strategy.max_staleness is not None
        return DownpourLoop(
            n_fetch=strategy.n_fetch,
            n_push=strategy.n_push,
            has_local_steps=self.local is not None,
            # With overlap one lease more: the next is to be there before the last push is answered.
            ahead=0 if is_bounded else 2 if strategy.overlap else 1,
            overlaps=strategy.overlap,
            fetches_at_start=is_bounded,
        )

    def task(self, model: nn.Module) -> Task:
        """What a replica computes, with this model as its own."""
        return Task(
            model=model,
            objective=self.objective,
            minibatches=self.minibatches,
            layout=self.layout,
            local=self.local,
            clip_norm=self.job.clip_norm,
            streams=self.job.strategy.n_push == 1,
            seed=self.job.seed,
            workers=self.workers,
            device=self.device,
            cut=self.cut,
            value=None if self.deferred is None else self.deferred.value,
        )

    def states_of(self, shard: int) -> list[SliceState]:
        """The slices of one shard as the run starts from them, made here; for the one who is to have them."""
        specs = self.layout.slices_of(shard)
        if self.first.states is not None:
            return [self.first.states[spec.slice] for spec in specs]
        value = self.first.value if self.deferred is None else self.deferred.value
        return first_states(self.layout, specs, self.rule, value)

    @property
    def rhythm(self) -> Rhythm | None:
        """How often the only replica fetches, where not every block ends with a fetch; else None.

        With overlap a replica never has its own last push, and no moment is like a fresh start.
        """
        strategy = self.job.strategy
        is_even = strategy.n_fetch in (1, strategy.n_push) or strategy.max_staleness is not None
        if is_even or strategy.overlap or self.job.replicas > 1:
            return None
        return Rhythm(n_fetch=strategy.n_fetch, n_push=strategy.n_push)

    def buffers_at(self, memories: Sequence[Tensor], settled: BlockSet | None = None) -> dict[str, Tensor]:
        """The buffers that replicas have left, as one set; those of the start, if none has left any.

        Args:
            memories: of the replicas, the lowest first.
            settled: a checkpoint's positions; then each replica's buffers as of it, else its newest.
        """

        def is_part(epoch: int, position: int) -> bool:
            assert settled is not None
            return settled.cover(Block(self.plan.stage, epoch, position, position + 1)) is Cover.CONTAINED

        sets = [self.buffers.read(memory, None if settled is None else is_part) for memory in memories]
        left = [values for values in sets if values is not None]
        if left:
            return self.buffers.merge(left)
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def replicate(self) -> nn.Module:
        """Another model like the run's, sharing no memory with it; of a deferred one as much as there is."""
        return copy.deepcopy(self.model) if self.deferred is not None else replicate(self.job, self.model)

    def whole(self) -> nn.Module:
        """Another model like the run's, whole in any case."""
        return replicate(self.job, self.model)


def prepare(job: Job, checkpoint: Checkpoint | None = None) -> Prepared:
    """Check a job against its model and data, and derive what a run needs.

    Raises:
        ConfigError, DataError, ModelError: before anything is trained.
    """
    device = device_of(job.device)
    loading = as_source(job.train, job.batch_size)
    workers = _workers(job, loading)
    minibatches = _minibatches(job, loading, shuffle=job.shuffle)
    loss = None if job.step is not None else job.loss
    objective = Objective(loss=loss, step=job.step, precision=job.precision)
    if not (workers.num and workers.init):  # else what it needs may be there in workers only
        _check_batch(objective, minibatches)

    deferred = job.model(job.seed) if isinstance(job.model, ModelInParts) and is_cut(job) else None
    model = build(job) if deferred is None else deferred.model
    cut = cut_of(job, model, objective, minibatches, data_workers=workers.num)
    if deferred is not None:
        deferred.with_buffers()
    if checkpoint is not None:
        set_buffers(model, dict(checkpoint.buffers))
    whole = ParameterSpace.of(model, is_deferred=deferred is not None)
    space = whole if cut is None else cut.space(whole)
    layout = Layout.balanced(space, job.shards)
    evaluation = _evaluation(job, loading, objective, layout)
    if evaluation is not None:
        try_evaluation(evaluation, model, minibatches, lambda: replicate(job, model))
    rule = rule_per_tensor(job.strategy.rule, space)
    identity = {
        "num_examples": loading.source.num_examples,
        "batch_size": loading.batch_size,
        "drop_last": loading.drop_last,
        "shuffle": job.shuffle,
        "seed": job.seed,
        "schema": whole.schema_hash,
        "rule": state_form(job.strategy.rule),
    }
    if checkpoint is not None:
        _check_identity(checkpoint.identity, identity)
        states, books = relaid(checkpoint, layout)
        first = First(states=tuple(states))
    else:
        first, books = First(values=None if deferred is not None else trained(model)), first_books(layout)
    hollow: tuple[Tensor, ...] = ()
    if deferred is None:
        model, hollow = hollowed(model, is_ours=isinstance(job.model, nn.Module))
    return Prepared(
        job=job,
        model=model,
        hollow=hollow,
        deferred=deferred,
        layout=layout,
        buffers=BufferSpace.of(model, job.buffers),
        objective=objective,
        minibatches=minibatches,
        evaluation=evaluation,
        plan=_plan(job, minibatches),
        rule=rule,
        local=job.strategy.local_rule,
        first=first,
        books=tuple(books),
        settled=BlockSet() if checkpoint is None else checkpoint.settled,
        identity=identity,
        cut=cut,
        threads=job.threads or max(1, (os.cpu_count() or 1) // (job.replicas * job.num_partitions)),
        workers=workers,
        device=device,
        starts=0 if checkpoint is None else checkpoint.starts + 1,
        time_s=0.0 if checkpoint is None else checkpoint.time_s,
    )


def build(job: Job) -> nn.Module:
    """The job's model: a copy of the one given, or what the function returns under the job's seed."""
    if isinstance(job.model, nn.Module):
        return _on_cpu(replicate(job, job.model))
    return build_like(job.model, job.seed, {})


def build_like(
    function: Callable[[], nn.Module] | ModelInParts, seed: int, fixed: Mapping[str, Tensor]
) -> nn.Module:
    """What a model function returns under a seed, whole, with these values for what is not trained."""
    with random_state_kept():
        seed_everything(seed)
        try:
            model = function(seed).whole() if isinstance(function, ModelInParts) else function()
        except SquallError:
            raise
        except Exception as error:
            raise UserCodeError.of(error, role="the model function", step="") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            subject="the model function",
            expected="a torch.nn.Module to be returned",
            got=f"a {type(model).__name__}",
        )
    model = _on_cpu(model)
    with torch.no_grad():
        own = not_trained(model)
        for name, value in fixed.items():
            own[name].copy_(value)
    return model


def _on_cpu(model: nn.Module) -> nn.Module:
    """The model in ordinary memory, wherever its user had put it: replicas move their own copies."""
    away = any(parameter.device.type in ("cuda", "mps") for parameter in model.parameters())
    return model.to(CPU) if away else model


def not_trained(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers with values, by name; not copies."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    fixed: dict[str, Tensor] = {**frozen, **dict(model.named_buffers())}
    return {name: value for name, value in fixed.items() if not value.is_meta}


def replicate(job: Job, model: nn.Module) -> nn.Module:
    """Another model like `model`, sharing no memory with it: what is not trained has the same values."""
    if not isinstance(job.model, nn.Module):
        return build_like(job.model, job.seed, not_trained(model))
    try:
        other = copy.deepcopy(model)
    except Exception as error:
        raise ModelError(
            subject="model",
            expected="one that can be copied",
            got=f"{type(error).__name__}: {error}",
            remedy="Pass a function that returns it: model=lambda: Net().",
        ) from error
    for parameter in other.parameters():
        parameter.grad = None
    return other


def _minibatches(job: Job, loading: Loading, *, shuffle: bool) -> Minibatches:
    return Minibatches(
        loading.source, loading.batch_size, seed=job.seed, shuffle=shuffle, drop_last=loading.drop_last
    )


def _workers(job: Job, loading: Loading) -> DataWorkers:
    """The job's own number of them, or the DataLoader's."""
    return DataWorkers(
        num=job.data_workers or loading.num_workers,
        init=loading.worker_init,
        dataset=getattr(loading.source, "dataset", None),
    )


def _evaluation(job: Job, loading: Loading, objective: Objective, layout: Layout) -> Evaluation | None:
    if job.test is None:
        return None
    test = as_source(job.test, max(loading.batch_size, 256))
    brought = {"accuracy": accuracy} if objective.loss == "cross_entropy" else {}
    return Evaluation(
        test=Minibatches(test.source, test.batch_size, seed=0, shuffle=False),
        objective=objective,
        metrics={**brought, **job.metrics},
        layout=layout,
    )


def _check_batch(objective: Objective, minibatches: Minibatches) -> None:
    """Look at one batch, so that a wrong shape of it is said before any process starts."""
    if objective.step is not None:
        return
    try:
        with random_state_kept():
            batch, _ = minibatches.load(0, 0)
    except SquallError:
        raise
    except Exception as error:
        raise UserCodeError.of(error, role="the data set", step="epoch 0, position 0") from error
    pair(batch)


def _plan(job: Job, minibatches: Minibatches) -> WorkPlan:
    return WorkPlan(
        stage=0,
        minibatches_per_epoch=minibatches.num_minibatches,
        block_length=job.strategy.n_push,
        epochs=job.num_epochs,
        steps=job.num_steps,
        warm_start=job.strategy.warm_start,
    )


def first_books(layout: Layout) -> list[SliceBook]:
    """The books of all slices, as before any update."""
    return [SliceBook.new(spec.slice, spec.partition) for spec in layout.slices]


def _check_identity(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """A resumed run must mean the same examples by the same positions, and the same parameters."""
    for name, value in new.items():
        if old.get(name) != value:
            raise ConfigError(
                subject=f"resuming: {name}",
                expected=f"{old.get(name)!r}, as the run began",
                got=repr(value),
                remedy="Positions in the data, parameters or rule state would mean something else. "
                "Resume with the same, or start a new run with another out=.",
            )
