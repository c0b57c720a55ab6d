"""Messages over a stream of bytes, however it is cut.

Faults planted by hand, each seen to fail a test here: a length is believed · the rest of a piece is dropped · a server waits
for a slow reader · what is kept for one is unbounded.
"""

import select
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.errors import LocalProtocolError, RemoteProtocolError
from squall.wire import stream
from squall.wire.stream import MAGIC, VERSION, StreamChannel


def frame(body: bytes) -> bytes:
    return struct.pack("<BBI", MAGIC, VERSION, len(body)) + body


def send_often(channel: StreamChannel, message: bytes) -> None:
    for _ in range(100):
        channel.send(message)


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 200)),
)
@settings(max_examples=50)
def test_messages_come_whole_and_in_order_however_the_bytes_are_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    near, far = socket.socketpair()
    channel = StreamChannel(far)
    data, found = b"".join(map(frame, bodies)), []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        near.sendall(data[start:stop])
        found += [received for received, _ in channel.arrived()]
    found += [received for received, _ in channel.arrived()]
    assert found == bodies
    assert (channel.bytes_received, channel.messages_received) == (len(data), len(bodies))
    near.close()
    channel.close()


def test_what_was_sent_before_the_end_still_arrives() -> None:
    near, far = socket.socketpair()
    channel = StreamChannel(far)
    near.sendall(frame(b"one") + frame(b"two") + b"S")
    near.close()

    assert [data for data, _ in channel.arrived()] == [b"one", b"two"]
    assert not channel.is_ended
    assert channel.arrived() == []
    assert channel.is_ended
    assert channel.receive() is None
    channel.close()


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<BBI", MAGIC, VERSION, 0xFFFFFFFF),
        struct.pack("<BBI", MAGIC, VERSION, 0),
        struct.pack("<BBI", MAGIC, VERSION + 1, 7),
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 8,
    ],
)
def test_a_header_that_is_none_is_refused_before_its_length_is_waited_for(header: bytes) -> None:
    near, far = socket.socketpair()
    channel = StreamChannel(far)
    near.sendall(header)
    with pytest.raises(RemoteProtocolError, match="expected a message of at most"):
        channel.arrived()
    near.close()
    channel.close()


def test_a_server_never_waits_for_a_slow_reader_and_sends_on_when_there_is_room() -> None:
    near, far = socket.socketpair()
    epoll = select.epoll()
    epoll.register(far.fileno(), select.EPOLLIN)
    channel = StreamChannel(far, epoll)
    messages = [bytes([number]) * 100_000 for number in range(20)]
    for message in messages:
        channel.send(message)
    assert channel.bytes_sent < len(messages) * len(messages[0])

    received = b""
    near.settimeout(5)
    sent = b"".join(map(frame, messages))
    while len(received) < len(sent):
        received += near.recv(1 << 16)
        for _, mask in epoll.poll(0):
            assert mask & select.EPOLLOUT
            assert channel.arrived() == []

    assert received == sent
    assert epoll.poll(0) == []
    near.close()
    channel.close()
    epoll.close()


def test_what_is_kept_for_a_slow_reader_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_QUEUED_BYTES", 1000)
    near, far = socket.socketpair()
    epoll = select.epoll()
    epoll.register(far.fileno(), select.EPOLLIN)
    channel = StreamChannel(far, epoll)
    with pytest.raises(ConnectionError, match="untaken"):
        send_often(channel, bytes(100_000))
    channel.arrived()
    assert channel.is_ended
    near.close()
    channel.close()
    epoll.close()


def test_a_client_waits_until_all_is_sent() -> None:
    near, far = socket.socketpair()
    channel = StreamChannel(near)
    reader = StreamChannel(far)
    channel.send(b"small")
    assert reader.receive() == (b"small", ())
    assert reader.receive_within(0) is None
    assert reader.try_receive() is None
    with pytest.raises(LocalProtocolError, match="no descriptors"):
        channel.send(b"x", [0])
    channel.close()
    assert reader.receive() is None
    with pytest.raises(ConnectionError):
        send_often(reader, b"anyone?")
    reader.close()
