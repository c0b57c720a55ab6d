"""Tests of squall.doctor.speeds and echo: every byte arrives before the answer comes, and nothing is left running.

Faults planted here by hand, each seen to fail a test: an answer before the message is whole · seconds instead of bytes per second.
"""

import socket
import threading
from dataclasses import asdict

import psutil

from squall.doctor import echo
from squall.doctor.speeds import measure, seconds


def test_everything_is_measured_and_no_process_is_left() -> None:
    before = {child.pid for child in psutil.Process().children()}

    speeds = measure(copy_bytes=1_000_000, sent_bytes=1_000_000)

    assert {child.pid for child in psutil.Process().children()} <= before
    told = asdict(speeds)
    assert all(value > 1e6 for name, value in told.items() if name.endswith("bytes_per_s"))
    assert all(0 < value < 1 for name, value in told.items() if name.endswith("round_trip_s"))


def test_the_other_end_answers_when_a_message_is_whole_and_not_before() -> None:
    near, far = socket.socketpair()
    with near, far:
        server = threading.Thread(target=echo.serve, args=(far, 100))
        server.start()
        near.sendall(b"\0")
        assert near.recv(10) == b"a"
        near.sendall(b"\1" + b"x" * 99)
        near.settimeout(0.05)
        try:
            early = near.recv(10)
        except TimeoutError:
            early = b""
        near.settimeout(5.0)
        near.sendall(b"x")
        assert (early, near.recv(10)) == (b"", b"a")
        near.shutdown(socket.SHUT_WR)
        server.join(5.0)
    assert not server.is_alive()


def test_the_first_time_does_not_count() -> None:
    done: list[int] = []

    seconds(lambda: done.append(1), repeats=3)

    assert len(done) == 4
