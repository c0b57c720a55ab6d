"""How long a silent replica is waited for is learned from its own blocks: a slow one gets less work, and none is thrown away.

Whole runs in virtual time, with the patience that real ones have.

Faults planted here by hand, each seen to fail a test: one deadline for all, from the fastest · a deadline of five seconds
whatever a replica's history · a paused replica waited for ten times as long.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import squall
from squall.observe.events import Event, Redone
from tests.processes.helpers import data, network


def modelled(out: Path, faults: str = "", **settings: Any) -> tuple[squall.Run, list[Event]]:
    cluster = squall.Simulated(
        seed=4, speeds=settings.pop("speeds"), jitter=0.3, faults=faults, compute="modelled"
    )
    usual = {"batch_size": 16, "epochs": 30, "progress": False, "cluster": cluster, "out": out}
    handle = squall.start(network, data(), **(usual | settings))
    events = list(handle.events())
    return handle.result(60), events


@pytest.mark.parametrize("times", [10, 400])
def test_a_slow_replica_gets_less_work_and_none_of_it_is_thrown_away(times: int, tmp_path: Path) -> None:
    run, events = modelled(tmp_path / "run", speeds=(10.0, 10.0 / times), replicas=2, epochs=80)
    rows = run.ledger()
    rows = rows[rows["slice"] == 0]
    assert set(rows["outcome"].tolist()) == {"applied"}
    assert not any(isinstance(event, Redone) for event in events)
    slow, fast = (int((rows["replica"] == number).sum()) for number in (1, 0))
    # At the end the run waits for what the slow one holds, a block and one ahead; counting is worth another.
    assert slow / fast == pytest.approx(1 / times, rel=0.25, abs=3 / fast)


def test_a_replica_that_stands_still_is_waited_for_as_its_own_history_says(tmp_path: Path) -> None:
    """Ten usual blocks, and five seconds at least: 5 s for one of 0.1 s a block, 20 s for one of 2 s."""
    for speed, expected in ((10.0, 5.0), (0.5, 20.0)):
        faults = "pause:replica1,500s@t=60"
        out = tmp_path / str(speed)
        run, events = modelled(out, faults, speeds=(10.0, speed), replicas=2, epochs=60)
        first = next(event for event in events if isinstance(event, Redone))
        median = expected / 10 if expected > 5 else 0.1
        # It had last been heard of up to a block before, and the coordinator looks twice a second.
        assert expected * 0.75 - 3 * median <= first.time_s - 60.0 <= expected * 1.3 + 1.0
        rows = run.ledger()
        again = rows[(rows["attempt"] > 1) & (rows["outcome"] == "applied")]
        assert np.unique(again["replica"]).tolist() == [0]
