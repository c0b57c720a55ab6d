"""Tests of squall.observe.metrics: one line an event, and damage is told from an unfinished line.

Faults planted here by hand, each seen to fail a test: the torn line kept when a log is continued · the file begun anew
when a log is continued · the last line read although it is torn · lines counted from 0 · JSON that is no object let
through · NaN let through on reading · lines held back in a buffer.
"""

from pathlib import Path

import pytest

from squall.errors import CorruptError
from squall.observe.events import Ended, Evaluated, Joined
from squall.observe.metrics import MetricsLog, read_history

JOINED = Joined(time_s=0.5, role="replica0.0", incarnation=1)


def test_events_are_read_while_the_log_is_open(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(JOINED)
        log.append(Ended(time_s=1.0, why="line one\nline two"))

        assert [(record["event"], record["time_s"]) for record in read_history(path)] == [
            ("Joined", 0.5),
            ("Ended", 1.0),
        ]

    assert path.read_bytes().count(b"\n") == 2


def test_a_metric_that_is_not_finite_leaves_the_line_readable(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(Evaluated(time_s=1.0, epoch=0, minibatches=1, metrics={"test_loss": float("inf")}))
    assert read_history(tmp_path / "m.jsonl")[0]["metrics"] == {"test_loss": None}


def test_a_torn_last_line_is_dropped_and_a_continued_log_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.append(JOINED)
    path.write_bytes(path.read_bytes() + b'{"event":"Pro')
    assert len(read_history(path)) == 1

    with MetricsLog(path) as log:
        log.append(Ended(time_s=9.0, why="done"))

    assert [record["event"] for record in read_history(path)] == ["Joined", "Ended"]


@pytest.mark.parametrize("damage", [b"{", b"[1]", b"\xff\xfe", b'{"a":NaN}', b""])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"event":"Ended"}\n' + damage + b'\n{"event":"Ended"}\n')

    with pytest.raises(CorruptError, match=r"m\.jsonl, line 2: expected one JSON object"):
        read_history(path)


def test_an_empty_log_has_no_history(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "m.jsonl").close()
    assert read_history(tmp_path / "m.jsonl") == []
