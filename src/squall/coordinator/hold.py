"""A hold: how all slices come to have the same positions for a moment, so that a checkpoint is one cut.

    GATHERING   shards admit no new block, and say what they hold; the union of it is what the cut will have.
                What some slice has and another has not is admitted there.
       |        all slices hold the union
    REACHED     nothing can change until the launcher has copied what goes with the cut
       |        it has
    ENDING      shards are told to store and go on, until each has said that it does
       |
    IDLE

A hold that cannot get there is called off, which leads to ENDING as well, and is tried again: when what was
missing has been done in the ordinary way, and no sooner than after as long as it had lasted. For a replica that
waits in a hold cannot redo what another one has left undone.
"""

from collections.abc import Iterator
from enum import Enum

from squall.blocks import Block, BlockSet
from squall.coordinator.events import Cut, ToShard
from squall.slices import Cover
from squall.wire.messages import Held, Hold, Release


class Stage(Enum):
    IDLE = "idle"
    GATHERING = "gathering"
    REACHED = "reached"
    ENDING = "ending"


class Holds:
    """The holds of a run, one at a time.

    Args:
        num_shards: who takes part.
        patience_s: how long a hold may take; twice as long after each that was called off [seconds].

    Attributes:
        wanted: name of the checkpoint that is to be taken; None: there is none.
    """

    def __init__(self, num_shards: int, patience_s: float) -> None:
        self.wanted: str | None = None
        self.stage = Stage.IDLE
        self.silent: set[int] = set()  # shards that an answer is awaited from
        self._shards = tuple(range(num_shards))
        self._patience_s = patience_s
        self._request = 0
        self._began = 0.0
        self._not_before = 0.0
        self._held: dict[int, Held] = {}
        self._union = BlockSet()
        self._missing: tuple[Block, ...] = ()
        self._release = ""

    def may_begin(self, now: float, settled: BlockSet) -> bool:
        """Whether one is wanted, and nothing speaks against it that called off the last one."""
        if self.wanted is None or self.stage is not Stage.IDLE or now < self._not_before:
            return False
        return all(settled.cover(block) is Cover.CONTAINED for block in self._missing)

    def begin(self, now: float) -> tuple[ToShard | Cut, ...]:
        self.stage, self._began = Stage.GATHERING, now
        self._request += 1
        self._held, self._union, self._missing = {}, BlockSet(), ()
        return self._ask() + self._look()

    def _ask(self) -> tuple[ToShard, ...]:
        message = Hold(request=self._request, admitted=self._union.blocks())
        return tuple(ToShard(shard=shard, message=message) for shard in self._shards)

    def heard(self, shard: int, held: Held) -> tuple[ToShard | Cut, ...]:
        """A shard says what it holds."""
        if self.stage is not Stage.GATHERING or held.request != self._request:
            return ()
        self._held[shard] = held
        return self._look()

    def _look(self) -> tuple[ToShard | Cut, ...]:
        """Once all have answered: have what is missing somewhere admitted there, or say that the cut is reached."""
        if len(self._held) < len(self._shards):
            return ()
        union = BlockSet.union(block for held in self._held.values() for block in held.anywhere)
        missing = (part for held in self._held.values() for part in _lacking(union, held))
        self._missing = BlockSet.union(missing).blocks()
        if self._missing:
            is_known, self._union = union == self._union, union
            return () if is_known else self._ask()
        self.stage = Stage.REACHED
        assert self.wanted is not None
        return (Cut(request=self._request, name=self.wanted, settled=union.blocks()),)

    def copied(self, request: int) -> tuple[ToShard, ...]:
        """What goes with the cut has been copied: shards may store it and go on."""
        if self.stage is not Stage.REACHED or request != self._request:
            return ()
        assert self.wanted is not None
        self._release, self.wanted, self._missing = self.wanted, None, ()
        return self._end()

    def is_stuck(self, now: float, in_hand: BlockSet) -> bool:
        """Whether what is being gathered takes too long, or lacks something that nobody has in hand."""
        if now - self._began > self._patience_s:
            return True
        return any(in_hand.cover(block) is not Cover.CONTAINED for block in self._missing)

    def shard_returned(self, now: float) -> tuple[ToShard, ...]:
        """A shard has come back, and knows of no hold.

        What is being gathered is tried again. A cut that was reached is given up: the shard may not have stored it.
        """
        if self.stage is Stage.REACHED:
            self.wanted = None
        return self.call_off(now)

    def call_off(self, now: float) -> tuple[ToShard, ...]:
        """Let shards go on without storing anything; one that stores already is not called off."""
        if self.stage not in (Stage.GATHERING, Stage.REACHED):
            return ()
        self._not_before = now + (now - self._began)
        self._patience_s *= 2
        self._release = ""
        return self._end()

    def _end(self) -> tuple[ToShard, ...]:
        self.stage, self.silent = Stage.ENDING, set(self._shards)
        self._settle_down()
        return self._let_go()

    def _let_go(self) -> tuple[ToShard, ...]:
        message = Release(request=self._request, name=self._release)
        return tuple(ToShard(shard=shard, message=message) for shard in sorted(self.silent))

    def let_go(self, shard: int, request: int) -> None:
        """A shard goes on."""
        if self.stage is Stage.ENDING and request == self._request:
            self.silent.discard(shard)
            self._settle_down()

    def _settle_down(self) -> None:
        if not self.silent:
            self.stage = Stage.IDLE

    def again(self) -> tuple[ToShard, ...]:
        """Whatever may have been lost, once more."""
        match self.stage:
            case Stage.GATHERING:
                return self._ask()
            case Stage.ENDING:
                return self._let_go()
            case _:
                return ()

    def waits(self) -> Iterator[str]:
        """Who waits for whom, in words."""
        if self.stage is Stage.GATHERING:
            missing = [str(block) for block in self._missing]
            silent = [f"shard{shard}" for shard in self._shards if shard not in self._held]
            yield f"the checkpoint waits for {', '.join(silent or missing)}"
        if self.stage is Stage.ENDING:
            yield f"the checkpoint is over, but not heard of by {', '.join(f'shard{n}' for n in sorted(self.silent))}"


def _lacking(union: BlockSet, held: Held) -> Iterator[Block]:
    """What some slice has and a slice of this shard has not."""
    everywhere = BlockSet.union(held.everywhere)
    for block in union.blocks():
        yield from everywhere.missing(block)
