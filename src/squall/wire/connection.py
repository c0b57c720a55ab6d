"""A channel that speaks messages instead of bytes."""

from collections.abc import Sequence
from typing import Any, get_args

from squall.wire.channel import Channel
from squall.wire.codec import Codec
from squall.wire.control import Control
from squall.wire.crew import Crew
from squall.wire.joining import Joining
from squall.wire.messages import Bundle, Message
from squall.wire.stream import StreamChannel

CODEC = Codec(*get_args(Message), *get_args(Joining), *get_args(Control), *get_args(Crew))


def unbundled(message: Any) -> tuple[Any, ...]:
    """The messages of a bundle; of any other message, that one."""
    return message.messages if isinstance(message, Bundle) else (message,)


class Connection:
    """One end of a connection between two roles.

    Attributes:
        name: the role at the other end, as traffic and errors call it.
        channel: what carries the bytes.
    """

    __slots__ = ("channel", "name")

    def __init__(self, channel: Channel | StreamChannel, name: str) -> None:
        self.channel = channel
        self.name = name

    @classmethod
    def from_fd(cls, fd: int, name: str) -> "Connection":
        return cls(Channel.from_fd(fd), name)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message.

        Raises:
            ConnectionError: the peer is gone.
        """
        self.channel.send(CODEC.encode(message), fds)

    def send_all(self, messages: Sequence[Any]) -> None:
        """Send messages between replica and coordinator so that the peer is woken once.

        Raises:
            ConnectionError: the peer is gone.
        """
        if len(messages) > 1:
            self.send(Bundle(messages=tuple(messages)))
        else:
            for message in messages:
                self.send(message)

    def receive(self) -> tuple[Any, tuple[int, ...]] | None:
        """Wait for a message and its descriptors; None at the end.

        Raises:
            RemoteProtocolError: what arrived is no message.
        """
        received = self.channel.receive()
        return None if received is None else (CODEC.decode(received[0]), received[1])

    def try_receive(self) -> tuple[Any, tuple[int, ...]] | None:
        """A message that is already there; None if there is none, or at the end (`is_ended`)."""
        received = self.channel.try_receive()
        return None if received is None else (CODEC.decode(received[0]), received[1])

    def arrived(self) -> list[tuple[Any, tuple[int, ...]]]:
        """All messages that are there whole, of one read, for who must not wait; `is_ended` after the last.

        Raises:
            RemoteProtocolError: what arrived is no message.
        """
        return [
            (message, fds)
            for data, fds in self.channel.arrived()
            for message in unbundled(CODEC.decode(data))
        ]

    def counts(self) -> tuple[int, int, int, int]:
        """Bytes and messages received, bytes and messages sent."""
        channel = self.channel
        return (
            channel.bytes_received,
            channel.messages_received,
            channel.bytes_sent,
            channel.messages_sent,
        )

    @property
    def is_ended(self) -> bool:
        return self.channel.is_ended

    def fileno(self) -> int:
        return self.channel.fileno()

    def close(self) -> None:
        self.channel.close()
