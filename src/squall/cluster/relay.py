"""Relays that stand between the two ends of a run's TCP connections: they count, slow, hold up, cut, and lose messages.

One thread serves all links. What comes is passed on in order, at the moment that is due; while one side takes nothing, the
other is not read, so that a slow reader is felt by whoever sends, as without a relay. Used in
``squall.Local(transport="tcp", relay=relays.between)``, by chaos, by benchmarks and by tests.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from squall.closes import Closes

PIECE_BYTES = 1 << 18
SLOW_PIECE_BYTES = 1 << 12
MOST_KEPT_BYTES = 8 << 20
TO_CALLEE, TO_CALLER = 0, 1


class Weather(Protocol):
    """What a link has to suffer. Called by the relays' thread."""

    def held_until(self, now: float) -> float:
        """Until when nothing passes [seconds, monotonic]; not after `now` if it does."""
        ...

    def delay_s(self) -> float:
        """How long the next piece is under way [seconds]."""
        ...

    def reader(self) -> "Callable[[int, bytes], int | None]":
        """Of a new connection: is told each piece and its direction; how many bytes of it pass before a message that is
        lost, with which the connection breaks; None: all of it."""
        ...


class Fair:
    """Nothing to suffer."""

    def held_until(self, now: float) -> float:
        return now

    def delay_s(self) -> float:
        return 0.0

    def reader(self) -> Callable[[int, bytes], int | None]:
        return lambda direction, data: None


@dataclass(eq=False)
class RelayedLink:
    """Everything that passes between one caller and one callee.

    Attributes:
        address: to call instead of the callee's.
        passed: bytes to the callee, and back to the caller.
        num_connections: made so far.
    """

    caller: str
    callee: str
    target: str
    address: str
    weather: Weather
    bytes_per_s: float | None
    passed: list[int] = field(default_factory=lambda: [0, 0])
    num_connections: int = 0
    ways: set["_Way"] = field(default_factory=set)
    free_at: float = 0.0
    held_from: int | None = None  # bytes that had passed
    is_held_both_ways: bool = True
    cut_at: int | None = None

    def is_held(self, direction: int) -> bool:
        """Whether nothing more is to pass in this direction, by `Relays.hold`."""
        if self.held_from is None or sum(self.passed) < self.held_from:
            return False
        return self.is_held_both_ways or direction == TO_CALLER


@dataclass(eq=False)
class _Way:
    """One direction of one connection."""

    link: RelayedLink
    direction: int
    source: socket.socket
    sink: socket.socket
    reads: Callable[[int, bytes], int | None]
    queue: deque[tuple[float, memoryview]] = field(default_factory=deque)  # when due
    num_kept: int = 0
    is_full: bool = False  # the sink takes nothing now
    has_ended: bool = False  # the source has no more to say
    is_over: bool = False  # and the sink knows
    breaks: bool = False  # with the end of the queue

    def wants_to_read(self, now: float) -> bool:
        if self.has_ended or self.breaks or self.num_kept >= MOST_KEPT_BYTES:
            return False
        return not self.link.is_held(self.direction) and self.link.weather.held_until(now) <= now

    def due_at(self, now: float) -> float | None:
        """When something is to be done next; None: nothing, as far as time goes."""
        held = self.link.weather.held_until(now)
        if held > now:
            return held
        return self.queue[0][0] if self.queue and not self.is_full else None


class Relays(Closes):
    """One relay for each link; a ``with`` block around a run, or `close` at its end.

    Args:
        weather: what a link between a caller and a callee has to suffer; None: nothing.

    >>> with Relays() as relays:
    ...     relays.between("replica0.0", "shard1", "127.0.0.1:40001").startswith("127.0.0.1:")
    True
    """

    def __init__(self, weather: Callable[[str, str], Weather] | None = None) -> None:
        self._weather = weather or (lambda caller, callee: Fair())
        self.links: dict[tuple[str, str], RelayedLink] = {}
        self._selector = selectors.DefaultSelector()
        self._interest: dict[socket.socket, int] = {}
        self._doors: dict[socket.socket, RelayedLink] = {}
        self._ways: dict[socket.socket, tuple[_Way, _Way]] = {}  # from it, and to it
        self._lock = threading.RLock()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)
        self._thread.start()

    # For whoever watches or disturbs --------------------------------------------------------------------

    def between(self, caller: str, callee: str, address: str, *, bytes_per_s: float | None = None) -> str:
        """Stand between two roles from now on; returns the address to call instead."""
        door = socket.create_server(("127.0.0.1", 0))
        door.setblocking(False)
        own = f"127.0.0.1:{door.getsockname()[1]}"
        link = RelayedLink(caller, callee, address, own, self._weather(caller, callee), bytes_per_s)
        with self._lock:
            if (before := self.links.get((caller, callee))) is not None:
                link.passed = before.passed
            self.links[caller, callee] = link
            self._doors[door] = link
            self._selector.register(door, selectors.EVENT_READ)
        self._ring()
        return own

    def counts(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(caller, callee) to bytes that went to the callee, and back; of links that something has passed on."""
        with self._lock:
            passed = {name: (link.passed[0], link.passed[1]) for name, link in self.links.items()}
        return {name: counts for name, counts in passed.items() if any(counts)}

    def forget(self) -> None:
        """Count from 0 again, before another run."""
        with self._lock:
            for link in self.links.values():
                link.passed[:] = [0, 0]

    def cut(self, link: RelayedLink) -> None:
        """End every connection of a link; new ones are let through."""
        with self._lock:
            for way in list(link.ways):
                with contextlib.suppress(OSError):
                    way.source.shutdown(socket.SHUT_RDWR)
                way.queue.clear()
                way.num_kept, way.breaks = 0, True
        self._ring()

    def hold(self, link: RelayedLink, *, after: int = 0, answers_only: bool = False) -> None:
        """Leave everything open, but pass on nothing any more, or no answers, when so many more bytes have passed."""
        with self._lock:
            link.held_from = sum(link.passed) + after
            link.is_held_both_ways = not answers_only
        self._ring()

    def release(self, link: RelayedLink) -> None:
        with self._lock:
            link.held_from = None
        self._ring()

    def cut_after(self, link: RelayedLink, num_bytes: int) -> None:
        """Cut when so many more bytes have gone either way."""
        with self._lock:
            link.cut_at = sum(link.passed) + num_bytes

    def close(self) -> None:
        """End all connections. Twice does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ring()
        self._thread.join()
        for one in (*self._doors, *self._ways, self._wake, self._woken):
            one.close()
        self._selector.close()

    # The thread -----------------------------------------------------------------------------------------

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def _run(self) -> None:
        while not self._is_closed:
            ready = self._selector.select(self._patience())
            with self._lock:
                for key, mask in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    self._look_at(key.fileobj, mask)
                for way in {way for ways in self._ways.values() for way in ways}:
                    self._pass_on(way)

    def _patience(self) -> float | None:
        """Look at what each end wants; return how long nothing is due."""
        now = time.monotonic()
        due: list[float] = []
        with self._lock:
            for one, (out, into) in self._ways.items():
                wanted = selectors.EVENT_READ * out.wants_to_read(now) | selectors.EVENT_WRITE * into.is_full
                self._watch(one, wanted)
                if (at := out.due_at(now)) is not None:
                    due.append(at)
        return max(0.0, min(due) - now) if due else None

    def _watch(self, one: socket.socket, wanted: int) -> None:
        before = self._interest.get(one, 0)
        if wanted == before:
            return
        self._interest[one] = wanted
        if not before:
            self._selector.register(one, wanted)
        elif not wanted:
            self._selector.unregister(one)
        else:
            self._selector.modify(one, wanted)

    def _look_at(self, one: socket.socket, mask: int) -> None:
        if one is self._woken:
            with contextlib.suppress(BlockingIOError):
                while one.recv(4096):
                    pass
        elif (link := self._doors.get(one)) is not None:
            self._let_in(one, link)
        elif one in self._ways:
            out, into = self._ways[one]
            if mask & selectors.EVENT_WRITE:
                into.is_full = False
            if mask & selectors.EVENT_READ:
                self._take(out)

    def _let_in(self, door: socket.socket, link: RelayedLink) -> None:
        try:
            caller, _ = door.accept()
        except OSError:
            return
        host, _, port = link.target.rpartition(":")
        try:
            callee = socket.create_connection((host.strip("[]"), int(port)))
        except OSError:
            caller.close()
            return
        reads = link.weather.reader()
        link.num_connections += 1
        for one in (caller, callee):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there = _Way(link, TO_CALLEE, caller, callee, reads)
        back = _Way(link, TO_CALLER, callee, caller, reads)
        link.ways |= {there, back}
        self._ways[caller], self._ways[callee] = (there, back), (back, there)

    def _take(self, way: _Way) -> None:
        link = way.link
        try:
            data = way.source.recv(SLOW_PIECE_BYTES if link.bytes_per_s else PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            way.breaks = True
            return
        if not data:
            way.has_ended = True
            return
        whole = way.reads(way.direction, data)
        if whole is not None:
            data, way.breaks = data[:whole], True
        self._keep(way, data)

    def _keep(self, way: _Way, data: bytes) -> None:
        link, now = way.link, time.monotonic()
        due = now + link.weather.delay_s()
        if link.bytes_per_s:
            due = link.free_at = max(due, link.free_at) + len(data) / link.bytes_per_s
        if way.queue:
            due = max(due, way.queue[-1][0])  # bytes of a connection do not overtake one another
        way.queue.append((due, memoryview(data)))
        way.num_kept += len(data)
        link.passed[way.direction] += len(data)
        if link.cut_at is not None and sum(link.passed) >= link.cut_at:
            link.cut_at = None
            self.cut(link)

    def _pass_on(self, way: _Way) -> None:
        """Send what is due, and see to the end of this direction."""
        now = time.monotonic()
        if way.is_over or way.link.weather.held_until(now) > now:
            return
        while way.queue and way.queue[0][0] <= now and not way.is_full:
            due, data = way.queue.popleft()
            try:
                count = way.sink.send(data)
            except BlockingIOError:
                count, way.is_full = 0, True
            except OSError:
                way.breaks = True
                way.queue.clear()
                break
            way.num_kept -= count
            if count < len(data):
                way.queue.appendleft((due, data[count:]))
        if way.queue:
            return
        if way.breaks:  # a message was lost, or an end is gone: nothing passes on this connection any more
            self._drop(way.source, way.sink)
        elif way.has_ended:
            way.is_over = True
            with contextlib.suppress(OSError):
                way.sink.shutdown(socket.SHUT_WR)
            out, into = self._ways.get(way.source, (way, way))
            if out.is_over and into.is_over:
                self._drop(way.source, way.sink)

    def _drop(self, *ends: socket.socket) -> None:
        for one in ends:
            ways = self._ways.pop(one, None)
            if ways is None:
                continue
            self._watch(one, 0)
            self._interest.pop(one, None)
            for way in ways:
                way.link.ways.discard(way)
                way.is_over = True
            one.close()
