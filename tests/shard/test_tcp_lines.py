"""What only a shard over TCP can get wrong: slow, dead, silent, stale and lying workers, and memory that grows.

A real shard in a thread, real workers, and between them a relay that slows, holds and cuts. Counting is the oracle, as
in tests/replica/test_exchange.py.

Faults planted by hand, each seen to fail a test here: no copy when an update comes · a copy of less than is left to be sent
· a dead reader keeps its copy · a dead writer keeps its staging set · staging sets are unbounded · copies are · nobody is
dropped while others wait · a new connection does not end the old one · an older incarnation is let in · another model is ·
the gradient is not looked at on arrival · what is absent is looked at · no connection is made anew.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from squall.blocks import Outcome
from squall.errors import ConfigError, LostError
from squall.shard import tcp_lines
from squall.wire.messages import Pushed
from tests.processes.helpers import wait_until
from tests.relay import Relay
from tests.shard.served import Client, Served, equal, layout_of

LARGE = (2_000_000, 500_000, 250_000)  # 12 MB: more than all buffers between two sockets


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served("tcp", layout_of(*LARGE), tmp_path) as shard:
        yield shard


@pytest.fixture
def relay(served: Served) -> Iterator[Relay]:
    with served.relayed() as between:
        yield between


def pushes(client: Client, positions: range) -> None:
    client.fill(-1.0)
    for position in positions:
        client.push(position)


def num_copies(shard: Served) -> int:
    return shard.lines._readers.copies.num_out


def test_a_slow_fetch_is_of_one_version_and_stops_nobody(served: Served, relay: Relay) -> None:
    fast, slow = served.worker(0), served.worker(1, address=relay.address)
    pushes(fast, range(2))
    relay.hold(answers_only=True)
    slow.begin_fetch()
    # The fast one's last answer may have come while the shard still counts it as going out.
    wait_until(lambda: served.lines._links[1, 0].outgoing is not None, 5, "the fetch to begin")

    pushes(fast, range(2, 8))

    assert equal(fast.values(), 8.0)
    assert num_copies(served) == 1
    relay.release()
    reply = slow.reply()
    assert [state.version for state in reply.states] == [2, 2]
    assert equal(slow.values(), 2.0)
    wait_until(lambda: num_copies(served) == 0, 5, "the copy to be given back")
    fast.close()
    slow.close()


def test_the_copy_of_a_reader_that_dies_ends_with_its_connection(served: Served, relay: Relay) -> None:
    fast, dying = served.worker(0), served.worker(1, address=relay.address)
    relay.hold(answers_only=True)
    dying.begin_fetch()
    wait_until(lambda: any(link.outgoing for link in served.lines._links.values()), 5, "the fetch to begin")
    pushes(fast, range(2))
    assert num_copies(served) == 1

    relay.cut()
    relay.release()

    wait_until(lambda: num_copies(served) == 0, 5, "the copy to be given back")
    dying.close()
    fast.close()


def test_readers_of_the_same_version_share_one_copy(served: Served, relay: Relay) -> None:
    fast = served.worker(0)
    slow = [served.worker(number, address=relay.address) for number in range(1, 6)]
    relay.hold(answers_only=True)
    for client in slow:
        client.begin_fetch()
    wait_until(lambda: sum(bool(x.outgoing) for x in served.lines._links.values()) == 5, 5, "five fetches")

    pushes(fast, range(1))

    assert num_copies(served) == 1
    relay.release()
    for client in slow:
        client.reply()
        assert equal(client.values(), 0.0)
        client.close()
    fast.close()


def test_a_push_that_stops_half_way_is_never_seen_and_stops_nobody(served: Served, relay: Relay) -> None:
    fast, stuck = served.worker(0), served.worker(1, address=relay.address)
    stuck.fill(-100.0)
    relay.hold(after=5_000_000)
    stuck.begin_push(50)
    wait_until(lambda: served.lines._staging.num_out == 1, 5, "the push to be admitted")

    pushes(fast, range(3))

    assert equal(fast.values(), 3.0)
    relay.release()
    stuck.reply()
    assert equal(stuck.values(), 103.0)
    stuck.close()
    fast.close()


def test_who_holds_the_last_staging_set_while_others_wait_is_dropped_and_repeats_its_push(
    served: Served, relay: Relay
) -> None:
    served.lines._staging.most = 1
    served.lines._patience.floor_s = 0.1
    fast, stuck = served.worker(0), served.worker(1, address=relay.address)
    stuck.fill(-100.0)
    relay.hold(after=5_000_000)
    stuck.begin_push(50)
    wait_until(lambda: served.lines._staging.num_out == 1, 5, "the push to be admitted")

    pushes(fast, range(3))
    assert equal(fast.values(), 3.0)
    relay.release()
    reply = stuck.reply()

    assert isinstance(reply, Pushed)
    assert set(reply.outcomes) == {Outcome.APPLIED}
    assert equal(stuck.values(), 103.0)
    assert relay.num_connections == 4
    assert served.lines.sets_made[0] == 1
    stuck.close()
    fast.close()


def test_who_holds_the_last_copy_while_an_update_waits_is_dropped_and_repeats_its_fetch(
    served: Served, relay: Relay
) -> None:
    served.lines._readers.copies.most = 1
    served.lines._patience.floor_s = 0.1
    fast = served.worker(0)
    slow = [served.worker(number, address=relay.address) for number in (1, 2)]
    relay.hold(answers_only=True)
    for number, client in enumerate(slow):  # of two versions
        client.begin_fetch()
        wait_until(
            lambda n=number: sum(bool(x.outgoing) for x in served.lines._links.values()) == n + 1,
            5,
            "a fetch",
        )
        pushes(fast, range(2 * number, 2 * number + 2))
    assert equal(fast.values(), 4.0)
    assert served.lines.sets_made[1] == 1

    relay.release()
    for client in slow:
        reply = client.reply()
        assert equal(client.values(), reply.states[0].version)
        client.close()
    fast.close()


def test_memory_is_bounded_however_many_push_at_once(tmp_path: Path) -> None:
    with Served("tcp", layout_of(400_000, 1000, 1000), tmp_path) as shard:
        clients = [shard.worker(number) for number in range(12)]
        for client in clients:
            client.fill(-1.0)
        for number, client in enumerate(clients):
            client.begin_push(number)
        for client in clients:
            reply = client.reply()
            assert equal(client.values(), reply.states[0].version)

        assert shard.lines.sets_made <= (tcp_lines.MOST_STAGED, tcp_lines.MOST_COPIES)
        assert shard.lines._staging.num_out == 0
        for client in clients:
            client.close()


def test_sixty_four_join_at_once(tmp_path: Path) -> None:
    with Served("tcp", layout_of(1000, 10, 10), tmp_path) as shard:
        clients: list[Client] = []

        def join(number: int) -> None:
            client = shard.worker(number)
            client.fill(-1.0)
            client.push(number)
            clients.append(client)

        threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(clients) == 64
        clients[0].fetch()
        assert equal(clients[0].values(), 64.0)
        for client in clients:
            client.close()


@pytest.mark.parametrize("num_bytes", [1, 150, 3_000_000, 13_000_000, 20_000_000])
def test_a_connection_that_breaks_anywhere_in_an_exchange_changes_nothing(
    served: Served, relay: Relay, num_bytes: int
) -> None:
    """B19: before, in and after the push, and in the values: applied once, and the values are there."""
    client = served.worker(0, address=relay.address)
    pushes(client, range(1))
    relay.cut_after(num_bytes)

    reply = client.push(1, into=1)

    assert equal(client.values(1), 2.0)
    assert [state.version for state in reply.states] == [2, 2]
    assert relay.num_connections == 4
    client.close()
    served.close()
    assert served.outcomes().count("applied") == 2


def test_a_line_that_stays_silent_counts_as_broken_once_that_is_unlike_it(
    served: Served, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("squall.replica.exchange.SILENT_AFTER_S", 0.2)
    monkeypatch.setattr("squall.replica.exchange.SILENT_TIMES", 1.0)
    monkeypatch.setattr("squall.replica.exchange.WAITS_TOLD_AFTER_S", 0.05)
    client = served.worker(0, address=relay.address)
    client.fetch()
    relay.hold()
    client.begin_fetch()
    threading.Timer(1.0, relay.release).start()

    client.reply()

    assert relay.num_connections >= 4
    client.close()


def test_a_worker_that_connects_again_ends_its_old_connection(served: Served) -> None:
    old = served.worker(0)
    pushes(old, range(1))
    new = served.worker(0, incarnation=1)
    new.fill(-1.0)
    new.push(1)
    assert equal(new.values(), 2.0)

    with pytest.raises(LostError, match="expected incarnation 1"):
        old.push(2)

    old.close()
    new.close()


def test_a_worker_of_another_model_is_told_so(served: Served) -> None:
    with pytest.raises(ConfigError, match="expected the model's"):
        served.worker(0, layout=layout_of(3, 4, 5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("absent", [(), (0,)])
def test_a_gradient_that_arrives_not_finite_is_not_applied(
    served: Served, bad: float, absent: tuple[int, ...]
) -> None:
    client = served.worker(0)
    client.fill(-1.0)
    next(iter(client.exchange.views.gradients[0].values()))[5] = bad

    reply = client.push(0, absent=absent)

    assert isinstance(reply, Pushed)
    expected = Outcome.APPLIED if absent else Outcome.NOT_FINITE
    assert set(reply.outcomes) == {expected}
    client.close()


def test_a_finite_gradient_whose_sum_overflows_is_applied(served: Served) -> None:
    client = served.worker(0)
    client.fill(-3e38)

    reply = client.push(0)

    assert isinstance(reply, Pushed)
    assert set(reply.outcomes) == {Outcome.APPLIED}
    assert all(torch.isfinite(values).all() for values in client.values())
    client.close()


def test_traffic_equals_what_a_relay_counts(served: Served, relay: Relay) -> None:
    client = served.worker(0, address=relay.address)
    for step in range(3):
        pushes(client, range(step, step + 1))
    client.close()
    served.close()

    assert served.counted is not None
    links: dict[Any, int] = {(x.sender, x.receiver): x.num_bytes for x in served.counted.links}
    assert links["replica0.0", "shard0"] == pytest.approx(relay.to_target, rel=0.02)
    assert links["shard0", "replica0.0"] == pytest.approx(relay.to_caller, rel=0.02)
