"""Runs whose roles connect over TCP: whatever works over shared memory works, and links can be cut, slowed and counted.

Faults planted by hand, each seen to fail a test here: the relay is not asked for the evaluator · a replica's own bytes are
not counted · what a door refuses is not counted · ports are not listed · "auto" without memfd is refused.
"""

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import squall
from squall.cluster.local import Local
from squall.observe.events import Left, Progress
from squall.training.fit import Handle
from tests.conftest import over_tcp
from tests.fuzz.targets import mutant
from tests.processes.helpers import applied_counts, data, job, kill, left_open, processes
from tests.processes.test_failures import assert_every_block_once, follow
from tests.relay import Relay

pytestmark = pytest.mark.processes


class Relays:
    """A relay on every link of a run, by (caller, callee)."""

    def __init__(self, **slow: float) -> None:
        self.by_link: dict[tuple[str, str], Relay] = {}
        self._slow = slow  # bytes per second, by caller

    def __call__(self, caller: str, callee: str, address: str) -> str:
        relay = Relay(address, bytes_per_s=self._slow.get(caller))
        self.by_link[caller, callee] = relay
        return relay.address

    def close(self) -> None:
        for relay in self.by_link.values():
            relay.close()


@pytest.fixture
def relays() -> Iterator[Relays]:
    made = Relays()
    yield made
    made.close()


def test_one_replica_gives_the_same_bytes_over_tcp_as_over_shared_memory(
    local: Local, local_tcp: Local
) -> None:
    settings = {"replicas": 1, "epochs": 2, "test": data(), "evaluate_every": 0.5}
    runs = [squall.fit(job(cluster, **settings)) for cluster in (local, local_tcp)]

    one, other = (run.state_dict() for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert runs[0].metrics["test_loss"] == runs[1].metrics["test_loss"]


def test_values_are_rounded_before_they_travel_where_the_shard_keeps_masters(
    local: Local, local_tcp: Local
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=torch.bfloat16), torch.nn.Tanh(), ToFloat())
    runs = [
        squall.fit(
            model,
            (torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.arange(40) % 3),
            replicas=1,
            batch_size=4,
            cluster=cluster,
            progress=False,
        )
        for cluster in (local, local_tcp)
    ]

    one, other = (run.state_dict() for run in runs)
    assert one["0.weight"].dtype == torch.bfloat16
    assert all(torch.equal(one[name], other[name]) for name in one)


class ToFloat(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": squall.Downpour(overlap=True)},
        pytest.param(
            {"strategy": squall.Downpour(n_push=4, n_fetch=4, max_staleness=2)}, marks=pytest.mark.nightly
        ),
        {"data_workers": 2, "clip_norm": 1.0, "record": True},
        {"shards": 5, "replicas": 3},
    ],
    ids=["overlap", "bound", "workers", "shards"],
)
def test_every_way_to_train_works_over_tcp(local_tcp: Local, settings: dict[str, object]) -> None:
    run = squall.fit(job(local_tcp, epochs=3, **settings))
    assert run.metrics["why"] == "epochs"
    assert run.metrics["connections_refused"] == 0
    counts = applied_counts(run)
    assert set(counts.values()) == {1}


def test_traffic_is_what_relays_count_on_every_link(local: Local, relays: Relays) -> None:
    run = squall.fit(job(over_tcp(local, relay=relays), epochs=4, test=data()))

    callers = {"replica0.0": {"shard0", "shard1", "coordinator"}, "evaluator": {"shard0", "shard1"}}
    for caller, callees in callers.items():
        assert {callee for other, callee in relays.by_link if other == caller} == callees
    assert ("shard1", "coordinator") in relays.by_link
    traffic = run.traffic()
    for (caller, callee), relay in relays.by_link.items():
        # What passed after the last count: a goodbye, an answer to nobody.
        assert traffic[caller, callee][0] == pytest.approx(relay.to_target, rel=0.02, abs=200)
        assert traffic[callee, caller][0] == pytest.approx(relay.to_caller, rel=0.02, abs=200)


def cut_and_end(handle: Handle, relays: Relays, link: tuple[str, str]) -> tuple[squall.Run, list[str]]:
    follow(handle, 100)
    relays.by_link[link].cut()
    left = [event.role for event in handle.events() if isinstance(event, Left)]
    return handle.result(30), left


def test_a_cut_between_a_replica_and_a_shard_costs_no_block(
    local: Local, relays: Relays, tmp_path: Path
) -> None:
    handle = squall.start(job(over_tcp(local, relay=relays), epochs=12, out=tmp_path / "run"))
    run, left = cut_and_end(handle, relays, ("replica1.0", "shard0"))
    assert left == []
    assert relays.by_link["replica1.0", "shard0"].num_connections == 4
    assert_every_block_once(run, 12, slices=2)


def test_a_replica_that_is_cut_off_from_the_coordinator_leaves_and_its_block_is_done(
    local: Local, relays: Relays, tmp_path: Path
) -> None:
    handle = squall.start(job(over_tcp(local, relay=relays), epochs=12, out=tmp_path / "run"))
    run, left = cut_and_end(handle, relays, ("replica1.0", "coordinator"))
    assert left == ["replica1.0"]
    assert_every_block_once(run, 12, slices=2)


def test_a_slow_link_slows_its_own_replica_only(local: Local) -> None:
    slow = Relays(**{"replica1.0": 20_000.0})  # a few round trips a second
    run = squall.fit(job(over_tcp(local, relay=slow), epochs=8))
    slow.close()
    assert_every_block_once(run, 8, slices=2)
    rows = run.ledger()
    shares = np.bincount(rows["replica"][rows["slice"] == 0], minlength=2)
    assert shares[0] > 2 * shares[1]


@pytest.mark.nightly
def test_a_killed_and_a_paused_replica_cost_no_block_over_tcp(local_tcp: Local, tmp_path: Path) -> None:
    epochs = 25
    handle = squall.start(job(local_tcp, replicas=4, epochs=epochs, out=tmp_path / "run"))
    follow(handle, 200)
    pids = processes(tmp_path / "run")
    kill(pids["replica2.0"], signal.SIGKILL)
    kill(pids["replica1.0"], signal.SIGSTOP)
    resume = threading.Timer(1.0, kill, (pids["replica1.0"], signal.SIGCONT))
    resume.start()

    left = [event.role for event in handle.events() if isinstance(event, Left)]
    run = handle.result(30)

    resume.join()
    assert left == ["replica2.0"]
    assert_every_block_once(run, epochs, slices=2)


def test_ports_are_listed_and_free_again_and_nothing_is_left_open(local_tcp: Local, tmp_path: Path) -> None:
    squall.fit(job(local_tcp, epochs=1, out=tmp_path / "first"))
    before = left_open()
    squall.fit(job(local_tcp, epochs=1, out=tmp_path / "second"))
    after = left_open()

    assert after == before
    rows = json.loads((tmp_path / "second" / "processes.json").read_text())
    num_ports = {row["name"]: len(row["ports"]) for row in rows}
    assert num_ports == {
        "shard0": 1,
        "shard1": 1,
        "coordinator": 1,
        "replica0.0": 0,
        "replica1.0": 0,
        "zygote": 0,
    }
    for row in rows:
        for port in row["ports"]:
            socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("bind", ["[::1]:0", pytest.param("localhost:0", marks=pytest.mark.nightly)])
def test_a_run_may_listen_at_any_loopback_address(local: Local, bind: str) -> None:
    run = squall.fit(job(over_tcp(local, bind=bind), epochs=1))
    assert run.metrics["why"] == "epochs"


def test_what_is_advertised_is_what_others_call(local: Local) -> None:
    run = squall.fit(job(over_tcp(local, bind="127.0.0.1:0", advertise="localhost:0"), epochs=1))
    assert run.metrics["why"] == "epochs"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "tcp", "bind": "0.0.0.0:0"}, "loopback"),
        ({"transport": "tcp", "bind": "127.0.0.1:4000"}, "port 0"),
        ({"transport": "carrier pigeon"}, "'auto', 'shared' or 'tcp'"),
        ({"relay": lambda *_: ""}, 'transport="tcp"'),
    ],
)
def test_a_local_cluster_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(squall.ConfigError, match=message):
        Local(**settings)  # type: ignore[arg-type]


def test_auto_means_shared_memory_where_there_is_some_and_tcp_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Local()._tcp_plan(None) is None
    monkeypatch.delattr(os, "memfd_create")
    assert Local()._tcp_plan(None) is not None
    with pytest.raises(squall.ConfigError, match="memfd_create"):
        Local(transport="shared")._tcp_plan(None)


def hammer(ports: list[int], until: float, lots: random.Random) -> int:
    """Connect to a run's ports and say things, until then; return how often."""
    count = 0
    while time.monotonic() < until:
        with socket.socket() as one:
            one.settimeout(1)
            try:
                one.connect(("127.0.0.1", lots.choice(ports)))
                one.sendall(mutant(lots))
                if lots.random() < 0.5:
                    one.settimeout(0.05)  # a door waits for the rest of what might become a hello
                    one.recv(100)
            except OSError:
                pass
        count += 1
    return count


def train_under_fire(cluster: Local, out: Path, seconds: float) -> None:
    handle = squall.start(job(cluster, epochs=100_000, out=out))
    follow(handle, 20)
    rows = json.loads((out / "processes.json").read_text())
    ports = [port for row in rows for port in row["ports"]]
    count = hammer(ports, time.monotonic() + seconds, random.Random(0))
    handle.stop()
    seen = [event.minibatches for event in handle.events() if isinstance(event, Progress)]
    run = handle.result(30)

    assert run.metrics["why"] == "stopped"
    assert set(applied_counts(run).values()) == {1}
    assert seen[-1] > seen[0]
    assert not [row for row in run.history if row.get("event") == "Left"]
    assert run.metrics["connections_refused"] > 0.9 * count > 10


def test_strangers_that_say_anything_disturb_nobody(local_tcp: Local, tmp_path: Path) -> None:
    """B09"""
    train_under_fire(local_tcp, tmp_path / "run", seconds=2.0)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_strangers_that_say_anything_for_a_minute_disturb_nobody(local_tcp: Local, tmp_path: Path) -> None:
    train_under_fire(local_tcp, tmp_path / "run", seconds=60.0)
