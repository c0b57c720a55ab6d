"""One example of every message, made from its annotations, so that a message that is added is fuzzed from its first day."""

import enum
import types
import typing
from typing import Any, get_args, get_origin

from squall.blocks import Block
from squall.nouns import Noun
from squall.wire.control import Control
from squall.wire.crew import Crew
from squall.wire.joining import Joining
from squall.wire.messages import Message

MESSAGES: tuple[type[Noun], ...] = tuple(
    kind for group in (Message, Joining, Control, Crew) for kind in get_args(group)
)


def example(kind: Any) -> Any:
    """A value that an annotation allows; of several it takes the first, and of collections one element.

    >>> example(tuple[tuple[int, str], ...])
    ((1, 'word'),)
    """
    simple = {int: 1, float: 0.5, bool: True, str: "word"}
    if kind in simple:
        return simple[kind]
    if kind is Block:
        return Block(stage=0, epoch=1, first=2, stop=5)
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        return (example(first),) if others == [...] else tuple(map(example, get_args(kind)))
    if get_origin(kind) in (types.UnionType, typing.Union):
        return example(get_args(kind)[0])
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    hints = typing.get_type_hints(kind)
    return kind(**{name: example(hints[name]) for name in kind.__struct_fields__})
