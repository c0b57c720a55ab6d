"""Blocks that nobody can compute: from the first gradient that is not finite to the last shard that keeps the
block as refused.

A block is given up when two replicas found it not finite, or one did twice that has nobody beside it, or a shard
had a part of it already. Then every shard is asked to keep it as refused, until all have.
"""

from collections.abc import Iterable, Iterator, Mapping

from squall.blocks import Block, BlockSet, Outcome
from squall.coordinator.events import ToShard
from squall.slices import Cover
from squall.wire.messages import Refuse, Refused

TERMINAL_IN_A_ROW = 3


class Refusals:
    """What was found not to be finite, what is being settled as refused, and what was.

    Args:
        num_shards: all of which must keep a block as refused.
        in_a_row: how many were refused since the last one that was done.

    Attributes:
        refused: blocks that were, with what was not finite.

    >>> refusals, block = Refusals(num_shards=1), Block(0, 0, 0, 1)
    >>> [refusals.found(block, replica, "weight", is_alone=False) for replica in (0, 0, 1)]
    [False, False, True]
    >>> refusals.settle(block)
    (ToShard(shard=0, message=Refuse(request=1, block=Block(stage=0, epoch=0, first=0, stop=1))),)
    >>> refusals.answered(0, Refused(request=1, block=block, outcomes=(Outcome.REFUSED,)))
    True
    >>> refusals.end(block)
    "the gradient of 'weight' was not finite"
    """

    def __init__(self, num_shards: int, in_a_row: int = 0) -> None:
        self.refused: dict[Block, str] = {}
        self._shards = tuple(range(num_shards))
        self._in_a_row = in_a_row
        self._finders: dict[Block, list[int]] = {}  # who found a block not finite
        self._tensors: dict[Block, str] = {}
        self._settling: dict[Block, set[int]] = {}  # shards that have not answered yet
        self._mixed: set[Block] = set()
        self._numbers: dict[Block, int] = {}
        self._requests = 0

    # Before it is given up ------------------------------------------------------------------------------

    def found(self, block: Block, replica: int, tensor: str, *, is_alone: bool) -> bool:
        """A replica found the gradient of a tensor not finite; True if nobody is left who should try."""
        self._tensors[block] = tensor
        finders = self._finders.setdefault(block, [])
        finders.append(replica)
        return len(set(finders)) > 1 or (len(finders) > 1 and is_alone)

    def has_found(self, block: Block, replica: int) -> bool:
        """Whether this replica has found it not finite."""
        return replica in self._finders.get(block, ())

    def passed(self, block: Block, *, is_new: bool) -> list[int]:
        """It was computed after all: who had found it not finite."""
        if is_new:
            self._in_a_row = 0
        return self._forget(block)

    def _forget(self, block: Block) -> list[int]:
        self._tensors.pop(block, None)
        return self._finders.pop(block, [])

    # While shards are asked -----------------------------------------------------------------------------

    @property
    def settling(self) -> Mapping[Block, set[int]]:
        """Blocks that are given up, and the shards that have not answered yet."""
        return self._settling

    def settle(self, block: Block, shards: Iterable[int] | None = None) -> tuple[ToShard, ...]:
        """Have shards, all of them by default, keep it as refused."""
        self._requests += 1
        self._numbers[block] = self._requests
        self._settling[block] = set(self._shards if shards is None else shards)
        return self._ask(block)

    def _ask(self, block: Block) -> tuple[ToShard, ...]:
        request = Refuse(request=self._numbers[block], block=block)
        return tuple(ToShard(shard=shard, message=request) for shard in sorted(self._settling[block]))

    def again(self) -> tuple[ToShard, ...]:
        """Whatever may have been lost, once more."""
        return tuple(effect for block in self._settling for effect in self._ask(block))

    def shard_returned(self, shard: int, had: BlockSet) -> None:
        """A shard that has come back with no more than this may have lost what it had answered."""
        for block, waiting in self._settling.items():
            if had.cover(block) is not Cover.CONTAINED:
                waiting.add(shard)

    def answered(self, shard: int, told: Refused) -> bool:
        """A shard keeps it as refused; True if it was the last one."""
        waiting = self._settling.get(told.block)
        if waiting is None or shard not in waiting:
            return False
        waiting.discard(shard)
        if Outcome.REPEATED in told.outcomes:
            self._mixed.add(told.block)
        return not waiting

    # When all have answered -----------------------------------------------------------------------------

    def tensor(self, block: Block) -> str:
        """What was not finite; "" if that was not the cause."""
        return self._tensors.get(block, "")

    def end(self, block: Block) -> str | None:
        """All shards keep it as refused: why, in words; None if it had been before, and a shard had lost it."""
        del self._settling[block], self._numbers[block]
        tensor = self.tensor(block)
        self._forget(block)
        if block in self.refused:
            return None
        why = f"the gradient of {tensor!r} was not finite" if tensor else "a shard has a part of it already"
        if block in self._mixed:
            why += "; some slices had applied it"
        self.refused[block] = why
        self._in_a_row += 1
        return why

    @property
    def is_diverging(self) -> bool:
        """So many in a row that the run makes no sense any more."""
        return self._in_a_row >= TERMINAL_IN_A_ROW

    def waits(self) -> Iterator[str]:
        """Who waits for whom, in words."""
        for block, shards in self._settling.items():
            yield f"{block} waits to be settled by {', '.join(f'shard{shard}' for shard in sorted(shards))}"

    def check_invariants(self, settled: BlockSet) -> None:
        for block in self.refused:
            assert settled.cover(block) is Cover.CONTAINED or block in self._settling
        for block in (*self._finders, *self._tensors):
            assert settled.cover(block) is Cover.DISJOINT, "what is settled is forgotten"
