"""Counts what passes a role's connections, bytes of shared tensors included."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from squall.wire.control import Counted, LinkCount


class Counting(Protocol):
    """A connection, or several to the same peer, that counts."""

    @property
    def name(self) -> str: ...

    def counts(self) -> tuple[int, int, int, int]:
        """Bytes and messages received, bytes and messages sent."""
        ...


class TrafficMeter:
    """What one role has sent to and received from each of its peers, since its start.

    Args:
        name: the role itself.

    Attributes:
        refused: connections that were not let in, or broke the protocol later, by kind.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.refused: Counter[str] = Counter()
        self._bulk: dict[str, tuple[int, int]] = {}  # tensor bytes by peer: from it, to it
        self._past: dict[tuple[str, str], tuple[int, int]] = {}  # of connections that have ended

    def count_tensors(self, peer: str, *, received: int = 0, sent: int = 0) -> None:
        """Count bytes of tensors that a peer left for us, or we for it, in shared memory."""
        before = self._bulk.get(peer, (0, 0))
        self._bulk[peer] = (before[0] + received, before[1] + sent)

    def ended(self, connection: Counting) -> None:
        """Keep the figures of a connection that is about to be closed."""
        for link in self._links(connection):
            self._add(self._past, link)
        self._bulk.pop(connection.name, None)

    def counted(self, connections: Iterable[Counting]) -> Counted:
        """The figures of all connections, past ones and these."""
        totals = dict(self._past)
        for connection in connections:
            for link in self._links(connection):
                self._add(totals, link)
        return Counted(
            links=tuple(
                LinkCount(sender=sender, receiver=receiver, num_bytes=num_bytes, messages=messages)
                for (sender, receiver), (num_bytes, messages) in totals.items()
            ),
            refused=self.refused.total(),
        )

    def _links(self, connection: Counting) -> tuple[LinkCount, LinkCount]:
        peer = connection.name
        tensors_received, tensors_sent = self._bulk.get(peer, (0, 0))
        received, messages_received, sent, messages_sent = connection.counts()
        return (
            LinkCount(
                sender=peer,
                receiver=self._name,
                num_bytes=received + tensors_received,
                messages=messages_received,
            ),
            LinkCount(
                sender=self._name,
                receiver=peer,
                num_bytes=sent + tensors_sent,
                messages=messages_sent,
            ),
        )

    @staticmethod
    def _add(totals: dict[tuple[str, str], tuple[int, int]], link: LinkCount) -> None:
        before = totals.get((link.sender, link.receiver), (0, 0))
        totals[link.sender, link.receiver] = (before[0] + link.num_bytes, before[1] + link.messages)
