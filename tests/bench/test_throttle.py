"""Tests of squall.bench.throttle: a process is stopped again and again, and runs freely in the end.

Faults planted here by hand, each seen to fail a test: no SIGCONT at the end · stopped for the share and not for the rest ·
a role that never appeared passed over in silence · another role's process taken.
"""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from squall.bench.throttle import PERIOD_S, Throttle, throttle_replica
from squall.errors import RunError
from tests.processes.helpers import wait_until


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_it_is_stopped_for_the_rest_of_each_period_and_continued_in_the_end() -> None:
    sent: list[signal.Signals] = []
    waits: list[float] = []
    throttle = Throttle(sent.append, share=0.25)

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            return len(waits) > 6

    throttle._is_over = Over()
    with throttle:
        throttle._thread.join(10)

    assert waits[:4] == pytest.approx([PERIOD_S / 4, PERIOD_S * 3 / 4] * 2)
    assert sent == [signal.SIGSTOP, signal.SIGCONT] * 3 + [signal.SIGCONT]


@pytest.mark.processes
def test_a_role_of_a_run_is_throttled_from_when_it_is_named(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            with throttle_replica(tmp_path, "replica1.0", share=0.1):
                rows = [{"name": "replica0.0", "pid": 1}, {"name": "replica1.0", "pid": process.pid}]
                (tmp_path / "processes.json").write_text(json.dumps(rows))
                wait_until(lambda: state(process.pid) == "T", 10, "the process to be stopped")
            wait_until(lambda: state(process.pid) != "T", 10, "the process to run again")
        finally:
            process.kill()


def test_a_role_that_never_appears_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"replica1\.0 never appeared"),
        throttle_replica(tmp_path, "replica1.0", share=0.5),
    ):
        pass
