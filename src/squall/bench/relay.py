"""Relays that stand between the two ends of a run's connections and count bytes, outside the engine."""

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

PIECE_BYTES = 1 << 18


class Relays:
    """One for each link, all served by one thread; used as a ``with`` block around the run.

    Give `between` to ``squall.Local(transport="tcp", relay=...)``.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._open: set[socket.socket] = set()
        self._wake, wake_far = socket.socketpair()
        self._open |= {self._wake, wake_far}
        self._selector.register(wake_far, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="relays", daemon=True)

    def between(self, caller: str, callee: str, address: str) -> str:
        """Stand between two roles from now on; returns the address to call instead."""
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        counts = self._counts.setdefault((caller, callee), [0, 0])
        self._open.add(listening)
        self._selector.register(listening, selectors.EVENT_READ, _Door(listening, address, counts))
        self._wake.send(b"!")
        return f"127.0.0.1:{listening.getsockname()[1]}"

    def counts(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(caller, callee) to bytes that went to the callee, and back."""
        return {link: (there, back) for link, (there, back) in self._counts.items()}

    def forget(self) -> None:
        """Count from 0 again, before another run."""
        self._counts.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake.shutdown(socket.SHUT_WR)
        self._thread.join()
        for one in self._open:
            one.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if isinstance(key.data, _Door):
                    self._let_in(key.data)
                elif isinstance(key.data, _Way):
                    self._pass_on(one, key.data)
                elif not one.recv(64):
                    return

    def _let_in(self, door: "_Door") -> None:
        try:
            caller, _ = door.listening.accept()
        except OSError:
            return
        host, _, port = door.address.rpartition(":")
        callee = socket.create_connection((host.strip("[]"), int(port)))
        caller.setblocking(True)
        self._open |= {caller, callee}
        for number, (one, other) in enumerate(((caller, callee), (callee, caller))):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(one, selectors.EVENT_READ, _Way(other, door.counts, number))

    def _pass_on(self, one: socket.socket, way: "_Way") -> None:
        try:
            data = one.recv(PIECE_BYTES)
            way.other.sendall(data)
        except OSError:
            data = b""
        way.counts[way.number] += len(data)
        if data:
            return
        # One way is over; the other may have more to say.
        self._selector.unregister(one)
        with contextlib.suppress(OSError):
            way.other.shutdown(socket.SHUT_WR)


class _Door:
    def __init__(self, listening: socket.socket, address: str, counts: list[int]) -> None:
        self.listening, self.address, self.counts = listening, address, counts


class _Way:
    """From one end of a connection to the other; `number` says which of the counts is this way's."""

    def __init__(self, other: socket.socket, counts: list[int], number: int) -> None:
        self.other, self.counts, self.number = other, counts, number
