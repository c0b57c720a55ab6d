"""Calling another role over TCP: reach it, prove the token, say who one is."""

import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

from squall.errors import ConfigError, LostError, RemoteProtocolError
from squall.wire.address import Address
from squall.wire.connection import CODEC, Connection
from squall.wire.hello import GREETING_BYTES, VERDICT_BYTES, CallerHello, RefusedError, check_token
from squall.wire.joining import Introduction, JoinCoordinator, Unwelcome, Welcome
from squall.wire.stream import StreamChannel

ANSWER_S = 10.0  # to each step of the hello
WELCOME_S = 60.0  # to the introduction, which a busy role may take a while to read
START_S = 300.0
WAITS_TOLD_AFTER_S = 5.0
BUFFER_BYTES = 4 << 20

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
# A peer whose machine or line is gone is noticed after 10 + 6 x 5 s by the kernels alone, so that a process that
# computes, or stands at a breakpoint, still counts as there.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}


def tune(connection: socket.socket) -> None:
    """Small messages at once, large buffers, and a dead line noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def wake_every(connection: socket.socket, seconds: float) -> None:
    """Have waiting calls of a blocking connection end with BlockingIOError now and then."""
    value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Caller:
    """Calls one role, again and again until it answers.

    Args:
        me, peer: names, for what is told of waiting.
        address: where the peer is reached.
        token: the cluster's.
        patience_s: how long to try before the peer counts as lost [seconds].
        given_up: asked after each call that failed; a text says why it is in vain to try again.
    """

    def __init__(
        self,
        *,
        me: str,
        peer: str,
        address: str,
        token: str,
        patience_s: float,
        given_up: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._given_up = given_up
        self._me, self._peer, self._address = me, peer, Address.parse(address)
        self._token = check_token(token)
        self._patience_s = patience_s

    def call(
        self, introduction: Introduction, patience_s: float | None = None
    ) -> tuple[StreamChannel, Welcome]:
        """Connect and be let in.

        Args:
            patience_s: for this time only.

        Raises:
            ConfigError: the peer refuses us for good: other token, other version, other model.
            LostError: nobody answered in time.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        began = told = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._call_once(introduction)
            except (OSError, RemoteProtocolError) as error:
                if isinstance(error, RefusedError):
                    raise self._refused(error.reason) from error
                if (why := self._given_up()) is not None:
                    raise LostError(reason=f"{self._me} lost {self._peer}: {why}") from error
                now = time.monotonic()
                if now - began > patience_s:
                    raise LostError(
                        reason=f"{self._me} could not reach {self._peer} at {self._address} "
                        f"within {patience_s:g} s: {error}"
                    ) from error
                if now - told > WAITS_TOLD_AFTER_S:
                    told = now
                    told_s = f"for {now - began:.0f} s"
                    print(
                        f"{self._me} waits {told_s} for {self._peer} at {self._address}: {error}", flush=True
                    )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _call_once(self, introduction: Introduction) -> tuple[StreamChannel, Welcome]:
        connection = self._connected()
        try:
            connection.settimeout(ANSWER_S)
            hello = CallerHello(self._token)
            connection.sendall(hello.hello)
            connection.sendall(hello.take_challenge(_exactly(connection, GREETING_BYTES)))
            hello.take_verdict(_exactly(connection, VERDICT_BYTES))
            channel = StreamChannel(connection)
            channel.bytes_sent = len(hello.hello) + 32
            channel.bytes_received = GREETING_BYTES + VERDICT_BYTES
            channel.send(CODEC.encode(introduction))
            return channel, self._welcome(channel)
        except BaseException:
            connection.close()
            raise

    def _welcome(self, channel: StreamChannel) -> Welcome:
        received = channel.receive_within(WELCOME_S)
        if received is None:
            raise ConnectionError(f"{self._peer} closed the connection, or did not answer")
        answer: Any = CODEC.decode(received[0])
        channel.messages_sent = channel.messages_received = 0
        if isinstance(answer, Unwelcome):
            raise self._refused(answer.reason)
        if not isinstance(answer, Welcome):
            raise RemoteProtocolError(reason=f"{self._peer} answered with a {type(answer).__name__}")
        return answer

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            subject=f"{self._me}'s connection to {self._peer} at {self._address}",
            expected="to be let in",
            got=f"this answer: {reason}",
            remedy="Start both from the same run, version and model.",
        )

    def _connected(self) -> socket.socket:
        """A connection by the first family that works."""
        last: OSError = ConnectionError(f"{self._address} has no address")
        for family, address in self._address.resolve():
            one = socket.socket(family, socket.SOCK_STREAM)
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                one.settimeout(ANSWER_S)
                one.connect(address)
                tune(one)
                return one
            except OSError as error:
                one.close()
                last = error
        raise last


def call_coordinator(
    name: str, introduction: JoinCoordinator, told: Mapping[str, Any]
) -> tuple[Connection, int]:
    """Connect a replica or shard with the coordinator.

    Args:
        told: "token", and "addresses" by role.

    Returns:
        The connection, and the epoch of the coordinator that answered: `introduction.epoch` or a later one.
    """
    address = told["addresses"]["coordinator"]
    caller = Caller(me=name, peer="coordinator", address=address, token=told["token"], patience_s=START_S)
    channel, welcome = caller.call(introduction)
    return Connection(channel, "coordinator"), welcome.epoch


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError(f"closed after {len(data)} of {num_bytes} bytes")
        data += part
    return data
