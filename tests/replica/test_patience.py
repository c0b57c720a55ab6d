"""Tests of squall.replica.patience: who is waited for, and what of it is told.

Faults planted by hand, each seen to fail a test: since when kept from one request to the next · told at each look · a
role that has answered not told · told though it never was for long · who is gone waited for for ever.
"""

import pytest

from squall.errors import LostError
from squall.replica.patience import LOST_AFTER_S, Absences, Silences
from squall.wire.control import Awaits


def told(silences: Silences, now: float, **awaited: int) -> list[tuple[str, float]]:
    looked = silences.look(awaited, now)
    assert all(isinstance(each, Awaits) for each in looked)
    return [(each.role, each.seconds) for each in looked]


def test_each_silence_is_told_once_and_once_when_it_is_over() -> None:
    silences = Silences()
    assert told(silences, 0.0, shard0=1, shard1=1) == []
    assert told(silences, 5.0, shard0=1, shard1=1) == []
    assert told(silences, 6.0, shard0=1, shard1=1) == [("shard0", 6.0), ("shard1", 6.0)]
    assert told(silences, 7.0, shard0=1, shard1=1) == []
    assert told(silences, 8.0, shard1=1) == [("shard0", 0.0)]
    assert bool(silences)
    assert told(silences, 9.0) == [("shard1", 0.0)]
    assert told(silences, 99.0) == []
    assert not silences


def test_each_request_is_waited_for_anew_though_nobody_looked_in_between() -> None:
    silences = Silences()
    for request in range(20):
        assert told(silences, float(request), shard0=request) == []
    assert told(silences, 25.0, shard0=19) == [("shard0", 6.0)]
    assert told(silences, 26.0, shard0=20) == [("shard0", 0.0)]
    assert told(silences, 32.0, shard0=20) == [("shard0", 6.0)]


def test_who_is_gone_is_waited_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    absences = Absences("replica0.0")
    absences.gone("shard0", 10.0)
    absences.gone("shard1", 11.0)
    absences.back("shard1")
    assert "shard0" in absences
    assert "shard1" not in absences
    for now in (12.0, 16.2, 17.0):
        absences.tick(now)
    assert capsys.readouterr().out == "replica0.0 waits for shard0, gone for 6 s\n"
    with pytest.raises(LostError, match="shard0 is gone"):
        absences.tick(10.5 + LOST_AFTER_S)
