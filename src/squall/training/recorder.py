"""What a run tells: it turns reports into events, keeps them in the run directory, and passes them on."""

from collections.abc import Callable
from dataclasses import replace

from squall.blocks import Block
from squall.observe.events import (
    Evaluated,
    Event,
    Joined,
    Left,
    Link,
    Progress,
    Recovered,
    Redone,
    Refused,
    RoleStatus,
    Unkept,
)
from squall.observe.meter import ProgressMeter
from squall.observe.metrics import MetricsLog
from squall.training.best import BestKeeper

SHOWN_EVERY_S = 0.2
KEPT_EVERY_S = 0.05
KEPT_SHARE = 1 / 300
"""A long run keeps a line of progress each time it has become longer by this share."""
MOST_ROLES_KEPT = 64
"""Of more roles than that, a kept line does not say what each one has done; the ledger does."""


NO_BETTER = "no better"


class Patience:
    """Counts evaluations in a row that were not better than the best before."""

    def __init__(self, best: BestKeeper, allowed: int) -> None:
        self._best = best
        self._allowed = allowed
        self._value = best.best()
        self._in_a_row = 0

    def saw(self, event: Evaluated) -> None:
        value = event.metrics[self._best.metric]
        if self._best.is_better(value, self._value):
            self._value, self._in_a_row = value, 0
        else:
            self._in_a_row += 1

    @property
    def is_over(self) -> bool:
        return self._in_a_row >= self._allowed


class Recorder:
    """Gathers what happens in a run, for people and for `metrics.jsonl`.

    Args:
        log: where events are kept.
        publish: called with every event, in order.
        total_minibatches: at which the run ends, if known.
        minibatches: done before, in a run that is resumed.
        evaluate_every: minibatches between evaluations; None: never.
        patience: ends the run when evaluations stop getting better; None: they do not matter.
        roles: everyone who belongs to the run.
        now: when the run, or this part of it, began [seconds].
        redone: blocks that earlier parts of the run had to do again.
    """

    def __init__(
        self,
        *,
        log: MetricsLog,
        publish: Callable[[Event], None],
        total_minibatches: int | None,
        minibatches: int,
        evaluate_every: float | None,
        patience: Patience | None,
        roles: tuple[str, ...],
        now: float,
        redone: int = 0,
    ) -> None:
        self._redone_before, self._redone = redone, set[Block]()
        self.meter = ProgressMeter(now=now, minibatches=minibatches)
        self.epoch = 0
        self.refused: list[Refused] = []
        self.connections_refused = 0
        self.recovered: list[Recovered] = []
        self.unkept: dict[str, str] = {}  # by role, why its state could not be kept on disk
        self.last_evaluation: Evaluated | None = None
        self._patience = patience
        self._log = log
        self._publish = publish
        self._total = total_minibatches
        self._evaluate_every = evaluate_every
        self._evaluated_at = minibatches
        self._minibatches_of = dict.fromkeys(roles, 0)
        self._states: dict[str, str] = dict.fromkeys(roles, "starting")
        self._shown_at = now - SHOWN_EVERY_S
        self._kept_at = now
        self._kept_minibatches = minibatches

    def closed(
        self, now: float, *, role: str, block: Block, examples: int, loss_sum: float | None, staleness: float
    ) -> None:
        """A block is done on every slice; `loss_sum` is None if nobody computed a loss."""
        self.epoch = max(self.epoch, block.epoch)
        self._minibatches_of[role] = self._minibatches_of.get(role, 0) + block.num_minibatches
        self._states[role] = "working"
        self.meter.add(
            now,
            minibatches=block.num_minibatches,
            examples=examples,
            loss_sum=loss_sum,
            staleness=[staleness],  # type: ignore[list-item]
        )

    def found(self, now: float, *, block: Block) -> None:
        """A block is done on every slice, and nobody is left who could tell how it went."""
        self.epoch = max(self.epoch, block.epoch)
        self.meter.add(now, minibatches=block.num_minibatches, examples=0, loss_sum=None)

    def happened(self, event: Event) -> None:
        """Something that is told once."""
        match event:
            case Joined(role=role):
                self._states[role] = "waiting"
            case Left(role=role, why=why):
                self._states[role] = "left" if why in ("steps", "epochs", "time") else "lost"
            case Redone(block=block):
                self._redone.add(block)
            case Refused():
                self.refused.append(event)
            case Recovered(role=role):
                self.recovered.append(event)
                self._states[role] = "working"
            case Unkept(role=role, why=why):
                self.unkept[role] = why or self.unkept.get(role, "")
            case Evaluated():
                self.last_evaluation = event
                if self._patience is not None:
                    self._patience.saw(event)
        self._log.append(event)
        self._publish(event)

    def counted_redone(self, blocks: int) -> None:
        """The ledger is complete, and says how many blocks were done again in all."""
        self._redone_before, self._redone = blocks, set()

    def reason_to_stop(self) -> str | None:
        """Why the run should end by what was measured; None if it should not."""
        return NO_BETTER if self._patience is not None and self._patience.is_over else None

    def is_evaluation_due(self) -> bool:
        """Whether so many minibatches are done that another evaluation should begin; says so once."""
        done = self.meter.minibatches
        if self._evaluate_every is None or done < self._evaluated_at + self._evaluate_every:
            return False
        if self._total is not None and done >= self._total:
            return False  # the end brings one of its own
        # From where it should have been, so that lateness does not add up; skipped ones are not made up for.
        behind = (done - self._evaluated_at) // self._evaluate_every
        self._evaluated_at += int(behind * self._evaluate_every)
        return True

    def tick(
        self, now: float, *, waits: tuple[str, ...] = (), links: tuple[Link, ...] = (), final: bool = False
    ) -> None:
        """Time has passed: tell how it goes, if it is time to."""
        is_shown = final or now - self._shown_at >= SHOWN_EVERY_S
        is_kept = final or (
            self.meter.minibatches > self._kept_minibatches
            and now - self._kept_at >= max(KEPT_EVERY_S, now * KEPT_SHARE)
        )
        if not is_shown and not is_kept:
            return
        progress = self.progress(now, waits=waits, links=links)
        if is_kept:
            few = len(progress.roles) <= MOST_ROLES_KEPT
            self._log.append(progress if few else replace(progress, roles=()))
            self._kept_at, self._kept_minibatches = now, self.meter.minibatches
        if is_shown:
            self._publish(progress)
            self._shown_at = now

    def progress(self, now: float, *, waits: tuple[str, ...] = (), links: tuple[Link, ...] = ()) -> Progress:
        roles = tuple(
            RoleStatus(name=name, state=state, minibatches=self._minibatches_of.get(name, 0))  # type: ignore[arg-type]
            for name, state in self._states.items()
        )
        progress = self.meter.progress(
            now,
            stage=0,
            epoch=self.epoch,
            total_minibatches=self._total,
            links=links,
            roles=roles,
            waits=waits,
        )
        return replace(progress, blocks_redone=self._redone_before + len(self._redone))

    def serving(self, role: str) -> None:
        """A role that trains nothing is there."""
        self._states[role] = "working"
