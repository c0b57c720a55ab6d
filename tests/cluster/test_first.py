"""Tests of squall.cluster.first, in one process.

Faults planted by hand, each caught: an end that the launcher keeps · a descriptor left open.
"""

import os
import threading

import pytest
import torch

from squall.cluster import first
from squall.cluster.first import FirstValues, Taken, first_values


def test_values_arrive_once_for_all_and_leave_nothing_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    sent = FirstValues({"weight": torch.arange(600.0), "bias": torch.ones(2)})
    header = sent.settings["first"]

    received = [first_values(header, os.dup(sent.fd)) for _ in range(2)]
    sent.close()

    for values in received:
        assert torch.equal(values["weight"], torch.arange(600.0))
        assert torch.equal(values["bias"], torch.ones(2))
    del received, values  # a mapping has a descriptor of its own
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_launcher_waits_until_the_last_shard_has_closed_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "TAKEN_S", 20.0)
    taken = Taken()
    ends = [os.dup(taken.fd) for _ in range(2)]
    is_over = threading.Event()
    waiting = threading.Thread(target=lambda: (taken.wait(), is_over.set()))
    waiting.start()

    os.close(ends[0])
    was_over = is_over.wait(0.1)
    os.close(ends[1])

    assert not was_over
    assert is_over.wait(10.0)
    waiting.join()
    taken.close()


def test_one_that_is_closed_before_anybody_waited_leaves_nothing_open() -> None:
    before = set(os.listdir("/proc/self/fd"))

    Taken().close()

    assert set(os.listdir("/proc/self/fd")) == before
