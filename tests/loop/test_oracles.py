"""A user's own loop equals the same loop with an optimizer of torch, and stops where it makes no sense to go on.

The oracle is torch.optim in the same loop.

Faults planted by hand, each seen to fail a test here: no gradient is pushed as zeros · the last block's sum is not forgotten ·
divergence is not passed on by the door.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.cluster.local import Local
from squall.loop.optimizer import DownpourOptimizer
from tests.loop.serving import backward, batches, distance, join, network, plain, serving, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(30)]

RULES: list[tuple[Any, Callable[..., torch.optim.Optimizer]]] = [
    (squall.Sgd(learning_rate=0.1, weight_decay=0.01), partial(torch.optim.SGD, lr=0.1, weight_decay=0.01)),
    (squall.Adagrad(learning_rate=0.05), partial(torch.optim.Adagrad, lr=0.05)),
    (squall.Adam(learning_rate=0.01), partial(torch.optim.Adam, lr=0.01)),
]


@pytest.mark.parametrize(("rule", "make"), RULES, ids=["sgd", "adagrad", "adam"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_one_loop_equals_torch_optim(
    local: Local, rule: Any, make: Any, dtype: torch.dtype, bound: float
) -> None:
    with serving(local, network(dtype), rule=rule) as servers:
        model = network(dtype, seed=2)
        with join(servers, model) as optimizer:
            train(model, optimizer, 30)

        assert distance(model, plain(make, 30, dtype)) < bound
        assert optimizer.version == 30
        assert optimizer.staleness == 0.0


def test_with_sgd_pushing_and_fetching_every_five_steps_is_the_same(local: Local) -> None:
    with serving(local, network()) as servers:
        model = network(seed=2)
        with join(servers, model, n_fetch=5, n_push=5) as optimizer:
            train(model, optimizer, 30)

        assert distance(model, plain(partial(torch.optim.SGD, lr=0.1), 30)) < 1e-12
        assert optimizer.version == 6


def test_with_another_rule_gradients_add_up_at_the_fetched_point(local: Local) -> None:
    with serving(local, network(), rule=squall.Adagrad(learning_rate=0.05)) as servers:
        model = network(seed=2)
        with join(servers, model, n_fetch=3, n_push=3) as optimizer:
            train(model, optimizer, 12)

        assert distance(model, plain(partial(torch.optim.Adagrad, lr=0.05), 12, per_step=3)) < 1e-12


def test_gradients_that_the_user_adds_up_are_one_push(local: Local) -> None:
    with serving(local, network()) as servers:
        model = network(seed=2)
        with join(servers, model) as optimizer:
            train(model, optimizer, 12, per_step=4)

        assert optimizer.version == 3
        assert distance(model, plain(partial(torch.optim.SGD, lr=0.1), 12, per_step=4)) < 1e-12


def test_a_schedule_counts_minibatches_on_the_servers(local: Local) -> None:
    rule = squall.Sgd(learning_rate=squall.schedules.linear(0.1, 0.0, 10))
    with serving(local, network(), rule=rule) as servers:
        model, other = network(seed=2), network()
        with join(servers, model) as optimizer:
            assert optimizer.param_groups[0]["lr"] is None
            train(model, optimizer, 8)
        reference = torch.optim.SGD(other.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: max(0.0, 1 - step / 10))
        for batch in batches(8):
            reference.zero_grad()
            backward(other, batch)
            reference.step()
            schedule.step()

        assert distance(model, other) < 1e-12
        with pytest.raises(squall.ConfigError, match=r"local=squall\.Sgd"):
            join(servers, network(), n_fetch=5, n_push=5)


def test_tensors_without_a_gradient_are_left_alone_with_their_state(local: Local) -> None:
    """B38. Frozen ones are not there at all; a branch that is used now and then keeps its own count of steps."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        model = nn.ModuleDict({name: nn.Linear(10, 2).double() for name in ("body", "branch", "frozen")})
        model["frozen"].requires_grad_(False)
        return model

    def run(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number, (x, y) in enumerate(batches(9)):
            optimizer.zero_grad()
            output = model["body"](x) + model["frozen"](x)
            if number % 3 == 0:
                output = output + model["branch"](x)
            nn.functional.cross_entropy(output, y).backward()
            optimizer.step()

    model, other = build(), build()
    with serving(local, build(), rule=squall.Adam(learning_rate=0.01)) as servers:
        with join(servers, model) as optimizer:
            run(model, optimizer)
        run(other, torch.optim.Adam([p for p in other.parameters() if p.requires_grad], lr=0.01))

        assert distance(model, other) < 1e-12


def test_sparse_gradients_and_tied_parameters_train_as_they_do_in_torch(local: Local) -> None:
    """B39, B43: the empty embedding row stays as it is; duplicates are summed."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.words = nn.Embedding(7, 4, sparse=True, dtype=torch.float64)
            self.one = nn.Linear(4, 4, dtype=torch.float64)
            self.two = nn.Linear(4, 4, dtype=torch.float64)
            self.two.weight = self.one.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.two(torch.tanh(self.one(self.words(words)))).square().mean()  # type: ignore[no-any-return]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for first in range(6):
            optimizer.zero_grad()
            model(torch.tensor([first, 0, first, 5])).backward()
            optimizer.step()

    model, other = Tied(), Tied()
    with serving(local, Tied()) as servers:
        with join(servers, model) as optimizer:
            run(model, optimizer)
        run(other, torch.optim.SGD(other.parameters(), lr=0.1))

        assert distance(model, other) < 1e-12
        assert torch.equal(model.words.weight[6], Tied().words.weight[6])
        assert model.one.weight is model.two.weight


def test_a_grad_scaler_unscales_before_and_skips_what_overflows(local: Local) -> None:
    with serving(local, network(torch.float32)) as servers:
        model, other = network(torch.float32), network(torch.float32)
        reference = torch.optim.SGD(other.parameters(), lr=0.1)
        with join(servers, model) as optimizer:
            for number, batch in enumerate(batches(5, torch.float32)):
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                optimizer.zero_grad()
                scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                if number != 2:
                    reference.zero_grad()
                    backward(other, batch)
                    reference.step()
            assert optimizer.refused == 0
            assert optimizer.version == 4
        assert distance(model, other) < 1e-6


def test_channels_last_expanded_and_clipped_gradients_are_as_in_torch(local: Local) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2)).double()
        return layers.to(memory_format=torch.channels_last)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        generator = torch.Generator().manual_seed(0)
        for number in range(4):
            optimizer.zero_grad(set_to_none=bool(number % 2))
            model[2].bias.grad = None  # type: ignore[index,union-attr]
            x = torch.randn(4, 3, 8, 8, generator=generator).double()
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            bias: Any = model[2].bias  # type: ignore[index]
            bias.grad = torch.full((), 0.01, dtype=torch.float64).expand(2)
            scaler.step(optimizer)
            scaler.update()

    model, other = make(), make()
    run(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with serving(local, make()) as servers, join(servers, model) as optimizer:
        run(model, optimizer)
    assert distance(model, other) == 0.0


def test_a_scheduler_beside_the_servers_own_schedule_is_refused_by_name(local: Local) -> None:
    rule = squall.Sgd(learning_rate=squall.schedules.linear(0.1, 0.0, 10))
    with serving(local, network(), rule=rule) as servers, join(servers, network()) as optimizer:
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
        with pytest.raises(squall.ConfigError, match=r"'lr'.*a scheduler, while the servers' rate"):
            optimizer.step()


def test_a_late_joiner_takes_the_servers_parameters_and_never_writes_its_own(local: Local) -> None:
    """B22."""
    with serving(local, network()) as servers:
        first, late = network(), network(seed=3)
        with join(servers, first) as optimizer:
            train(first, optimizer, 5)
            with join(servers, late):
                assert distance(first, late) == 0.0
            optimizer.fetch()
            assert distance(first, late) == 0.0


def test_a_gradient_that_is_not_finite_changes_nothing_and_three_in_a_row_end_it(local: Local) -> None:
    """B44."""
    with serving(local, network()) as servers:
        model = network()
        with join(servers, model) as optimizer:
            before = servers.state_dict()
            for refused in (1, 2):
                spoil(model, optimizer)
                assert optimizer.refused == refused
            assert all(torch.equal(before[n], v) for n, v in servers.state_dict().items())
            backward(model, batches(1)[0])
            optimizer.step()
            assert optimizer.version == 1
            optimizer.zero_grad()
            for _ in range(2):
                spoil(model, optimizer)
            with pytest.raises(squall.DivergedError, match=r"gradient of '0\.bias'"):
                spoil(model, optimizer)
            with pytest.raises(squall.DivergedError):
                optimizer.step()


def spoil(model: nn.Module, optimizer: DownpourOptimizer) -> None:
    optimizer.zero_grad()
    (model(torch.ones(1, 10).double()) * float("nan")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_update_that_is_not_finite_ends_it_for_every_loop(local: Local) -> None:
    with serving(local, nn.Linear(2, 1), rule=squall.Sgd(learning_rate=1e38), shards=1) as servers:
        one, other = nn.Linear(2, 1), nn.Linear(2, 1)
        with join(servers, one) as first, join(servers, other) as second:
            (one(torch.ones(1, 2)) * 1e30).sum().backward()
            with pytest.raises(squall.DivergedError, match="the update of 'bias'"):
                first.step()
            other(torch.ones(1, 2)).sum().backward()
            with pytest.raises(squall.DivergedError, match="the update of 'bias'"):
                second.step()
