"""Judges of simulated schedules: one that follows every decider, and facts that must hold at the end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from squall.coordinator.events import FromReplica, ToReplica
from squall.coordinator.machine import CoordinatorMachine
from squall.coordinator.recovery import Inheritance
from squall.machines import Machine, key_of
from squall.replica.downpour import DownpourLoop
from squall.replica.session import ReplicaSession
from squall.shard.books import SliceBook
from squall.shard.machine import ShardMachine
from squall.wire.messages import Ask, Lease
from tests.simulated.coordinator_rules import CoordinatorRules
from tests.simulated.replica_rules import ReplicaRules
from tests.simulated.shard_rules import ShardRules


class Judge:
    """Follows every decider of one schedule: their effects, their invariants, and what is worth counting.

    Args:
        rules: of the coordinator.
        loop, slices: what the replicas know.
        books: per shard, as at the start.
    """

    def __init__(
        self,
        *,
        rules: CoordinatorRules,
        loop: DownpourLoop,
        slices: Sequence[tuple[int, ...]],
        books: Mapping[int, Sequence[SliceBook]],
        incarnation: int,
    ) -> None:
        self.pairs: Counter[tuple[str, str, str]] = Counter()
        self.leases: list[tuple[float, ToReplica]] = []
        self._known: set[tuple[int, ...]] = set()
        self.asked: dict[int, float] = {}  # when each replica asked first
        self._coordinator: CoordinatorRules | None = rules
        self._epoch = 0
        self._loop = loop
        partitions = {book.slice: book.partition for held in books.values() for book in held}
        self._lines = {  # by partition and shard
            (partition, shard): tuple(n for n in held if partitions[n] == partition)
            for shard, held in enumerate(slices)
            for partition in sorted({partitions[n] for n in held})
        }
        self._replicas: dict[int, ReplicaRules] = {}  # by the identity of the session
        self._kept: list[Machine] = []  # so that no identity is used twice
        self._shards = [ShardRules(shard, incarnation, books[shard]) for shard in range(len(slices))]

    def came_back(self, shard: int, incarnation: int, books: Sequence[SliceBook]) -> None:
        """A shard that was killed goes on from these books."""
        self._shards[shard] = ShardRules(shard, incarnation, books)

    def followed_by(self, inheritance: Inheritance) -> Inheritance:
        """The coordinator was killed, and another follows it."""
        self._coordinator, self._epoch = None, inheritance.epoch
        return inheritance

    @property
    def num_followers(self) -> int:
        return self._epoch

    def watch(self, name: str, machine: Machine, event: Any, effects: tuple[Any, ...]) -> None:
        phase, seen = machine.story[-1]
        assert seen is event
        self.pairs[type(machine).__name__, phase.name, key_of(event).__name__] += 1
        machine.check_invariants()
        match machine:
            case ShardMachine():
                self._shards[machine.shard].see(machine, event, effects)
            case ReplicaSession():
                self._rules_of(machine).see(machine, event, effects)
            case CoordinatorMachine():
                self._note(event, effects)
                if self._coordinator is not None:
                    self._coordinator.see(machine, event, effects)

    def _rules_of(self, session: ReplicaSession) -> ReplicaRules:
        if id(session) not in self._replicas:
            self._replicas[id(session)] = ReplicaRules(self._loop, self._lines)
            self._kept.append(session)
        return self._replicas[id(session)]

    def _note(self, event: Any, effects: tuple[Any, ...]) -> None:
        if isinstance(event, FromReplica) and isinstance(event.message, Ask):
            self.asked.setdefault(event.replica, event.now)
        for effect in effects:
            if isinstance(effect, ToReplica) and isinstance(effect.message, Lease):
                self._note_lease(event.now, effect)

    def _note_lease(self, now: float, lease: ToReplica) -> None:
        message = lease.message
        name = (
            (self._epoch, lease.replica, lease.incarnation, message.request)
            if isinstance(message, Lease)
            else ()
        )
        if name not in self._known:  # else it is sent again
            self._known.add(name)
            self.leases.append((now, lease))

    def end(self, directs: CoordinatorMachine, shards: Sequence[ShardMachine]) -> None:
        if self._coordinator is not None:
            self._coordinator.end(directs)
        for rules, machine in zip(self._shards, shards, strict=True):
            rules.end(machine)
