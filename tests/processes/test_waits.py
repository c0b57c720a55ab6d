"""Nothing waits without saying for what: a shard or a coordinator that stands still is named, and the run goes on with it.

Faults planted by hand, each seen to fail a test here: the silence not told the launcher · told and not shown.
"""

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

import squall
from squall.cli.explain import explain, lines
from squall.cli.live import LiveView
from squall.cluster.local import Local
from squall.observe.events import Event, Left, Progress, Silent
from squall.training.fit import Handle
from tests.conftest import beside
from tests.processes.helpers import job, kill, processes
from tests.processes.test_failures import assert_every_block_once, follow

pytestmark = pytest.mark.processes


def until_waits_name(handle: Handle, words: str) -> list[Event]:
    """Take events until progress says so."""
    seen: list[Event] = []
    for event in handle.events():
        seen.append(event)
        if isinstance(event, Progress) and any(words in wait for wait in event.waits):
            return seen
    raise AssertionError(f"nobody said {words!r}: {seen[-1:]}")


def shown(events: list[Event]) -> str:
    out = io.StringIO()
    with LiveView(Console(file=out), total_replicas=2, clock=iter(range(10**9)).__next__) as view:
        for event in events:
            view.show(event)
    return out.getvalue()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_shard_that_stands_still_is_named_and_the_run_waits_for_it(
    local: Local, tmp_path: Path, transport: str
) -> None:
    epochs = 60
    cluster = beside(local, transport=transport)
    handle = squall.start(job(cluster, epochs=epochs, out=tmp_path / "run"))
    seen = follow(handle, 100)
    pid = processes(tmp_path / "run")["shard0"]
    kill(pid, signal.SIGSTOP)
    try:
        seen += until_waits_name(handle, "and 1 more wait for shard0, since")
    finally:
        kill(pid, signal.SIGCONT)
    seen += list(handle.events())
    run = handle.result(60)

    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, epochs, slices=2)
    assert not [event for event in seen if isinstance(event, Left)]
    first, last = [event for event in seen if isinstance(event, Silent)]
    assert (first.role, len(first.waiting), last.role, last.waiting) == ("shard0", 1, "shard0", ())
    assert last.seconds >= first.seconds > 5.0
    text = shown(seen)
    assert f"{first.waiting[0]} waits for shard0, which has not answered for" in text
    assert "more wait for shard0, since" in text, "the plain line of progress names it"
    told = explain(tmp_path / "run")
    assert [(wait.role, wait.seconds is not None) for wait in told.waits] == [("shard0", True)]
    assert any("for shard0, which did not answer, from" in line for line in lines(told, tmp_path / "run"))


def test_a_shard_that_stands_still_at_the_end_of_a_run_is_named(local: Local, tmp_path: Path) -> None:
    """The run stops, and its last checkpoint cannot be had without it."""
    handle = squall.start(job(local, epochs=100_000, out=tmp_path / "run"))
    follow(handle, 100)
    pid = processes(tmp_path / "run")["shard1"]
    kill(pid, signal.SIGSTOP)
    handle.stop()
    try:
        until_waits_name(handle, "the last checkpoint waits for shard1, since")
    finally:
        kill(pid, signal.SIGCONT)
    assert handle.result(60).metrics["why"] == "stopped"


def test_a_coordinator_that_stands_still_is_named(local: Local, tmp_path: Path) -> None:
    handle = squall.start(job(local, epochs=60, out=tmp_path / "run"))
    follow(handle, 100)
    pid = processes(tmp_path / "run")["coordinator"]
    kill(pid, signal.SIGSTOP)
    try:
        until_waits_name(handle, "the run waits for the coordinator, since")
    finally:
        kill(pid, signal.SIGCONT)
    run = handle.result(60)
    assert run.metrics["why"] == "epochs"
    assert_every_block_once(run, 60, slices=2)
