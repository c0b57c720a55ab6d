"""Tests of squall.cluster.weather: what faults make of a link.

Faults planted here by hand, each seen to fail a test: a cut that holds other links · a delay that is
always its middle · bytes of the hello taken for messages · a message dropped together with the one before it · tensors
taken for messages · losses on a shard's line to the coordinator.
"""

import random
import statistics
from collections.abc import Sequence

import pytest

from squall.blocks import Block
from squall.cluster.relay import TO_CALLEE, TO_CALLER
from squall.cluster.weather import FrameReader, LinkWeather
from squall.faults import parse
from squall.wire.connection import CODEC
from squall.wire.hello import GREETING_BYTES, PROOF_BYTES, VERDICT_BYTES
from squall.wire.joining import JoinBulk, JoinCoordinator, Welcome
from squall.wire.messages import Ask, Bundle, Goodbye, Lease
from squall.wire.stream import frame


def weather(text: str, caller: str = "replica2.0", callee: str = "shard0") -> LinkWeather:
    return LinkWeather(caller, callee, parse(text), seed=3, began=100.0)


def test_a_cut_holds_its_link_for_its_seconds_and_no_other() -> None:
    text = "cut:replica2|shard0,5s@t=1"
    one = weather(text)
    assert [one.held_until(now) for now in (100.9, 101.0, 105.9, 106.0)] == [100.9, 106.0, 106.0, 106.0]
    assert weather(text.replace("replica2|shard0", "shard|replica")).held_until(102.0) == 106.0
    for caller, callee in (("replica1.0", "shard0"), ("replica2.0", "shard1"), ("replica2.0", "coordinator")):
        assert weather(text, caller, callee).held_until(102.0) == 102.0


def test_delays_lie_within_their_spread_and_add_up() -> None:
    one = weather("delay=50ms+-20; delay=1s")
    drawn = [one.delay_s() for _ in range(2000)]
    assert 1.03 <= min(drawn) < 1.032 < 1.068 < max(drawn) <= 1.07
    assert statistics.mean(drawn) == pytest.approx(1.05, abs=0.002)
    assert weather("kill:replica").delay_s() == 0.0


def stream(direction: int, messages: Sequence[object]) -> bytes:
    hello = GREETING_BYTES + (PROOF_BYTES if direction == TO_CALLEE else VERDICT_BYTES)
    noise = random.Random(1).randbytes(hello)
    return noise + b"".join(frame(CODEC.encode(message)) for message in messages)  # type: ignore[arg-type]


LEASE = Lease(request=1, block=Block(0, 0, 0, 1), attempt=1, refresh=False)
ASK = Ask(request=1, finished=None)
ME = JoinCoordinator(role="replica", number=0, incarnation=0)


def passed(reader: FrameReader, direction: int, data: bytes, piece: int) -> int:
    """How many bytes pass before the connection breaks."""
    for first in range(0, len(data), piece):
        whole = reader(direction, data[first : first + piece])
        if whole is not None:
            return first + whole
    return len(data)


@pytest.mark.parametrize("piece", [1, 2, 5, 7, 64, 10_000])
def test_a_lost_message_takes_nothing_with_it_that_came_before(piece: int) -> None:
    asked: list[str] = []

    def second_ask(kind: str) -> bool:
        asked.append(kind)
        return asked.count("ask") == 2

    reader = FrameReader(second_ask)
    there = stream(TO_CALLEE, [ME, ASK, ASK, Goodbye()])
    back = stream(TO_CALLER, [Welcome(link=3), LEASE])
    assert passed(reader, TO_CALLER, back, piece) == len(back)
    before = len(stream(TO_CALLEE, [ME, ASK]))
    gone = passed(reader, TO_CALLEE, there, piece)
    assert before <= gone < before + len(frame(CODEC.encode(ASK)))
    assert gone == before or piece < len(frame(CODEC.encode(ASK)))
    assert asked == ["ask.reply", "ask", "ask"]


def test_a_bundle_is_lost_with_any_message_in_it() -> None:
    asked: list[str] = []
    reader = FrameReader(lambda kind: bool(asked.append(kind)) or kind == "goodbye")
    there = stream(TO_CALLEE, [ME, Bundle(messages=(ASK, ASK)), Bundle(messages=(ASK, Goodbye(), ASK))])
    assert reader(TO_CALLEE, there) == len(stream(TO_CALLEE, [ME, Bundle(messages=(ASK, ASK))]))
    assert asked == ["ask", "ask", "ask", "goodbye", "ask"]


def test_tensors_are_no_messages() -> None:
    asked: list[str] = []
    reader = FrameReader(lambda kind: bool(asked.append(kind)))
    there = stream(TO_CALLEE, [JoinBulk(link=5)])
    assert reader(TO_CALLEE, there + frame(CODEC.encode(ASK))) is None
    assert reader(TO_CALLER, frame(CODEC.encode(LEASE))) is None
    assert asked == []


def test_nothing_is_lost_between_a_shard_and_the_coordinator() -> None:
    data = stream(TO_CALLEE, [ME, ASK])
    assert weather("drop:*=1").reader()(TO_CALLEE, data) == len(stream(TO_CALLEE, [ME]))
    assert weather("drop:*=1", "shard0", "coordinator").reader()(TO_CALLEE, data) is None
    assert weather("drop:push=1").reader()(TO_CALLEE, data) is None
