"""What a shard remembers of a slice besides its values."""

from dataclasses import dataclass

from squall.blocks import BlockSet
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

    @property
    def state(self) -> SliceState:
        return SliceState(slice=self.slice, version=self.version, minibatches=self.minibatches)

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
