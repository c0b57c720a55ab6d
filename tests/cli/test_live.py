"""Tests of squall.cli.live: what people see, on a terminal and without one, with a clock of our own.

Faults planted here by hand, each seen to fail a test: the table drawn although the output is no terminal · progress
lines at every event · events held back with the progress lines · markup read in an error's text · escapes of an
error let through · the live table not stopped on an exception · a cut replica counted as alive by halves · the first
start of a role told as news · time left from the beginning of the run instead of the pace · the last
table not drawn on leaving · lines wrapped at the console's width.
"""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from squall.blocks import Block
from squall.cli.live import LINE_EVERY_S, Board, LiveView
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
    RoleStatus,
    Silent,
    Unkept,
)

BLOCK = Block(0, 1, 10, 15)
NEWS: list[tuple[Event, str]] = [
    (
        Evaluated(
            time_s=5.0, epoch=1, minibatches=1090, metrics={"test_loss": 0.3123, "test_accuracy": 0.93}
        ),
        "   5.0 s  evaluated after 1,090 minibatches: test_loss 0.3123, test_accuracy 0.93",
    ),
    (
        Left(time_s=6.0, role="replica1.0", why="killed by signal 9"),
        "   6.0 s  lost replica1.0: killed by signal 9",
    ),
    (
        Redone(time_s=6.1, block=BLOCK, attempt=2, replica=0, why="replica 1 was lost"),
        "   6.1 s  redone: epoch 1, positions 10 to 14, attempt 2, by replica 0: replica 1 was lost",
    ),
    (Joined(time_s=7.0, role="replica1.0", incarnation=2), "   7.0 s  replica1.0 is back"),
    (
        Refused(time_s=8.0, block=BLOCK, why="the gradient of '[bold]w[/bold]' is not finite"),
        "   8.0 s  refused: epoch 1, positions 10 to 14: the gradient of '[bold]w[/bold]' is not finite",
    ),
    (
        Checkpointed(time_s=9.0, path="runs/demo-1/checkpoints/2000", minibatches=2000),
        "   9.0 s  checkpoint after 2,000 minibatches: runs/demo-1/checkpoints/2000",
    ),
    (
        Recovered(time_s=7.1, role="shard0", incarnation=1, lost=1200),
        "   7.1 s  shard0 is back, without 1,200 minibatches, which are done again",
    ),
    (Recovered(time_s=7.2, role="shard0", incarnation=1, lost=0), "   7.2 s  shard0 is back, without a loss"),
    (
        Unkept(time_s=7.3, role="shard1", why="No space left on device"),
        "   7.3 s  shard1 cannot keep its state on disk: No space left on device",
    ),
    (Unkept(time_s=7.4, role="shard1", why=""), "   7.4 s  shard1 keeps its state on disk again"),
    (
        Silent(time_s=9.3, role="shard0", seconds=5.4, waiting=("replica0.0",)),
        "   9.3 s  replica0.0 waits for shard0, which has not answered for 5 s",
    ),
    (Silent(time_s=9.4, role="shard0", seconds=12.0), "   9.4 s  the wait for shard0 is over, after 12 s"),
    (
        Disturbed(time_s=9.5, role="shard0", what="stop", fault="pause:shard,3s@t=9"),
        "   9.5 s  chaos, pause:shard,3s@t=9: stops shard0",
    ),
    (
        AlsoFailed(time_s=9.6, error="shard0 was killed by SIGKILL"),
        "   9.6 s  failed as well: shard0 was killed by SIGKILL",
    ),
    (
        Ended(
            time_s=10.0,
            why="the user's code\n\x1b[31m  raised",
            error="ValueError: shown by whoever it is raised to",
        ),
        "  10.0 s  ended: the user's code [31m raised",
    ),
]


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def role(name: str, state: str = "working") -> RoleStatus:
    return RoleStatus(name=name, state=state, minibatches=512 if "replica" in name else 0)  # type: ignore[arg-type]


def progress(
    minibatches: int = 50,
    *,
    time_s: float = 1.0,
    roles: tuple[RoleStatus, ...] = (),
    waits: tuple[str, ...] = (),
    total: int | None = 200,
) -> Progress:
    return Progress(
        time_s=time_s,
        stage=0,
        epoch=3,
        minibatches=minibatches,
        total_minibatches=total,
        train_loss=0.25,
        examples_per_second=12345.6,
        pushes_per_second=190.2,
        staleness=1.02,
        links=tuple(
            Link(sender=f"replica{at}.0", receiver="shard0", bytes_per_second=1e6 * (at + 1))
            for at in range(5)
        ),
        roles=roles,
        waits=waits,
    )


def drawn(board: Board, width: int = 100) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(board.table())
    return console.export_text()


def lines_of(
    events: list[Event], *, clock: Clock | None = None, step_s: float = 0.0, width: int = 80
) -> list[str]:
    out, clock = io.StringIO(), clock or Clock()
    with LiveView(Console(file=out, width=width), total_replicas=2, clock=clock) as view:
        for event in events:
            view.show(event)
            clock.now += step_s
    return out.getvalue().splitlines()


# Without a terminal -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "line"), NEWS, ids=lambda value: type(value).__name__)
def test_each_event_worth_a_line_gets_exactly_that_line_at_once(event: Event, line: str) -> None:
    before: list[Event] = (
        [Left(time_s=6.0, role="replica1.0", why="lost")] if isinstance(event, Joined) else []
    )
    lines = lines_of([*before, progress(), event], width=40)
    assert lines[-1] == line


def test_the_first_start_of_a_role_is_not_worth_a_line() -> None:
    assert lines_of([Joined(time_s=0.1, role="replica0.0", incarnation=1)]) == []


def test_progress_gets_a_line_every_two_seconds_at_most() -> None:
    lines = lines_of([progress(at) for at in range(41)], step_s=LINE_EVERY_S / 4)
    assert len(lines) == 11


def test_a_line_about_progress_says_where_the_run_stands() -> None:
    roles = (role("replica0.0"), role("replica1.0", "lost"))
    line = lines_of([progress(roles=roles, waits=("replica0.0 waits for shard0", "b"))])[0]
    assert line == (
        "   1.0 s  epoch 3, 50 of 200 minibatches (25 %), loss 0.25, 12,346 examples/s, staleness 1.02, "
        "1 of 2 replicas alive, replica0.0 waits for shard0, and 1 more"
    )


def test_no_escape_reaches_what_is_no_terminal() -> None:
    lines = lines_of([progress(), *(event for event, _ in NEWS)])
    assert "\x1b" not in "\n".join(lines)


def test_an_output_that_knows_few_letters_gets_question_marks() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    with LiveView(Console(file=out), total_replicas=1, clock=Clock()) as view:
        view.show(Ended(time_s=1.0, why="d\u00e9j\u00e0 vu"))
    out.flush()
    assert raw.getvalue() == b"   1.0 s  ended: d?j? vu\n"


# The table ----------------------------------------------------------------------------------------------


def test_the_table_says_everything_at_once() -> None:
    board = Board(total_replicas=2, title="digits", now=100.0)
    roles = (role("replica0.0"), role("replica1.0", "waiting"), role("shard0"), role("coordinator"))
    board.take(progress(0), 101.0)
    board.take(NEWS[0][0], 102.0)
    board.take(progress(50, roles=roles, waits=("replica1.0 waits for shard0",)), 111.0)

    table = drawn(board)

    for words in (
        "50 of 200 minibatches (25 %), epoch 3",
        "11.0 s so far, about 30.0 s left",
        "0.25",
        "test_loss 0.3123, test_accuracy 0.93",
        "12,346 examples/s, 190 pushes/s",
        "1.02 updates",
        "15.0 MB/s in all: replica4.0 -> shard0 5.00 MB/s, replica3.0 -> shard0 4.00 MB/s",
        "and 2 more",
        "2 of 2 replicas",
        "replica0.0 working (512 minibatches), replica1.0 waiting (512 minibatches)",
        "shard0 working, coordinator working",
        "replica1.0 waits for shard0",
        "0 redone, 0 refused",
        "evaluated after 1,090 minibatches",
    ):
        assert words in table, words


def test_the_time_left_follows_the_pace_of_the_last_minute() -> None:
    board = Board(total_replicas=1, title="", now=0.0)
    for second in range(1000):
        board.take(progress(0, total=2000), float(second))
    for second in range(1000, 1100):
        board.take(progress(10 * (second - 1000), total=2000), float(second))

    # 990 of 2,000 are done, ten a second.
    assert "about 1 min 41 s left" in drawn(board)


@pytest.mark.parametrize("total", [None, 0])
def test_a_run_without_a_known_end_shows_no_bar_and_no_time_left(total: int | None) -> None:
    board = Board(total_replicas=1, title="", now=0.0)
    board.take(progress(5, total=total), 1.0)
    board.take(progress(10, total=total), 3.0)

    table = drawn(board)

    assert "10 minibatches" in table
    assert "left" not in table
    assert "%" not in table


def test_a_replica_that_is_cut_is_alive_only_as_a_whole() -> None:
    board = Board(total_replicas=3, title="", now=0.0)
    roles = (role("replica0.0", "lost"), role("replica0.1"), role("replica1.0"), role("replica1.1"))
    board.take(progress(roles=(*roles, role("replica2.0", "starting"))), 1.0)
    assert re.search(r"alive +1 of 3 replicas", drawn(board))


def test_many_roles_are_counted_and_the_lost_are_named() -> None:
    board = Board(total_replicas=200, title="", now=0.0)
    roles = tuple(role(f"replica{at}.0", "lost" if at in (7, 9) else "working") for at in range(200))
    board.take(progress(roles=roles), 1.0)
    assert "198 working, 2 lost (replica7.0, replica9.0)" in drawn(board)


def test_redone_and_refused_blocks_are_counted_beyond_the_news_that_fits() -> None:
    board = Board(total_replicas=2, title="", now=0.0)
    for _ in range(7):
        board.take(NEWS[2][0], 1.0)
    board.take(NEWS[4][0], 1.0)
    board.take(replace(progress(), blocks_redone=6), 1.0)  # of which one twice

    table = drawn(board)

    assert "6 redone, 1 refused" in table
    assert table.count("redone: epoch 1") == 2
    assert "'[bold]w[/bold]'" in table


@pytest.mark.parametrize("width", [100, 40, 20, 9, 3])
def test_the_table_fits_a_terminal_of_any_width(width: int) -> None:
    board = Board(total_replicas=2, title="a title that is longer than the terminal is wide", now=0.0)
    assert max(len(line) for line in drawn(board, width).splitlines()) <= width
    for event, _ in NEWS:
        board.take(event, 1.0)
    board.take(progress(roles=(role("replica0.0"), role("shard0")), waits=("a waits for b",)), 1.0)
    assert max(len(line) for line in drawn(board, width).splitlines()) <= width


# A terminal ---------------------------------------------------------------------------------------------

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def terminal() -> tuple[io.StringIO, Console]:
    out = io.StringIO()
    environment = {"TERM": "xterm-256color"}
    return out, Console(
        file=out, width=40, height=24, force_terminal=True, force_interactive=True, _environ=environment
    )


def test_a_terminal_is_given_back_when_something_raises() -> None:
    out, console = terminal()

    def interrupted() -> None:
        with LiveView(console, total_replicas=2, clock=Clock()) as view:
            view.show(progress())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert HIDE_CURSOR in out.getvalue()
    assert out.getvalue().rindex(SHOW_CURSOR) > out.getvalue().rindex(HIDE_CURSOR)


def test_a_terminal_is_redrawn_ten_times_a_second_at_most_but_news_is_shown_at_once() -> None:
    out, console = terminal()
    clock = Clock()
    with LiveView(console, total_replicas=2, clock=clock) as view:
        view.show(progress(1))
        shown = len(out.getvalue())
        view.show(progress(2))
        assert len(out.getvalue()) == shown
        view.show(Left(time_s=1.0, role="replica1.0", why="gone"))
        assert "lost" in out.getvalue()[shown:]
        shown = len(out.getvalue())
        clock.now += 0.2
        view.show(progress(3))
        assert "3 of 200" in out.getvalue()[shown:]


def test_the_last_table_stays_on_the_terminal() -> None:
    out, console = terminal()
    with LiveView(console, total_replicas=2, clock=Clock()) as view:
        view.show(progress(199))
        view.show(progress(200))
    view.show(Ended(time_s=3.0, why="after the view was left"))

    assert "200 of 200" in out.getvalue()
    assert out.getvalue().endswith("ended: after the view was left\n")
