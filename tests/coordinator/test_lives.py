"""Tests of squall.coordinator.lives: what a shard has that was killed and has come back.

Planted faults, each seen to fail: what it has acknowledged since taken for lost · what a life before had acknowledged taken
for kept.
"""

from squall.blocks import BlockSet
from squall.coordinator.lives import ShardLives
from tests.coordinator.plans import block


def test_what_it_has_acknowledged_since_is_there_though_a_replica_was_quicker_to_tell() -> None:
    """Else a block that every shard has was done again, or the run said to be short of it (schedule 4014)."""
    lives = ShardLives()
    assert lives.vouch(block(0), [(0, 0)])
    assert lives.vouch(block(1), [(0, 0)])
    assert lives.vouch(block(2), [(0, 1)])
    had = lives.returned(0, 1, BlockSet.union([block(0)]))
    assert had is not None
    assert had.blocks() == (block(0), block(2))
    assert not lives.vouch(block(1), [(0, 0)])
    assert lives.vouch(block(2), [(0, 1)])


def test_what_a_life_before_had_acknowledged_is_what_it_came_back_with() -> None:
    lives = ShardLives()
    assert lives.vouch(block(0), [(0, 1)])
    had = lives.returned(0, 2, BlockSet())
    assert had is not None
    assert had.num_minibatches == 0
