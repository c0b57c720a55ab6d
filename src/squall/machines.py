"""What every decider has: a phase, a table of legal (phase, event) pairs, and a story of what it saw.

A machine has one way in, `handle(event) -> effects`. It never waits, reads no clock, opens no socket and
touches no tensor: whatever runs it does all that, and tells it the results as events.
"""

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, TypeAlias

from squall.errors import LocalProtocolError

STORY_LENGTH = 256


class IllegalEventError(LocalProtocolError):
    """An event met a machine in a phase whose table does not list it; the machine is unchanged."""


class Machine:
    """Base of the deciders: dispatches events by the table and keeps the story.

    A subclass sets `TABLE`, from ``(phase, key of the event)`` to the name of the method that handles the
    pair. The key is the event's class, or, for an event with a `message`, the message's class.
    """

    TABLE: ClassVar[Mapping[tuple[Enum, type], str]]

    def __init__(self, phase: Enum) -> None:
        self.phase = phase
        self.story: deque[tuple[Enum, Any]] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: Any) -> tuple[Any, ...]:
        """Take one event, change state, and return what is to be done, in order.

        Raises:
            IllegalEventError: the table does not list the pair; nothing was changed.
            RemoteProtocolError: the event carries a message that its sender may not send; nothing was changed.
        """
        key = (self.phase, key_of(event))
        name = self.TABLE.get(key)
        if name is None:
            raise IllegalEventError(
                reason=f"{type(self).__name__} in phase {self.phase.name} cannot take {key[1].__name__}: {event!r}"
            )
        self.story.append((self.phase, event))
        method: Callable[[Any], tuple[Any, ...]] = getattr(self, name)
        return method(event)

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself; tests call it after each event."""


def key_of(event: Any) -> type:
    """What the table lists an event under: its message's class if it carries one, else its own."""
    return type(getattr(event, "message", event))


Watch: TypeAlias = Callable[[Machine, Any, tuple[Any, ...]], None]


def drive(machine: Machine, event: Any, carry_out: Callable[[Any], Any], watch: Watch | None = None) -> None:
    """Hand an event to a machine, carry out its effects in order, and hand it what comes of them.

    Args:
        watch: called with each event and its effects, before these are carried out.
    """
    events = deque([event])
    while events:
        event = events.popleft()
        effects = machine.handle(event)
        if watch is not None:
            watch(machine, event, effects)
        for effect in effects:
            if (result := carry_out(effect)) is not None:
                events.append(result)
