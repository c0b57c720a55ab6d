"""A relay for tests: stands between two ends of TCP connections, counts, slows, holds and cuts."""

import contextlib
import select
import socket
import threading
import time


class Relay:
    """Passes on what comes to `address` to another address, in a thread of its own.

    Attributes:
        address: to connect to.
        to_target, to_caller: bytes passed on so far.
        num_connections: accepted so far.
    """

    def __init__(self, target: str, *, bytes_per_s: float | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._bytes_per_s = bytes_per_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.to_target = self.to_caller = self.num_connections = 0
        self._peers: dict[
            socket.socket, tuple[socket.socket, bool]
        ] = {}  # and whether it leads to the target
        self._is_closed = self._holds_requests = False
        self._held_from: int | None = None
        self._cut_after: int | None = None
        self._lock = threading.Lock()
        self._wake, self._wake_far = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """End every connection that there is; new ones are let through."""
        with self._lock:
            for one in list(self._peers):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def cut_after(self, num_bytes: int) -> None:
        """Cut when so many more bytes have gone either way."""
        self._cut_after = self.to_target + self.to_caller + num_bytes

    def hold(self, *, after: int = 0, answers_only: bool = False) -> None:
        """Leave everything open, but pass on nothing any more, or no answers, when so many more bytes have passed."""
        self._held_from = self.to_target + self.to_caller + after
        self._holds_requests = not answers_only
        self._wake_far.send(b"!")

    def release(self) -> None:
        self._held_from = None
        self._wake_far.send(b"!")

    def close(self) -> None:
        self._is_closed = True
        self._wake_far.send(b"!")
        self._thread.join()
        for one in (*self._peers, self._listening, self._wake, self._wake_far):
            one.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closed:
            ready, _, _ = select.select([self._listening, self._wake, *self._sources()], [], [])
            for one in ready:
                if one is self._listening:
                    self._accept()
                elif one is self._wake:
                    self._wake.recv(64)
                elif one in self._peers:
                    self._pass_on(one)

    def _sources(self) -> list[socket.socket]:
        """Whose bytes are passed on now."""
        if self._held_from is None or self.to_target + self.to_caller < self._held_from:
            return list(self._peers)
        return [] if self._holds_requests else [one for one, (_, asks) in self._peers.items() if asks]

    def _accept(self) -> None:
        caller, _ = self._listening.accept()
        try:
            target = socket.create_connection(self._target)
        except OSError:
            caller.close()
            return
        with self._lock:
            self.num_connections += 1
            self._peers[caller] = (target, True)
            self._peers[target] = (caller, False)

    def _pass_on(self, one: socket.socket) -> None:
        other, is_to_target = self._peers[one]
        try:
            data = one.recv(4096 if self._bytes_per_s else 1 << 16)
            if not data:
                raise ConnectionError
            other.sendall(data)
        except OSError:
            with self._lock:
                del self._peers[one], self._peers[other]
            one.close()
            other.close()
            return
        if is_to_target:
            self.to_target += len(data)
        else:
            self.to_caller += len(data)
        if self._bytes_per_s:
            time.sleep(len(data) / self._bytes_per_s)
        if self._cut_after is not None and self.to_target + self.to_caller >= self._cut_after:
            self._cut_after = None
            self.cut()
