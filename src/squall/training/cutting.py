"""From a job to the cut of its model: the training graph, the plan, and what cannot be cut yet."""

from torch import nn

from squall.data.minibatches import Minibatches
from squall.errors import ConfigError
from squall.model.capture import capture
from squall.model.captured import Captured
from squall.model.deferred import ModelInParts
from squall.model.device import CPU, device_of
from squall.model.objective import Objective
from squall.model.randomness import random_state_kept
from squall.partition import planner
from squall.partition.coupling import refuse_coupled
from squall.partition.cut import Cut, WithLoss
from squall.partition.model_plan import Plan
from squall.training.job import Job


def is_cut(job: Job) -> bool:
    """Whether each replica's model is computed by the engine."""
    return job.partitions != 1 or job.microbatches != 1


def cut_of(
    job: Job, model: nn.Module, objective: Objective, minibatches: Minibatches, *, data_workers: int
) -> Cut | None:
    """How the job's model is cut; None for one partition.

    A number of partitions cuts through layers, each over all partitions; with microbatches, whole layers go to
    partitions, which then work at the same time on different microbatches.

    Raises:
        ConfigError: the plan does not fit the model, or the job asks for what cut models do not have yet.
        ModelError: the model cannot be captured.
    """
    if not is_cut(job):
        return None
    _refuse_not_built(job, data_workers)
    captured = captured_for(model, objective, minibatches)
    if isinstance(job.model, ModelInParts):
        _refuse_for_deferred(job, captured)
    if isinstance(job.partitions, Plan):
        plan = job.partitions.on(captured.graph)
    else:
        make = planner.vertical if job.microbatches == 1 else planner.horizontal
        plan = make(captured.graph, job.partitions)
    plan.check(captured.graph)
    cut = Cut(captured=captured, plan=plan, microbatches=job.microbatches)
    if job.microbatches > 1:
        refuse_coupled(captured.graph, cut.loss)
    return cut


def captured_for(model: nn.Module, objective: Objective, minibatches: Minibatches) -> Captured:
    """The training graph of a model: a minibatch in, its mean loss out. Plans of a job are plans of this graph."""
    with random_state_kept():
        batch, _ = minibatches.load(0, 0)
    return capture(WithLoss(model, objective), (batch,))


def _refuse_for_deferred(job: Job, captured: Captured) -> None:
    """Say what needs a whole model."""
    for subject, is_asked, why in (
        ("Job(record=True)", job.record, "the first values of a deferred model, which the launcher has not"),
        (
            "an opaque module",
            bool(captured.opaques),
            "one in a deferred model, whose parameters nobody makes",
        ),
    ):
        if is_asked:
            raise ConfigError(
                subject=subject,
                expected="a model that is whole",
                got=why,
                remedy="Give the module itself, or a function that returns it, instead of squall.deferred(...).",
            )


def _refuse_not_built(job: Job, data_workers: int) -> None:
    """Say what does not go together with partitions yet."""
    for name, is_asked, instead in (
        ("precision", job.precision is not None, "None"),
        ("device", device_of(job.device) != CPU, "'cpu'"),
        ("data_workers", data_workers > 0, "0, also in a DataLoader"),
    ):
        if is_asked:
            raise ConfigError(
                subject=f"Job({name}=) of a model that is cut over partitions",
                expected=instead,
                got=repr(getattr(job, name)),
                remedy="This version does not have both yet: leave one out.",
            )
