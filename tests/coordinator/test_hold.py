"""Tests of squall.coordinator.hold: what shards say goes in, what they are told comes out.

Faults planted, each caught: the cut called reached while a slice lacks something · what is missing not admitted · a
word of an older hold heard · a hold that stores called off · the next one begun at once, or before the last was heard of
by all · patience that does not grow.
"""

from squall.blocks import Block, BlockSet
from squall.coordinator.events import Cut
from squall.coordinator.hold import Holds, Stage
from squall.wire.messages import Held, Hold, Release

ONE, TWO = Block(0, 0, 0, 1), Block(0, 0, 1, 2)
BOTH = Block(0, 0, 0, 2)
NOTHING = BlockSet()


def held(*everywhere: Block, request: int = 1, anywhere: tuple[Block, ...] | None = None) -> Held:
    return Held(request=request, anywhere=everywhere if anywhere is None else anywhere, everywhere=everywhere)


def begun(num_shards: int = 2, patience_s: float = 2.0) -> Holds:
    holds = Holds(num_shards, patience_s)
    holds.wanted = "7"
    assert holds.may_begin(10.0, NOTHING)
    messages = [effect.message for effect in holds.begin(10.0)]  # type: ignore[union-attr]
    assert messages == [Hold(request=1, admitted=())] * num_shards
    return holds


def test_shards_that_hold_the_same_are_a_cut_and_store_when_it_has_been_copied() -> None:
    holds = begun()
    assert holds.heard(0, held(BOTH)) == ()
    assert holds.heard(1, held(BOTH)) == (Cut(request=1, name="7", settled=(BOTH,)),)

    stored = [(effect.shard, effect.message) for effect in holds.copied(1)]

    assert stored == [(shard, Release(request=1, name="7")) for shard in (0, 1)]
    holds.let_go(1, 1)
    assert [effect.shard for effect in holds.again()] == [0]
    holds.let_go(0, 1)
    assert (holds.stage, holds.wanted) == (Stage.IDLE, None)


def test_what_a_slice_lacks_is_admitted_until_it_has_it() -> None:
    holds = begun()
    holds.heard(0, held(ONE, anywhere=(BOTH,)))  # two slices of one shard differ, too
    asked = holds.heard(1, held(ONE))
    assert [effect.message for effect in asked] == [Hold(request=1, admitted=(BOTH,))] * 2  # type: ignore[union-attr]
    assert holds.heard(0, held(BOTH)) == ()
    assert tuple(holds.waits()) == ("the checkpoint waits for epoch 0, position 1",)
    assert holds.heard(1, held(BOTH)) == (Cut(request=1, name="7", settled=(BOTH,)),)


def test_what_lacks_a_sender_or_lasts_too_long_is_called_off_and_tried_again_later() -> None:
    holds = begun()
    holds.heard(0, held(BOTH))
    holds.heard(1, held(ONE))
    assert not holds.is_stuck(12.0, BlockSet.union([BOTH]))
    assert holds.is_stuck(12.0, BlockSet.union([ONE]))
    assert holds.is_stuck(12.1, BlockSet.union([BOTH]))

    assert {effect.message for effect in holds.call_off(12.1)} == {Release(request=1, name="")}

    assert holds.stage is Stage.ENDING
    assert not holds.may_begin(20.0, BlockSet.union([BOTH]))
    holds.let_go(0, 1)
    holds.let_go(1, 1)
    assert not holds.may_begin(20.0, BlockSet.union([ONE]))
    assert not holds.may_begin(14.1, BlockSet.union([BOTH]))
    assert holds.may_begin(14.3, BlockSet.union([BOTH]))
    holds.begin(15.0)
    assert not holds.is_stuck(18.9, NOTHING)
    assert holds.is_stuck(19.1, NOTHING)


def test_words_of_another_hold_change_nothing() -> None:
    holds = begun()
    assert holds.heard(0, held(BOTH, request=2)) == holds.copied(1) == ()
    assert holds.heard(1, held(BOTH)) == ()
    assert holds.heard(0, held(BOTH)) != ()
    assert holds.copied(2) == ()
    holds.copied(1)
    holds.let_go(0, 3)
    assert holds.silent == {0, 1}
    assert holds.call_off(11.0) == ()
    assert holds.heard(0, held(ONE)) == ()


def test_without_shards_the_cut_is_there_at_once() -> None:
    holds = Holds(0, 2.0)
    holds.wanted = "7"
    assert holds.begin(0.0) == (Cut(request=1, name="7", settled=()),)
    assert holds.copied(1) == ()
    assert holds.stage is Stage.IDLE


def test_only_the_copy_of_a_cut_that_was_reached_lets_shards_store() -> None:
    holds = begun(num_shards=1)
    assert holds.copied(1) == (), "there is no cut yet"
    holds.heard(0, held(BOTH))
    assert holds.copied(2) == (), "that is another one"
    assert holds.stage is Stage.REACHED
    assert [effect.message for effect in holds.copied(1)] == [Release(request=1, name="7")]
