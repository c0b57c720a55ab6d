"""What a cluster is asked to do, and what it answers: the border between a run and where it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

from torch import Tensor

from squall.errors import SquallError
from squall.observe.events import Checkpointed
from squall.training.best import BestKeeper
from squall.training.directory import RunDirectory
from squall.training.job import Job
from squall.training.keeping import CheckpointKeeper
from squall.training.prepare import Prepared
from squall.training.recorder import Recorder


class RunClock:
    """Seconds since a run began: real ones, unless a simulation has it follow its own.

    Attributes:
        began: on this host's monotonic clock, the moment that counts as second 0 of the run.
        is_virtual: whether it follows a simulation.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.is_virtual = False
        self.now: Callable[[], float] = self.real

    def real(self) -> float:
        return monotonic() - self.began

    def follow(self, now: Callable[[], float]) -> None:
        """Tell virtual seconds from now on."""
        self.now, self.is_virtual = now, True


Traffic = dict[tuple[str, str], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One run, ready to be carried out.

    Attributes:
        prepared: what to run.
        directory: where the roles leave their files.
        recorder: whom to tell.
        best: keeps the best model, if that is asked for.
        checkpoints: of the run; the last is stored when nothing more is pushed, and sealed by whoever asked.
        may_go_on: asked often; a text says why the run should stop.
        clock: of the run.
        on_sealed: called with the folder of each checkpoint that has become whole.
    """

    prepared: Prepared
    directory: RunDirectory
    recorder: Recorder
    best: BestKeeper | None
    checkpoints: CheckpointKeeper
    may_go_on: Callable[[], str | None]
    clock: "RunClock"
    on_sealed: Callable[[Path], None] = lambda folder: None

    def seal(self) -> None:
        """Complete the checkpoint that is on its way, if all of it is there."""
        if (sealed := self.checkpoints.seal()) is not None:
            self.on_sealed(sealed.path)
            told = Checkpointed(time_s=self.now(), path=str(sealed.path), minibatches=sealed.minibatches)
            self.recorder.happened(told)

    def now(self) -> float:
        """Seconds since the run began, by the run's clock."""
        return self.clock.now()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an execution ended. Its last checkpoint is stored by then, without its manifest.

    Attributes:
        why: a word: "steps", "epochs", "time", or what `may_go_on` said.
        checkpoint: name of the last one.
        buffers: one merged set, as of it.
        traffic: what went from whom to whom: (bytes, messages).
        minibatches: settled on every slice, from the run's beginning.
        error: what the run failed with, though its checkpoint is good; None if it did not.
    """

    why: str
    checkpoint: str
    buffers: Mapping[str, Tensor]
    traffic: Traffic
    minibatches: int
    error: SquallError | None = None


class Cluster(Protocol):
    """Where runs are carried out; a value."""

    @property
    def is_modelled(self) -> bool:
        """Whether no gradient is computed there: a run has a ledger then, but neither losses nor a model."""
        ...

    def expect(self, job: Job) -> None:
        """Refuse a job that cannot be carried out there, before anything has started.

        Raises:
            ConfigError: says what of it.
        """
        ...

    def run(self, execution: Execution) -> Ending:
        """Carry out a run to its end.

        Raises:
            RunError: it could not finish; nothing of it is left running.
        """
        ...


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
