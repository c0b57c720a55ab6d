"""Tests of squall.replica.runner: what a worker has to say to the coordinator waits a moment, and no longer.

Faults planted, each caught: sent twice · the last message left behind · sent at once, each alone · never due · an ask before
the first word to another coordinator.
"""

from squall.replica.runner import HELD_BACK_S, Outbox
from squall.wire.channel import Channel
from squall.wire.connection import Connection
from squall.wire.messages import Ask, Goodbye, Resume


def test_messages_wait_for_company_and_are_sent_in_order_once_due() -> None:
    near, far = Channel.pair()
    there, outbox = Connection(far, "replica"), Outbox(Connection(near, "coordinator"))
    asks = [Ask(request=number, finished=None) for number in range(4)]

    def heard() -> list[object]:
        received = iter(there.arrived, [])
        return [message for batch in received for message, _ in batch]

    assert outbox.due_ms is None
    outbox.put(asks[0])
    outbox.send_if_due(now=5.0)  # long after the last
    assert heard() == asks[:1]
    assert outbox.due_ms is None

    outbox.put(asks[1])
    outbox.put(asks[2])
    outbox.send_if_due(now=5.0 + HELD_BACK_S / 2)
    assert heard() == []
    assert outbox.due_ms == 1000 * HELD_BACK_S
    outbox.send_if_due(now=5.0 + HELD_BACK_S)
    before = there.counts()[1]
    assert heard() == asks[1:3]
    assert there.counts()[1] == before + 1  # woken once
    outbox.send_if_due(now=6.0)
    assert heard() == []

    outbox.put(asks[3])
    outbox.put(Goodbye())
    outbox.send()
    assert heard() == [asks[3], Goodbye()]
    near.close()
    far.close()


def test_the_first_word_to_another_coordinator_is_what_is_held_and_each_open_ask_is_said_once_behind_it() -> (
    None
):
    """What was decided between its coming and that word would be answered first, and what was asked before it late."""
    (near, far), (old, gone) = Channel.pair(), Channel.pair()
    there, outbox = Connection(far, "replica"), Outbox(Connection(old, "coordinator"))
    asks = [Ask(request=number, finished=None) for number in range(3)]
    outbox.put(asks[0])
    outbox.redirect(Connection(near, "coordinator"))
    outbox.put(asks[2])
    resume = Resume(leases=(), done=())
    for message in (resume, *asks):
        outbox.put(message)
    outbox.send()
    assert [message for message, _ in there.arrived()] == [resume, *asks]
    for end in (near, far, old, gone):
        end.close()
