"""Devices that are there and are not, told by a stand-in for what torch sees: nobody has a GPU here.

Faults planted by hand, each seen to fail a test: any index taken for a known kind · kinds of torch that nobody has
tried let through · named tuples taken apart before their own ``to`` is asked · lists returned as tuples · the current
device seeded instead of the named one.
"""

from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import squall
from squall.errors import ConfigError
from squall.model import device as devices
from squall.model.device import device_of, devices_seen, seed_device, to_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:1", torch.device("cuda:1")])
def test_a_device_that_is_there_is_taken(two_gpus: None, name: Any) -> None:
    assert device_of(name) == torch.device(name)
    assert devices_seen()[:4] == ("cpu", "cuda", "cuda:0", "cuda:1")


def test_a_gpu_with_another_number_is_refused(two_gpus: None) -> None:
    with pytest.raises(ConfigError, match=r"torch sees here \(cpu, cuda, .*\), but got 'cuda:2'\. Take one"):
        device_of("cuda:2")


@pytest.mark.parametrize(("name", "how"), [("cuda", "torch.cuda"), ("cuda:1", "torch.cuda"), ("mps", "mps")])
def test_a_device_that_is_not_there_is_refused_with_the_way_on(no_gpu: None, name: str, how: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"\(cpu\), but got '{name}'\. .*cpu.*{how}.*is_available"
    ) as raised:
        device_of(name)
    assert raised.value.subject == "Job(device=)"


@pytest.mark.parametrize("name", ["gpu", "", "meta", "xpu", 3.5])
def test_what_is_no_device_for_a_model_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match='expected "cpu", "cuda"'):
        device_of(name)


def test_a_job_is_refused_before_anything_is_started(no_gpu: None) -> None:
    data = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    with pytest.raises(ConfigError, match="but got 'cuda:1'"):
        squall.fit(torch.nn.Linear(3, 2), data, device="cuda:1", cluster=squall.InProcess(), progress=False)


class Bag:
    """A batch with a way of its own to a device."""

    at: Any = None

    def to(self, device: torch.device) -> "Bag":
        self.at = device
        return self


Pair = namedtuple("Pair", ["x", "y"])


def test_every_tensor_of_a_batch_is_moved_and_nothing_else_is_touched() -> None:
    meta, bag = torch.device("meta"), Bag()  # of all devices but the processor the one that is everywhere

    moved = to_device({"a": [torch.zeros(2), "text"], "b": Pair(torch.ones(1), (3, bag))}, meta)

    assert moved["a"][0].device == meta
    assert moved["a"][1] == "text"
    assert isinstance(moved["a"], list)
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.device == meta
    assert moved["b"].y == (3, bag)
    assert bag.at == meta


def test_a_packed_sequence_moves_by_its_own_rules() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])

    moved = to_device(packed, torch.device("meta"))

    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


def test_the_named_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[Any] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        seeded.append(device)
        yield
        seeded.append("before")

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda seed: seeded.append(("mps", seed)))

    seed_device(torch.device("cuda:1"), 7)
    seed_device(torch.device("mps"), 8)
    seed_device(devices.CPU, 9)

    assert seeded == [torch.device("cuda:1"), 7, "before", ("mps", 8)]
