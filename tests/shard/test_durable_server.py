"""A real shard in a thread under "ack": what its disk has been told when it answers.

A killed process cannot show it, since what it wrote outlives it in the system's memory; so the call is watched.

Faults planted here by hand, each seen to fail a test: answers that do not wait for the round's end · no sync · a sync for
each push over shared memory · over TCP an answer after the next update · a gradient scaled where the worker keeps it.
"""

import os
import threading
from pathlib import Path

import pytest

from squall.shard.frames import Frames
from squall.shard.snapshot import Place
from tests.shard.served import Client, Served, Transport, equal, layout_of

LAYOUT = layout_of(5, 3)


class Disk:
    """Watches syncs: how many commits the log had at each; the first waits until it is let go."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = Place(folder=folder / "shards" / "shard0", shard=0, schema="")
        self.synced: list[int] = []
        self.is_waiting, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        real = os.fdatasync

        def sync(fd: int) -> None:
            commits = self.commits()
            if commits:
                self.is_waiting.set()
                self.go_on.wait(10)
            real(fd)
            self.synced.append(commits)

        monkeypatch.setattr("squall.shard.keeper.os.fdatasync", sync)

    def commits(self) -> int:
        return len(list(Frames(self.place.path(1, "log")))) - 1


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def close(*workers: Client) -> None:
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_no_push_is_answered_before_it_is_on_disk(transport: Transport, tmp_path: Path, disk: Disk) -> None:
    with Served(transport, LAYOUT, tmp_path, "ack") as served:
        worker = served.worker()
        worker.fill(2.0)
        disk.go_on.clear()
        worker.begin_push(0)
        assert disk.is_waiting.wait(10)
        assert not worker.exchange.replies()
        disk.go_on.set()
        worker.reply()

        assert disk.synced == [0, 1]
        assert equal(worker.values(), -2.0)
        close(worker)


def test_pushes_that_come_together_are_brought_to_disk_together(tmp_path: Path, disk: Disk) -> None:
    with Served("shared", LAYOUT, tmp_path, "ack") as served:
        workers = [served.worker(replica) for replica in range(3)]
        for worker in workers:
            worker.fetch(into=1)
        disk.go_on.clear()
        workers[0].begin_push(0)
        assert disk.is_waiting.wait(10)
        for number, worker in enumerate(workers[1:], start=1):
            worker.begin_push(number)
        disk.go_on.set()
        for worker in workers:
            worker.reply()

        assert disk.synced == [0, 1, 3]
        close(*workers)


def test_over_tcp_an_answer_has_the_values_that_it_speaks_of(tmp_path: Path, disk: Disk) -> None:
    with Served("tcp", LAYOUT, tmp_path, "ack") as served:
        workers = [served.worker(replica) for replica in range(3)]
        for worker in workers:
            worker.fill(1.0)
        disk.go_on.clear()
        workers[0].begin_push(0)
        assert disk.is_waiting.wait(10)
        for number, worker in enumerate(workers[1:], start=1):
            worker.begin_push(number)
        disk.go_on.set()
        for worker in workers:
            version = worker.reply().states[0].version
            assert equal(worker.values(), -float(version))
        close(*workers)


def test_a_gradient_that_is_scaled_stays_as_it_is_in_the_workers_memory(tmp_path: Path) -> None:
    """If the shard dies now, the push comes again from there."""
    with Served("shared", LAYOUT, tmp_path, "ack") as served:
        worker = served.worker()
        worker.fill(2.0)
        worker.push(0, scale=0.5)

        assert equal(worker.values(), -1.0)
        assert equal(list(worker.exchange.views.gradients[0].values()), 2.0)
        close(worker)
