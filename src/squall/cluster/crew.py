"""What the launcher makes for the workers of one replica: connections and memory between each two of them."""

from itertools import combinations

from squall.partition.slots import slots_between
from squall.training.prepare import Prepared
from squall.wire.channel import Channel
from squall.wire.memory import SharedArena


class CrewMemory:
    """Channels and arenas of one replica, until its workers have theirs.

    Args:
        prepared: of a run whose replicas are cut.
    """

    def __init__(self, prepared: Prepared) -> None:
        assert prepared.cut is not None
        sizes = edge_bytes(prepared)
        self._buffers = SharedArena.create(prepared.buffers.arena_bytes)
        self._partitions = prepared.cut.partitions
        self._ends: dict[tuple[int, int], Channel] = {}  # by whose end it is, and to whom
        self._arenas: dict[tuple[int, int], SharedArena] = {}
        for one, other in combinations(range(self._partitions), 2):
            self._ends[one, other], self._ends[other, one] = Channel.pair()
            arena = SharedArena.create(sizes[one, other])
            self._arenas[one, other] = self._arenas[other, one] = arena

    def _others(self, partition: int) -> list[int]:
        return [other for other in range(self._partitions) if other != partition]

    def num_bytes_of(self, partition: int) -> dict[str, int]:
        """Of each colleague of a worker, the bytes that both share; as JSON has it, with text as keys."""
        return {str(other): self._arenas[partition, other].num_bytes for other in self._others(partition)}

    def fds_of(self, partition: int) -> list[int]:
        """What a worker is handed: memory for the model's buffers, and a connection and memory for each colleague."""
        fds = [self._buffers.fd]
        for other in self._others(partition):
            fds += [self._ends[partition, other].fileno(), self._arenas[partition, other].fd]
        return fds

    def close(self) -> None:
        """Give back this process's ends."""
        self._buffers.close()
        made: list[Channel | SharedArena] = [*self._ends.values(), *self._arenas.values()]
        for end in made:
            end.close()


def edge_bytes(prepared: Prepared) -> dict[tuple[int, int], int]:
    """How much memory each two workers of a replica share, for minibatches of every size that the run has."""
    cut, minibatches = prepared.cut, prepared.minibatches
    assert cut is not None
    found: dict[tuple[int, int], int] = {}
    for examples in {minibatches.size(0), minibatches.size(minibatches.num_minibatches - 1)}:
        program, count = cut.program(examples), cut.count(examples)
        for pair in combinations(range(cut.partitions), 2):
            needed = slots_between(program, count, *pair).num_bytes
            found[pair] = max(found.get(pair, 64), needed)
    return found
