"""From reports about blocks to figures worth looking at: rates and means over the last seconds.

A decider: time comes in as an argument, so the same meter runs in real and in virtual time.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from squall.observe.events import Link, Progress, RoleStatus

WINDOW_S = 5.0
FEWEST_REPORTS = 8
GRAIN_S = 0.05
"""So that a window holds a hundred reports, however many blocks a second are done."""


@dataclass(slots=True, kw_only=True)
class _Report:
    """What was done up to `time_s`; blocks that follow within `GRAIN_S` of its first are added to it."""

    began: float
    time_s: float
    minibatches: int = 0
    examples: int = 0
    pushes: int = 0
    loss_sum: float = 0.0
    num_losses: int = 0
    staleness_sum: float = 0.0
    num_staleness: int = 0


class ProgressMeter:
    """Gathers what was done and says how it goes.

    Figures are taken over the last `WINDOW_S` seconds, or over the last `FEWEST_REPORTS` reports where these
    go further back, so that a slow run's rates do not flicker between nothing and much. When no report
    comes any more, rates fall toward zero; they never stand still at what once was.

    Args:
        now: when the run (or this part of it) began [seconds].
        minibatches: done before, in a run that is resumed.

    >>> meter = ProgressMeter(now=0.0)
    >>> for second in range(1, 11):
    ...     meter.add(float(second), minibatches=2, examples=128, loss_sum=1.0, staleness=[1])
    >>> progress = meter.progress(10.0, stage=0, epoch=0)
    >>> progress.minibatches, progress.train_loss, progress.examples_per_second, progress.staleness
    (20, 0.5, 128.0, 1.0)
    """

    def __init__(self, *, now: float, minibatches: int = 0) -> None:
        self.minibatches = self.minibatches_before = minibatches
        # The reports of the window, oldest first; `_since` is when the one before them came.
        self._reports: deque[_Report] = deque()
        self._since = now

    def add(
        self,
        now: float,
        *,
        minibatches: int,
        examples: int,
        loss_sum: float | None,
        staleness: tuple[int, ...] | list[int] = (),
        pushes: int = 1,
    ) -> None:
        """Take in one finished block.

        Args:
            now: when, not before the last report [seconds].
            minibatches, examples: what it held.
            loss_sum: sum over its minibatches of each one's mean loss; None: nobody computed any.
            staleness: of its pushes, one for each slice that was told [updates].
            pushes: how many pushes it took.
        """
        self.minibatches += minibatches
        report = self._reports[-1] if self._reports else None
        if report is None or now - report.began >= GRAIN_S:
            report = _Report(began=now, time_s=now)
            self._reports.append(report)
            self._forget(now)
        report.time_s = now
        report.minibatches += minibatches
        report.examples += examples
        report.pushes += pushes
        report.staleness_sum += sum(staleness)
        report.num_staleness += len(staleness)
        if loss_sum is not None:
            report.loss_sum += loss_sum
            report.num_losses += minibatches

    def _forget(self, now: float) -> None:
        while len(self._reports) > FEWEST_REPORTS and self._reports[0].time_s <= now - WINDOW_S:
            self._since = self._reports.popleft().time_s

    def _start_of_window(self, now: float) -> float:
        start = now - WINDOW_S
        if self._reports and self._reports[0].time_s > start and self._since < start - GRAIN_S:
            return start  # the report before the window's first came long before
        return self._since

    def progress(
        self,
        now: float,
        *,
        stage: int,
        epoch: int,
        total_minibatches: int | None = None,
        links: tuple[Link, ...] = (),
        roles: tuple[RoleStatus, ...] = (),
        waits: tuple[str, ...] = (),
    ) -> Progress:
        """Say how it goes at `now`; what the meter cannot know is passed through."""
        self._forget(now)
        seconds = now - self._start_of_window(now)
        heard = sum(report.num_staleness for report in self._reports)
        return Progress(
            time_s=now,
            stage=stage,
            epoch=epoch,
            minibatches=self.minibatches,
            total_minibatches=total_minibatches,
            train_loss=_mean_loss(self._reports),
            examples_per_second=_rate(sum(report.examples for report in self._reports), seconds),
            pushes_per_second=_rate(sum(report.pushes for report in self._reports), seconds),
            staleness=sum(report.staleness_sum for report in self._reports) / heard if heard else None,
            links=links,
            roles=roles,
            waits=waits,
        )


def _mean_loss(reports: Iterable[_Report]) -> float | None:
    done = sum(report.num_losses for report in reports)
    return sum(report.loss_sum for report in reports) / done if done else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
