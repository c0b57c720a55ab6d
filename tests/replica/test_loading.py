"""Loading ahead in real processes: the same minibatches as loading here, in bounded memory, and no way to hang.

Faults planted by hand, each seen to fail a test: the generators are not put back after a batch · they are put back to
where they were before it · the bound per worker is left out · what is dropped counts as in hand · what was not asked for is handed out as the answer to
the next · a dead process is not watched (only its connection) · a minibatch that nobody expected is waited for without
being ordered · a view travels with all of what it is a view of · the descriptor of an answer is not closed, here or in
the worker · later workers keep the connections of earlier ones · SIGTERM ends a worker · `worker_init` is not called.
"""

import os
import random
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from squall.blocks import Block
from squall.cluster.payload import Payload
from squall.cluster.role import _pack_minibatch, _unpack_minibatch
from squall.data import Minibatches, Source
from squall.errors import ConfigError, DataError, LostError, UserCodeError
from squall.replica.data_worker import DataWorkers, Duty, Packing
from squall.replica.loading import LoadsAhead, LoadsHere

PACKING = Packing(pack=_pack_minibatch, unpack=_unpack_minibatch)
BATCH = 4


class Noisy(Source):
    """Draws from all three generators for some minibatches, and from none for others."""

    num_examples = 4000

    def batch(self, indices: NDArray[np.int64]) -> Any:
        x = torch.arange(len(indices) * 3, dtype=torch.float32).reshape(-1, 3)
        if int(indices[0]) % 3:
            # An odd count of each: a half of a pair that the generators keep for the next call.
            x = x + torch.randn(1) + float(np.random.randn()) + random.gauss(0.0, 1.0)
        return {"x": x, "at": indices.copy()}, ["as", "it", "is"]


class Plain(Source):
    num_examples = 4000

    def batch(self, indices: NDArray[np.int64]) -> Any:
        return torch.from_numpy(indices.copy())


def minibatches(source: Source) -> Minibatches:
    return Minibatches(source, BATCH, seed=1, shuffle=False)


class Ahead:
    """Makes loaders and closes them."""

    def __init__(self) -> None:
        self._made: list[LoadsAhead] = []

    def __call__(self, source: Source, num: int = 1, *, inherited: Any = (), **settings: Any) -> LoadsAhead:
        packing = settings.pop("packing", PACKING)
        workers = DataWorkers(num=num, **settings)
        duty = Duty(
            role="replica0.0", minibatches=minibatches(source), seed=1, workers=workers, packing=packing
        )
        self._made.append(LoadsAhead(duty, inherited))
        return self._made[-1]

    def close(self) -> None:
        for loader in self._made:
            loader.close()


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    made = Ahead()
    yield made
    made.close()


def block(first: int, stop: int, epoch: int = 0) -> Block:
    return Block(stage=0, epoch=epoch, first=first, stop=stop)


def drawn() -> tuple[Any, ...]:
    """The next numbers of the three generators, of two kinds each."""
    torchs = torch.randn(3).tolist(), torch.rand(1).item()
    numpys = np.random.randn(3).tolist(), np.random.rand()
    return torchs, numpys, random.gauss(0, 1), random.random()


def has_ended(pid: int, timeout_s: float) -> bool:
    """Whether a child of this process ends in time; leaves it to be waited for."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        select.select([], [], [], 0.005)
    return False


def test_minibatches_and_what_is_drawn_after_them_are_those_of_loading_here(ahead: Ahead) -> None:
    loader, here = ahead(Noisy(), num=2), LoadsHere(minibatches(Noisy()), seed=1)
    loader.expect(block(0, 7))
    loader.expect(block(0, 3, epoch=1))

    for key in [(0, position) for position in range(7)] + [(1, position) for position in range(3)]:
        (got, words), examples = loader.load(*key)
        after = drawn()
        (expected, _), _ = here.load(*key)

        assert torch.equal(got["x"], expected["x"])
        assert np.array_equal(got["at"], expected["at"])
        assert (words, examples) == (["as", "it", "is"], BATCH)
        assert after == drawn()


def test_each_worker_has_at_most_two_in_hand_however_much_is_expected(ahead: Ahead) -> None:
    loader = ahead(Plain(), num=2)
    loader.expect(block(0, 100))
    assert [len(worker.orders) for worker in loader.workers] == [2, 2]

    for position in range(10):
        loader.load(0, position)
        assert [len(worker.orders) for worker in loader.workers] == [2, 2]


def test_what_was_expected_and_is_not_asked_for_is_dropped(ahead: Ahead) -> None:
    loader = ahead(Plain(), num=2)
    loader.expect(block(0, 4))
    loader.expect(block(50, 60))
    loader.load(0, 50)
    assert all(sum(position > 50 for _, position in worker.orders) == 2 for worker in loader.workers)

    for position in (51, 58, 59):  # a lease revoked, and one cut short
        assert loader.load(0, position)[0].tolist() == list(range(position * BATCH, (position + 1) * BATCH))

    assert all(not worker.orders or worker.orders[0][1] < 58 for worker in loader.workers)


def test_what_nobody_expected_is_loaded_at_once_even_when_all_hands_are_full(ahead: Ahead) -> None:
    loader = ahead(Plain(), num=1)
    loader.expect(block(0, 20))

    assert loader.load(0, 900)[0][0].item() == 900 * BATCH
    assert list(loader.workers[0].orders) == [(0, 0), (0, 1)], "what it jumped over is to be loaded anew"
    for position in (0, 900, 19, 3):
        assert loader.load(0, position)[0][0].item() == position * BATCH


class RaisesAt(Source):
    """Raises for one minibatch."""

    num_examples = 4000

    def __init__(self, position: int, error: BaseException) -> None:
        self.first, self.error = position * BATCH, error

    def batch(self, indices: NDArray[np.int64]) -> Any:
        if int(indices[0]) == self.first:
            raise self.error
        return torch.zeros(1)


def test_an_exception_of_the_users_code_is_told_when_its_minibatch_is_asked_for(ahead: Ahead) -> None:
    loader = ahead(RaisesAt(2, ValueError("a torn image")), num=1)
    loader.expect(block(0, 4))
    loader.load(0, 0)
    loader.load(0, 1)

    with pytest.raises(UserCodeError) as raised:
        loader.load(0, 2)

    error = raised.value
    assert (error.role, error.step) == ("replica0.0", "epoch 0, position 2")
    assert error.error == "ValueError: a torn image"
    assert "test_loading.py" in error.line
    assert "in batch" in error.line
    assert "raise self.error" in error.traceback
    loader.load(0, 3)  # and the worker goes on


def test_squalls_own_errors_arrive_as_they_are(ahead: Ahead) -> None:
    error = DataError(subject="a.csv", expected="numbers", got="'x'")

    with pytest.raises(DataError, match=r"a\.csv: expected numbers, but got 'x'"):
        ahead(RaisesAt(0, error)).load(0, 0)


def short_of_memory(found: Any) -> tuple[bytes, int]:
    raise ConfigError(subject="shared memory", expected="9 MiB to be free", got="1 MiB available")


def test_too_little_memory_is_a_memory_error_wherever_it_is_noticed(ahead: Ahead) -> None:
    with pytest.raises(MemoryError, match="no room"):
        ahead(RaisesAt(0, MemoryError("no room"))).load(0, 0)
    with pytest.raises(MemoryError, match="9 MiB to be free"):
        ahead(Plain(), packing=Packing(pack=short_of_memory, unpack=_unpack_minibatch)).load(0, 0)


class Unsendable(Plain):
    def batch(self, indices: NDArray[np.int64]) -> Any:
        return (number for number in indices)


def test_a_batch_that_cannot_be_sent_is_refused_with_the_way_on(ahead: Ahead) -> None:
    with pytest.raises(DataError, match=r"epoch 0, position 5: .*generator.*data_workers=0"):
        ahead(Unsendable()).load(0, 5)


class Dies(Plain):
    """Ends its process, some of it after starting another that holds the connection open."""

    def __init__(self, how: str) -> None:
        self.how = how

    def batch(self, indices: NDArray[np.int64]) -> Any:
        if self.how == "killed, and survived by a child" and os.fork() == 0:
            signal.alarm(20)
            signal.pause()
        if self.how == "leaves":
            raise SystemExit(7)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "killed",
            r"data worker 0 of replica0\.0 was killed by signal 9 .*while loading epoch 0, position 3",
        ),
        ("killed, and survived by a child", "was killed by signal 9"),
        ("leaves", "exited with 7 while loading"),
    ],
)
def test_a_worker_that_dies_is_noticed(ahead: Ahead, how: str, told: str) -> None:
    loader = ahead(Dies(how))

    with pytest.raises(LostError, match=told):
        loader.load(0, 3)

    loader.close()


def test_a_worker_that_died_idle_is_noticed_by_the_next_order(ahead: Ahead) -> None:
    loader = ahead(Plain())
    os.kill(loader.workers[0].pid, signal.SIGKILL)
    assert has_ended(loader.workers[0].pid, 5)

    with pytest.raises(LostError, match=r"data worker 0 of replica0\.0 was killed by signal 9"):
        loader.expect(block(0, 2))


def test_signals_that_ask_a_replica_to_leave_do_not_end_its_workers(ahead: Ahead) -> None:
    loader = ahead(Plain())
    loader.load(0, 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(loader.workers[0].pid, number)

    loader.load(0, 1)


class Who(Plain):
    """Says who loads it."""

    told = -1

    def batch(self, indices: NDArray[np.int64]) -> Any:
        info = get_worker_info()
        assert info is not None
        return self.told, info.id, info.num_workers, info.dataset.name  # type: ignore[attr-defined]


class Named:
    name = "photos"


def test_a_worker_init_function_runs_first_in_each_worker(ahead: Ahead) -> None:
    source = Who()

    def remember(number: int) -> None:
        source.told = 10 + number

    loader = ahead(source, num=2, init=remember, dataset=Named())
    loader.expect(block(0, 2))

    assert [loader.load(0, position)[0] for position in (0, 1)] == [
        (10, 0, 2, "photos"),
        (11, 1, 2, "photos"),
    ]
    assert source.told == -1


def test_what_a_worker_init_function_raises_is_the_users(ahead: Ahead) -> None:
    def fails(number: int) -> None:
        raise OSError("no such archive")

    with pytest.raises(UserCodeError, match=r"replica0\.0: OSError: no such archive .*test_loading\.py"):
        ahead(Plain(), init=fails).load(0, 0)


class Views(Source):
    """Hands out rows, and every second column of some, of one large tensor."""

    num_examples = 4000

    def __init__(self) -> None:
        self.all = torch.arange(4000 * 100, dtype=torch.float32).view(4000, 100)

    def batch(self, indices: NDArray[np.int64]) -> Any:
        rows = self.all[int(indices[0]) : int(indices[-1]) + 1]
        return rows, rows[:, ::2], torch.tensor([1.5]).expand(3, 2), rows.t()


def test_a_view_travels_alone_and_in_its_own_memory_order(ahead: Ahead) -> None:
    sizes: list[int] = []

    def unpack(header: bytes, fd: int) -> Any:
        sizes.append(Payload(fd=fd, header=header).num_bytes)
        return _unpack_minibatch(header, fd)

    loader = ahead(Views(), packing=Packing(pack=_pack_minibatch, unpack=unpack))

    got, _ = loader.load(0, 11)

    expected = Views().batch(np.arange(44, 48))
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert [one.stride() for one in got] == [other.stride() for other in expected]
    assert sizes[0] < 3 * rows_bytes() + 4096


def rows_bytes() -> int:
    return BATCH * 100 * 4


def held(pid: int | str) -> tuple[int, int]:
    """Descriptors and mappings of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/maps").read_text().count("memfd:squall")


def test_nothing_is_left_of_a_thousand_minibatches(ahead: Ahead) -> None:
    loader, names = ahead(Noisy(), num=1), set(os.listdir("/dev/shm"))
    pid = loader.workers[0].pid
    loader.expect(block(0, 1000))
    loader.load(0, 0)
    before = held("self"), held(pid)

    for position in range(1, 1000, 2):
        loader.load(0, position)  # and drops every second one

    after = held("self"), held(pid)
    for was, now in zip(before, after, strict=True):
        assert now[0] <= was[0] + LoadsAhead.IN_HAND  # answers in flight
        assert now[1] <= was[1] + LoadsAhead.IN_HAND
    assert set(os.listdir("/dev/shm")) <= names


def test_workers_hold_neither_what_they_must_not_inherit_nor_one_another(ahead: Ahead) -> None:
    ours, theirs = os.pipe()
    loader = ahead(Plain(), num=2, inherited=[theirs])
    loader.load(0, 0)
    loader.load(0, 1)
    os.close(theirs)

    assert select.select([ours], [], [], 5)[0], "a worker holds the other end of a pipe"
    os.close(ours)
    for worker in loader.workers:
        worker.dismiss()
        assert has_ended(worker.pid, 5), "a worker holds the connection of another"


class Stuck(Plain):
    def batch(self, indices: NDArray[np.int64]) -> Any:
        signal.alarm(60)
        signal.pause()


def test_closing_ends_idle_and_busy_workers(ahead: Ahead) -> None:
    loader = ahead(Stuck(), num=2)
    loader.expect(block(0, 1))
    pids = [worker.pid for worker in loader.workers]

    loader.close()

    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    loader.close()
