"""What a user asks for: one value that says model, data, strategy and cluster."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from squall.errors import ConfigError
from squall.faults import Fault, expect_roles, faults_of
from squall.keywords import named
from squall.model.deferred import ModelInParts
from squall.model.objective import Loss, Metric, Step
from squall.model.precision import check_precision
from squall.partition.model_plan import Plan
from squall.training.durability import Durability, check_durability
from squall.training.strategies import Downpour, expect_whole

ModelLike = nn.Module | Callable[[], nn.Module] | ModelInParts


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a job came from, so that the command line can make it again.

    Attributes:
        name: a recipe's name, or the path of a Python file.
        function: which function of it.
        settings: ``("strategy.n_push", "5")`` and the like, as given with ``--set``.
        hash: sha256 of the file's text.
    """

    name: str
    function: str
    settings: tuple[tuple[str, str], ...]
    hash: str


@named
@dataclass(frozen=True)
class Job:
    """One training run, as a value; nothing happens before `squall.fit` or `squall.start`.

    Args:
        model: an `nn.Module`, which is not changed, a function that returns one, or `squall.deferred` of such a function.
        train: a `squall.data.Source`, a map-style Dataset, a DataLoader (its dataset, batch size, drop_last,
            collate_fn, num_workers and worker_init_fn are taken), or any pytree of tensors or arrays with a
            common first dimension.
        loss: a name ("cross_entropy", "mse", "l1", "bce_with_logits", "nll"), a loss module, or
            ``loss(output, target)`` returning the mean over the minibatch.
        step: instead of `loss`: ``step(model, batch)`` returning the mean, or (sum, weight), for any batch.
        test: what to evaluate on, of the same kinds as `train`.
        metrics: name to ``function(output, target)``; cross_entropy brings "accuracy".
        strategy: how replicas teach one another.
        replicas, shards: how many of each.
        partitions: over how many workers each replica's model is cut: a number, or what `squall.plan` made. A number
            cuts through layers; with `microbatches`, between layers.
        microbatches: in how many parts, at most, a minibatch is computed by a model that is cut, so that workers whose
            layers follow one another are busy at the same time. The gradient is the same.
        batch_size: examples in a minibatch; a DataLoader's own wins.
        epochs, steps, time_s: the run ends at whichever comes first; none given: one epoch. `steps` counts
            minibatches over all replicas.
        shuffle: draw a new order each epoch.
        data_workers: processes of each replica that load minibatches ahead, under `squall.Local`; 0: as many as
            the DataLoader given as `train` has. Results do not depend on it.
        device: where replicas compute: "cpu", "cuda", "cuda:1" or "mps". Parameters, updates and evaluation stay
            in ordinary memory, so each swap and each gradient is a copy. Nobody has run this on a GPU yet.
        clip_norm: scale each minibatch's gradient down to this norm, over all tensors together; None: never.
        precision: "bfloat16": forward, loss and metrics under torch's autocast, in training, evaluation and
            `Run.predict`; parameters and gradients keep their dtypes. None: all in the model's own dtypes.
        evaluate_every: epochs between evaluations, a float.
        checkpoint_every: epochs between checkpoints while the run goes on, a float; None: there is one at its end and
            when it is stopped. Each is one cut: all slices hold the same work, and
            ``resume=True`` goes on from the newest whole one, also after every process has been killed.
        keep_best: name of a metric; the model that an evaluation finds best by it is kept as ``best.safetensors``
            (`Run.best`). "accuracy" and the like: the larger the better; names with "loss" or "error": the smaller.
        patience: end the run after so many evaluations in a row that were not better by `keep_best`.
        durability: what a shard that is killed comes back with, under `squall.Local` and `squall.Simulated`. "ack": every push that was
            acknowledged. `squall.Interval(seconds)`: all but what was applied since it was last written down; that work
            is done again. "none": nothing, so that its death ends the run.
        record: keep every applied gradient in the run directory.
        cluster: where it runs; None: `squall.Local()`.
        buffers: name pattern to how replicas' buffers become one for evaluation and export: "mean", "max" or
            "first"; by default the mean of floating-point ones, the maximum of integer ones.
        threads: of torch in each replica; None: cores divided by replicas.
        seed: of order, randomness and a model function.
        out: the run directory; None: a temporary one, which the summary names.
        progress: show the live view.
        loggers: told every event, as `squall.TensorBoard(directory)`.
        keep_checkpoints: how many whole checkpoints stay, the newest ones; the last whole one is never removed.
        checkpoint_to: a URL of fsspec's, as ``"s3://bucket/runs/a"``: each whole checkpoint is copied there while the run goes
            on, its manifest last, and as many stay as here; `fit` returns when the last one is there.
            ``resume=True`` goes on from there, too, also where the run directory is gone.
        chaos: what is to go wrong, in the language of `squall.faults`, as in ``"kill:replica@p=0.01"``; drawn from the
            run's seed.

    Raises:
        ConfigError: the request contradicts itself or asks for what is not built yet.

    >>> job = Job(nn.Linear(3, 1), train=None, replicas=0)
    Traceback (most recent call last):
        ...
    squall.errors.ConfigError: Job(replicas=): expected a whole number of at least 1, but got 0.
    """

    model: ModelLike
    train: Any
    loss: Loss = "cross_entropy"
    step: Step | None = None
    test: Any = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    strategy: Downpour = field(default_factory=Downpour)
    replicas: int = 2
    partitions: int | Plan = 1
    microbatches: int = 1
    shards: int = 1
    batch_size: int = 64
    epochs: int | None = None
    steps: int | None = None
    time_s: float | None = None
    shuffle: bool = True
    data_workers: int = 0
    clip_norm: float | None = None
    precision: str | None = None
    device: str = "cpu"
    buffers: Mapping[str, str] = field(default_factory=dict)
    evaluate_every: float = 1.0
    checkpoint_every: float | None = None
    keep_best: str | None = None
    patience: int | None = None
    durability: Durability = "none"
    record: bool = False
    cluster: Any = None
    threads: int | None = None
    seed: int = 0
    out: str | PathLike[str] | None = None
    progress: bool = True
    loggers: tuple[Any, ...] = ()
    chaos: str | Sequence[Fault] = ()
    keep_checkpoints: int = 2
    checkpoint_to: str | None = None
    recipe: Recipe | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_kinds()
        self.expect_roles(self.faults, "Job(chaos=)")

    def expect_roles(self, faults: Sequence[Fault], where: str) -> None:
        """Refuse faults of roles that a run of this job does not have.

        Raises:
            ConfigError: names the fault, the role, and `where` it was given.
        """
        has_evaluator = self.test is not None
        expect_roles(
            faults, replicas=self.replicas, shards=self.shards, has_evaluator=has_evaluator, where=where
        )

    def _check_counts(self) -> None:
        for name in ("replicas", "partitions", "microbatches", "shards", "batch_size", "keep_checkpoints"):
            if name == "partitions" and isinstance(self.partitions, Plan):
                continue
            expect_whole(f"Job({name}=)", getattr(self, name), 1)
        for name in ("epochs", "steps", "threads", "patience"):
            if getattr(self, name) is not None:
                expect_whole(f"Job({name}=)", getattr(self, name), 1)
        for name in ("seed", "data_workers"):
            expect_whole(f"Job({name}=)", getattr(self, name), 0)
        for name in ("time_s", "evaluate_every", "checkpoint_every", "clip_norm"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not value > 0):
                raise ConfigError(subject=f"Job({name}=)", expected="a number above 0", got=repr(value))
        every = self.checkpoint_every
        if every is not None and (isinstance(every, bool) or not isfinite(every)):
            raise ConfigError(
                subject="Job(checkpoint_every=)",
                expected="a number above 0, of epochs",
                got=repr(every),
                remedy="None: a checkpoint at the end only.",
            )

    def _check_kinds(self) -> None:
        check_precision(self.precision)
        check_durability(self.durability)
        if not isinstance(self.model, nn.Module) and not callable(self.model):
            raise ConfigError(
                subject="Job(model=)",
                expected="a torch.nn.Module, or a function that returns one",
                got=f"a {type(self.model).__name__}",
            )
        if isinstance(self.model, type):
            raise ConfigError(
                subject="Job(model=)",
                expected="a torch.nn.Module, or a function that returns one",
                got=f"the class {self.model.__name__}",
                remedy=f"Pass {self.model.__name__}(...), or lambda: {self.model.__name__}(...).",
            )
        if not isinstance(self.strategy, Downpour):
            raise ConfigError(
                subject="Job(strategy=)", expected="squall.Downpour(...)", got=repr(self.strategy)
            )
        if self.patience is not None and self.keep_best is None:
            raise ConfigError(
                subject="Job(patience=)",
                expected="keep_best=, the metric that it watches",
                got="none",
            )
        if self.strategy.steps is not None and self.steps is not None and self.strategy.steps != self.steps:
            raise ConfigError(
                subject="Job(steps=) and Downpour(steps=)",
                expected="one of them, or the same number",
                got=f"{self.steps} and {self.strategy.steps}",
            )

    @property
    def num_partitions(self) -> int:
        return self.partitions.partitions if isinstance(self.partitions, Plan) else self.partitions

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What is to go wrong."""
        return faults_of(self.chaos, "Job(chaos=)")

    @property
    def num_steps(self) -> int | None:
        return self.steps if self.steps is not None else self.strategy.steps

    @property
    def num_epochs(self) -> int | None:
        """Passes over the data; one if nothing else bounds the run."""
        if self.epochs is None and self.num_steps is None and self.time_s is None:
            return 1
        return self.epochs

    @property
    def directory(self) -> Path | None:
        return None if self.out is None else Path(self.out)
