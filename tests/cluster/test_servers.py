"""`squall.serve`: what it refuses, what it tells, and that nothing stays behind."""

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import squall
from squall.cluster.local import Local
from squall.observe.ledger import read_ledger
from squall.wire.hello import new_token
from tests.loop.serving import join, network, serving, train
from tests.processes.helpers import is_alive

pytestmark = [pytest.mark.processes, pytest.mark.timeout(30)]


def test_nothing_is_left_behind(local: Local) -> None:
    """B10: no process, descriptor or file; and the port is free again, at once."""
    with serving(local, network()):
        pass  # what is made once, is made now
    before = set(os.listdir("/proc/self/fd"))
    servers = serving(local, network())
    pids = [role.pid for role in servers._roster.roles.values()]
    path = servers.path
    with servers:
        loop = join(servers, network())
        loop.close()
        servers.state_dict()
    servers.close()

    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids)
    assert not path.exists()
    assert set(os.listdir("/proc/self/fd")) == before
    with serving(local, network(), bind=servers.address) as again:
        assert again.address == servers.address


def test_a_port_that_is_taken_is_named(local: Local) -> None:
    """B02."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(squall.ConfigError, match=f"{where}.*in use.*port 0"):
            squall.serve(network(), bind=where)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "nonsense"])
def test_an_address_that_others_could_reach_is_refused(bind: str) -> None:
    """B67."""
    with pytest.raises(squall.ConfigError, match="address"):
        squall.serve(network(), bind=bind)


@pytest.mark.parametrize("bind", ["[::1]:0", "localhost:0"])
def test_it_serves_at_names_and_ipv6(local: Local, bind: str) -> None:
    """B04."""
    with serving(local, network(), bind=bind) as servers:
        assert servers.address.rpartition(":")[0] == bind.rpartition(":")[0]
        model = network(seed=2)
        with join(servers, model) as optimizer:
            train(model, optimizer, 2)
            assert optimizer.version == 2


def test_loops_are_told_the_address_that_is_advertised(local: Local) -> None:
    with serving(local, network(), advertise="localhost:0") as servers:
        assert servers.address.startswith("localhost:")
        join(servers, network()).close()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shards": 0}, "shards"),
        ({"rule": 0.1}, "rule"),
        ({"token": "short"}, "token"),
        ({"rule": squall.Rules({"nothing.*": squall.Sgd(), "*": squall.Sgd()})}, "nothing"),
    ],
)
def test_a_setting_that_is_wrong_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(squall.ConfigError, match=named):
        squall.serve(network(), **settings)


def test_the_caller_s_model_stays_as_it_was_and_buffers_as_they_were(local: Local, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()

    given, model = build(), build()
    given[0].requires_grad_(False)
    model[0].requires_grad_(False)
    with serving(local, given) as servers:
        with join(servers, model) as optimizer:
            train(model, optimizer, 4)
        trained = servers.state_dict()
        servers.save(tmp_path / "model.safetensors")

    assert list(trained) == list(given.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(given.parameters(), build().parameters(), strict=True))
    for name, value in trained.items():
        is_trained = name in {n for n, p in model.named_parameters() if p.requires_grad}
        assert torch.equal(value, (model if is_trained else build()).state_dict()[name]), name
    assert not torch.equal(trained["2.weight"], given.state_dict()["2.weight"])
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in trained.items())


def test_the_ledger_is_kept_where_the_user_says_and_never_mixed_with_another(
    local: Local, tmp_path: Path
) -> None:
    with serving(local, network(), out=tmp_path) as servers:
        model = network()
        with join(servers, model) as optimizer:
            train(model, optimizer, 3)
    assert len(read_ledger(tmp_path / "ledger")) == 6
    assert (tmp_path / "logs" / "door.log").exists()
    with pytest.raises(squall.RunExistsError, match="ledger"):
        squall.serve(network(), out=tmp_path)


def test_servers_that_are_closed_or_lost_say_so(local: Local) -> None:
    servers = serving(local, network())
    servers.close()
    with pytest.raises(squall.LostError, match="closed"):
        servers.state_dict()


def test_strangers_and_nonsense_at_the_door_change_nothing(local: Local) -> None:
    """B09, B68."""
    token = new_token()
    with serving(local, network(), token=token) as servers:
        model = network()
        with join(servers, model) as optimizer:
            host, _, port = servers.address.rpartition(":")
            for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95" * 40, struct.pack("<Q", 2**63) * 10):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(nonsense)
            train(model, optimizer, 3)
            assert optimizer.version == 3
