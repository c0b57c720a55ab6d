"""A door and who knocks: on real sockets, the door stepped by a thread as a role's loop does.

Faults planted by hand, each seen to fail a test here: strangers are unbounded · the newest stranger goes, not the oldest
· silence is allowed · an introduction's length is believed · an unexpected introduction is let in · bytes behind the hello
are lost · a wrong token is retried for ever · one family only · the port of `advertise` is lost · any host is bound.
"""

import contextlib
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from squall.errors import ConfigError, LostError
from squall.wire import listener
from squall.wire.connection import CODEC, Connection
from squall.wire.hello import CallerHello, new_token
from squall.wire.joining import JoinBulk, JoinCoordinator, Welcome
from squall.wire.listener import Door, Guest, Listener
from squall.wire.stream import HEADER, MAGIC, VERSION, frame
from squall.wire.tcp import Caller
from tests.processes.helpers import wait_until
from tests.wire.test_hello import greeting

ME = JoinCoordinator(role="replica", number=3, incarnation=0)


class Porter:
    """Steps a door in a thread, and welcomes everyone who is through."""

    def __init__(self, bind: str = "127.0.0.1:0") -> None:
        self.token = new_token()
        self.refused: Counter[str] = Counter()
        opened = Listener.open(bind)
        self.address, self.port = opened.address, opened.port
        self.door = Door(opened, self.token, (JoinCoordinator,), self.refused)
        self.guests: list[Guest] = []
        self.kept: list[Connection] = []
        self._epoll = select.epoll()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            select.select([self.door.fileno()], [], [], 0.02)
            for guest in self.door.step():
                channel = guest.stream(self._epoll, link=5)
                self._epoll.register(channel.fileno(), select.EPOLLIN)
                self.kept.append(Connection(channel, "guest"))
                self.guests.append(guest)

    def call(self, token: str | None = None, patience_s: float = 5.0) -> tuple[Any, Welcome]:
        caller = Caller(
            me="replica3.0",
            peer="coordinator",
            address=self.address,
            token=token or self.token,
            patience_s=patience_s,
        )
        return caller.call(ME)

    def raw(self) -> socket.socket:
        one = socket.create_connection(("127.0.0.1", self.port))
        one.settimeout(5)
        return one

    def proved(self) -> socket.socket:
        """A connection on which only the introduction is missing."""
        one, hello = self.raw(), CallerHello(self.token.encode())
        one.sendall(hello.hello)
        one.sendall(hello.take_challenge(one.recv(44, socket.MSG_WAITALL)))
        hello.take_verdict(one.recv(33, socket.MSG_WAITALL))
        return one

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        for connection in self.kept:
            connection.close()
        self.door.close()
        self._epoll.close()


@pytest.fixture
def porter() -> Iterator[Porter]:
    one = Porter()
    yield one
    one.close()


def is_closed(one: socket.socket) -> bool:
    """The other side closes without a word, or with no more than one."""
    try:
        while one.recv(1000):
            pass
    except ConnectionResetError:
        pass
    one.close()
    return True


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
def test_who_knows_the_token_is_let_in_at_every_loopback_address(bind: str) -> None:
    porter = Porter(bind)
    channel, welcome = porter.call()

    wait_until(lambda: len(porter.guests) == 1, 5, "the door to know")
    assert welcome == Welcome(link=5)
    assert porter.guests[0].introduction == ME
    assert (channel.messages_sent, channel.messages_received) == (0, 0)
    connection, there = Connection(channel, "door"), porter.kept[0]
    connection.send(ME)
    wait_until(lambda: [message for message, _ in there.arrived()] == [ME], 5, "a message")
    assert there.counts()[:3:2] == connection.counts()[2::-2]
    connection.close()
    porter.close()


def test_a_name_is_listened_at_in_all_its_families_at_one_port() -> None:
    opened = Listener.open("localhost:0")
    families = {one.family for one in opened.sockets}
    resolved = {family for family, *_ in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    assert families == resolved
    assert {one.getsockname()[1] for one in opened.sockets} == {opened.port}
    opened.close()


def test_what_is_advertised_may_differ_from_what_is_bound() -> None:
    opened = Listener.open("127.0.0.1:0", "worker-host:0")
    assert opened.address == f"worker-host:{opened.port}"
    opened.close()


def test_a_port_that_is_taken_is_named_at_once_and_free_again_afterwards() -> None:
    first = Listener.open("127.0.0.1:0")
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{first.port}.*already in use.*port 0"):
        Listener.open(first.address)
    first.close()
    Listener.open(first.address).close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "192.0.2.7:0"])
def test_a_door_opens_on_loopback_only(bind: str) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        Listener.open(bind)


def test_a_wrong_token_is_told_and_counted_and_not_tried_again(porter: Porter) -> None:
    with pytest.raises(ConfigError, match="same cluster token"):
        porter.call(new_token())
    wait_until(lambda: porter.refused["token"] == 1, 5, "the count")
    assert not porter.guests
    porter.call()[0].close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", "hello"),
        (bytes(range(256)), "hello"),
        (greeting(version=0), "version"),
        (greeting() + bytes(32), "token"),
        (greeting()[:20], "hello"),
        (b"", "hello"),
    ],
)
def test_whatever_a_stranger_says_closes_its_connection_only(porter: Porter, said: bytes, kind: str) -> None:
    """B09: random bytes, HTTP GET, older version, truncated."""
    one = porter.raw()
    one.sendall(said)
    with contextlib.suppress(OSError):  # closed already
        one.shutdown(socket.SHUT_WR)

    assert is_closed(one)
    wait_until(lambda: porter.refused == {kind: 1}, 5, f"{kind} to be counted, not {porter.refused}")
    porter.call()[0].close()


@pytest.mark.parametrize(
    "said",
    [
        HEADER.pack(MAGIC, VERSION, 0xFFFFFFFF),
        HEADER.pack(MAGIC, VERSION, 1) + b"x",
        b"\xff" * 64,
        frame(CODEC.encode(JoinBulk(link=1))),
    ],
)
def test_who_knows_the_token_must_still_introduce_itself(porter: Porter, said: bytes) -> None:
    one = porter.proved()
    one.sendall(said)
    assert is_closed(one)
    wait_until(lambda: porter.refused == {"introduction": 1}, 5, "the count")


def test_silence_is_bounded(porter: Porter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HELLO_S", 0.1)
    silent, slow = porter.raw(), porter.raw()
    slow.sendall(greeting()[:10])
    assert is_closed(silent)
    assert is_closed(slow)
    wait_until(lambda: porter.refused == {"silent": 2}, 5, "the count")


def test_strangers_are_bounded_and_who_comes_later_still_gets_in(
    porter: Porter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_STRANGERS", 5)
    strangers = [porter.raw() for _ in range(12)]
    wait_until(lambda: porter.refused["crowded"] == 7, 5, "the oldest to go")

    porter.call()[0].close()

    assert porter.refused["crowded"] == 8
    for one in strangers[:8]:
        assert is_closed(one)
    for one in strangers[8:]:
        one.close()


def test_a_callee_that_is_not_there_yet_is_waited_for_and_named_if_it_never_comes() -> None:
    opened = Listener.open("127.0.0.1:0")
    address, token = opened.address, new_token()
    opened.close()
    caller = Caller(me="replica3.0", peer="shard1", address=address, token=token, patience_s=0.2)
    with pytest.raises(LostError, match=rf"replica3\.0 could not reach shard1 at {address} within 0.2 s"):
        caller.call(ME)

    late = Caller(me="replica3.0", peer="shard1", address=address, token=token, patience_s=20)
    answered: list[Any] = []
    thread = threading.Thread(target=lambda: answered.append(late.call(ME)), daemon=True)
    thread.start()
    door = Door(Listener.open(address), token, (JoinCoordinator,))
    until = time.monotonic() + 10
    while not (guests := door.step()) and time.monotonic() < until:
        select.select([door.fileno()], [], [], 0.1)
    kept = guests[0].welcome()
    thread.join(10)
    assert answered[0][1] == Welcome(link=0)
    answered[0][0].close()
    kept.close()
    door.close()


def test_a_guest_that_is_turned_away_is_told_why() -> None:
    opened = Listener.open("127.0.0.1:0")
    token, address = new_token(), opened.address
    door = Door(opened, token, (JoinCoordinator,))
    told: list[str] = []

    def call() -> None:
        try:
            Caller(me="x", peer="y", address=address, token=token, patience_s=5).call(ME)
        except ConfigError as error:
            told.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while not (guests := door.step()):
        select.select([door.fileno()], [], [], 0.1)
    guests[0].turn_away("we are full")
    thread.join(5)
    assert "we are full" in told[0]
    assert door.refused == {"introduction": 1}
    door.close()
