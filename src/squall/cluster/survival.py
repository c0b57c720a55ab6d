"""What of a shard survives its death where all roles live in one thread: what a real one would have on disk."""

from dataclasses import dataclass

from squall.cluster.accounts import Accounts
from squall.cluster.arithmetic import TensorArithmetic
from squall.rules.apply import SliceState
from squall.shard.books import SliceBook
from squall.shard.events import Applied, Record
from squall.shard.machine import Phase, ShardMachine
from squall.shard.store import copied


@dataclass(slots=True)
class _Kept:
    books: list[SliceBook]
    states: list[SliceState]


class Survival:
    """Keeps what shards come back with.

    Args:
        mode: "ack": all that was applied; a number: what was there at the last of such intervals [virtual seconds].
        tensors: None: there are none, only books.
        shards: as the run begins.
    """

    def __init__(
        self,
        mode: float | str,
        accounts: Accounts,
        tensors: TensorArithmetic | None,
        shards: list[ShardMachine],
    ) -> None:
        self._interval_s = None if isinstance(mode, str) else mode
        self._due = self._interval_s or 0.0
        self._accounts, self._tensors = accounts, tensors
        self._kept: dict[int, _Kept] = {}
        self._waiting = set[int]()
        if self._interval_s is not None:
            self._kept = {machine.shard: self._copy(machine) for machine in shards}

    def tick(self, now: float, shards: list[ShardMachine]) -> None:
        """Time has passed: write down what is due, of each shard between two of its updates."""
        if self._interval_s is None:
            return
        if now >= self._due:
            self._due = now + self._interval_s
            self._waiting = set(self._kept)
        for index in tuple(self._waiting):
            if shards[index].phase is not Phase.APPLYING:
                self._waiting.discard(index)
                self._kept[index] = self._copy(shards[index])

    def _copy(self, machine: ShardMachine) -> _Kept:
        states = [] if self._tensors is None else self._tensors.states_kept(machine.shard)
        return _Kept([book.copy() for book in machine.books.values()], states)

    def come_back(self, index: int, dead: ShardMachine) -> ShardMachine:
        """The next life of a shard that was killed."""
        if self._interval_s is None:
            self._finish(dead)
            books = list(dead.books.values())
        else:
            books = [book.copy() for book in self._kept[index].books]
        versions = {book.slice: book.version for book in books}
        if self._interval_s is not None and self._tensors is not None:
            states = [copied(state) for state in self._kept[index].states]
            self._tensors.put_back(index, states, versions)
        incarnation = dead.incarnation + 1
        self._accounts.came_back(index, incarnation, versions)
        return ShardMachine(shard=index, incarnation=incarnation, books=tuple(books))

    def _finish(self, dead: ShardMachine) -> None:
        """An update that ran when it was killed has been written down, and answered to nobody."""
        if dead.phase is Phase.APPLYING:
            for effect in dead.handle(Applied()):
                if isinstance(effect, Record):
                    self._accounts.record(dead.shard, effect)
