"""All roles of a run in one thread and virtual time, over links that delay, drop, duplicate and cut.

The deciders here are the very ones that real processes run. What they want done with tensors is an
`Arithmetic`: real tensors for `InProcess` and `Simulated`, bookkeeping alone for schedules by the thousand.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeAlias

from squall.cluster.director import DirectorBook
from squall.cluster.links import Links, Passage
from squall.coordinator import events as coordinator
from squall.coordinator.events import CoordinatorEffect
from squall.coordinator.machine import CoordinatorMachine
from squall.coordinator.recovery import Inheritance
from squall.errors import LostError
from squall.faults import AtStep, AtTime, Chance, Fault, Kill, Pause, is_named, role_of
from squall.machines import Machine, drive
from squall.replica import session as replica
from squall.replica.downpour import Compute, Computed, Loop
from squall.replica.session import ReplicaSession, ShardSlices
from squall.shard import events as shard
from squall.shard.events import Worker
from squall.shard.machine import ShardMachine
from squall.wire import messages

COORDINATOR = "coordinator"
AGAIN_S = 0.1
"""After so long a shard or coordinator comes back that was killed, if the fault does not say [virtual seconds]."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
NO_REPLICA = "no replica is left"


class Arithmetic(Protocol):
    """What is done with tensors, on behalf of every role."""

    def attach(self, worker: Worker) -> None:
        """A replica with this lead begins a life: give its workers a model and buffers of their own."""

    def compute(self, worker: Worker, wish: Compute) -> Computed: ...

    def swap(self, worker: Worker, buffer: int) -> None: ...

    def apply(self, shard: int, effect: shard.Apply) -> shard.Applied | shard.NotFinite: ...

    def write_out(self, shard: int, effect: shard.WriteOut) -> None: ...

    def record(self, shard: int, row: shard.Record, now: float) -> None: ...

    def store(self, shard: int, effect: shard.Store) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, in virtual seconds.

    Attributes:
        speeds: minibatches a second, by replica; the last one holds for all further ones.
        jitter: spread of a minibatch's time (sigma of a lognormal).
        begin_s: from a replica's joining to its first step.
        links: between roles, before faults.
        apply_s: of one update on a shard.
        tick_s: between two ticks of the coordinator.
        resend_s: between two ticks of a replica.
    """

    speeds: tuple[float, ...] = (1.0,)
    jitter: float = 0.2
    begin_s: float = 0.0
    links: Links = field(default_factory=Links)
    apply_s: float = 0.0
    tick_s: float = 0.5
    resend_s: float = 1.0

    def speed(self, number: int) -> float:
        return self.speeds[min(number, len(self.speeds) - 1)]


Watch: TypeAlias = Callable[[str, Machine, Any, tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """An event that no role of the world causes: the launcher's, a signal's, a foreign peer's.

    Attributes:
        at_s: when it comes [virtual seconds].
        role: whose it is, as in ``"shard0"``; a replica that is dead then does not get it.
    """

    at_s: float
    role: str
    event: Any


class NoEndError(AssertionError):
    """A schedule did not end within its bound of virtual time."""


class World:
    """Runs one coordinator, the shards and the replicas until the coordinator says that the stage has ended.

    Args:
        directs: the coordinator's decider.
        shards: the shards' deciders.
        slices: per shard, the slices that a worker talks to it about.
        num_replicas: replicas that start at time 0.
        loop: makes the strategy's generator for one life of a replica.
        arithmetic: what is done with tensors.
        tell: called with the time and each effect of the coordinator that is not a message.
        pace, faults, seed: what time and chance do.
        sizes: bytes of a message between two roles, for links that have a rate.
        struck: called with the time, the role, the fault that befalls it now, and what that is: "kill", "stop", "go on".
        come_back: makes the decider of a shard that was killed and is started anew, from the one that was killed; None:
            no shard is, and the first that is killed ends the run.
        follow: makes the decider of a coordinator that follows one that was killed; None: none is.
        outside: events that come to roles from outside of this world (tests).
        watch: called after every event with the role's name, its decider, the event and its effects, before
            these are carried out (tests).
    """

    def __init__(
        self,
        *,
        directs: CoordinatorMachine,
        shards: Sequence[ShardMachine],
        slices: Sequence[tuple[int, ...]],
        num_replicas: int,
        loop: Callable[[], Loop],
        arithmetic: Arithmetic,
        tell: Callable[[float, CoordinatorEffect], None] = lambda now, effect: None,
        pace: Pace | None = None,
        sizes: Callable[[str, str, messages.Message], int] = lambda sender, receiver, message: 0,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        struck: Callable[[float, str, Kill | Pause, str], None] = lambda now, role, fault, what: None,
        come_back: Callable[[int, ShardMachine], ShardMachine] | None = None,
        follow: Callable[[Inheritance], CoordinatorMachine] | None = None,
        outside: Sequence[Outside] = (),
        watch: Watch | None = None,
    ) -> None:
        self.now = 0.0
        self.directs = directs
        self.shards = list(shards)
        self.sessions: dict[int, ReplicaSession] = {}
        self.workers: dict[int, Worker] = {}
        self.why: str | None = None
        self._slices = [
            line for shard, held in zip(self.shards, slices, strict=True) for line in _lines(shard, held)
        ]
        self._partitions = sorted({0, *(line.partition for line in self._slices)})
        self._num_replicas = num_replicas
        self._loop = loop
        self._arithmetic = arithmetic
        self._tell = tell
        self._pace = pace or Pace()
        self._watch = watch
        self._outside = tuple(outside)
        self._random = random.Random(seed)
        self._passage = Passage(self._pace.links, sizes, faults, self._random)
        self._heap: list[tuple[float, int, str, Callable[[], None]]] = []
        self._order = count()
        self._paused: dict[str, float] = {}
        self._left: dict[Worker, ReplicaSession] = {}  # which hear what was on its way when they left
        self._steps: dict[str, int] = {}
        self._restarting = 0
        self._struck = struck
        self._come_back = come_back
        self._away: set[int] = set()  # shards that were killed
        self._follow = follow
        self._director = DirectorBook(now=0.0)
        self._epoch = 0
        self._is_headless = False  # the coordinator was killed, and the next has not been started
        # What the launcher has asked for, who asks the next coordinator again: a stop, and a checkpoint.
        self._stop: coordinator.Stop | None = None
        self._wanted = ""
        self._heard_epoch: dict[
            str, int
        ] = {}  # by role: of the newest coordinator that it was connected with
        self._heard_life = [machine.incarnation for machine in self.shards]  # by the coordinator
        self._upsets = [fault for fault in faults if isinstance(fault, Kill | Pause)]

    # Time -----------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        bound_s: float = float("inf"),
        linger_s: float = 0.0,
        may_go_on: Callable[[], str | None] = lambda: None,
    ) -> str:
        """Let time pass until the stage has ended; return why it did.

        Args:
            bound_s: virtual time after which a `NoEndError` is raised [seconds].
            linger_s: how long time passes after the end, so that what is late arrives too [seconds].
            may_go_on: asked before each event; a text stops the run and says why.
        """
        for number in range(self._num_replicas):
            self._start(number, incarnation=0)
        self._at(self._pace.tick_s, COORDINATOR, self._tick)
        for upset in self._upsets:
            if isinstance(upset.when, AtTime):
                for name in self._named(upset.role):
                    self._at(upset.when.seconds, "", partial(self._upset, name, upset))
        for outside in self._outside:
            self._at(outside.at_s, outside.role, partial(self._intrude, outside))
        is_stopping = False
        while self.why is None:
            if not is_stopping and (why := may_go_on()) is not None:
                is_stopping = True
                self._stop = coordinator.Stop(now=self.now, why=why)
                self._direct(self._stop)
                continue
            self._pass()
            if self.now > bound_s:
                raise NoEndError(f"no end after {bound_s} virtual seconds: {self.directs.waits(self.now)}")
        until = self.now + linger_s
        while self._heap[0][0] <= until and linger_s:
            self._pass()
        return self.why

    def _pass(self) -> None:
        """Let time pass until the next event, and have it happen."""
        time, _, name, act = heapq.heappop(self._heap)
        if self._paused and (resumes := self._paused.get(name, 0.0)) > time:
            self._at(resumes - self.now, name, act)
            return
        if time > self.now:
            self.now = time
        act()

    def _at(self, after_s: float, name: str, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + after_s, next(self._order), name, act))

    def _tick(self) -> None:
        self._at(self._pace.tick_s, COORDINATOR, self._tick)
        is_empty = not self.directs.members and not self._restarting and not self.sessions
        if is_empty and not self._is_headless:
            self._direct(coordinator.Stop(now=self.now, why=NO_REPLICA))
            return
        self._direct(coordinator.Tick(now=self.now))

    def _tick_replica(self, worker: Worker) -> None:
        if self.workers.get(worker.replica) == worker:
            self._at(self._pace.resend_s, _name(worker), lambda: self._tick_replica(worker))
        self._work(worker, replica.Tick())

    # Roles ----------------------------------------------------------------------------------------------

    def _start(self, number: int, incarnation: int) -> None:
        worker = Worker(replica=number, partition=0, incarnation=incarnation)
        self._arithmetic.attach(worker)
        self.workers[number] = worker
        self.sessions[number] = ReplicaSession(loop=self._loop(), shards=self._slices)
        self._heard_epoch[_name(worker)] = self._epoch
        for index in range(len(self.shards)):
            for one in self._workers_of(worker):
                self._serve(index, shard.Attach(worker=one))
        self._direct(coordinator.Joined(now=self.now, replica=number, incarnation=incarnation))
        self._at(self._pace.begin_s, _name(worker), lambda: self._work(worker, replica.Started()))
        self._at(self._pace.resend_s, _name(worker), lambda: self._tick_replica(worker))

    def _workers_of(self, lead: Worker) -> list[Worker]:
        return [lead.beside(partition) for partition in self._partitions]

    def _drive(self, name: str, machine: Machine, event: Any, carry_out: Callable[[Any], Any]) -> None:
        watch = self._watch
        if watch is None:
            drive(machine, event, carry_out)
        else:
            drive(machine, event, carry_out, lambda *seen: watch(name, *seen))

    def _intrude(self, outside: Outside) -> None:
        if outside.role == COORDINATOR:
            self._direct(outside.event)
        elif outside.role.startswith("shard"):
            self._serve(int(outside.role.removeprefix("shard")), outside.event)
        else:
            number = int(outside.role.removeprefix("replica"))
            for worker in (*self.workers.values(), *self._left):
                if worker.replica == number:
                    self._work(worker, outside.event)
                    return

    def _direct(self, event: coordinator.CoordinatorEvent) -> None:
        if isinstance(event, coordinator.Checkpoint):
            self._wanted = self._wanted or event.name
        if self._is_headless:
            return
        self._drive(COORDINATOR, self.directs, event, self._carry_out_direction)

    def _carry_out_direction(self, effect: CoordinatorEffect) -> coordinator.Copied | None:
        epoch = self._epoch
        match effect:
            case coordinator.ToReplica(replica=number, incarnation=incarnation, message=message):
                worker = Worker(replica=number, partition=0, incarnation=incarnation)
                event = replica.FromCoordinator(message=message)
                name = _name(worker)
                self._send(COORDINATOR, name, message, lambda: self._hear_direction(worker, event, epoch))
            case coordinator.ToShard(shard=index, message=message):
                request = shard.FromCoordinator(message=message)
                life = self.shards[index].incarnation
                arrive = partial(self._hear_request, index, request, life, epoch)
                self._send(COORDINATOR, f"shard{index}", message, arrive)
            case coordinator.Ended(why=why):
                self.why = why
                self._tell(self.now, effect)
            case coordinator.Cut(request=request):
                self._tell(self.now, effect)
                self._wanted = ""  # if the coordinator is lost now, it is given up
                return coordinator.Copied(now=self.now, request=request)
            case _:
                self._note(effect)
                self._tell(self.now, effect)
        return None

    # The coordinator's lives. Roles hear the newest one alone that they were connected with.

    def _note(self, effect: CoordinatorEffect) -> None:
        """Keep what the next coordinator must be told."""
        match effect:
            case coordinator.Closed(report=report):
                self._director.closed([report.block])
            case coordinator.Found(blocks=blocks):
                self._director.closed(blocks)
            case coordinator.Report(event=event):
                self._director.happened(event)

    def _hear_direction(self, worker: Worker, event: replica.FromCoordinator, epoch: int) -> None:
        if epoch == self._heard_epoch[_name(worker)]:
            self._work(worker, event)

    def _hear_request(self, index: int, request: shard.FromCoordinator, life: int, epoch: int) -> None:
        if epoch == self._heard_epoch.get(f"shard{index}", 0):
            self._serve(index, request, life)

    def _kill_coordinator(self, back_after_s: float) -> None:
        self._is_headless = True
        self._at(back_after_s, "", self._coordinator_back)

    def _coordinator_back(self) -> None:
        assert self._follow is not None, "nothing was said of who follows a coordinator"
        self._epoch += 1
        self._is_headless = False
        self.directs = self._follow(self._director.inheritance(self._epoch, self.workers))
        for index in range(len(self.shards)):
            self._heard_epoch[f"shard{index}"] = self._epoch
        for worker in list(self.workers.values()):
            joined = coordinator.Joined(now=self.now, replica=worker.replica, incarnation=worker.incarnation)
            self._direct(joined)
            self._at(0.01, _name(worker), partial(self._redirect, worker, self._epoch))
        self._direct(coordinator.Tick(now=self.now))
        if self._wanted:
            self._direct(coordinator.Checkpoint(now=self.now, name=self._wanted))
        if self._stop is not None:
            self._direct(self._stop)

    def _redirect(self, worker: Worker, epoch: int) -> None:
        if epoch < self._epoch:
            return
        if self.workers.get(worker.replica) != worker:
            self._lose(worker)
            return
        self._heard_epoch[_name(worker)] = epoch
        self._work(worker, replica.Redirected())

    def take_checkpoint(self, name: str) -> None:
        """Ask for a checkpoint of this name; to be called where `may_go_on` is."""
        self._direct(coordinator.Checkpoint(now=self.now, name=name))

    def _serve(self, index: int, event: shard.ShardEvent, life: int | None = None) -> None:
        """Have a shard take an event; nobody is there if it was killed, or its `life` is over."""
        if index in self._away or (life is not None and life != self.shards[index].incarnation):
            return
        carry_out = partial(self._carry_out_service, index)
        self._drive(f"shard{index}", self.shards[index], event, carry_out)

    def _carry_out_service(self, index: int, effect: shard.ShardEffect) -> shard.ShardEvent | None:
        life = self.shards[index].incarnation
        match effect:
            case shard.Apply():
                result = self._arithmetic.apply(index, effect)
                if not self._pace.apply_s:
                    return result
                self._at(self._pace.apply_s, f"shard{index}", lambda: self._serve(index, result, life))
            case shard.WriteOut():
                self._arithmetic.write_out(index, effect)
            case shard.Record():
                self._arithmetic.record(index, effect, self.now)
            case shard.Store():
                self._arithmetic.store(index, effect)
            case shard.Answer(to=worker, message=message):
                event = replica.FromShard(shard=index, message=message, partition=worker.partition)
                lead = worker.beside(0)
                self._send(f"shard{index}", _name(worker), message, lambda: self._reply(lead, event, life))
            case shard.Tell(message=message):
                epoch = self._heard_epoch.get(f"shard{index}", 0)
                arrive = partial(self._hear_shard, index, message, life, epoch)
                self._send(f"shard{index}", COORDINATOR, message, arrive)
        return None

    # A connection ends with either side: what was on its way from or to the past life of a shard is lost with it.

    def _reply(self, worker: Worker, event: replica.FromShard, life: int) -> None:
        if event.shard in self._away or life == self.shards[event.shard].incarnation:
            self._work(worker, event)

    def _hear_shard(self, index: int, message: Any, life: int, epoch: int) -> None:
        if epoch == self._epoch and life >= self._heard_life[index]:
            self._heard_life[index] = life
            self._direct(coordinator.FromShard(now=self.now, shard=index, message=message))

    def _work(self, worker: Worker, event: replica.SessionEvent) -> None:
        is_working = self.workers.get(worker.replica) == worker
        session = self.sessions[worker.replica] if is_working else self._left.get(worker)
        if session is not None:  # else that life is over
            self._drive(_name(worker), session, event, partial(self._carry_out_work, worker))

    def _carry_out_work(self, worker: Worker, effect: replica.SessionEffect) -> None:
        name = _name(worker)
        match effect:
            case Compute():
                self._begin(worker, effect)
            case replica.Swap(buffer=buffer):
                self._arithmetic.swap(worker, buffer)
            case replica.ToShard(shard=index, message=request, partition=partition):
                sender = worker.beside(partition)
                asked = shard.FromWorker(sender=sender, message=request)
                life = self.shards[index].incarnation
                self._send(_name(sender), f"shard{index}", request, lambda: self._serve(index, asked, life))
            case replica.ToCoordinator(message=told):
                epoch = self._heard_epoch[name]
                self._send(name, COORDINATOR, told, lambda: self._hear(worker, told, epoch))
            case replica.Quit():
                self.workers.pop(worker.replica)
                self._left[worker] = self.sessions.pop(worker.replica)

    def _hear(
        self, worker: Worker, message: messages.Ask | messages.Goodbye | messages.Resume, epoch: int
    ) -> None:
        if epoch != self._epoch:
            return
        event = coordinator.FromReplica(
            now=self.now, replica=worker.replica, incarnation=worker.incarnation, message=message
        )
        self._direct(event)

    def _begin(self, worker: Worker, wish: Compute) -> None:
        name = _name(worker)
        step = self._steps[name] = self._steps.get(name, -1) + 1
        whole = self._steps[""] = self._steps.get("", -1) + 1  # of the run, by which others are upset
        for upset in self._upsets:
            if is_named(name, upset.role):
                if self._strikes(upset, step):
                    self._upset(name, upset)
            elif not upset.role.startswith("replica") and self._strikes(upset, whole):
                for other in self._named(upset.role):
                    self._upset(other, upset)
        if self.workers.get(worker.replica) != worker:
            return
        seconds = self._random.lognormvariate(0.0, self._pace.jitter) / self._pace.speed(worker.replica)
        computed = self._arithmetic.compute(worker, wish)
        self._at(seconds, name, lambda: self._work(worker, computed))

    # Faults ---------------------------------------------------------------------------------------------

    def _named(self, role: str) -> list[str]:
        if role[-1].isdigit() or role == COORDINATOR:
            return [role]
        number = self._num_replicas if role == "replica" else len(self.shards)
        return [f"{role}{index}" for index in range(number)]

    def _strikes(self, upset: Kill | Pause, step: int) -> bool:
        match upset.when:
            case AtStep(step=at):
                return step == at
            case Chance(probability=probability):
                return self._random.random() < probability
            case AtTime():
                return False

    def _upset(self, name: str, upset: Kill | Pause) -> None:
        number = int(name.lstrip(_LETTERS) or 0)
        if self._is_gone(name, number):
            return
        if isinstance(upset, Pause):
            self._struck(self.now, name, upset, "stop")
            self._paused[name] = max(self._paused.get(name, 0.0), self.now + upset.seconds)
            self._at(upset.seconds, "", partial(self._goes_on, name, upset))
            return
        self._struck(self.now, name, upset, "kill")
        self._paused.pop(name, None)
        back_after_s = upset.restart or AGAIN_S
        if name == COORDINATOR:
            self._kill_coordinator(back_after_s)
            return
        if name.startswith("shard"):
            self._kill_shard(number, back_after_s)
            return
        worker = self.workers.pop(number)
        self.sessions.pop(number)
        self._at(0.01, COORDINATOR, partial(self._lose, worker))
        for index in range(len(self.shards)):
            for one in self._workers_of(worker):
                self._at(0.01, f"shard{index}", partial(self._serve, index, shard.Detach(worker=one)))
        if upset.restart is not None:
            self._restarting += 1
            self._at(upset.restart, "", lambda: self._restart(number, worker.incarnation + 1))

    def _is_gone(self, name: str, number: int) -> bool:
        if name == COORDINATOR:
            return self._is_headless or self.why is not None
        return number in self._away if name.startswith("shard") else number not in self.workers

    def _goes_on(self, name: str, pause: Pause) -> None:
        if name in self._paused and self._paused[name] <= self.now:
            del self._paused[name]
            self._struck(self.now, name, pause, "go on")

    def _kill_shard(self, index: int, back_after_s: float) -> None:
        if self._come_back is None:
            raise LostError(reason=f"shard{index} was killed, and the run cannot go on without it.")
        self._away.add(index)
        self._at(0.01, COORDINATOR, partial(self._lose_shard, index))
        self._at(back_after_s, "", partial(self._shard_back, index))

    def _lose_shard(self, index: int) -> None:
        if index in self._away:
            self._direct(coordinator.ShardLost(now=self.now, shard=index))

    def _shard_back(self, index: int) -> None:
        assert self._come_back is not None
        self.shards[index] = self._come_back(index, self.shards[index])
        self._away.discard(index)
        for lead in self.workers.values():
            for worker in self._workers_of(lead):
                self._serve(index, shard.Attach(worker=worker))
        self._serve(index, shard.ComeBack())
        for line in self._slices:
            if line.shard == index:
                back = replica.Reconnected(shard=index, partition=line.partition)
                for worker in (*self.workers.values(), *self._left):
                    self._at(0.01, _name(worker), partial(self._work, worker, back))

    def _lose(self, worker: Worker) -> None:
        lost = coordinator.Lost(
            now=self.now, replica=worker.replica, incarnation=worker.incarnation, why="killed"
        )
        self._direct(lost)

    def _restart(self, number: int, incarnation: int) -> None:
        self._restarting -= 1
        self._start(number, incarnation)

    def _send(
        self, sender: str, receiver: str, message: messages.Message, arrive: Callable[[], None]
    ) -> None:
        for after_s in self._passage.arrivals(sender, receiver, message, self.now):
            self._at(after_s, role_of(receiver), arrive)


def _name(worker: Worker) -> str:
    """As links call it: a replica's lead has the replica's own name."""
    return f"replica{worker.replica}.{worker.partition}" if worker.partition else f"replica{worker.replica}"


def _lines(shard: ShardMachine, held: Sequence[int]) -> list[ShardSlices]:
    """A shard's slices, by whose partition they are of."""
    by_partition: dict[int, list[int]] = {}
    for number in held:
        by_partition.setdefault(shard.books[number].partition if number in shard.books else 0, []).append(
            number
        )
    return [
        ShardSlices(shard=shard.shard, slices=tuple(numbers), partition=partition)
        for partition, numbers in sorted(by_partition.items())
    ]
