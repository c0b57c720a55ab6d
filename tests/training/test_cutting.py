"""Runs whose replicas are cut over partitions, in one thread, against plain PyTorch.

Nothing here uses Squall's engine, rules or layout to compute what is expected.

Faults planted by hand, each seen to fail a test here: the norm of the first partition alone · a microbatch that weighs as a
minibatch · masks keyed by the partition · what the first partition lacks taken for absent · pushes of all partitions
by the lead · values forgotten when a checkpoint is cut anew.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.errors import ConfigError
from squall.model.capture import capture
from squall.partition import planner

torch.set_num_threads(1)
BATCH, NUM_EXAMPLES, STEPS, SEED, RATE = 8, 60, 20, 3, 0.05  # a short last minibatch of 4


class Net(nn.Module):
    """Convolutions, batch norm, a tied weight, a parameter that is not used, and one that is frozen."""

    def __init__(self, dropout: float = 0.0, *, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.second = nn.Conv2d(6, 4, 3, padding=1)
        self.wide = nn.Linear(4 * 3 * 3, 9)
        self.drop = nn.Dropout(dropout)
        self.square = nn.Linear(9, 9)
        self.again = nn.Linear(9, 9)
        self.again.weight = self.square.weight
        self.out = nn.Linear(9, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((9,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        x = torch.tanh(self.wide(torch.relu(self.second(x)).flatten(1)))
        x = torch.tanh(self.again(torch.tanh(self.square(self.drop(x))))) * self.frozen
        return self.out(x)  # type: ignore[no-any-return]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_EXAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, (x.sum(dim=(1, 2, 3)) > 0).long()


def network(**settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return Net(**settings).double()


def plain(
    model: nn.Module, *, clip_norm: float | None = None, optimizer: Any = torch.optim.SGD, steps: int = STEPS
) -> tuple[nn.Module, list[float]]:
    """What a user would write, over the published order."""
    model = copy.deepcopy(model)
    x, y = data()
    moves = optimizer([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses: list[float] = []
    per_epoch = -(-NUM_EXAMPLES // BATCH)
    for step in range(steps):
        epoch, position = divmod(step, per_epoch)
        chosen = squall.data.order(NUM_EXAMPLES, SEED, epoch)[position * BATCH : (position + 1) * BATCH]
        moves.zero_grad()
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        moves.step()
        losses.append(loss.item())
    return model, losses


def job(
    model: nn.Module, rule: Any = None, strategy: dict[str, Any] | None = None, **settings: Any
) -> squall.Job:
    usual = {
        "replicas": 1,
        "shards": 2,
        "batch_size": BATCH,
        "steps": STEPS,
        "seed": SEED,
        "progress": False,
        "cluster": squall.InProcess(),
    }
    downpour = squall.Downpour(rule=rule or squall.Sgd(learning_rate=RATE), **(strategy or {}))
    return squall.Job(model, data(), strategy=downpour, **(usual | settings))


def random_plan(model: nn.Module, partitions: int, seed: int) -> squall.Plan:
    """A plan of the model alone, in training, by names: every value is cut in a way of its own."""
    graph = capture(model, (data()[0][:4],)).graph
    return squall.Plan.of(graph, planner.random(graph, partitions, seed), how="random")


def furthest(run: squall.Run, model: nn.Module) -> float:
    """The largest difference of any parameter or buffer."""
    state = run.state_dict()
    assert set(state) == set(model.state_dict())
    return max((state[name] - value).abs().max().item() for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("rule", "optimizer", "settings"),
    [
        (squall.Sgd(learning_rate=RATE), torch.optim.SGD, {"partitions": 2}),
        (squall.Adagrad(learning_rate=RATE), torch.optim.Adagrad, {"partitions": 3, "clip_norm": 0.3}),
        (squall.Adam(learning_rate=RATE), torch.optim.Adam, {"partitions": 2, "shards": 1}),
    ],
    ids=["sgd", "adagrad, clipped", "adam"],
)
def test_twenty_steps_of_a_cut_model_are_those_of_plain_pytorch(
    rule: Any, optimizer: Any, settings: dict[str, Any]
) -> None:
    model = network()
    expected, _ = plain(model, optimizer=optimizer, clip_norm=settings.get("clip_norm"))

    run = squall.fit(job(model, rule, **settings))

    assert furthest(run, expected) < 1e-8


@pytest.mark.parametrize("settings", [{"partitions": 3}, {"partitions": 2, "microbatches": 4}])
def test_the_loss_is_that_of_plain_pytorch(settings: dict[str, Any]) -> None:
    model = network(norm=False)
    run = squall.fit(job(model, steps=1, **settings))
    assert run.metrics["train_loss"] == pytest.approx(plain(model, steps=1)[1][0], abs=1e-12)


def test_local_steps_between_fetches_are_those_of_plain_sgd() -> None:
    model = network()
    run = squall.fit(job(model, strategy={"n_fetch": 4, "n_push": 4}, partitions=2))
    assert furthest(run, plain(model)[0]) < 1e-8


@pytest.mark.parametrize(
    "settings", [{"partitions": 2, "microbatches": 4}, {"partitions": 3, "microbatches": 3}]
)
def test_microbatches_leave_the_gradient_as_it_is(settings: dict[str, Any]) -> None:
    """The last minibatch has 4 examples, the others 8, which 3 does not divide."""
    model = network(norm=False)
    assert furthest(squall.fit(job(model, **settings)), plain(model)[0]) < 1e-8


def test_any_plan_of_the_model_is_followed() -> None:
    model = network()
    run = squall.fit(job(model, partitions=random_plan(model, 3, seed=5)))
    assert furthest(run, plain(model)[0]) < 1e-8
    assert set(run.ledger()["partition"].tolist()) == {0, 1, 2}


def test_masks_of_dropout_do_not_depend_on_the_cut() -> None:
    model = network(dropout=0.5)
    plans = [squall.plan(model, data()[0][:4], partitions=1, how="vertical"), random_plan(model, 3, seed=1)]
    one, three = (squall.fit(job(model, partitions=plan, steps=6)).state_dict() for plan in plans)
    assert max((one[name] - three[name]).abs().max() for name in one) < 1e-12
    undropped = plain(network(), steps=6)[0].state_dict()
    assert max((one[name] - undropped[name]).abs().max() for name in one) > 1e-3


def test_each_worker_exchanges_its_own_parameters_alone_and_the_ledger_says_whose_they_are() -> None:
    model = network()
    run = squall.fit(job(model, partitions=2))
    ledger = run.ledger()
    rows = {(int(row["slice"]), int(row["partition"]), int(row["shard"])) for row in ledger}
    assert len(rows) == len({number for number, _, _ in rows}), "a slice is of one partition and one shard"
    assert {partition for _, partition, _ in rows} == {0, 1}
    pushed = {link for link in run.traffic() if link[1].startswith("shard")}
    assert pushed == {(f"replica0.{partition}", f"shard{shard}") for _, partition, shard in rows}
    total = sum(run.traffic()[link][0] for link in pushed)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert total == STEPS * trained * 8
    assert {("replica0.0", "replica0.1"), ("replica0.1", "replica0.0")} <= set(run.traffic())


def test_what_partitions_sent_stands_beside_what_the_plan_says(tmp_path: Path) -> None:
    """Eight units cross, up and down, in float64: counted by hand, short minibatches and a resumed run included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plan = squall.plan(model, data()[0][:4], how={"[0-2]": 0, "3": 1})
    full, short = (2 * 8 * 8 * examples for examples in (BATCH, NUM_EXAMPLES % BATCH))
    usual = {"partitions": plan, "out": tmp_path / "run"}

    run = squall.fit(job(model, steps=7, **usual))
    assert run.metrics["partition_bytes"] == run.metrics["partition_bytes_planned"] == full

    run = squall.fit(job(model, steps=STEPS, **usual), resume=True)
    expected = ((STEPS - 7 - 2) * full + 2 * short) / (STEPS - 7)
    assert run.metrics["partition_bytes"] == pytest.approx(expected)
    assert run.metrics["partition_bytes_planned"] == pytest.approx(expected)


def test_a_cut_run_goes_on_from_its_checkpoint_over_another_number_of_partitions_and_shards(
    tmp_path: Path,
) -> None:
    model = network()
    rule = squall.Adagrad(learning_rate=RATE)
    out = tmp_path / "run"
    squall.fit(job(model, rule, partitions=2, steps=7, out=out))
    squall.fit(job(model, rule, partitions=3, shards=3, steps=13, out=out), resume=True)
    run = squall.fit(job(model, rule, partitions=1, shards=1, out=out), resume=True)
    assert furthest(run, plain(model, optimizer=torch.optim.Adagrad)[0]) < 1e-8


@pytest.mark.parametrize("seed", range(2))
def test_replicas_of_two_partitions_that_die_and_come_back_lose_and_repeat_no_block(seed: int) -> None:
    faults = "kill:replica1,restart=2@step=5; kill:replica2@step=3; drop:*=0.05; dup:*=0.1; delay=10ms+-10"
    cluster = squall.Simulated(seed=seed, faults=faults, compute="modelled")
    run = squall.fit(job(network(), replicas=3, partitions=2, steps=60, cluster=cluster))
    ledger = run.ledger()
    assert set(ledger["partition"].tolist()) == {0, 1}
    applied = ledger[ledger["outcome"] == "applied"]
    for number in set(ledger["slice"].tolist()):
        rows = applied[applied["slice"] == number]
        places = set(zip(rows["epoch"].tolist(), rows["first"].tolist(), strict=True))
        assert len(places) == len(rows) == 60


def test_a_gradient_that_is_not_finite_in_one_partition_reaches_no_slice_of_any() -> None:
    x, y = data()
    x[squall.data.order(NUM_EXAMPLES, SEED, 0)[2 * BATCH]] = torch.inf
    usual = job(network(norm=False), partitions=2)
    run = squall.fit(dataclasses.replace(usual, train=(x, y), steps=6))
    ledger = run.ledger()
    assert set(ledger[ledger["first"] == 2]["outcome"].tolist()) == {"not_finite", "refused"}
    assert set(ledger[ledger["first"] != 2]["outcome"].tolist()) == {"applied"}
    assert all(torch.isfinite(value).all() for value in run.state_dict().values())


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bfloat16"},
        {"data_workers": 2},
        {"partitions": 0},
        {"partitions": "two"},
        {"microbatches": 0},
    ],
)
def test_what_cut_models_do_not_have_is_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        squall.fit(job(network(), **({"partitions": 2} | settings)))


def test_microbatches_are_refused_where_examples_are_coupled_and_the_op_is_named() -> None:
    with pytest.raises(ConfigError, match=r"batch_norm|norm\.running_mean"):
        squall.fit(job(network(), partitions=2, microbatches=2))
