"""``squall explain``: what became of a run, and what to do now."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from squall.cli.runs import table
from squall.errors import CorruptError
from squall.observe.ledger import read_ledger
from squall.observe.metrics import read_history
from squall.observe.story import Durable, Left, Story, Wait, tell
from squall.observe.units import human_seconds
from squall.training.directory import RunDirectory

MOST_DEATHS = 20
MOST_WAITS = 5


def explain(path: Path) -> Story:
    """Read what a run left and make a story of it.

    Raises:
        ConfigError: there is no run.
        CorruptError: a file of it is damaged.
    """
    directory = RunDirectory.open(path)
    job = directory.read_json(directory.job)
    left = Left(
        history=read_history(directory.metrics) if directory.metrics.exists() else [],
        ledger=read_ledger(directory.ledger),
        slices=len({row["slice"] for row in job["layout"]}),
        durable=durable(directory.checkpoints),
        is_going_on=is_going_on(directory),
        resumed=len(list(directory.ledger.glob("rolled-back-*"))),
    )
    return tell(left)


def durable(checkpoints: Path) -> Durable | None:
    """The newest checkpoint that is whole, every byte of it looked at."""
    from squall.training.checkpoint import MANIFEST, read_checkpoint

    damaged: list[str] = []
    folders = (path for path in checkpoints.iterdir() if path.name.isdigit() and (path / MANIFEST).exists())
    for folder in sorted(folders, key=lambda folder: -int(folder.name)):
        try:
            # Its books, not its manifest: at an end they also hold what nobody reported any more.
            books = read_checkpoint(folder).books
        except CorruptError as error:
            damaged.append(str(error))
            continue
        minibatches = min((book.minibatches for book in books), default=0)
        return Durable(path=f"checkpoints/{folder.name}", minibatches=minibatches, damaged=tuple(damaged))
    return None


def is_going_on(directory: RunDirectory) -> bool:
    """Whether the run's coordinator is there still, on this machine."""
    if not directory.processes.exists():
        return False
    rows = directory.read_json(directory.processes)
    pids = [row["pid"] for row in rows if row["role"] == "coordinator"]
    return any(_is_called(pid, "coordinator") for pid in pids)


def _is_called(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    except OSError:
        return False


def as_dict(story: Story) -> dict[str, Any]:
    """The story for ``--json``."""
    return asdict(story)


def lines(story: Story, path: Path) -> list[str]:
    """The story for people."""
    of = "" if story.total is None else f" of {story.total:,}"
    rows = [
        ("run", f"{_STATES[story.state]} after {human_seconds(story.after_s)}: {story.why}"),
        ("cause", story.cause or ""),
        *(("and then", words) for words in story.also),
        ("done", f"{story.minibatches:,}{of} minibatches on every slice"),
        ("last", story.last),
        ("kept", _kept(story)),
        *(("damaged", words) for words in (story.durable.damaged if story.durable else ())),
        ("lost", f"{story.lost:,} minibatches are in no checkpoint" if story.lost else "nothing"),
        ("redone", f"{story.redone:,} blocks; {story.repeated:,} pushes came twice and changed nothing"),
        ("before", _before(story)),
        *(("refused", words) for words in story.refused),
        *(("waited", words) for words in _waited(story.waits)),
        ("next", _next(story, path)),
    ]
    width = max(len(name) for name, _ in rows)
    told = [f"{name:<{width}}  {words}" for name, words in rows if words]
    return [*told, "", *_deaths(story)] if story.deaths else told


_STATES = {
    "done": "done",
    "stopped": "stopped",
    "failed": "failed",
    "cut off": "cut off",
    "going on": "goes on,",
}


def _kept(story: Story) -> str:
    if story.durable is None:
        return "no checkpoint: a new run must begin from the start"
    return f"{story.durable.path}: {story.durable.minibatches:,} minibatches, whole"


def _before(story: Story) -> str:
    if not story.resumed:
        return ""
    return f"resumed {story.resumed:,} times; {story.rolled_back:,} minibatches of earlier lives were lost and done again"


def _waited(waits: Sequence[Wait]) -> Iterator[str]:
    if (rest := len(waits) - MOST_WAITS) > 0:
        yield f"{rest:,} times before that"
    for wait in waits[-MOST_WAITS:]:
        how_long = "to the end" if wait.seconds is None else f"for {human_seconds(wait.seconds)}"
        yield f"for {wait.role}, which did not answer, from {wait.since_s:.1f} s on, {how_long}"


def _next(story: Story, path: Path) -> str:
    name = shlex.quote(str(path))
    if story.state == "going on":
        return "wait for it"
    if story.state == "done":
        return f"squall ledger {name}"
    return f"squall resume {name}" if story.durable else ""


def _deaths(story: Story) -> list[str]:
    shown = story.deaths[-MOST_DEATHS:]
    rows = [
        (
            f"{death.time_s:.1f} s",
            death.role,
            death.incarnation,
            "stayed away" if death.back_s is None else f"back after {death.back_s - death.time_s:.1f} s",
            death.why,
        )
        for death in shown
    ]
    rest = len(story.deaths) - len(shown)
    told = table(("time", "role", "life", "then"), [row[:4] for row in rows])
    told = [f"{line}  {words}" for line, words in zip(told, ["how", *(row[4] for row in rows)], strict=True)]
    return [*told, *([f"and {rest:,} earlier"] if rest else [])]
