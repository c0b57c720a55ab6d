"""Tests of squall.cluster.relay: what passes is passed on whole, and counted, each way for itself.

Faults planted here by hand, each seen to fail a test: both ways counted together · an end that closes both ways at once ·
counts kept when they should be forgotten.
"""

import socket
import threading

from squall.cluster.relay import Relays


def answering(listening: socket.socket, answer: bytes, got: list[bytes]) -> None:
    """Take everything until the caller has no more to say, and only then answer."""
    connection, _ = listening.accept()
    with connection:
        while data := connection.recv(65536):
            got.append(data)
        connection.sendall(answer)


def call(relays: Relays, message: bytes, answer: bytes) -> tuple[bytes, bytes]:
    """What arrives at the callee, and back at the caller."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        callee = threading.Thread(target=answering, args=(listening, answer, got))
        callee.start()
        host, _, relay_port = relays.between("replica0.0", "shard1", f"127.0.0.1:{port}").rpartition(":")
        with socket.create_connection((host, int(relay_port)), timeout=10) as near:
            near.sendall(message)
            near.shutdown(socket.SHUT_WR)
            back = b""
            while data := near.recv(65536):
                back += data
        callee.join(10)
    return b"".join(got), back


def test_bytes_pass_whole_and_are_counted_each_way() -> None:
    message, answer = b"m" * 1_000_003, b"a" * 300_001
    with Relays() as relays:
        assert call(relays, message, answer) == (message, answer)
        assert relays.counts() == {("replica0.0", "shard1"): (1_000_003, 300_001)}
        relays.forget()
        assert relays.counts() == {}
        call(relays, b"x", b"yy")
        assert relays.counts() == {("replica0.0", "shard1"): (1, 2)}
    assert not any(thread.name == "relays" for thread in threading.enumerate())
