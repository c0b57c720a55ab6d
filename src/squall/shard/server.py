"""The process of one shard: sockets and tensors around a `ShardMachine`.

Walk of a push: its message arrives on the worker's socket, the machine decides, the rule reads the gradient
where the worker left it and writes the new values through, the answer goes back, a row goes to the ledger.
"""

import contextlib
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from squall.errors import RemoteProtocolError
from squall.machines import drive
from squall.model.layout import Layout
from squall.observe.ledger import LedgerWriter
from squall.rules.apply import SliceState
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule
from squall.shard.books import SliceBook
from squall.shard.durable import come_back, open_place, put_right
from squall.shard.events import (
    Answer,
    Applied,
    Apply,
    Close,
    ComeBack,
    FromCoordinator,
    FromWorker,
    Record,
    Save,
    ShardEffect,
    ShardEvent,
    Store,
    Tell,
    WriteOut,
)
from squall.shard.keeper import Keeper
from squall.shard.lines import LineEvent, Lines, SharedLines, tell_closing
from squall.shard.machine import ShardMachine
from squall.shard.records import ledger_file, ledger_row
from squall.shard.recovery import Recovered
from squall.shard.store import SliceWriter, copied, shard_file
from squall.shard.tcp_lines import TcpLines
from squall.shard.tensors import PushRecorder, ShardTensors
from squall.wire.connection import Connection
from squall.wire.control import AttachWorker, CoordinatorBack, Durability, Finish, Ready, Saved, SaveSlices
from squall.wire.joining import JoinBulk, JoinCoordinator, JoinShard
from squall.wire.listener import Door, Listener
from squall.wire.messages import Hold, Inquire, Refuse, Release
from squall.wire.tcp import call_coordinator
from squall.wire.traffic import TrafficMeter

COUNTED_EVERY_S = 0.5


def serve(settings: dict[str, Any], load: dict[str, Any], launcher: Connection, fds: list[int]) -> None:
    """Serve one shard until the launcher says to finish.

    Args:
        settings: "shard", "incarnation", "directory" of the run, "began" (monotonic), "record"; "epoch", of the coordinator, 0 if it is not there; "durability", if its
            state is to survive it (see `squall.shard.keeper`), and "is_back", if it is to come back with that; "tcp",
            if workers come that way: a mapping with "token", "addresses" of roles, and "address", its own.
        load: "layout", "rule", "states" and "books" of this shard, as the run began; instead of "states" those "made" in
            this process. With "tells_taken" of the settings, nothing is held of what came once the first of `fds` is closed.
        launcher: the connection to it.
        fds: the connection to the coordinator; or, with "tcp", sockets that listen.
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
        self._ledger = LedgerWriter(self._directory / "ledger" / ledger_file(self._shard, self._incarnation))
        # Into memory of its own: what came from the launcher is mapped copy on write, and let go here.
        states: list[SliceState] = (
            load["made"] if "made" in load else [copied(state) for state in load["states"]]
        )
        books: tuple[SliceBook, ...] = tuple(load["books"])
        load.clear()
        if settings.get("tells_taken"):
            os.close(fds.pop(0))
        self._keeper: Keeper | None = None
        if books and settings.get("durability") is not None:
            self._keeper, states, books = self._keep(settings, states, books, rule)
        self._recorder = None
        if settings["record"]:
            versions = {book.slice: book.version for book in books}
            sizes = {state.spec.slice: state.spec.num_master_bytes for state in states}
            self._recorder = PushRecorder(self._directory / "pushes", versions, sizes)
        self._tensors = ShardTensors(states=states, rule=rule, recorder=self._recorder)
        self._machine = ShardMachine(shard=self._shard, incarnation=self._incarnation, books=books)
        self._launcher = launcher
        self._tcp: dict[str, Any] | None = settings.get("tcp")
        self._epoch: int = settings.get("epoch", 0)
        self._traffic = TrafficMeter(f"shard{self._shard}")
        self._coordinator, self._lines = self._connect(self._tcp, fds)
        self._writer = SliceWriter()
        self._epoll = select.epoll()
        self._is_finished = False
        self._is_last = False  # what is written now is what the run ends with
        self._has_recorded = False
        self._answers: list[Answer] = []  # that wait until what they say is on disk
        self._records: list[tuple[Record, float]] = []  # for the ledger, once whoever waits has been answered
        self._is_back: bool = settings.get("is_back", False)

    def _keep(
        self,
        settings: dict[str, Any],
        states: list[SliceState],
        books: tuple[SliceBook, ...],
        rule: Rule | RulePerTensor,
    ) -> tuple[Keeper, list[SliceState], tuple[SliceBook, ...]]:
        """Come back, if that is what this start is, and write down what is done from now on."""
        is_back = settings.get("is_back", False)
        schema = self._layout.space.schema_hash
        place = open_place(self._directory, self._shard, schema, is_back=is_back)
        found = Recovered(states=states, books=list(books))
        if is_back:
            found = come_back(place, states, books, rule)
            put_right(self._directory / "ledger", self._shard, found, self._ledger, self._now())
        keeper = Keeper(
            place,
            settings["durability"],
            incarnation=self._incarnation,
            found=found,
            before_snapshot=self._ledger.flush,
            now=self._now(),
        )
        return keeper, found.states, tuple(found.books)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _connect(self, tcp: dict[str, Any] | None, fds: list[int]) -> tuple[Connection, Lines]:
        if tcp is None:
            specs = self._layout.slices_of(self._shard)
            return Connection.from_fd(fds[0], "coordinator"), SharedLines(specs, self._tensors, self._traffic)
        lines = TcpLines(
            shard=self._shard,
            layout=self._layout,
            tensors=self._tensors,
            door=Door(
                Listener.from_fds(fds, tcp["address"]),
                tcp["token"],
                (JoinShard, JoinBulk),
                self._traffic.refused,
            ),
            traffic=self._traffic,
        )
        return self._call_coordinator(tcp), lines

    def _call_coordinator(self, tcp: dict[str, Any]) -> Connection:
        me = JoinCoordinator(
            role="shard", number=self._shard, incarnation=self._incarnation, epoch=self._epoch
        )
        connection, self._epoch = call_coordinator(f"shard{self._shard}", me, tcp)
        return connection

    def run(self) -> None:
        for end in (self._launcher, self._coordinator, self._lines, self._writer):
            self._epoll.register(end.fileno(), select.EPOLLIN)
        if self._keeper is not None:
            self._epoll.register(self._keeper.fileno(), select.EPOLLIN)
        if self._is_back:
            self._handle(ComeBack())
        self._launcher.send(Ready())
        counted_at = time.monotonic()
        while not self._is_finished:
            for fd, _ in self._epoll.poll(COUNTED_EVERY_S):
                self._read(fd)
            if self._keeper is not None:
                self._end_round(self._keeper)
            if (now := time.monotonic()) - counted_at >= COUNTED_EVERY_S:
                counted_at = now
                self._ledger.flush()
                self._tell_count()
                self._serve(self._lines.tick())
        self._writer.close()
        if self._keeper is not None:
            self._keeper.close()
        self._ledger.close()
        if self._recorder is not None:
            self._recorder.close()
        self._tell_count()

    # What arrives ---------------------------------------------------------------------------------------

    def _read(self, fd: int) -> None:
        if fd == self._lines.fileno():
            self._serve(self._lines.events())
        elif fd == self._coordinator.fileno():
            for message, _ in self._coordinator.arrived():
                if isinstance(message, Refuse | Hold | Release | Inquire):
                    self._handle(FromCoordinator(message=message))
            if self._coordinator.is_ended:
                self._epoll.unregister(fd)
        elif fd == self._writer.fileno():
            for name in self._writer.written():
                self._launcher.send(Saved(name=name))
        elif self._keeper is not None and fd == self._keeper.fileno():
            self._keeper.written(self._now())
        elif fd == self._launcher.fileno():
            received = self._launcher.receive()
            if received is None:
                raise SystemExit(1)  # nobody is left to serve
            self._obey(*received)

    def _serve(self, events: Iterable[LineEvent]) -> None:
        """Handle what workers do; one that breaks the protocol is dropped, and nobody else notices."""
        for event in events:
            try:
                self._handle(event)
            except RemoteProtocolError as error:
                self._traffic.refused["protocol"] += 1
                worker = event.sender if isinstance(event, FromWorker) else event.worker
                tell_closing(f"replica{worker.replica}.{worker.partition}", error)
                self._serve(self._lines.drop(worker))

    def _obey(self, message: Any, fds: tuple[int, ...]) -> None:
        match message:
            case AttachWorker():
                assert isinstance(self._lines, SharedLines)
                self._handle(self._lines.attach(message, fds))
            case CoordinatorBack(epoch=epoch):
                self._follow(epoch, fds)
            case SaveSlices(name=name):
                self._is_last = True
                self._handle(Save(name=name))
            case Finish():
                self._handle(Close())
                self._is_finished = True

    def _follow(self, epoch: int, fds: tuple[int, ...]) -> None:
        """Hear another coordinator from now on, and no more of the one before."""
        if epoch <= self._epoch:
            return  # over TCP it was reached before we were told
        if not self._coordinator.is_ended:
            self._epoll.unregister(self._coordinator.fileno())
        self._traffic.ended(self._coordinator)
        self._coordinator.close()
        self._epoch = epoch
        if self._tcp is None:
            self._coordinator = Connection.from_fd(fds[0], "coordinator")
        else:
            self._coordinator = self._call_coordinator(self._tcp)
        self._epoll.register(self._coordinator.fileno(), select.EPOLLIN)

    # What the machine wants -----------------------------------------------------------------------------

    def _handle(self, event: ShardEvent) -> None:
        drive(self._machine, event, self._carry_out)
        self._write_records()

    def _write_records(self) -> None:
        """Into the ledger: whoever waited for an answer has had it by now."""
        for record, time_s in self._records:
            self._ledger.append(ledger_row(self._shard, self._incarnation, record, time_s))
        if self._records and not self._has_recorded:
            self._has_recorded = True
            self._ledger.flush()  # who watches a run start should see it start
        self._records.clear()

    def _carry_out(self, effect: ShardEffect) -> ShardEvent | None:
        match effect:
            case Apply():
                return self._apply(effect)
            case Answer():
                if self._keeper is None:
                    self._lines.answer(effect)
                else:
                    self._keeper.commit()  # the gradient is the worker's again once it is answered
                    self._answers.append(effect)
            case Record():
                time_s = self._now()
                self._records.append((effect, time_s))
                if self._keeper is not None:
                    self._keeper.record(effect, time_s)
            case WriteOut():
                self._lines.write_out(effect)
            case Tell(message=message):
                self._answer_all()
                with contextlib.suppress(ConnectionError):  # another one will ask
                    self._coordinator.send(message)
            case Store(name=name, books=books):
                self._store(name, books)
        return None

    def _apply(self, effect: Apply) -> ShardEvent:
        if self._keeper is not None:
            self._keeper.commit()
        if self._lines.sends_live_values:
            self._answer_all()  # with the values that these answers speak of
        if self._is_last:
            self._writer.wait()
        self._lines.before_apply(effect)
        done = self._tensors.apply(effect)
        if self._keeper is not None and isinstance(done, Applied):
            if self._recorder is not None:
                self._recorder.flush()  # what comes back from disk is recorded
            self._keeper.applied(effect.push.absent, self._tensors.applied)
        return done

    def _answer_all(self) -> None:
        """Answer what has waited, once all that is said there is on disk: one `fsync` for all of it."""
        if self._keeper is not None:
            self._keeper.sync(self._now())
        answers, self._answers = self._answers, []
        for answer in answers:
            self._lines.answer(answer)

    def _end_round(self, keeper: Keeper) -> None:
        """After each round of events: answer, and begin a snapshot if one is due."""
        self._answer_all()
        keeper.tick(self._now())
        if (lost := keeper.news()) is not None:
            print(f"cannot be kept on disk: {lost}" if lost else "is kept on disk again", flush=True)
            self._launcher.send(Durability(lost=lost))

    def _store(self, name: str, books: tuple[SliceBook, ...]) -> None:
        """Copy now, and write while training goes on; at the end of the run write from where the values are."""
        self._write_records()
        self._ledger.flush()
        if self._recorder is not None:
            self._recorder.flush()
        path = self._directory / "checkpoints" / name / shard_file(self._shard)
        states = list(self._tensors.states.values()) if self._is_last else self._tensors.states_kept()
        self._writer.write(name, path, states, books)

    # What it has cost -----------------------------------------------------------------------------------

    def _tell_count(self) -> None:
        self._launcher.send(self._traffic.counted([self._coordinator, *self._lines.counted()]))
