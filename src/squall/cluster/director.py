"""The coordinator's lives, as the launcher sees them: what the next one must be told, and whether this one is alive.

Time comes in as an argument. The launcher starts the processes.
"""

from collections.abc import Iterable

from squall.blocks import Block, BlockSet
from squall.coordinator.recovery import Inheritance
from squall.observe.events import Event, Recovered, Refused
from squall.slices import Cover

SILENT_S = 20.0
"""A coordinator says something four times a second; one that has been silent for so long is taken for lost."""


class DirectorBook:
    """What a coordinator has told its launcher: kept for the one that follows it.

    Args:
        now: when the coordinator was started [seconds].
        settled: positions that were done before this start of the run, of which nobody is told.

    >>> book = DirectorBook(now=0.0)
    >>> book.closed([Block(0, 0, 0, 2)])
    >>> book.inheritance(1, expected=[0, 2]).told.entries(), book.is_silent(19.0), book.is_silent(21.0)
    (((0, 0, 0, 2),), False, True)
    """

    def __init__(self, now: float) -> None:
        self._heard = now
        self._told = BlockSet()
        self._refused: dict[Block, str] = {}
        self._refused_in_a_row = 0
        self._lives: dict[int, int] = {}

    def heard(self, now: float) -> None:
        """It has said something, or another was started."""
        self._heard = now

    def silent_s(self, now: float) -> float:
        """For how long it has said nothing [seconds]."""
        return now - self._heard

    def is_silent(self, now: float) -> bool:
        """Whether it has been silent for too long."""
        return self.silent_s(now) > SILENT_S

    def closed(self, blocks: Iterable[Block]) -> None:
        """It has told that these are done."""
        for block in blocks:
            if self._told.cover(block) is Cover.DISJOINT:
                self._told.add(block)
                self._refused_in_a_row = 0

    def happened(self, event: Event) -> None:
        """It has told of this."""
        if isinstance(event, Refused) and event.block not in self._refused:
            self._refused[event.block] = event.why
            self._refused_in_a_row += 1
        if isinstance(event, Recovered):
            self._lives[int(event.role.removeprefix("shard"))] = event.incarnation

    def serves(self, shard: int, incarnation: int) -> None:
        """A shard was started for the first time."""
        self._lives[shard] = incarnation

    def inheritance(self, epoch: int, expected: Iterable[int]) -> Inheritance:
        """What the next coordinator is told.

        Args:
            epoch: of it.
            expected: replicas that are alive.
        """
        return Inheritance(
            epoch=epoch,
            expected=tuple(expected),
            told=BlockSet(self._told.entries()),
            refused=dict(self._refused),
            refused_in_a_row=self._refused_in_a_row,
            lives=dict(self._lives),
        )
