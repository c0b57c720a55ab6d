"""From reports about blocks to figures worth looking at: rates and means over the last seconds.

A decider: time comes in as an argument, so the same meter runs in real and in virtual time.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from squall.observe.events import Link, Progress, RoleStatus

WINDOW_S = 5.0
FEWEST_REPORTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    time_s: float
    minibatches: int
    examples: int
    pushes: int
    loss_sum: float | None
    staleness_sum: float
    num_staleness: int


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
        self.minibatches = minibatches
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
        self._reports.append(
            _Report(
                time_s=now,
                minibatches=minibatches,
                examples=examples,
                pushes=pushes,
                loss_sum=loss_sum,
                staleness_sum=float(sum(staleness)),
                num_staleness=len(staleness),
            )
        )
        self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._reports) > FEWEST_REPORTS and self._reports[0].time_s <= now - WINDOW_S:
            self._since = self._reports.popleft().time_s

    def _start_of_window(self, now: float) -> float:
        if self._reports and self._reports[0].time_s > now - WINDOW_S:
            return max(self._since, now - WINDOW_S)
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
    known = [(report.loss_sum, report.minibatches) for report in reports if report.loss_sum is not None]
    done = sum(minibatches for _, minibatches in known)
    return sum(loss for loss, _ in known) / done if done else None


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
