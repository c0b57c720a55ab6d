"""The live view: what a run tells, as one table on a terminal, or as plain lines anywhere else."""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from squall.observe.events import (
    AlsoFailed,
    Checkpointed,
    Disturbed,
    Ended,
    Evaluated,
    Event,
    Joined,
    Left,
    Link,
    Progress,
    Recovered,
    Redone,
    Refused,
    RoleState,
    RoleStatus,
    Silent,
    Unkept,
)
from squall.observe.units import human_bytes, human_rate, human_seconds, one_line

LINE_EVERY_S = 2.0
REFRESH_EVERY_S = 0.1
MOST_NAMED = 3


class LiveView:
    """Shows a run's events one by one, on the console that it is given.

    On a terminal one table is redrawn in place; anything else (a pipe, a file, a log of a batch system) gets
    plain lines: one about progress every two seconds at most, and one for each event worth a line.
    The terminal is as it was before when the ``with`` block is left, whatever the reason.

    Args:
        console: where to.
        total_replicas: how many replicas the run asked for.
        title: heads the table.
        clock: seconds that never run backward; real ones, since people read in real time.

    >>> import io
    >>> out = io.StringIO()
    >>> with LiveView(Console(file=out), total_replicas=2) as view:
    ...     view.show(Ended(time_s=3.0, why="all steps are done"))
    >>> out.getvalue()
    '   3.0 s  ended: all steps are done\\n'
    """

    def __init__(
        self,
        console: Console,
        *,
        total_replicas: int,
        title: str = "squall",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._board = Board(total_replicas=total_replicas, title=title, now=clock())
        self._live: Live | None = None
        self._last_shown: float | None = None

    def __enter__(self) -> Self:
        # An "interactive" console is a terminal that can move its cursor.
        if self._console.is_interactive:
            self._live = Live(self._board.table(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            try:
                live.update(self._board.table())
            finally:
                live.stop()

    def show(self, event: Event) -> None:
        """Take in one event, and draw or write what is due."""
        now = self._clock()
        line = self._board.take(event, now)
        may_wait = isinstance(event, Progress)
        if self._live is not None:
            if not may_wait or self._is_due(now, REFRESH_EVERY_S):
                self._live.update(self._board.table(), refresh=True)
        elif line is not None and (not may_wait or self._is_due(now, LINE_EVERY_S)):
            self._write(line)

    def _write(self, line: str) -> None:
        # A pipe may know fewer letters than a user's error message has.
        line = line.encode(self._console.encoding, "replace").decode(self._console.encoding)
        # A line stays one line, however narrow the console: others will search and cut it.
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _is_due(self, now: float, every_s: float) -> bool:
        if self._last_shown is not None and now - self._last_shown < every_s:
            return False
        self._last_shown = now
        return True


class Board:
    """What is known of a run right now, and how it reads; takes time as an argument and writes nothing."""

    def __init__(self, *, total_replicas: int, title: str, now: float) -> None:
        self._total_replicas = total_replicas
        self._title = title
        self._began = self._now = now
        self._progress: Progress | None = None
        self._evaluated: Evaluated | None = None
        self._num_refused = 0
        # (real time, minibatches) of the last minute or so: how fast the end comes nearer.
        self._pace: deque[tuple[float, int]] = deque(maxlen=60)
        self._gone: set[str] = set()
        self._news: deque[str] = deque(maxlen=MOST_NAMED)

    def take(self, event: Event, now: float) -> str | None:
        """Remember an event that came at `now` [real seconds].

        Returns:
            one line about it; None if it is not worth one (the first start of a role).
        """
        self._now = now
        self._remember(event)
        words = self._words(event)
        if isinstance(event, Joined):
            self._gone.discard(event.role)
        if words is None:
            return None
        line = f"{event.time_s:6.1f} s  {one_line(words)}"
        if not isinstance(event, Progress):
            self._news.append(line.strip())
        return line

    def _remember(self, event: Event) -> None:
        match event:
            case Progress():
                self._progress = event
                if not self._pace or self._now - self._pace[-1][0] >= 1.0:
                    self._pace.append((self._now, event.minibatches))
            case Evaluated():
                self._evaluated = event
            case Refused():
                self._num_refused += 1
            case Recovered():
                self._gone.discard(event.role)
            case Left():
                self._gone.add(event.role)
            case _:
                pass

    # Words --------------------------------------------------------------------------------------------

    def _words(self, event: Event) -> str | None:
        match event:
            case Progress():
                return ", ".join(part for part in self._progress_words(event) if part)
            case Evaluated():
                return f"evaluated after {event.minibatches:,} minibatches: {_metric_words(event)}"
            case Joined():
                return f"{event.role} is back" if event.role in self._gone else None
            case Left():
                return f"lost {event.role}: {event.why}"
            case Redone():
                return (
                    f"redone: {event.block}, attempt {event.attempt}, by replica {event.replica}: {event.why}"
                )
            case Refused():
                return f"refused: {event.block}: {event.why}"
            case Checkpointed():
                return f"checkpoint after {event.minibatches:,} minibatches: {event.path}"
            case Recovered():
                lost = (
                    f"without {event.lost:,} minibatches, which are done again"
                    if event.lost
                    else "without a loss"
                )
                return f"{event.role} is back, {lost}"
            case Unkept():
                return (
                    f"{event.role} cannot keep its state on disk: {event.why}"
                    if event.why
                    else f"{event.role} keeps its state on disk again"
                )
            case Silent():
                seconds = f"{event.seconds:.0f} s"
                return (
                    f"{event.waiting[0]} waits for {event.role}, which has not answered for {seconds}"
                    if event.waiting
                    else f"the wait for {event.role} is over, after {seconds}"
                )
            case Disturbed():
                return f"chaos, {event.fault}: {_STRIKES[event.what]} {event.role}"
            case AlsoFailed():
                return f"failed as well: {event.error}"
            case Ended():
                # Not the error: whoever the run raises it to shows it, once.
                return f"ended: {event.why}"

    def _progress_words(self, progress: Progress) -> list[str]:
        return [
            f"epoch {progress.epoch}",
            _done_words(progress),
            "" if progress.train_loss is None else f"loss {progress.train_loss:.4g}",
            f"{human_rate(progress.examples_per_second)} examples/s",
            "" if progress.staleness is None else f"staleness {progress.staleness:.2f}",
            self._alive_words(progress.roles),
            self._left_words(progress),
            *_few(list(progress.waits), 1),
        ]

    def _left_words(self, progress: Progress) -> str:
        (then, done_then), (now, done) = (
            (self._pace[0], self._pace[-1]) if self._pace else ((0.0, 0), (0.0, 0))
        )
        if not progress.total_minibatches or done <= done_then:
            return ""
        rest = max(progress.total_minibatches - progress.minibatches, 0)
        return f"{human_seconds(rest * (now - then) / (done - done_then))} left"

    def _alive_words(self, roles: tuple[RoleStatus, ...]) -> str:
        replicas: dict[str, bool] = {}
        for role in roles:
            if role.name.startswith("replica"):
                # A replica is alive only as a whole: "replica0.1" is a partition of "replica0".
                name = role.name.partition(".")[0]
                replicas[name] = replicas.get(name, True) and role.state in ("working", "waiting")
        return f"{sum(replicas.values())} of {self._total_replicas} replicas alive" if replicas else ""

    # The table ----------------------------------------------------------------------------------------

    def table(self) -> RenderableType:
        """The whole view as one table, which fits any width."""
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(ratio=1, overflow="fold")
        for name, content in self._rows():
            # Text, not str: what users and errors say must not be read as markup.
            grid.add_row(name, Text(content) if isinstance(content, str) else content)
        return Panel(grid, title=Text(one_line(self._title)), title_align="left", border_style="blue")

    def _rows(self) -> list[tuple[str, RenderableType]]:
        progress = self._progress
        gone = human_seconds(self._now - self._began)
        if progress is None:
            rows: list[tuple[str, RenderableType]] = [
                ("time", f"{gone}, starting {self._total_replicas} replicas")
            ]
        else:
            rows = self._progress_rows(progress, gone)
        if self._news:
            rows.append(("news", "\n".join(self._news)))
        return rows

    def _progress_rows(self, progress: Progress, gone: str) -> list[tuple[str, RenderableType]]:
        left = self._left_words(progress)
        rate = f"{human_rate(progress.examples_per_second)} examples/s, {human_rate(progress.pushes_per_second)} pushes/s"
        staleness = "" if progress.staleness is None else f"{progress.staleness:.2f} updates"
        rows: list[tuple[str, RenderableType]] = [
            ("done", f"{_done_words(progress)}, epoch {progress.epoch}"),
            ("", _bar(progress)),
            ("time", f"{gone} so far" + (f", about {left}" if left else "")),
            ("loss", "" if progress.train_loss is None else f"{progress.train_loss:.4g}"),
            ("test", "" if self._evaluated is None else _metric_words(self._evaluated)),
            ("speed", rate),
            ("staleness", staleness),
            ("links", _link_words(progress.links)),
            ("alive", self._alive_words(progress.roles).removesuffix(" alive")),
            *_role_rows(progress.roles),
            ("waits", Text("\n".join(_few([one_line(wait) for wait in progress.waits])), style="yellow")),
            ("blocks", f"{progress.blocks_redone:,} redone, {self._num_refused:,} refused"),
        ]
        return [(name, content) for name, content in rows if content]


_STRIKES = {"kill": "kills", "stop": "stops", "go on": "lets go of"}


def _done_words(progress: Progress) -> str:
    if not progress.total_minibatches:
        return f"{progress.minibatches:,} minibatches"
    share = 100 * progress.minibatches // progress.total_minibatches
    return f"{progress.minibatches:,} of {progress.total_minibatches:,} minibatches ({share} %)"


def _bar(progress: Progress) -> RenderableType:
    if not progress.total_minibatches:
        return ""
    return ProgressBar(
        total=progress.total_minibatches,
        completed=progress.minibatches,
        complete_style="blue",
        finished_style="green",
    )


def _metric_words(evaluated: Evaluated) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in evaluated.metrics.items())


def _few(words: list[str], most: int = MOST_NAMED) -> list[str]:
    """The first few, and how many more there are."""
    rest = len(words) - most
    return words if rest <= 0 else [*words[:most], f"and {rest:,} more"]


def _link_words(links: tuple[Link, ...]) -> str:
    """The sum over all links, then the busiest; empty if nothing flows."""
    busy = sorted(
        (link for link in links if link.bytes_per_second > 0), key=lambda link: -link.bytes_per_second
    )
    if not busy:
        return ""
    total = human_bytes(sum(link.bytes_per_second for link in busy))
    named = [f"{link.sender} -> {link.receiver} {human_bytes(link.bytes_per_second)}/s" for link in busy]
    return one_line(f"{total}/s in all: {', '.join(_few(named))}")


_STYLES: dict[RoleState, str] = {
    "starting": "cyan",
    "working": "green",
    "waiting": "yellow",
    "lost": "bold red",
    "left": "dim",
}


def _role_rows(roles: tuple[RoleStatus, ...]) -> list[tuple[str, RenderableType]]:
    """A row for the replicas and one for the others: each by name while they are few, else counted by state."""
    replicas = [role for role in roles if role.name.startswith("replica")]
    others = [role for role in roles if not role.name.startswith("replica")]
    return [
        (title, _named(members) if len(members) <= MOST_NAMED else _counted(members))
        for title, members in (("replicas", replicas), ("others", others))
    ]


def _named(members: list[RoleStatus]) -> Text:
    words = Text()
    for role in members:
        words.append((", " if words else "") + one_line(role.name) + " ")
        words.append(role.state, style=_STYLES[role.state])
        if role.minibatches:
            words.append(f" ({role.minibatches:,} minibatches)")
    return words


def _counted(members: list[RoleStatus]) -> Text:
    words = Text()
    for state, style in _STYLES.items():
        names = [role.name for role in members if role.state == state]
        if names:
            words.append(", " if words else "").append(f"{len(names):,} {state}", style=style)
        if names and state == "lost":
            words.append(f" ({one_line(', '.join(_few(names)))})")
    return words
