"""What a loop does when lines break, servers come and go, and the user interrupts: a push counts once or is told lost.

The oracle is counting: the servers begin at zeros and add what is pushed.

Faults planted by hand, each seen to fail a test here: a gradient is not taken along when a loop comes back · positions go on
after other servers came · the door does not say farewell.
"""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import squall
from squall.cluster.local import Local
from squall.cluster.servers import Servers
from squall.loop import client as client_module
from squall.loop.client import LoopClient
from squall.loop.line import DoorLine
from squall.loop.optimizer import DownpourOptimizer
from squall.wire.hello import new_token
from squall.wire.listener import Listener
from tests.loop.serving import join, serving
from tests.processes.helpers import is_alive
from tests.relay import Relay

pytestmark = [pytest.mark.processes, pytest.mark.timeout(30)]

SIZE = 300_000  # more than what a socket buffers


def zeros(size: int = SIZE) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(3))])


def push(model: nn.Module, optimizer: Any, times: int = 1, amount: float = 1.0) -> None:
    """Ask for so much more in every element."""
    for _ in range(times):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -amount)
        optimizer.step()


def is_all(model: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in model.parameters())


@pytest.fixture
def servers(local: Local, tmp_path: Path) -> Iterator[Servers]:
    rule = squall.Sgd(learning_rate=1.0)
    with serving(local, zeros(), rule=rule, out=tmp_path / "served") as servers:
        yield servers


def through(servers: Servers, relays: list[Relay], model: nn.Module) -> LoopClient:
    """A client that reaches each shard through a relay."""
    line = DoorLine(servers.address, servers.token, 5.0)
    line.served = msgspec.structs.replace(line.served, shards=tuple(relay.address for relay in relays))
    return LoopClient(model, line, n_fetch=1, n_push=1, local=None, patience_s=5.0)


def test_a_push_that_is_sent_again_over_a_new_line_counts_once(servers: Servers) -> None:
    addresses = servers.addresses
    model = zeros()
    with Relay(addresses[0]) as first, Relay(addresses[1]) as second:
        client = through(servers, [first, second], model)
        push(model, client)
        first.cut_after(100_000)  # in the gradient
        push(model, client)
        second.cut_after(4 * SIZE // 2 + 200_000)  # in the values that come back
        push(model, client)
        push(model, client)
        client.close(flush=True)

    assert is_all(model, 4.0)
    assert first.num_connections >= 4
    assert second.num_connections >= 4


def test_a_loop_that_has_lost_all_its_lines_goes_on_with_its_session_and_its_gradient(
    servers: Servers,
) -> None:
    model = zeros()
    relays = [Relay(address) for address in servers.addresses]
    client = through(servers, relays, model)
    push(model, client)
    client._line._channel.shut()
    for relay in relays:
        relay.close()

    push(model, client, amount=10.0)
    push(model, client)
    client.close(flush=True)
    servers.close()

    assert is_all(model, 12.0)
    assert set(servers.ledger()["epoch"]) == {0}
    assert servers.ledger()["first"].tolist() == [0, 0, 1, 1, 2, 2]


def test_each_session_is_one_range_of_blocks_and_every_block_is_applied_once(servers: Servers) -> None:
    models = [zeros(), zeros(), zeros()]
    loops = [join(servers, model, n_push=n) for model, n in zip(models, (1, 2, 3), strict=True)]
    for _ in range(6):
        for model, loop in zip(models, loops, strict=True):
            push(model, loop)
    for loop in loops:
        loop.close()
    trained = servers.state_dict()
    servers.close()

    rows = servers.ledger()
    assert all(bool((value == 18.0).all()) for value in trained.values())
    assert set(rows["outcome"]) == {"applied"}
    assert set(rows["epoch"]) == {0, 1, 2}
    for session, n_push in enumerate((1, 2, 3)):
        mine = rows[(rows["epoch"] == session) & (rows["slice"] == 0)]
        assert mine["first"].tolist() == list(range(0, 6, n_push))
        assert set(mine["minibatches"]) == {n_push}
    assert len(np.unique(rows[rows["slice"] == 0]["block"])) == 6 + 3 + 2


def test_flush_and_close_push_a_block_that_is_cut_short(servers: Servers) -> None:
    model = zeros()
    loop = join(servers, model, n_push=4, n_fetch=4)
    push(model, loop, 3)
    assert bool((servers.state_dict()["0"] == 0.0).all())
    loop.flush()
    assert is_all(model, 3.0)
    loop.flush()
    push(model, loop, 4)
    assert is_all(model, 7.0)
    push(model, loop)
    loop.close()
    loop.close()
    assert bool((servers.state_dict()["0"] == 8.0).all())
    with pytest.raises(squall.LostError, match="was closed"):
        loop.step()
    servers.close()
    rows = servers.ledger()
    assert rows[rows["slice"] == 0]["first"].tolist() == [0, 3, 7]
    assert rows[rows["slice"] == 0]["minibatches"].tolist() == [3, 4, 1]


def test_a_loop_that_ends_by_an_error_pushes_no_half_block(servers: Servers) -> None:
    def begin() -> None:
        model = zeros()
        with join(servers, model, n_push=4) as loop:
            push(model, loop, 3)
            raise KeyError

    with pytest.raises(KeyError):
        begin()
    assert bool((servers.state_dict()["0"] == 0.0).all())


def test_an_interrupt_while_it_waits_loses_nothing(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C in a notebook, after which the user goes on."""
    model = zeros()
    loop = join(servers, model)
    wait = client_module.wait

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(client_module, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(client_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        push(model, loop)
    push(model, loop, 2)
    assert is_all(model, 3.0)

    monkeypatch.setattr(client_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.fetch()
    push(model, loop)
    assert is_all(model, 4.0)
    loop.close()


def test_an_optimizer_that_is_forgotten_leaves_its_connections(servers: Servers) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("exchange-")]

    loop = join(servers, zeros())
    assert len(names()) == 2
    del loop
    gc.collect()
    assert names() == []


def test_servers_that_are_closed_end_the_next_step_and_say_so(servers: Servers) -> None:
    model = zeros()
    loop = join(servers, model)
    push(model, loop)
    servers.close()
    for _ in range(2):
        with pytest.raises(squall.LostError, match="the servers were closed"):
            push(model, loop)
    loop.close()


def test_a_shard_that_is_killed_ends_every_loop_and_is_named(servers: Servers) -> None:
    model = zeros()
    loop = join(servers, model)
    os.kill(servers._roster.roles["shard1"].pid, signal.SIGKILL)
    with pytest.raises(squall.LostError, match="shard1 is gone"):
        push(model, loop, 1000)
    loop.close()


def free_port() -> int:
    listener = Listener.open("127.0.0.1:0")
    listener.close()
    return listener.port


def test_servers_that_do_not_come_are_lost_and_their_address_is_named() -> None:
    """B01."""
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(squall.LostError, match=rf"{address} within 0\.2 s"):
        DownpourOptimizer(zeros(3), address, token=new_token(), patience_s=0.2)


def test_a_loop_waits_for_servers_that_come_later_and_for_such_as_come_back(
    local: Local, tmp_path: Path
) -> None:
    """B01, B08. Of servers that were killed nothing is left: the loop goes on with the parameters of the new ones."""
    where, token = f"127.0.0.1:{free_port()}", new_token()
    model = zeros(10)
    steps: list[Tensor] = []
    may_go_on = threading.Event()

    def work() -> None:
        with DownpourOptimizer(model, where, token=token, patience_s=20.0) as loop:
            for _ in range(3):
                push(model, loop)
                steps.append(model[0].detach().clone())
                may_go_on.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    rule = squall.Sgd(learning_rate=1.0)
    with serving(local, zeros(10), rule=rule, bind=where, token=token) as servers:
        while not steps and thread.is_alive():
            thread.join(0.01)
        pids = [role.pid for role in servers._roster.roles.values()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while any(is_alive(pid) for pid in pids):
            thread.join(0.01)
    other = zeros(10)
    for parameter in other.parameters():
        parameter.data.fill_(100.0)
    with serving(local, other, rule=rule, bind=where, token=token, out=tmp_path) as servers:
        may_go_on.set()
        thread.join(20)
    assert [float(values[0]) for values in steps] == [1.0, 100.0, 101.0]
    assert set(servers.ledger()["first"]) == {0}
