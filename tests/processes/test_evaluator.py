"""The evaluator dies, in real processes: another follows it, measures what was asked for, and goes on.

Faults planted by hand, each seen to fail a test here: not started again · what was asked for forgotten · a death forgiven at the next start.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.cli.explain import explain
from squall.cluster.local import Local
from squall.observe.events import Evaluated, Event, Joined, Left
from squall.training.fit import Handle
from tests.conftest import beside
from tests.processes.helpers import data, job, kill, network, processes
from tests.processes.test_failures import follow, role_name

pytestmark = pytest.mark.processes


class Slow(nn.Module):
    """Takes its time, so that an evaluation is not due before it is to be."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return self.inner(x)  # type: ignore[no-any-return]


def until(handle: Handle, seen: list[Event], kind: type[Event]) -> Any:
    """Take events until one is of this kind."""
    for event in handle.events():
        seen.append(event)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__}: {seen[-1:]}")


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_what_a_killed_evaluator_was_asked_for_is_measured_by_the_next_and_so_is_what_follows(
    local: Local, tmp_path: Path, transport: str
) -> None:
    """While it is asked for, and until another has measured, nobody trains: so no second one is due."""
    every, path = 2000, tmp_path / "run"
    settings = {"epochs": 100_000, "evaluate_every": every / 40, "test": data(), "out": path}
    handle = squall.start(Slow(), data(), **_settings(beside(local, transport=transport), **settings))
    seen = follow(handle, 1)
    pids = processes(path)
    kill(pids["evaluator"], signal.SIGSTOP)
    seen += follow(handle, every + 100)
    assert not [event for event in seen if isinstance(event, Evaluated)]
    replicas = [pid for name, pid in pids.items() if name.startswith("replica")]
    for pid in replicas:
        kill(pid, signal.SIGSTOP)
    try:
        kill(pids["evaluator"], signal.SIGKILL)
        assert until(handle, seen, Left).role == "evaluator"
        back = until(handle, seen, Joined)
        again = until(handle, seen, Evaluated)
    finally:
        for pid in replicas:
            kill(pid, signal.SIGCONT)
    later = until(handle, seen, Evaluated)
    handle.stop()
    list(handle.events())
    run = handle.result(60)

    assert (back.role, back.incarnation) == ("evaluator", 1)
    assert every <= again.minibatches < later.minibatches
    assert run.metrics["why"] == "stopped"
    (death,) = explain(path).deaths
    assert (death.role, death.back_s is not None) == ("evaluator", True)


def _settings(cluster: Local, **settings: Any) -> dict[str, Any]:
    usual = {"replicas": 2, "shards": 2, "batch_size": 16, "progress": False, "threads": 1}
    return {**usual, "cluster": cluster, **settings}


def dies(output: torch.Tensor, target: torch.Tensor) -> float:
    """A metric that the evaluator's process does not survive."""
    if role_name() == "evaluator":
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def test_an_evaluator_that_dies_again_and_again_is_given_up_and_the_run_goes_on(
    local: Local, tmp_path: Path
) -> None:
    cluster = beside(local, restarts=squall.Restarts(most=2, first_s=0.0))
    settings = {"epochs": 100_000, "evaluate_every": 1.0, "test": data(), "metrics": {"dies": dies}}
    handle = squall.start(job(cluster, out=tmp_path / "run", **settings))
    seen: list[Event] = []
    lost = [until(handle, seen, Left) for _ in range(3)]
    done = max(getattr(event, "minibatches", 0) for event in seen)
    follow(handle, done + 500)
    handle.stop()
    seen += handle.events()
    run = handle.result(60)

    assert [(event.role, event.incarnation) for event in lost] == [("evaluator", life) for life in range(3)]
    assert ["not started again" in event.why for event in lost] == [False, False, True]
    assert not [event for event in seen if isinstance(event, Joined) and event.incarnation > 2]
    assert run.metrics["why"] == "stopped"
