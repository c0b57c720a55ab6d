"""What a shard remembers of a slice besides its values."""

from dataclasses import dataclass

from squall.blocks import Block, BlockSet
from squall.wire.messages import SliceState


@dataclass(slots=True)
class SliceBook:
    """What a shard remembers of one slice besides its values, in the same commit as these.

    Attributes:
        settled: positions applied or refused for good.
        refused: those of them that were refused.
    """

    slice: int
    partition: int
    version: int
    minibatches: int
    settled: BlockSet
    refused: BlockSet

    def state(self, incarnation: int) -> SliceState:
        """As a reply of the shard's `incarnation`-th start tells it."""
        return SliceState(
            slice=self.slice, version=self.version, minibatches=self.minibatches, incarnation=incarnation
        )

    def take(self, block: Block, minibatches: int) -> None:
        """The block has been applied."""
        self.settled.add(block)
        self.version += 1
        self.minibatches += minibatches

    def refuse(self, block: Block) -> tuple[Block, ...]:
        """Settle as refused what the slice lacks of the block; returns that."""
        missing = self.settled.missing(block)
        for part in missing:
            self.settled.add(part)
            self.refused.add(part)
        return missing

    def copy(self) -> "SliceBook":
        return SliceBook(
            self.slice,
            self.partition,
            self.version,
            self.minibatches,
            BlockSet(self.settled.entries()),
            BlockSet(self.refused.entries()),
        )

    @classmethod
    def new(cls, slice: int, partition: int) -> "SliceBook":
        return cls(slice, partition, 0, 0, BlockSet(), BlockSet())
