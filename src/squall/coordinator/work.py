"""Which blocks a stage consists of, in the order in which they are first handed out."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from squall.blocks import Block, BlockSet


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlan:
    """The extent of one stage.

    Attributes:
        stage: index of the strategy in the run's list.
        minibatches_per_epoch: positions in one epoch's order, above 0.
        block_length: `n_push`, the usual length of a block [minibatches].
        epochs: passes over the data; None: no bound.
        steps: minibatches over all replicas, earlier ones included; None: no bound.
        warm_start: blocks that one replica computes alone before the others start [blocks].

    >>> plan = WorkPlan(stage=0, minibatches_per_epoch=5, block_length=2, epochs=2, steps=8, warm_start=0)
    >>> [(block.epoch, block.first, block.stop) for block in plan.blocks(BlockSet())]
    [(0, 0, 2), (0, 2, 4), (0, 4, 5), (1, 0, 2), (1, 2, 3)]
    """

    stage: int
    minibatches_per_epoch: int
    block_length: int
    epochs: int | None
    steps: int | None
    warm_start: int

    @property
    def total(self) -> int | None:
        """Minibatches of the whole stage; None if only time bounds it."""
        by_epochs = None if self.epochs is None else self.epochs * self.minibatches_per_epoch
        bounds = [bound for bound in (by_epochs, self.steps) if bound is not None]
        return min(bounds) if bounds else None

    @property
    def why_over(self) -> str:
        """What the run says when all of it is done."""
        return "steps" if self.steps is not None and self.total == self.steps else "epochs"

    def blocks(self, settled: BlockSet) -> Iterator[Block]:
        """Yield the blocks that are not in `settled`, which a resumed run starts from, in order."""
        total = self.total
        left = None if total is None else total - settled.num_minibatches
        for epoch in count() if self.epochs is None else range(self.epochs):
            gaps = list(settled.of(self.stage, epoch).gaps(self.minibatches_per_epoch))
            for start, stop in gaps:
                for first in range(start, stop, self.block_length):
                    length = min(self.block_length, stop - first)
                    if left is not None:
                        if left <= 0:
                            return
                        length = min(length, left)
                        left -= length
                    yield Block(self.stage, epoch, first, first + length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How often the only replica of a run fetches; with others beside it, no moment is like a fresh start.

    Attributes:
        n_fetch, n_push: as of `Downpour` [minibatches].
    """

    n_fetch: int
    n_push: int

    def is_at_rest(self, blocks: int, minibatches: int) -> bool:
        """Whether after so much work since its start the replica has just fetched, and counts from 0 again.

        >>> [blocks for blocks in range(11) if Rhythm(n_fetch=5, n_push=2).is_at_rest(blocks, 2 * blocks)]
        [0, 5, 10]
        """
        # As replicas count: within blocks every minibatch, else a block in full, even if it is a short one.
        counted = minibatches if self.n_fetch < self.n_push else blocks * self.n_push
        return counted % self.n_fetch == 0
