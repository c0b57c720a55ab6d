"""One suite for every way in which a worker and a shard exchange tensors, run against each of them.

Behind it stands a real shard in a thread. The oracle is counting: the shard begins at zeros and subtracts, so after
pushes of minus one its values say how many it has applied.

Faults planted by hand, each seen to fail a test here: buffer 0 is always written (either transport) · the second gradient
buffer is ignored · a push that is not finite waits for its gradient · it is applied · only the first slice is sent · the
gradient is not scaled · a fetch over shared memory is not written.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from squall.blocks import Outcome
from squall.errors import LostError
from squall.wire.messages import Fetched, Pushed
from tests.shard.served import Client, Served, Transport, equal, layout_of


@pytest.fixture(params=get_args(Transport))
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    with Served(request.param, layout_of(1000, 77, 33), tmp_path) as shard:
        yield shard


@pytest.fixture
def worker(served: Served) -> Iterator[Client]:
    client = served.worker(num_gradients=2)
    yield client
    client.close()


def test_a_pushed_gradient_is_applied_and_the_values_come_back(worker: Client) -> None:
    generator = torch.Generator().manual_seed(0)
    for vector in worker.exchange.views.gradients[0].values():
        vector.copy_(torch.randn(vector.shape, generator=generator, dtype=vector.dtype))

    reply = worker.push(0, into=1)

    assert isinstance(reply, Pushed)
    assert reply.outcomes == (Outcome.APPLIED, Outcome.APPLIED)
    assert [state.version for state in reply.states] == [1, 1]
    gradients = worker.exchange.views.gradients[0].values()
    assert all(torch.equal(v, -g) for v, g in zip(worker.values(1), gradients, strict=True))
    assert equal(worker.values(0), 0.0)


def test_a_fetch_brings_the_values_as_they_are_into_the_buffer_that_it_names(worker: Client) -> None:
    worker.fill(-1.0)
    worker.push(0, into=None)
    assert equal(worker.values(0) + worker.values(1), 0.0)

    reply = worker.fetch(into=1)

    assert isinstance(reply, Fetched)
    assert [state.version for state in reply.states] == [1, 1]
    assert equal(worker.values(1), 1.0)
    assert equal(worker.values(0), 0.0)


def test_the_push_says_which_gradient_buffer_and_what_scale(worker: Client) -> None:
    worker.fill(-1.0, gradient=0)
    worker.fill(-8.0, gradient=1)

    worker.push(0, buffer=1, scale=0.25)

    assert equal(worker.values(), 2.0)


def test_what_is_not_finite_changes_nothing(worker: Client) -> None:
    worker.fill(-1.0)

    reply = worker.push(0, not_finite="weight")

    assert isinstance(reply, Pushed)
    assert reply.outcomes == (Outcome.NOT_FINITE, Outcome.NOT_FINITE)
    assert equal(worker.values(), 0.0)


def test_a_block_that_is_pushed_again_is_applied_once(worker: Client) -> None:
    worker.fill(-1.0)
    worker.push(0)

    reply = worker.push(0, into=1)

    assert isinstance(reply, Pushed)
    assert reply.outcomes == (Outcome.REPEATED, Outcome.REPEATED)
    assert equal(worker.values(1), 1.0)


def test_tensors_without_a_gradient_stay_as_they_are(worker: Client) -> None:
    worker.fill(-1.0)

    worker.push(0, absent=(1,))

    weights = worker.values()[0]
    assert equal([weights[:1000]], 1.0)
    assert equal([weights[1000:]], 0.0)


def test_a_reply_does_not_come_before_its_request_and_says_so_by_the_descriptor(worker: Client) -> None:
    assert worker.exchange.replies() == []
    worker.begin_fetch()
    reply = worker.reply()
    assert reply.request == 1
    assert worker.exchange.replies() == []


def test_every_worker_reads_its_own_writes(served: Served) -> None:
    one, other = served.worker(0), served.worker(1)
    one.fill(-1.0)
    other.fill(-10.0)
    for step in range(5):
        one.push(2 * step)
        assert equal(one.values(), 11.0 * step + 1)
        other.push(2 * step + 1)
        assert equal(other.values(), 11.0 * step + 11)
    one.close()
    other.close()


def test_pushes_of_many_at_once_are_each_counted_once_and_no_fetch_is_torn(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """B47, B48: on slices that are larger than what a socket buffers."""
    for transport in get_args(Transport):
        folder = tmp_path / transport
        folder.mkdir()
        with Served(transport, layout_of(600_000, 400_000, 200_000), folder) as shard:
            count_together(shard, num_workers=4, num_pushes=6)


def count_together(shard: Served, num_workers: int, num_pushes: int) -> None:
    torn: list[list[float]] = []
    ended: list[str] = []

    def work(number: int) -> None:
        client = shard.worker(number)
        client.fill(-1.0)
        for step in range(num_pushes):
            reply = client.push(number * num_pushes + step)
            versions = [state.version for state in reply.states]
            if not all(equal([v], w) for v, w in zip(client.values(), versions, strict=True)):
                torn.append([float(v[0]) for v in client.values()] + [float(v[-1]) for v in client.values()])
        client.close()
        ended.append("well")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert ended == ["well"] * num_workers
    assert torn == []
    last = shard.worker(99)
    last.fetch()
    assert equal(last.values(), num_workers * num_pushes)
    last.close()


def test_a_worker_that_leaves_is_not_missed_and_may_come_again(served: Served) -> None:
    first, other = served.worker(0), served.worker(1)
    first.fill(-1.0)
    first.push(0)
    first.close()

    other.fill(-1.0)
    other.push(1)
    again = served.worker(0, incarnation=1)
    again.fetch()

    assert equal(other.values(), 2.0)
    assert equal(again.values(), 2.0)
    other.close()
    again.close()


def test_a_request_that_makes_no_sense_costs_its_sender_the_line_and_nobody_else(served: Served) -> None:
    wrong, right = served.worker(0), served.worker(1)
    wrong.begin_push(0, into=7)
    with pytest.raises((LostError, KeyError, IndexError)):
        wrong.reply()

    right.fill(-1.0)
    right.push(1)
    assert equal(right.values(), 1.0)
    right.close()
    wrong.close()


def test_a_shard_that_ends_is_lost(served: Served, worker: Client) -> None:
    worker.fetch()
    served.close()
    with pytest.raises((LostError, ConnectionError)):
        worker.fetch()


def test_traffic_counts_what_was_exchanged(served: Served, worker: Client) -> None:
    num_bytes = sum(spec.num_bytes for spec in served.layout.slices)
    for step in range(10):
        worker.push(step)
    worker.fetch()

    served.close()

    assert served.counted is not None
    links = {(link.sender, link.receiver): link for link in served.counted.links}
    to, back = links["replica0.0", "shard0"], links["shard0", "replica0.0"]
    assert 10 * num_bytes < to.num_bytes < 1.2 * 10 * num_bytes + 2000
    assert 11 * num_bytes < back.num_bytes < 1.2 * 11 * num_bytes + 2000
    assert (to.messages, back.messages) == (11, 11)
