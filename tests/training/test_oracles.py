"""Whole runs against independent oracles: plain PyTorch loops, and a replay of the ledger in float64.

Nothing here uses Squall's rules, layout or coordinator to compute what is expected.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import squall
from squall.cluster.local import Local
from tests.staleness import staleness_under_way

torch.set_num_threads(1)
BATCH = 16
NUM_EXAMPLES = 200  # not a multiple of the batch size: a short last minibatch is kept
STEPS = 50
SEED = 3


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_EXAMPLES, 5, generator=generator, dtype=torch.float64).to(dtype)
    return x, (x.sum(dim=1) > 0).long()


def network(dtype: torch.dtype, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 2)).to(dtype)


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    steps: int,
    *,
    clip_norm: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> nn.Module:
    """What a user would write, over the published order and seeds."""
    epoch = position = 0
    for _ in range(steps):
        chosen = squall.data.order(len(x), SEED, epoch)[position * BATCH : (position + 1) * BATCH]
        torch.manual_seed(squall.data.seed_for(SEED, epoch, position))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        position += 1
        if position * BATCH >= len(x):
            epoch, position = epoch + 1, 0
    return model


RULES: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (squall.Sgd(learning_rate=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (squall.Adagrad(learning_rate=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
}
RULES |= {
    "momentum": (
        squall.Momentum(learning_rate=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (squall.Adam(learning_rate=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (squall.AdamW(learning_rate=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
}
CLUSTERS = ("in process", pytest.param("local", marks=pytest.mark.processes))


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Any:
    return squall.InProcess() if request.param == "in process" else request.getfixturevalue("local")


def difference(run: squall.Run, model: nn.Module) -> float:
    expected = model.state_dict()
    got = run.state_dict()
    assert got.keys() == expected.keys()
    return max((got[name] - value).abs().max().item() for name, value in expected.items() if value.numel())


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    ("rule", "shards"),
    [("sgd", 1), ("sgd", 3), ("adagrad", 1), ("adagrad", 3), ("momentum", 3), ("adam", 3), ("adamw", 3)],
)
def test_one_replica_equals_a_plain_loop(
    cluster: Any, dtype: torch.dtype, bound: float, shards: int, rule: str
) -> None:
    """B37"""
    ours, theirs = RULES[rule]
    x, y = data(dtype)
    run = squall.fit(
        network(dtype, dropout=0.3),
        (x, y),
        steps=STEPS,
        batch_size=BATCH,
        replicas=1,
        shards=shards,
        strategy=squall.Downpour(rule=ours),
        seed=SEED,
        cluster=cluster,
        threads=1,
        progress=False,
    )
    model = network(dtype, dropout=0.3)
    plain_loop(model, theirs(model.parameters()), x, y, STEPS)
    assert difference(run, model) <= bound


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_one_replica_that_pushes_and_fetches_every_five_equals_plain_sgd(
    cluster: Any, dtype: torch.dtype, bound: float
) -> None:
    """With local steps at the same rate; 13 minibatches an epoch, so that blocks of five are cut short."""
    x, y = data(dtype)
    run = squall.fit(
        network(dtype),
        (x, y),
        steps=STEPS,
        batch_size=BATCH,
        replicas=1,
        shards=2,
        strategy=squall.Downpour(n_fetch=5, n_push=5, rule=squall.Sgd(learning_rate=0.1)),
        seed=SEED,
        cluster=cluster,
        threads=1,
        progress=False,
    )
    model = network(dtype)
    plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, STEPS)
    assert difference(run, model) <= bound


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("n", [1, 3])
def test_clipping_a_schedule_and_patterns_equal_a_plain_loop(
    cluster: Any, dtype: torch.dtype, bound: float, n: int
) -> None:
    """Sgd, so that pushing every three with local steps must give the same."""
    x, y = data(dtype)
    rate = squall.schedules.step(0.2, every=9, gamma=0.5)
    sgd = squall.Sgd(learning_rate=rate) if n == 1 else squall.Sgd(learning_rate=0.2)
    rule = squall.Rules({"*.bias": sgd, "*": squall.Adagrad(learning_rate=0.1)}) if n == 1 else sgd
    run = squall.fit(
        network(dtype),
        (x, y),
        steps=30,
        batch_size=BATCH,
        replicas=1,
        shards=2,
        clip_norm=0.3,
        strategy=squall.Downpour(n_fetch=n, n_push=n, rule=rule),
        seed=SEED,
        cluster=cluster,
        threads=1,
        progress=False,
    )
    model = network(dtype)
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    if n == 1:
        optimizers = [torch.optim.SGD(biases, lr=0.2), torch.optim.Adagrad(weights, lr=0.1)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=9, gamma=0.5)
        plain_loop(model, Both(optimizers), x, y, 30, clip_norm=0.3, scheduler=scheduler)  # type: ignore[arg-type]
    else:
        plain_loop(model, torch.optim.SGD(model.parameters(), lr=0.2), x, y, 30, clip_norm=0.3)
    assert difference(run, model) <= bound


class Both:
    """Two optimizers as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


class Odd(nn.Module):
    """Tied, frozen, zero-sized, 0-d, non-contiguous and mixed-dtype parameters, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(2, 5).t())
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.full((2,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        out = (self.scale * hidden) @ self.turned + self.wide.float()
        return out * self.sometimes if x[0, 0] > 0 else out


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_odd_parameters_train_as_in_a_plain_loop(cluster: Any, rule: str) -> None:
    """B38, B39: absent gradients are skipped, ties survive."""
    ours, theirs = RULES[rule]
    x, y = data(torch.float32)
    run = squall.fit(
        Odd(),
        (x, y),
        steps=30,
        batch_size=BATCH,
        replicas=1,
        shards=3,
        strategy=squall.Downpour(rule=ours),
        seed=SEED,
        cluster=cluster,
        threads=1,
        progress=False,
    )
    model = Odd()
    plain_loop(model, theirs([p for p in model.parameters() if p.requires_grad]), x, y, 30)
    assert difference(run, model) <= 1e-6
    trained = run.model
    assert isinstance(trained, Odd)
    assert trained.tied.weight is trained.first.weight


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
def test_batch_norm_with_one_replica_equals_a_plain_loop_running_statistics_included(cluster: Any) -> None:
    x, y = data(torch.float64)

    def normalised() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(
            nn.Linear(5, 8, bias=False),  # whose gradient would be rounding alone
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 2, bias=False),
            nn.BatchNorm1d(2, momentum=None),
        ).double()

    run = squall.fit(
        normalised(), (x, y), steps=STEPS, batch_size=BATCH, replicas=1, shards=2, seed=SEED, cluster=cluster,
        strategy=squall.Downpour(rule=squall.Adagrad(learning_rate=0.1)), threads=1, progress=False,
    )  # fmt: skip
    model = normalised()
    plain_loop(model, torch.optim.Adagrad(model.parameters(), lr=0.1), x, y, STEPS)
    assert model[1].num_batches_tracked == STEPS  # type: ignore[index]
    assert difference(run, model) <= 1e-12


def test_a_run_is_repeated_exactly_in_one_process() -> None:
    """B54"""
    x, y = data(torch.float32)
    runs = [
        squall.fit(
            network(torch.float32), (x, y), epochs=3, batch_size=BATCH, replicas=3, shards=2,
            cluster=squall.InProcess(), threads=1, progress=False,
        )
        for _ in range(2)
    ]  # fmt: skip
    first, second = (run.state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


# Four replicas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_four_replicas_read_their_own_writes_and_replay(cluster: Any, rule: str, tmp_path: Path) -> None:
    """F3, F4: invariants of the ledger, and parameters replayed from it in float64."""
    ours, _ = RULES[rule]
    x, y = data(torch.float32)
    replicas, epochs = 4, 12
    run = squall.fit(
        network(torch.float32), (x, y), epochs=epochs, batch_size=BATCH, replicas=replicas, shards=2,
        strategy=squall.Downpour(rule=ours), cluster=cluster, threads=1, record=True, out=tmp_path / "run", progress=False,
    )  # fmt: skip
    ledger = run.ledger()
    applied = ledger[ledger["outcome"] == "applied"]

    for number in (0, 1):
        rows = applied[applied["slice"] == number]
        rows = rows[np.argsort(rows["version"])]
        assert rows["version"].tolist() == list(range(1, len(rows) + 1))
        blocks = list(zip(rows["epoch"].tolist(), rows["first"].tolist(), strict=True))
        assert sorted(blocks) == [(epoch, first) for epoch in range(epochs) for first in range(13)]
        assert (rows["staleness"] == rows["version"] - 1 - rows["based_on"]).all()
        for replica in range(replicas):
            own = rows[rows["replica"] == replica]
            assert (own["based_on"][1:] >= own["version"][:-1]).all()
        assert rows["staleness"].var() > 0

    replayed = replay(tmp_path / "run", applied, rule)
    stored = run.state_dict()
    for name, value in replayed.items():
        assert np.abs(value - stored[name].numpy()).max() <= 1e-6


def replay(run: Path, applied: Any, rule: str) -> dict[str, np.ndarray[Any, Any]]:
    """Apply the recorded pushes in the order of each slice's ledger, with formulas of our own, in float64."""
    pushes = run / "pushes"
    initial = {
        name: value.double().numpy() for name, value in load_file(pushes / "initial.safetensors").items()
    }
    flat = {name: value.reshape(-1).copy() for name, value in initial.items()}
    for number in np.unique(applied["slice"]).tolist():
        segments = [row for row in json.loads((pushes / "layout.json").read_text()) if row["slice"] == number]
        size = max(row["stop"] for row in segments)
        recorded = (
            np.fromfile(pushes / f"slice{number}.bin", dtype="<f4").reshape(-1, size).astype(np.float64)
        )
        values, squares = np.zeros(size), np.zeros(size)
        for row in segments:
            values[row["start"] : row["stop"]] = flat[row["tensor"]][row["tensor_start"] : row["tensor_stop"]]
        for version in np.sort(applied[applied["slice"] == number]["version"]).tolist():
            gradient = recorded[version - 1]
            if rule == "sgd":
                values -= 0.1 * gradient
            else:
                squares += gradient**2
                values -= 0.1 * gradient / (np.sqrt(squares) + 1e-10)
        for row in segments:
            flat[row["tensor"]][row["tensor_start"] : row["tensor_stop"]] = values[row["start"] : row["stop"]]
    return {name: flat[name].reshape(initial[name].shape) for name in initial}


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
@pytest.mark.parametrize(("replicas", "overlap"), [(4, False), (2, True)])
def test_staleness_tends_to_n_less_one_and_with_overlap_to_two_n_less_one(
    cluster: Any, replicas: int, overlap: bool
) -> None:
    x, y = data(torch.float32)
    run = squall.fit(
        network(torch.float32), (x, y), epochs=60, batch_size=BATCH, replicas=replicas, shards=2,
        strategy=squall.Downpour(overlap=overlap), cluster=cluster, threads=1, progress=False,
    )  # fmt: skip
    applied = run.ledger()
    assert set(applied["outcome"].tolist()) == {"applied"}
    assert len(applied) == 2 * 60 * 13
    for number in (0, 1):
        mean = staleness_under_way(applied[applied["slice"] == number])
        if not overlap:
            assert mean == pytest.approx(replicas - 1, abs=0.2)
        else:  # where a replica must wait for the other's exchange, it is less: processes share cores here
            assert replicas - 0.5 < mean <= 2 * replicas - 1


@pytest.mark.parametrize("cluster", CLUSTERS, indirect=True)
def test_no_push_is_staler_than_max_staleness(cluster: Any) -> None:
    x, y = data(torch.float32)
    run = squall.fit(
        network(torch.float32), (x, y), epochs=15, batch_size=BATCH, replicas=4, shards=2,
        strategy=squall.Downpour(max_staleness=1), cluster=cluster, threads=1, progress=False,
    )  # fmt: skip
    applied = run.ledger()
    assert len(applied) == 2 * 15 * 13
    assert applied["staleness"].max() <= 1
    assert len(np.unique(applied["replica"])) == 4


def test_a_warm_start_is_computed_by_one_replica_alone(local: Local, tmp_path: Path) -> None:
    x, y = data(torch.float32)
    run = squall.fit(
        network(torch.float32), (x, y), epochs=20, batch_size=BATCH, replicas=3,
        strategy=squall.Downpour(warm_start=15), cluster=local, threads=1, progress=False,
    )  # fmt: skip
    ledger = run.ledger()
    first = ledger[ledger["version"] <= 15]
    assert len(np.unique(first["replica"])) == 1
    assert (first["staleness"] == 0).all()
    assert len(np.unique(ledger["replica"])) == 3
