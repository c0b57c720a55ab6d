"""What the coordinator knows of shards that were killed and have come back, perhaps from an older state."""

from collections.abc import Iterator, Sequence

from squall.blocks import Block, BlockSet
from squall.slices import Cover


class ShardLives:
    """Which start of each shard is the newest, and what it came back with.

    Attributes:
        away: shards that are gone and have not come back, and since when.

    >>> lives = ShardLives()
    >>> lives.returned(0, 1, BlockSet(((0, 0, 0, 5),))).num_minibatches
    5
    >>> [lives.vouch(Block(0, 0, first, first + 5), [(0, life)]) for first, life in ((5, 0), (5, 1), (0, 0))]
    [False, True, True]
    """

    def __init__(self) -> None:
        self.away: dict[int, float] = {}
        self._newest: dict[int, tuple[int, BlockSet]] = {}
        # By shard, the newest start that replicas have told of, and what it has acknowledged.
        self._acknowledged: dict[int, tuple[int, BlockSet]] = {}

    def returned(self, shard: int, incarnation: int, had: BlockSet) -> BlockSet | None:
        """A shard has come back with these positions on every slice; None if that is known.

        Returns:
            what it has now, at least: it may have acknowledged more since, of which a replica was quicker to tell.
        """
        self.away.pop(shard, None)
        if shard in self._newest and self._newest[shard][0] >= incarnation:
            return None
        newest, acknowledged = self._acknowledged.get(shard, (incarnation, BlockSet()))
        if newest >= incarnation:
            had = BlockSet.union((*had.blocks(), *acknowledged.blocks()))
        self._newest[shard] = (incarnation, had)
        return had

    def vouch(self, block: Block, lives: Sequence[tuple[int, int]]) -> bool:
        """Whether a block that these starts of shards have acknowledged is still on all of them."""
        for shard, incarnation in lives:
            newest, had = self._newest.get(shard, (incarnation, None))
            if incarnation < newest and had is not None and had.cover(block) is not Cover.CONTAINED:
                return False
        for shard, incarnation in lives:
            self._take_note(shard, incarnation, block)
        return True

    def _take_note(self, shard: int, incarnation: int, block: Block) -> None:
        newest, acknowledged = self._acknowledged.get(shard, (-1, BlockSet()))
        if incarnation > newest:
            acknowledged = BlockSet()
            self._acknowledged[shard] = (incarnation, acknowledged)
        if incarnation >= newest and acknowledged.cover(block) is Cover.DISJOINT:
            acknowledged.add(block)

    def waits(self, now: float) -> Iterator[str]:
        """Who waits for whom, in words."""
        for shard, since in self.away.items():
            yield f"the run waits for shard{shard} to come back, since {now - since:.0f} s"
