"""What TCP links have to suffer by the faults of a job: delays, cuts, and messages that are lost with their connection."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from squall.cluster.kinds import KIND_OF
from squall.cluster.relay import TO_CALLEE, Relays
from squall.errors import RemoteProtocolError
from squall.faults import Cut, Delay, Drop, Fault, is_named, role_of
from squall.wire.connection import CODEC, unbundled
from squall.wire.hello import GREETING_BYTES, PROOF_BYTES, VERDICT_BYTES
from squall.wire.joining import JoinBulk
from squall.wire.stream import HEADER

Between = Callable[[str, str, str], str]


@contextmanager
def suffering(
    faults: Sequence[Fault], seed: int, began: float, inner: Between | None
) -> Iterator[Between | None]:
    """Relays that make the links of a run suffer, if its faults have anything to say of links.

    Args:
        seed: of chance.
        began: when faults began to count [seconds, monotonic].
        inner: what stands between as well, behind ours.
    """
    of_links = [fault for fault in faults if isinstance(fault, Delay | Cut | Drop)]
    if not of_links:
        yield inner
        return

    def between(caller: str, callee: str, address: str) -> str:
        behind = address if inner is None else inner(caller, callee, address)
        return relays.between(caller, callee, behind)

    with Relays(lambda caller, callee: LinkWeather(caller, callee, of_links, seed, began)) as relays:
        yield between


class LinkWeather:
    """An implementation of `squall.cluster.relay.Weather`, by faults.

    Args:
        caller, callee: whose link this is.
        faults: of the whole run.
        seed, began: as of `suffering`.
    """

    def __init__(self, caller: str, callee: str, faults: Sequence[Fault], seed: int, began: float) -> None:
        ends = role_of(caller), role_of(callee)
        self._random = random.Random(f"{seed}/{caller}/{callee}")
        self._delays = [fault for fault in faults if isinstance(fault, Delay)]
        # The line between a shard and the coordinator is not made anew, so nothing is lost on it.
        is_replicas = not caller.startswith("shard")
        self._drops = [fault for fault in faults if isinstance(fault, Drop) and is_replicas]
        self._cuts = [
            (began + fault.when.seconds, began + fault.when.seconds + fault.seconds)
            for fault in faults
            if isinstance(fault, Cut) and _joins(fault, *ends)
        ]

    def held_until(self, now: float) -> float:
        return max((until for since, until in self._cuts if since <= now < until), default=now)

    def delay_s(self) -> float:
        return sum(
            max(0.0, fault.seconds + self._random.uniform(-fault.spread, fault.spread))
            for fault in self._delays
        )

    def reader(self) -> Callable[[int, bytes], int | None]:
        return FrameReader(self._is_lost) if self._drops else lambda direction, data: None

    def _is_lost(self, kind: str) -> bool:
        return any(
            fault.kind in (kind, "*") and self._random.random() < fault.probability for fault in self._drops
        )


class FrameReader:
    """Finds the messages in the bytes of one connection, in both directions.

    Args:
        is_lost: asked of each message of the protocol, by its kind in the fault language; a bundle is lost with any
            message that is in it.
    """

    def __init__(self, is_lost: Callable[[str], bool]) -> None:
        self._is_lost = is_lost
        self._to_skip = [GREETING_BYTES + PROOF_BYTES, GREETING_BYTES + VERDICT_BYTES]
        self._unread = (bytearray(), bytearray())
        self._is_bulk = False  # what follows is tensors

    def __call__(self, direction: int, data: bytes) -> int | None:
        """How many bytes of `data` come before a message that is lost; None: all pass."""
        if self._is_bulk:
            return None
        unread = self._unread[direction]
        before = len(unread)
        unread += data
        at = min(self._to_skip[direction], len(unread))
        self._to_skip[direction] -= at
        while not self._is_bulk and len(unread) - at >= HEADER.size:
            stop = at + HEADER.size + HEADER.unpack_from(unread, at)[2]
            if len(unread) < stop:
                break
            if self._loses(direction, bytes(unread[at + HEADER.size : stop])):
                return max(0, at - before)
            at = stop
        del unread[:at]
        return None

    def _loses(self, direction: int, content: bytes) -> bool:
        try:
            message = CODEC.decode(content)
        except RemoteProtocolError:
            return False  # the receiver says what it thinks of it
        if direction == TO_CALLEE and isinstance(message, JoinBulk):
            self._is_bulk = True
        kinds = [KIND_OF[type(each)] for each in unbundled(message) if type(each) in KIND_OF]
        return any([self._is_lost(kind) for kind in kinds])  # each has its own chance


def _joins(cut: Cut, one: str, other: str) -> bool:
    return (is_named(one, cut.one) and is_named(other, cut.other)) or (
        is_named(other, cut.one) and is_named(one, cut.other)
    )
