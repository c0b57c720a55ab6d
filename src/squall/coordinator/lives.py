"""What the coordinator knows of shards that were killed and have come back, perhaps from an older state."""

from collections.abc import Iterable, Iterator

from squall.blocks import Block, BlockSet
from squall.slices import Cover


class ShardLives:
    """Which start of each shard is the newest, and what it came back with.

    Attributes:
        away: shards that are gone and have not come back, and since when.

    >>> lives = ShardLives()
    >>> lives.returned(0, 1, BlockSet(((0, 0, 0, 5),)))
    True
    >>> [lives.vouch(Block(0, 0, first, first + 5), [(0, life)]) for first, life in ((5, 0), (5, 1), (0, 0))]
    [False, True, True]
    """

    def __init__(self) -> None:
        self.away: dict[int, float] = {}
        self._newest: dict[int, tuple[int, BlockSet]] = {}

    def returned(self, shard: int, incarnation: int, had: BlockSet) -> bool:
        """A shard has come back with these positions on every slice; False if that is known."""
        self.away.pop(shard, None)
        if shard in self._newest and self._newest[shard][0] >= incarnation:
            return False
        self._newest[shard] = (incarnation, had)
        return True

    def vouch(self, block: Block, lives: Iterable[tuple[int, int]]) -> bool:
        """Whether a block that these starts of shards have acknowledged is still on all of them."""
        for shard, incarnation in lives:
            newest, had = self._newest.get(shard, (incarnation, None))
            if incarnation < newest and had is not None and had.cover(block) is not Cover.CONTAINED:
                return False
        return True

    def waits(self, now: float) -> Iterator[str]:
        """Who waits for whom, in words."""
        for shard, since in self.away.items():
            yield f"the run waits for shard{shard} to come back, since {now - since:.0f} s"
