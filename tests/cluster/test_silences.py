"""Tests of squall.cluster.silences: who waits for whom, as several replicas tell it.

Faults planted by hand, each seen to fail a test: over when the first has had its answer · who is gone waits on · a silence
that is over never told again.
"""

from squall.cluster.silences import Silences
from squall.observe.events import Silent


def test_a_silence_is_over_when_nobody_waits_any_more() -> None:
    silences = Silences()
    first = silences.told("replica0.0", "shard0", 5.0, now=10.0)
    assert first == Silent(time_s=10.0, role="shard0", seconds=5.0, waiting=("replica0.0",))
    assert silences.told("replica1.0", "shard0", 6.0, now=12.0) is None
    assert silences.told("replica1.0", "shard1", 6.0, now=12.0) is not None
    assert silences.told("replica0.0", "shard0", 0.0, now=13.0) is None
    assert silences.waits(16.0) == (
        "replica1.0 waits for shard0, since 10 s",
        "replica1.0 waits for shard1, since 10 s",
    )
    assert silences.told("replica1.0", "shard0", 0.0, now=14.0) == Silent(
        time_s=14.0, role="shard0", seconds=9.0
    )
    assert silences.told("replica1.0", "shard0", 0.0, now=14.0) is None


def test_who_is_gone_waits_for_nobody_and_the_next_silence_is_told() -> None:
    silences = Silences()
    silences.told("replica0.0", "shard0", 5.0, now=10.0)
    silences.ended("replica0.0")
    assert silences.waits(11.0) == ()
    assert silences.told("replica0.0", "shard0", 5.5, now=20.0) is not None
