"""The process of the coordinator: sockets and a clock around a `CoordinatorMachine`."""

import contextlib
import select
import time
from typing import Any

from squall.coordinator.events import (
    PROCESS_GONE,
    Checkpoint,
    Closed,
    CoordinatorEffect,
    CoordinatorEvent,
    Copied,
    Cut,
    Diverging,
    Ended,
    Found,
    FromReplica,
    FromShard,
    Joined,
    Lost,
    Report,
    ShardLost,
    Stop,
    Tick,
    ToReplica,
    ToShard,
)
from squall.coordinator.machine import CoordinatorMachine, Phase
from squall.errors import RemoteProtocolError
from squall.machines import drive
from squall.observe import events
from squall.wire.connection import Connection
from squall.wire.control import (
    AttachReplica,
    AttachShard,
    BuffersCopied,
    ClosedBlock,
    Closings,
    CutReached,
    DivergedRun,
    EndedRun,
    Finish,
    FoundClosed,
    Happened,
    Ready,
    StopRun,
    TakeCheckpoint,
    Waiting,
)
from squall.wire.joining import JoinCoordinator
from squall.wire.listener import Door, Guest, Listener
from squall.wire.messages import Ask, Books, Goodbye, Held, Refused, Released, Resume, Returned
from squall.wire.messages import Diverged as DivergedAt
from squall.wire.traffic import TrafficMeter

TICK_S = 0.25
TOLD_EVERY_S = 0.05
MOST_TOLD = 500
WAITS_TOLD_AFTER_S = 5.0
EXIT_FOLLOWED = 5


def serve(settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
    """Serve as coordinator until the launcher says to finish.

    Args:
        settings: "began" (monotonic), "num_replicas", "num_shards", "max_staleness"; "tcp", if the others come that
            way: a mapping with "token", and "address", its own.
        load: "plan", "settled", "rhythm", and "inheritance", if it follows one that was lost.
        launcher: the connection to it.
        fds: with "tcp", sockets that listen.
    """
    tcp = settings.get("tcp")
    door, traffic = None, TrafficMeter("coordinator")
    if tcp is not None:
        listener = Listener.from_fds(fds, tcp["address"])
        door = Door(listener, tcp["token"], (JoinCoordinator,), traffic.refused)
    inheritance = load["inheritance"]
    machine = CoordinatorMachine(
        plan=load["plan"],
        num_replicas=settings["num_replicas"],
        num_shards=settings["num_shards"],
        settled=load["settled"],
        max_staleness=settings["max_staleness"],
        rhythm=load["rhythm"],
        inheritance=inheritance,
    )
    epoch = 0 if inheritance is None else inheritance.epoch
    CoordinatorServer(machine, launcher, settings["began"], door, traffic, epoch=epoch).run()


class CoordinatorServer:
    """Carries out what one `CoordinatorMachine` decides."""

    def __init__(
        self,
        machine: CoordinatorMachine,
        launcher: Connection,
        began: float,
        door: Door | None,
        traffic: TrafficMeter,
        *,
        epoch: int = 0,
    ) -> None:
        self._epoch = epoch
        self._machine = machine
        self._door = door
        self._traffic = traffic
        self._launcher = launcher
        self._began = began
        self._replicas: dict[int, tuple[int, int, Connection]] = {}  # by descriptor: replica, incarnation
        self._lines: dict[tuple[int, int], Connection] = {}
        self._next: dict[
            tuple[str, int], int
        ] = {}  # over TCP: the least incarnation to come, by role and number
        self._shards: dict[int, Connection] = {}
        self._shard_of: dict[int, tuple[int, Connection]] = {}  # by descriptor
        self._unsent: dict[
            tuple[int, int], list[Any]
        ] = {}  # by replica and incarnation, until the round is over
        self._closings: list[ClosedBlock] = []
        self._waits: dict[str, float] = {}  # since when
        self._told_waits: tuple[str, ...] = ()
        self._is_finished = False
        self._epoll = select.epoll()
        for end in (launcher, door):
            if end is not None:
                self._epoll.register(end.fileno(), select.EPOLLIN)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> None:
        self._launcher.send(Ready())
        ticked = told = self._now()
        while not self._is_finished:
            for fd, _ in self._epoll.poll(TOLD_EVERY_S if self._closings else TICK_S):
                self._read(fd)
            self._send_to_replicas()
            now = self._now()
            if self._closings and (now - told >= TOLD_EVERY_S or len(self._closings) >= MOST_TOLD):
                told = now
                self._tell_closings()
            if now - ticked >= TICK_S:
                ticked = now
                self._handle(Tick(now=now))
                self._send_to_replicas()
                self._tell_waits(now)
                self._tell_count()
                if self._door is not None:
                    self._door.tick()
        self._tell_count()

    # What arrives ---------------------------------------------------------------------------------------

    def _read(self, fd: int) -> None:
        if fd in self._replicas:
            self._read_replica(fd)
        elif fd in self._shard_of:
            self._read_shard(fd)
        elif self._door is not None and fd == self._door.fileno():
            for guest in self._door.step():
                self._let_in(guest)
        elif fd == self._launcher.fileno():
            received = self._launcher.receive()
            if received is None:
                raise SystemExit(1)
            self._obey(*received)

    def _read_replica(self, fd: int) -> None:
        replica, incarnation, connection = self._replicas[fd]
        why = PROCESS_GONE
        try:
            for message, _ in connection.arrived():
                if not isinstance(message, Ask | Goodbye | Resume):
                    raise RemoteProtocolError(reason=f"a replica sent a {type(message).__name__}")
                self._handle(
                    FromReplica(now=self._now(), replica=replica, incarnation=incarnation, message=message)
                )
            if not connection.is_ended:
                return
        except RemoteProtocolError as error:
            self._traffic.refused["protocol"] += 1
            why = f"it broke the protocol: {error}"
        self._epoll.unregister(connection.fileno())
        del self._replicas[fd], self._lines[replica, incarnation]
        self._traffic.ended(connection)
        connection.close()
        self._handle(Lost(now=self._now(), replica=replica, incarnation=incarnation, why=why))

    def _read_shard(self, fd: int) -> None:
        shard, connection = self._shard_of[fd]
        is_ended = False
        try:
            for message, _ in connection.arrived():
                if isinstance(message, Refused | DivergedAt | Returned | Held | Released | Books):
                    self._handle(FromShard(now=self._now(), shard=shard, message=message))
            is_ended = connection.is_ended
        except RemoteProtocolError as error:
            self._traffic.refused["protocol"] += 1
            print(f"closing the connection of {connection.name}: {error}", flush=True)
            is_ended = True
        if is_ended:
            self._part_with(shard)
            self._handle(ShardLost(now=self._now(), shard=shard))

    def _let_in(self, guest: Guest) -> None:
        """Take a role that has come over TCP."""
        told: JoinCoordinator = guest.introduction
        if told.epoch > self._epoch:
            print(f"was followed by a coordinator of epoch {told.epoch}, and ends", flush=True)
            raise SystemExit(EXIT_FOLLOWED)  # who called tries again, and reaches the other one
        place = told.role, told.number
        if told.incarnation < self._next.get(place, 0) or not self._belongs(told):
            guest.turn_away(
                f"expected a role of this run, of a later incarnation than any before, but got {told}"
            )
            return
        self._next[place] = told.incarnation + 1
        if told.role == "replica":
            connection = Connection(guest.stream(self._epoll, epoch=self._epoch), f"replica{told.number}.0")
            self._attach_replica(told.number, told.incarnation, connection)
        else:
            self._attach_shard(
                told.number, Connection(guest.stream(self._epoll, epoch=self._epoch), f"shard{told.number}")
            )

    def _belongs(self, told: JoinCoordinator) -> bool:
        num = {"replica": self._machine.num_replicas, "shard": self._machine.num_shards}.get(told.role, 0)
        return 0 <= told.number < num

    def _attach_replica(self, replica: int, incarnation: int, connection: Connection) -> None:
        self._replicas[connection.fileno()] = (replica, incarnation, connection)
        self._lines[replica, incarnation] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._handle(Joined(now=self._now(), replica=replica, incarnation=incarnation))

    def _part_with(self, shard: int) -> None:
        """Close a shard's connection; what it had said and was not read belongs to a past start of it."""
        if (connection := self._shards.pop(shard, None)) is not None:
            self._epoll.unregister(connection.fileno())
            del self._shard_of[connection.fileno()]
            connection.close()

    def _attach_shard(self, shard: int, connection: Connection) -> None:
        self._part_with(shard)
        self._shards[shard] = connection
        self._shard_of[connection.fileno()] = (shard, connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        if self._machine.phase is Phase.RECOVERING:
            self._handle(Tick(now=self._now()))  # which asks whoever has not been asked

    def _obey(self, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case AttachReplica(replica=replica, incarnation=incarnation):
                self._attach_replica(replica, incarnation, Connection.from_fd(fds[0], f"replica{replica}.0"))
            case AttachShard(shard=shard):
                self._attach_shard(shard, Connection.from_fd(fds[0], f"shard{shard}"))
            case StopRun(why=why):
                self._handle(Stop(now=self._now(), why=why))
            case TakeCheckpoint(name=name):
                self._handle(Checkpoint(now=self._now(), name=name))
            case BuffersCopied(request=request):
                self._handle(Copied(now=self._now(), request=request))
            case Finish():
                self._is_finished = True

    # What the machine wants -----------------------------------------------------------------------------

    def _handle(self, event: CoordinatorEvent) -> None:
        drive(self._machine, event, self._carry_out)

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case ToReplica(replica=replica, incarnation=incarnation, message=message):
                self._unsent.setdefault((replica, incarnation), []).append(message)
            case ToShard(shard=shard, message=message):
                if (line := self._shards.get(shard)) is not None:
                    with contextlib.suppress(ConnectionError):  # its end is read, and told, in its turn
                        line.send(message)
            case Closed(replica=replica, report=report):
                self._closings.append(
                    ClosedBlock(
                        time_s=self._now(),
                        replica=replica,
                        block=report.block,
                        examples=report.examples,
                        loss_sum=report.loss_sum,
                        staleness=report.staleness,
                    )
                )
            case Found(blocks=blocks):
                self._tell_closings()
                self._launcher.send(FoundClosed(time_s=self._now(), blocks=blocks))
            case Cut(request=request, name=name, settled=settled):
                self._launcher.send(CutReached(request=request, name=name, settled=settled))
            case Report(event=event):
                self._tell_closings()
                self._launcher.send(_happened(event))
            case Diverging(what=what, tensor=tensor, block=block):
                name, number = (tensor, -1) if isinstance(tensor, str) else ("", tensor)
                self._launcher.send(DivergedRun(what=what, tensor=name, number=number, block=block))
            case Ended(why=why):
                self._tell_closings()
                self._launcher.send(EndedRun(why=why, settled=self._machine.settled.blocks()))

    def _send_to_replicas(self) -> None:
        """Send what has come together for each, which is woken once."""
        for place, messages in self._unsent.items():
            if (line := self._lines.get(place)) is not None:
                with contextlib.suppress(ConnectionError):  # its end is read, and told, in its turn
                    line.send_all(messages)
        self._unsent.clear()

    def _tell_closings(self) -> None:
        if self._closings:
            self._launcher.send(Closings(blocks=tuple(self._closings)))
            self._closings.clear()

    def _tell_count(self) -> None:
        """What passed between it and the replicas; the shards count what passed between it and them."""
        self._launcher.send(self._traffic.counted(connection for _, _, connection in self._replicas.values()))

    def _tell_waits(self, now: float) -> None:
        """Pass on what has been waited for long enough to be worth a word."""
        current = {_cause(wait): wait for wait in self._machine.waits(now)}
        self._waits = {cause: self._waits.get(cause, now) for cause in current}
        waits = tuple(
            wait for cause, wait in current.items() if now - self._waits[cause] >= WAITS_TOLD_AFTER_S
        )
        if waits != self._told_waits:
            self._told_waits = waits
            self._launcher.send(Waiting(waits=waits))


def _cause(wait: str) -> str:
    """A wait without the seconds in it, which change."""
    return "".join(letter for letter in wait if not letter.isdigit())


def _happened(
    event: events.Joined | events.Left | events.Redone | events.Refused | events.Recovered,
) -> Happened:
    kind = type(event).__name__
    match event:
        case events.Joined(time_s=time_s, role=role, incarnation=incarnation):
            return Happened(kind=kind, time_s=time_s, role=role, number=incarnation, block=None, why="")
        case events.Left(time_s=time_s, role=role, why=why, incarnation=incarnation):
            return Happened(kind=kind, time_s=time_s, role=role, number=incarnation, block=None, why=why)
        case events.Redone(time_s=time_s, block=block, attempt=attempt, replica=replica, why=why):
            return Happened(kind=kind, time_s=time_s, role=str(replica), number=attempt, block=block, why=why)
        case events.Refused(time_s=time_s, block=block, why=why):
            return Happened(kind=kind, time_s=time_s, role="", number=0, block=block, why=why)
        case events.Recovered(time_s=time_s, role=role, incarnation=incarnation, lost=lost):
            return Happened(
                kind=kind, time_s=time_s, role=role, number=incarnation, block=None, why="", lost=lost
            )
