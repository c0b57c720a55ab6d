"""What of a torch optimizer's face works, and what is refused by name.

Planted by hand and seen to fail a test here: another model is not refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.cluster.servers import Servers
from squall.loop.optimizer import DownpourOptimizer
from tests.loop.serving import backward, batches, join, network, serving

pytestmark = [pytest.mark.processes, pytest.mark.timeout(30)]


@pytest.fixture(scope="module")
def servers(warm: Local) -> Iterator[Servers]:
    """Of `network()`, for tests that do not mind what others have pushed; no others may be served beside them."""
    with serving(warm, network()) as servers:
        yield servers


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(servers: Servers) -> None:
    model = network()
    with join(servers, model) as optimizer:
        batch = batches(1)[0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return backward(model, batch)

        with torch.no_grad():
            first, second = optimizer.step(closure), optimizer.step(closure)
        assert second < first


def test_zero_grad_works_as_in_torch_in_both_ways(servers: Servers) -> None:
    model = network()
    with join(servers, model) as optimizer:
        backward(model, batches(1)[0])
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())


def test_the_groups_show_the_servers_rate(servers: Servers) -> None:
    with join(servers, network()) as optimizer:
        assert [group["lr"] for group in optimizer.param_groups] == [0.1]
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
        assert optimizer.state_dict()["state"] == {}


def test_a_scheduler_that_changes_nothing_passes_and_one_that_does_is_refused_by_name(
    servers: Servers,
) -> None:
    """B50."""
    model = network()
    with join(servers, model) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        backward(model, batches(1)[0])
        optimizer.step()
        schedule.step()
        optimizer.step()
        version = optimizer.version
        schedule.step()
        with pytest.raises(squall.ConfigError, match=r"'lr'.*0\.1 changed to 0\.05.*squall\.schedules"):
            optimizer.step()
        assert optimizer.version == version


@pytest.mark.parametrize("name", ["weight_decay", "maximize"])
def test_a_setting_of_the_rule_in_a_group_is_refused_by_name(servers: Servers, name: str) -> None:
    with join(servers, network()) as optimizer:
        optimizer.param_groups[0][name] = True
        with pytest.raises(squall.ConfigError, match=f"'{name}'"):
            optimizer.step()


@pytest.mark.parametrize("name", ["lr", "momentum", "maximize"])
def test_a_setting_of_the_rule_is_refused_as_an_argument(servers: Servers, name: str) -> None:
    with pytest.raises(squall.ConfigError, match=rf"\({name}=\).*on the servers"):
        join(servers, network(), **{name: 0.1})


@pytest.mark.parametrize(
    ("settings", "name"), [({"n_push": 0}, "n_push"), ({"n_fetch": True}, "n_fetch"), ({"local": 3}, "local")]
)
def test_a_setting_out_of_range_is_refused_by_name(
    servers: Servers, settings: dict[str, Any], name: str
) -> None:
    with pytest.raises(squall.ConfigError, match=name):
        join(servers, network(), **settings)


def test_parameters_instead_of_a_model_are_refused(servers: Servers) -> None:
    with pytest.raises(squall.ConfigError, match=r"not model\.parameters"):
        join(servers, network().parameters())  # type: ignore[arg-type]


def test_groups_and_state_are_the_servers_own(servers: Servers) -> None:
    with join(servers, network()) as optimizer:
        with pytest.raises(squall.ConfigError, match="add_param_group"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(squall.ConfigError, match="load_state_dict"):
            optimizer.load_state_dict(optimizer.state_dict())


def test_a_parameter_that_would_not_be_trained_is_named(servers: Servers) -> None:
    model: Any = network()
    with join(servers, model) as optimizer:
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        with pytest.raises(squall.ConfigError, match=r"'2\.weight'"):
            optimizer.step()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).double(),
            r"'2\.bias': expected shape \(2,\) and dtype float64.*got shape \(3,\)",
        ),
        (network(torch.float32), r"'0\.bias': expected .*float64.*got .*float32"),
        (nn.Linear(2, 2), r"'0\.bias': expected shape \(20,\).*no trainable tensor"),
    ],
    ids=["shape", "dtype", "names"],
)
def test_another_model_is_refused_by_its_first_tensor_that_differs(
    servers: Servers, model: nn.Module, told: str
) -> None:
    """B46. And it is left as it was."""
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(squall.ModelError, match=told):
        join(servers, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_another_token_is_refused(servers: Servers) -> None:
    """B67."""
    with pytest.raises(squall.ConfigError, match="same cluster token"):
        DownpourOptimizer(network(), servers.address, token="x" * 32)


def test_a_model_that_is_saved_takes_no_more_than_its_own(servers: Servers, tmp_path: Path) -> None:
    model = network()
    with join(servers, model):
        torch.save(model.state_dict(), tmp_path / "model.pt")
        torch.save(network().state_dict(), tmp_path / "plain.pt")
    assert (tmp_path / "model.pt").stat().st_size == (tmp_path / "plain.pt").stat().st_size
