"""Turns messages into bytes and back: strict, by their annotations, and without pickle.

A message on the wire is one MessagePack array: the code of its class, then its fields in order. A dataclass-like
field is an array again, an enum member its value. Both ends must have been made from the same classes: a field
too many or too few, or of another type, is a malformed message, never one that is passed over.
"""

from typing import Any, TypeAlias, Union

import msgspec

from squall.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from squall.nouns import Noun

Data: TypeAlias = bytes | memoryview


class Codec:
    """Encodes and decodes the messages of one conversation.

    Args:
        message_types: subclasses of `Noun`, each with a number of its own as `tag`.

    Raises:
        ConfigError: a class has no such number, or a field that cannot be sent.

    >>> class Fetch(Noun, frozen=True, kw_only=True, tag=3):
    ...     replica: int
    ...     slices: tuple[int, ...]
    >>> codec = Codec(Fetch)
    >>> data = codec.encode(Fetch(replica=7, slices=(0, 2)))
    >>> data.hex(" "), codec.decode(data)
    ('93 03 07 92 00 02', Fetch(replica=7, slices=(0, 2)))
    """

    def __init__(self, *message_types: type[Noun]) -> None:
        for message_type in message_types:
            if not isinstance(code_of(message_type), int):
                raise ConfigError(
                    subject=f"message {message_type.__name__}",
                    expected="a number of its own as its tag",
                    got=repr(code_of(message_type)),
                    remedy="Write class Name(Noun, frozen=True, tag=NUMBER).",
                )
        self._types = frozenset(message_types)
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            self._decode = msgspec.msgpack.Decoder(Union[message_types]).decode  # noqa: UP007  made at run time
        except (TypeError, ValueError) as error:
            names = ", ".join(sorted(kind.__name__ for kind in message_types))
            raise ConfigError(
                subject=f"messages {names}",
                expected="different tags, and fields that can be told apart on the wire",
                got=str(error),
                remedy="Give a field another type, or a class another tag.",
            ) from error

    def encode(self, message: Noun) -> bytes:
        """Return the bytes of `message`.

        Raises:
            LocalProtocolError: it is not of this conversation, or a field holds what cannot be sent at all. That a
                field holds what its annotation allows is for the type checker here, and for the receiver to refuse.
        """
        if type(message) not in self._types:
            raise _unsendable(message, "which is no message of this conversation")
        try:
            return self._encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _unsendable(message, str(error)) from error

    def decode(self, data: Data) -> Any:
        """Return the message that `data` holds, whole and with nothing behind it.

        Raises:
            RemoteProtocolError: anything else; memory is allocated only for what is really there.
        """
        try:
            return self._decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(
                reason=f"malformed message of {len(data)} bytes ({bytes(data[:16]).hex(' ')} ...): {error}"
            ) from error


def code_of(message_type: type[Noun]) -> int | str | None:
    """The number that stands for a class of messages on the wire."""
    return message_type.__struct_config__.tag


def _unsendable(message: object, why: str) -> LocalProtocolError:
    return LocalProtocolError(
        reason=f"{type(message).__name__}: expected a message whose fields can be sent, but got {why}: {message!r:.500}"
    )
