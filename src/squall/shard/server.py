"""The process of one shard: sockets and tensors around a `ShardMachine`.

Walk of a push: its message arrives on the worker's socket, the machine decides, the rule reads the gradient
where the worker left it and writes the new values through, a row goes to the ledger, the answer goes back.
"""

import contextlib
import select
import time
from pathlib import Path
from typing import Any

import torch

from squall.errors import RemoteProtocolError
from squall.machines import drive
from squall.model.exchange import ExchangePlan
from squall.model.layout import Layout
from squall.observe.ledger import LedgerWriter
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule
from squall.shard.books import SliceBook
from squall.shard.events import (
    Answer,
    Apply,
    Attach,
    Close,
    Detach,
    FromCoordinator,
    FromWorker,
    Record,
    Save,
    ShardEffect,
    ShardEvent,
    Store,
    Tell,
    Worker,
    WriteOut,
)
from squall.shard.machine import ShardMachine
from squall.shard.records import ledger_row
from squall.shard.store import SliceWriter, copied, shard_file
from squall.shard.tensors import PushRecorder, ShardTensors, WorkerMemory
from squall.wire.connection import Connection
from squall.wire.control import AttachWorker, Finish, Ready, Saved, SaveSlices
from squall.wire.memory import SharedArena
from squall.wire.messages import Fetch, Hold, Push, Refuse, Release
from squall.wire.traffic import TrafficMeter

COUNTED_EVERY_S = 0.5


def serve(settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
    """Serve one shard until the launcher says to finish.

    Args:
        settings: "shard", "incarnation", "directory" of the run, "began" (monotonic), "record".
        load: "layout", "rule", "states" and "books" of this shard.
        launcher: the connection to it.
        fds: the connection to the coordinator.
    """
    torch.set_grad_enabled(False)
    ShardServer(settings, load, launcher, fds).run()


class ShardServer:
    """Carries out what one `ShardMachine` decides."""

    def __init__(
        self, settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]
    ) -> None:
        self._shard: int = settings["shard"]
        self._incarnation: int = settings["incarnation"]
        self._began: float = settings["began"]
        self._directory = Path(settings["directory"])
        self._layout: Layout = load["layout"]
        rule: Rule | RulePerTensor = load["rule"]
        books: tuple[SliceBook, ...] = load["books"]
        # Into memory of its own: what came from the launcher is mapped copy on write, and let go here.
        states = [copied(state) for state in load["states"]]
        load.clear()
        self._recorder = None
        if settings["record"]:
            versions = {book.slice: book.version for book in books}
            sizes = {state.spec.slice: state.spec.num_bytes for state in states}
            self._recorder = PushRecorder(self._directory / "pushes", versions, sizes)
        self._tensors = ShardTensors(states=states, rule=rule, recorder=self._recorder)
        self._machine = ShardMachine(shard=self._shard, incarnation=self._incarnation, books=books)
        name = f"shard{self._shard}-{self._incarnation}.ledger"
        self._ledger = LedgerWriter(self._directory / "ledger" / name)
        self._launcher = launcher
        self._coordinator = Connection.from_fd(fds[0], "coordinator")
        self._workers: dict[int, tuple[Worker, Connection]] = {}  # by descriptor
        self._lines: dict[tuple[int, int], Connection] = {}  # by place
        self._traffic = TrafficMeter(f"shard{self._shard}")
        self._writer = SliceWriter()
        self._epoll = select.epoll()
        self._is_finished = False
        self._has_recorded = False

    def run(self) -> None:
        for source in (self._launcher, self._coordinator, self._writer):
            self._epoll.register(source.fileno(), select.EPOLLIN)
        self._launcher.send(Ready())
        counted_at = time.monotonic()
        while not self._is_finished:
            for fd, _ in self._epoll.poll(COUNTED_EVERY_S):
                self._read(fd)
            if (now := time.monotonic()) - counted_at >= COUNTED_EVERY_S:
                counted_at = now
                self._ledger.flush()
                self._tell_count()
        self._writer.close()
        self._ledger.close()
        if self._recorder is not None:
            self._recorder.close()
        self._tell_count()

    # What arrives ---------------------------------------------------------------------------------------

    def _read(self, fd: int) -> None:
        if fd in self._workers:
            self._read_worker(fd)
        elif fd == self._coordinator.fileno():
            received = self._coordinator.receive()
            if received is None:
                self._epoll.unregister(fd)
            elif isinstance(received[0], Refuse | Hold | Release):
                self._handle(FromCoordinator(message=received[0]))
        elif fd == self._writer.fileno():
            for name in self._writer.written():
                self._launcher.send(Saved(name=name))
        elif fd == self._launcher.fileno():
            received = self._launcher.receive()
            if received is None:
                raise SystemExit(1)  # nobody is left to serve
            self._obey(*received)

    def _read_worker(self, fd: int) -> None:
        worker, connection = self._workers[fd]
        try:
            received = connection.receive()
            if received is not None:
                message = received[0]
                if not isinstance(message, Fetch | Push):
                    raise RemoteProtocolError(
                        reason=f"{connection.name} sent a {type(message).__name__} to a shard"
                    )
                self._handle(FromWorker(sender=worker, message=message))
                return
        except RemoteProtocolError as error:
            print(f"closing the connection of {connection.name}: {error}", flush=True)
        except ConnectionError:
            pass
        self._drop(fd)

    def _drop(self, fd: int) -> None:
        worker, connection = self._workers.pop(fd)
        self._epoll.unregister(fd)
        self._handle(Detach(worker=worker))
        self._traffic.ended(connection)
        if self._lines.get(worker.place) is connection:
            del self._lines[worker.place]
            self._tensors.detach(worker)
        connection.close()

    def _obey(self, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case AttachWorker():
                self._attach(message, fds)
            case SaveSlices(name=name):
                self._handle(Save(name=name))
            case Finish():
                self._handle(Close())
                self._is_finished = True

    def _attach(self, told: AttachWorker, fds: tuple[int, ...]) -> None:
        worker = Worker(replica=told.replica, partition=told.partition, incarnation=told.incarnation)
        plan = ExchangePlan(self._layout.slices_of(self._shard), told.num_gradients)
        arena = SharedArena.attach(fds[1], plan.num_bytes, writable=True)
        views = plan.views(arena)
        connection = Connection.from_fd(fds[0], told.name)
        self._tensors.attach(worker, WorkerMemory(gradients=views.gradients, buffers=views.buffers))
        self._workers[connection.fileno()] = (worker, connection)
        self._lines[worker.place] = connection
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._handle(Attach(worker=worker))

    # What the machine wants -----------------------------------------------------------------------------

    def _handle(self, event: ShardEvent) -> None:
        drive(self._machine, event, self._carry_out)

    def _carry_out(self, effect: ShardEffect) -> ShardEvent | None:
        match effect:
            case Apply(sender=sender, push=push, slices=slices):
                self._count(sender, slices, is_pushed=True, is_fetched=push.into is not None)
                return self._tensors.apply(effect)
            case Answer(to=worker, message=message):
                if (line := self._lines.get(worker.place)) is not None:
                    with contextlib.suppress(ConnectionError):  # its end is read, and told, in its turn
                        line.send(message)
            case Record():
                time_s = time.monotonic() - self._began
                self._ledger.append(ledger_row(self._shard, self._incarnation, effect, time_s))
                if not self._has_recorded:
                    self._has_recorded = True
                    self._ledger.flush()  # who watches a run start should see it start
            case WriteOut(to=worker, slices=slices):
                self._count(worker, slices, is_pushed=False, is_fetched=True)
                self._tensors.write_out(effect)
            case Tell(message=message):
                self._coordinator.send(message)
            case Store(name=name, books=books):
                self._store(name, books)
        return None

    def _store(self, name: str, books: tuple[SliceBook, ...]) -> None:
        """Copy now; write while training goes on."""
        self._ledger.flush()
        if self._recorder is not None:
            self._recorder.flush()
        path = self._directory / "checkpoints" / name / shard_file(self._shard)
        states = [copied(state) for state in self._tensors.states.values()]
        self._writer.write(name, path, states, books)

    # What it has cost -----------------------------------------------------------------------------------

    def _count(self, worker: Worker, slices: tuple[int, ...], *, is_pushed: bool, is_fetched: bool) -> None:
        if (line := self._lines.get(worker.place)) is not None:
            num_bytes = sum(self._layout.slices[number].num_bytes for number in slices)
            self._traffic.count_tensors(
                line.name, received=num_bytes * is_pushed, sent=num_bytes * is_fetched
            )

    def _tell_count(self) -> None:
        workers = (connection for _, connection in self._workers.values())
        self._launcher.send(self._traffic.counted([self._coordinator, *workers]))
