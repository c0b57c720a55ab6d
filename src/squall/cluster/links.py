"""How messages pass between two roles in virtual time: links with a latency and a rate, and faults that disturb them."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import repeat

from squall.cluster.kinds import KIND_OF
from squall.faults import Cut, Delay, Drop, Duplicate, Fault, is_named, role_of
from squall.keywords import named
from squall.wire import messages


@named
@dataclass(frozen=True, slots=True)
class Link:
    """How messages pass between two roles, in each direction.

    Attributes:
        latency_s: of every message [seconds].
        bytes_per_s: one message after another [bytes per second].
    """

    latency_s: float = 0.001
    bytes_per_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Links:
    """The link between any two roles.

    Attributes:
        usual: where nothing else is said.
        special: by two name patterns, as in ``{("replica2.0", "shard*"): Link(0.1, 1e6)}``; the first that fits, in
            either direction, holds. ``replica2`` is ``replica2.0``, too.

    >>> links = Links(special={("replica2.0", "shard*"): Link(1.0), ("replica1", "coordinator"): Link(2.0)})
    >>> links.of("shard3", "replica2").latency_s, links.of("replica2.0", "shard3").latency_s
    (1.0, 1.0)
    >>> links.of("replica1", "coordinator").latency_s, links.of("replica2.1", "shard3").latency_s
    (2.0, 0.001)
    """

    usual: Link = field(default_factory=Link)
    special: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def of(self, one: str, other: str) -> Link:
        if not self.special:
            return self.usual
        for (first, second), link in self.special.items():
            if (_fits(one, first) and _fits(other, second)) or (_fits(other, first) and _fits(one, second)):
                return link
        return self.usual


def _fits(name: str, pattern: str) -> bool:
    """Whether a role's name, as links call it, is of a pattern; a replica's lead has two names."""
    is_lead = name.startswith("replica") and "." not in name
    return fnmatchcase(name, pattern) or (is_lead and fnmatchcase(f"{name}.0", pattern))


class Passage:
    """Says when a message arrives: once, more often, or never.

    Args:
        links: between roles, before faults.
        sizes: bytes of a message between two roles, for links that have a rate.
        faults: of which those of links count.
        draw: chance, shared with whatever else happens by chance.

    >>> passage = Passage(Links(Link(0.5)), lambda *_: 0, [], random.Random(0))
    >>> list(passage.arrivals("replica0", "shard0", messages.Recall(why=""), now=0.0))
    [0.5]
    """

    def __init__(
        self,
        links: Links,
        sizes: Callable[[str, str, messages.Message], int],
        faults: Sequence[Fault],
        draw: random.Random,
    ) -> None:
        self._links = links
        self._sizes = sizes
        self._random = draw
        self._free_at: dict[tuple[str, str], float] = {}
        self._drops = [fault for fault in faults if isinstance(fault, Drop)]
        self._duplicates = [fault for fault in faults if isinstance(fault, Duplicate)]
        self._delays = [fault for fault in faults if isinstance(fault, Delay)]
        self._cuts = [fault for fault in faults if isinstance(fault, Cut)]
        self._is_disturbed = bool(self._drops or self._duplicates or self._delays or self._cuts)

    def arrivals(self, sender: str, receiver: str, message: messages.Message, now: float) -> Iterator[float]:
        """After how many seconds each copy of a message arrives that is sent `now`."""
        if not self._is_disturbed or isinstance(message, _FIRST_WORDS):
            yield self._transfer(sender, receiver, message, now)
            return
        kind = KIND_OF[type(message)]
        if self._is_cut(role_of(sender), role_of(receiver), now):
            return
        if any(map(self._happens, self._drops, repeat(kind))):
            return
        copies = 1 + sum(map(self._happens, self._duplicates, repeat(kind)))
        for _ in range(copies):
            yield self._latency() + self._transfer(sender, receiver, message, now)

    def _happens(self, fault: Drop | Duplicate, kind: str) -> bool:
        return fault.kind in (kind, "*") and self._random.random() < fault.probability

    def _transfer(self, sender: str, receiver: str, message: messages.Message, now: float) -> float:
        """Seconds until a link has passed on this message, behind what it is passing on already."""
        link = self._links.of(sender, receiver)
        if link.bytes_per_s == float("inf"):
            return link.latency_s
        num_bytes = self._sizes(sender, receiver, message)
        free = max(now, self._free_at.get((sender, receiver), 0.0)) + num_bytes / link.bytes_per_s
        self._free_at[sender, receiver] = free
        return free - now + link.latency_s

    def _latency(self) -> float:
        return sum(
            max(0.0, fault.seconds + self._random.uniform(-fault.spread, fault.spread))
            for fault in self._delays
        )

    def _is_cut(self, sender: str, receiver: str, now: float) -> bool:
        return any(
            fault.when.seconds <= now < fault.when.seconds + fault.seconds
            and all(is_named(name, fault.one) or is_named(name, fault.other) for name in (sender, receiver))
            for fault in self._cuts
        )


_FIRST_WORDS = messages.Returned | messages.Resume
"""Of a connection: they arrive, or the connection ends."""
