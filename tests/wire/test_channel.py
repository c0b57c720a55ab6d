"""Tests of squall.wire.channel, with both ends in this process unless a test needs a death.

Faults planted to check these tests, each caught: a reset taken as the end - MSG_CMSG_CLOEXEC left out - descriptors
leaked when a message is cut - an empty message sent - no limit on the size - `try_receive` that waits - counters of
messages for bytes - `wait` in milliseconds for seconds.
"""

import os
import signal
import socket
import time

import pytest

from squall.errors import LocalProtocolError, RemoteProtocolError
from squall.wire import channel
from squall.wire.channel import MAX_FDS, Channel
from squall.wire.waiting import wait


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_arrive_whole_and_in_order() -> None:
    near, far = Channel.pair()
    for data in (b"a", b"bb" * 1000, b"\0"):
        near.send(data)
    near.send(memoryview(b"view"))

    assert [far.receive() for _ in range(4)] == [(d, ()) for d in (b"a", b"bb" * 1000, b"\0", b"view")]
    near.close()
    far.close()


def test_both_ends_count_bytes_and_messages() -> None:
    near, far = Channel.pair()
    near.send(b"12345")
    near.send(b"123")
    far.receive()

    assert (near.bytes_sent, near.messages_sent, near.bytes_received, near.messages_received) == (8, 2, 0, 0)
    assert (far.bytes_sent, far.messages_sent, far.bytes_received, far.messages_received) == (0, 0, 5, 1)
    near.close()
    far.close()


def test_descriptors_travel_and_no_child_inherits_them() -> None:
    near, far = Channel.pair()
    end, other = os.pipe()
    near.send(b"with", [other, end])

    received = far.receive()

    assert received is not None
    data, (theirs, end_again) = received
    os.write(theirs, b"through")
    assert (data, os.read(end_again, 10)) == (b"with", b"through")
    assert not os.get_inheritable(theirs)
    for fd in (end, other, theirs, end_again):
        os.close(fd)
    near.close()
    far.close()


def test_looking_for_a_message_does_not_wait() -> None:
    near, far = Channel.pair()
    assert far.try_receive() is None
    assert not far.is_ended
    near.send(b"x")
    assert far.try_receive() == (b"x", ())
    near.close()
    assert far.try_receive() is None
    assert far.is_ended
    far.close()


def test_what_a_peer_sent_before_it_closed_still_arrives() -> None:
    near, far = Channel.pair()
    far.send(b"never read: the system now says that the connection was reset")
    near.send(b"goodbye")
    near.close()

    assert far.receive() == (b"goodbye", ())
    assert far.receive() is None
    assert far.receive() is None
    far.close()


def test_a_killed_peer_is_an_end_and_not_a_wait() -> None:
    near, far = Channel.pair()
    pid = os.fork()
    if pid == 0:
        near.close()
        far.send(b"alive")
        signal.pause()
        os._exit(0)
    far.close()
    assert near.receive() == (b"alive", ())

    os.kill(pid, signal.SIGKILL)

    assert near.receive() is None
    os.waitpid(pid, 0)
    with pytest.raises(ConnectionError):
        near.send(b"anyone?")
    near.close()


def test_a_message_that_the_system_would_not_take_is_our_mistake() -> None:
    near, far = Channel.pair()
    with pytest.raises(LocalProtocolError, match=rf"{near.max_message_bytes + 1} bytes.*SharedArena"):
        near.send(bytes(near.max_message_bytes + 1))
    with pytest.raises(LocalProtocolError, match="but got 0 bytes"):
        near.send(b"")
    with pytest.raises(LocalProtocolError, match=f"{MAX_FDS + 1} descriptors"):
        near.send(b"x", [0] * (MAX_FDS + 1))
    assert far.try_receive() is None
    near.close()
    far.close()


def test_the_largest_message_passes_with_the_most_descriptors() -> None:
    near, far = Channel.pair()
    data = os.urandom(near.max_message_bytes)
    before = num_fds()
    near.send(data, [0] * MAX_FDS)

    received = far.receive()

    assert received is not None
    assert received[0] == data
    assert len(received[1]) == MAX_FDS
    for fd in received[1]:
        os.close(fd)
    assert num_fds() == before
    near.close()
    far.close()


def test_a_message_larger_than_allowed_is_refused_and_its_descriptors_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE_BYTES", 100)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far = Channel(ours)
    before = num_fds()
    socket.send_fds(theirs, [b"x" * 101], [0, 1])

    with pytest.raises(RemoteProtocolError, match="at most 100 bytes"):
        far.receive()

    assert num_fds() == before
    far.close()
    theirs.close()


def test_an_end_can_be_handed_over_as_a_descriptor() -> None:
    near, far = Channel.pair()
    again = Channel.from_fd(os.dup(far.fileno()))
    far.close()
    near.send(b"x")
    assert again.receive() == (b"x", ())
    near.close()
    again.close()


def test_a_descriptor_that_is_no_channel_is_refused_and_closed() -> None:
    before = num_fds()
    end, other = os.pipe()
    stream, stream_peer = socket.socketpair()

    for fd in (end, stream.detach()):
        with pytest.raises(RemoteProtocolError, match="one end of a channel"):
            Channel.from_fd(fd)

    os.close(other)
    stream_peer.close()
    assert num_fds() == before


def test_waiting_returns_the_channels_that_have_something() -> None:
    pairs = [Channel.pair() for _ in range(3)]
    ours = [near for near, _ in pairs]
    assert wait(ours, timeout_s=0) == []

    began = time.monotonic()
    assert wait(ours, timeout_s=0.02) == []
    assert 0.02 <= time.monotonic() - began < 5

    pairs[2][1].send(b"x")
    pairs[0][1].close()
    assert wait(ours, timeout_s=None) == [ours[0], ours[2]]
    for end in [end for pair in pairs for end in pair]:
        end.close()
