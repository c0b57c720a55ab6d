"""What users do to their process, model and optimizer while they train: it works as with torch.optim, or is refused by name.

The oracle of what works is torch.optim in the same loop, or the servers' own parameters.

Faults planted by hand, each seen to fail a test here: the process is not compared · groups are compared by their number
alone · a setting that is gone passes · shapes are not compared · parameters that are gone pass · parameters are moved to
memory of their own when they are bound.
"""

import copy
import io
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.cluster.servers import Servers
from squall.loop.optimizer import DownpourOptimizer
from tests.loop.serving import backward, batches, distance, join, network, serving

pytestmark = [pytest.mark.processes, pytest.mark.timeout(30)]


@pytest.fixture(scope="module")
def servers(warm: Local) -> Iterator[Servers]:
    """Of `network()`, for tests that do not mind what others have pushed; no others may be served beside them."""
    with serving(warm, network()) as servers:
        yield servers


def follows(servers: Servers, model: nn.Module) -> bool:
    """Whether the model has the servers' parameters."""
    trained = servers.state_dict()
    return all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


# Groups ---------------------------------------------------------------------------------------------------


def append_a_group(optimizer: DownpourOptimizer) -> None:
    optimizer.param_groups.append({"params": [], "lr": 0.1})


def drop_all_groups(optimizer: DownpourOptimizer) -> None:
    optimizer.param_groups.clear()


def drop_a_parameter(optimizer: DownpourOptimizer) -> None:
    del optimizer.param_groups[0]["params"][0]


def drop_the_rate(optimizer: DownpourOptimizer) -> None:
    del optimizer.param_groups[0]["lr"]


def schedule_by_plateau(optimizer: DownpourOptimizer) -> None:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 2.0):
        schedule.step(loss)


def schedule_one_cycle(optimizer: DownpourOptimizer) -> None:
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (append_a_group, "param_groups: expected the group of all"),
        (drop_all_groups, "param_groups: expected the group of all"),
        (drop_a_parameter, "param_groups: expected the group of all"),
        (drop_the_rate, r"'lr'.*0\.1 changed to None"),
        (schedule_by_plateau, r"'lr'.*0\.1 changed to 0\.01"),
        (schedule_one_cycle, r"'lr'.*squall\.schedules"),
    ],
)
def test_a_change_of_the_groups_is_refused_by_name_before_anything_is_pushed(
    servers: Servers, change: Callable[[DownpourOptimizer], None], told: str
) -> None:
    model = network()
    with join(servers, model) as optimizer:
        version = optimizer.version
        change(optimizer)
        backward(model, batches(1)[0])
        for act in (optimizer.step, optimizer.fetch, optimizer.flush):
            with pytest.raises(squall.ConfigError, match=told):
                act()
        assert optimizer.version == version


# The model ------------------------------------------------------------------------------------------------


def halve(model: Any) -> None:
    model.float()


def reshape(model: Any) -> None:
    model[0].bias.data = torch.zeros(3).double()


def freeze_by_replacing(model: Any) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone(), requires_grad=False)


def remove(model: Any) -> None:
    del model[2]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (halve, r"'0\.bias'.*float64, as the servers have it.*float32"),
        (reshape, r"'0\.bias': expected shape \(20,\).*shape \(3,\)"),
        (freeze_by_replacing, r"'2\.weight'.*without it"),
        (remove, r"'2\.bias'.*without it"),
    ],
)
def test_a_change_of_the_model_is_refused_by_its_first_tensor(
    servers: Servers, change: Callable[[nn.Module], None], told: str
) -> None:
    model = network()
    with join(servers, model) as optimizer:
        change(model)
        with pytest.raises(squall.ConfigError, match=told):
            optimizer.step()


def test_parameters_that_were_given_other_memory_still_follow_the_servers(servers: Servers) -> None:
    """As `model.to`, or an assignment to `.data`, gives."""
    model: Any = network()
    with join(servers, model) as optimizer:
        model[0].weight.data = torch.zeros(20, 10).double()
        model[2].weight.data = torch.zeros(20, 2).double().T
        backward(model, batches(1)[0])
        optimizer.step()
        assert follows(servers, model)


def test_parameters_stay_in_the_memory_that_they_have(servers: Servers) -> None:
    """So a model in shared memory stays there, for whoever else looks at it."""
    model = network()
    model.share_memory()
    looker = [parameter.detach() for parameter in model.parameters()]
    with join(servers, model) as optimizer:
        backward(model, batches(1)[0])
        optimizer.step()
        assert all(own.is_shared() for own in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(looker, model.parameters(), strict=True))
        assert follows(servers, model)


def test_a_parameter_that_is_frozen_for_a_while_is_left_alone_meanwhile(servers: Servers) -> None:
    model: Any = network()
    with join(servers, model) as optimizer:
        before = model[0].weight.detach().clone()
        model[0].weight.requires_grad_(False)
        backward(model, batches(1)[0])
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, before)
        model[0].weight.requires_grad_(True)
        backward(model, batches(1)[0])
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


# The process ----------------------------------------------------------------------------------------------


def test_a_copy_is_refused_by_name_and_one_of_the_model_is_not(servers: Servers) -> None:
    model = network()
    with join(servers, model) as optimizer:
        for act in (copy.deepcopy, copy.copy, lambda own: torch.save(own, io.BytesIO())):
            with pytest.raises(squall.ConfigError, match="make one there"):
                act(optimizer)
        assert distance(copy.deepcopy(model), model) == 0.0
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)


def test_a_fork_is_refused_by_name_and_leaves_the_parents_connections(servers: Servers) -> None:
    model = network()
    optimizer = join(servers, model)
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(5)
        told = []
        for act in (optimizer.step, optimizer.fetch, optimizer.flush, optimizer.close):
            try:
                told.append(str(act()))
            except squall.ConfigError as error:
                told.append(error.got)
        del optimizer
        os.write(theirs, "; ".join(told).encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)

    assert os.read(ours, 1000).decode() == "; ".join([*["a fork of that process"] * 3, "None"])
    os.close(ours)
    version = optimizer.version
    backward(model, batches(1)[0])
    optimizer.step()
    assert optimizer.version == version + 1
    optimizer.close()


def test_a_process_with_thousands_of_open_files_trains(servers: Servers) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        model = network()
        with join(servers, model) as optimizer:
            backward(model, batches(1)[0])
            optimizer.step()
            assert follows(servers, model)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_sixty_four_join_at_once_and_two_share_a_model(servers: Servers) -> None:
    models = [network(seed=seed) for seed in range(63)]
    models.append(models[0])
    joined: list[DownpourOptimizer] = []

    def work(model: nn.Module) -> None:
        optimizer = join(servers, model)
        joined.append(optimizer)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(joined) == 64
    assert all(follows(servers, model) for model in models)
    version = joined[0].version
    for optimizer in joined:
        optimizer.step()
        optimizer.close()
    with join(servers, network()) as last:
        assert last.version == version + 64


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"patience_s": "long"}, r"patience_s=.*'long'"),
        ({"patience_s": float("nan")}, "patience_s="),
        ({"patience_s": 0}, "patience_s="),
        ({"token": None}, "token.*NoneType"),
        ({"token": b"0" * 64}, "token.*bytes"),
        ({"address": None}, '"host:port".*None'),
        ({"address": ("127.0.0.1", 4000)}, '"host:port"'),
        ({"address": "127.0.0.1:" + "1" * 5000}, '"host:port"'),
    ],
)
def test_what_is_no_address_token_or_time_is_refused_by_name(
    servers: Servers, settings: dict[str, Any], told: str
) -> None:
    usual = {"address": servers.address, "token": servers.token}
    with pytest.raises(squall.ConfigError, match=told):
        DownpourOptimizer(network(), **usual | settings)
