"""What a user calls: fit, start, load, and the kinds of data, losses and models that they take."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import squall
from squall.observe.events import Ended, Evaluated, Joined, Progress

torch.set_num_threads(1)


def fit(model: Any, train: Any, **settings: Any) -> squall.Run:
    usual = {"cluster": squall.InProcess(), "progress": False, "threads": 1, "batch_size": 8}
    return squall.fit(model, train, **(usual | settings))


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(dim=1) > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


class Rows(Dataset[tuple[np.ndarray[Any, Any], int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
        return np.full(4, index, dtype=np.float32), index % 2


def test_a_run_holds_its_model_figures_history_and_ledger(tmp_path: Path) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    run = fit(model, data(), test=data(), epochs=3, out=tmp_path / "run")

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(run.model.weight, model.weight)  # type: ignore[arg-type]
    assert run.metrics["why"] == "epochs"
    assert run.metrics["test_accuracy"] > 0.5
    assert run.metrics["samples_per_second"] > 0
    assert {"train_loss", "test_loss", "wall_s"} <= run.metrics.keys()
    assert any(record["event"] == "Evaluated" for record in run.history)
    assert len(run.ledger()) == 3 * 8
    names = {path.name for path in run.path.iterdir()}
    assert {
        "result.json",
        "metrics.jsonl",
        "model.safetensors",
        "plan.svg",
        "loss.png",
        "ledger",
        "checkpoints",
    } <= names
    assert run.traffic()["replica0.0", "shard0"][0] > 0


def test_a_loaded_run_predicts_like_the_one_that_was_trained(tmp_path: Path) -> None:
    x, y = data()
    run = fit(network(), (x, y), out=tmp_path / "run")

    loaded = squall.load(tmp_path / "run", model=network())

    assert torch.equal(loaded.predict(x), run.predict(x))
    assert torch.equal(run.predict(x.numpy()), run.predict(x))
    assert loaded.metrics == run.metrics


def test_a_run_without_a_model_says_how_to_give_one(tmp_path: Path) -> None:
    fit(network(), data(), out=tmp_path / "run")
    with pytest.raises(squall.ConfigError, match=r"squall.load\(DIR, model=Net\(\)\)"):
        _ = squall.load(tmp_path / "run").model


@pytest.mark.parametrize("kind", ["numpy", "dataset", "tensor dataset", "loader"])
def test_data_of_every_kind_trains(kind: str) -> None:
    x, y = data()
    train: Any = {
        "numpy": (x.numpy(), y.numpy()),
        "dataset": Rows(),
        "tensor dataset": torch.utils.data.TensorDataset(x, y),
        "loader": DataLoader(Rows(), batch_size=5, shuffle=True),
    }[kind]
    run = fit(network(), train, epochs=1)
    expected = {"numpy": 8, "dataset": 3, "tensor dataset": 8, "loader": 4}[kind]
    assert run.metrics["minibatches"] == expected


def test_iterable_data_is_refused_with_a_way_on() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(squall.DataError):
        fit(network(), Stream())


def test_a_step_of_the_users_own_takes_any_batch_and_may_return_a_sum_and_a_weight() -> None:
    x, y = data()
    batch = {"inputs": {"x": x}, "y": y, "weight": torch.ones(64)}

    def step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(model(batch["inputs"]["x"]), batch["y"], reduction="none")
        return (loss * batch["weight"]).sum(), batch["weight"].sum()

    weighted = fit(network(), batch, step=step, replicas=1, epochs=1)
    plain = fit(network(), (x, y), replicas=1, epochs=1)

    torch.testing.assert_close(weighted.state_dict(), plain.state_dict())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.body(torch.cat([a, b], dim=1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_models_of_several_inputs_take_them_by_position_or_by_name(kind: str) -> None:
    x, y = data()
    parts = {"a": x[:, :1], "b": x[:, 1:]}
    inputs = tuple(parts.values()) if kind == "tuple" else parts
    run = fit(TwoInputs(), (inputs, y[:, None].float()), loss="mse")
    assert run.predict(inputs).shape == (64, 1)


def test_batch_norm_is_evaluated_with_statistics_that_were_trained() -> None:
    """B40"""
    x, y = data()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    run = fit(model, (5 + 3 * x, y), replicas=2, epochs=20)
    state = run.state_dict()
    assert (state["0.running_mean"] - 5).abs().max() < 1
    assert state["0.num_batches_tracked"] > 0
    assert state["0.num_batches_tracked"].dtype == torch.int64


def test_events_come_in_order_and_end_with_the_end() -> None:
    handle = squall.start(
        network(), data(), test=data(), epochs=2, batch_size=8, cluster=squall.InProcess(), threads=1
    )
    seen = list(handle.events())
    assert isinstance(seen[0], Joined | Progress)
    assert sum(isinstance(event, Joined) for event in seen) == 2
    assert any(isinstance(event, Evaluated) for event in seen)
    assert isinstance(seen[-1], Ended)
    assert [event.time_s for event in seen] == sorted(event.time_s for event in seen)
    assert handle.result().metrics["why"] == "epochs"


def test_a_failed_background_run_raises_its_error_from_result() -> None:
    handle = squall.start(network(), data(), loss=lambda output, target: 1 / 0, cluster=squall.InProcess())
    with pytest.raises(squall.UserCodeError, match="ZeroDivisionError"):
        handle.result(30)


def test_the_best_model_is_kept_and_patience_ends_the_run(tmp_path: Path) -> None:
    x, y = data()
    wrong = (x, 1 - y)  # the better it trains, the worse it tests
    run = fit(
        network(),
        (x, y),
        test=wrong,
        epochs=50,
        keep_best="accuracy",
        patience=3,
        out=tmp_path / "run",
        replicas=1,
    )
    measured = [
        record["metrics"]["test_accuracy"] for record in run.history if record["event"] == "Evaluated"
    ]
    assert run.metrics["why"] == "no better"
    assert run.metrics["minibatches"] < 50 * 8
    output = run.best()(x)
    kept = (output.argmax(dim=1) == wrong[1]).double().mean().item()
    assert kept == max(measured)


def test_loggers_are_told_every_event_and_closed() -> None:
    class Kept:
        def __init__(self) -> None:
            self.events: list[Any] = []
            self.is_closed = False

        def log(self, event: Any) -> None:
            self.events.append(event)

        def close(self) -> None:
            self.is_closed = True

    logger = Kept()
    fit(network(), data(), test=data(), loggers=(logger,))
    assert logger.is_closed
    assert isinstance(logger.events[-1], Ended)
    assert any(isinstance(event, Evaluated) for event in logger.events)


def test_time_ends_a_run() -> None:
    run = fit(network(), data(), time_s=0.2, epochs=10**9)
    assert run.metrics["why"] == "time"
    assert 0.2 <= run.metrics["wall_s"] < 10


def test_steps_count_minibatches_over_all_replicas() -> None:
    run = fit(network(), data(), steps=11, replicas=3)
    assert run.metrics["minibatches"] == 11
    assert run.ledger()["minibatches"].sum() == 11


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 0}, r"Job\(replicas=\): expected a whole number of at least 1, but got 0"),
        ({"loss": "crossentropy"}, "loss: expected one of cross_entropy"),
        ({"checkpoint_every": 0}, r"Job\(checkpoint_every=\): expected a number above 0, but got 0"),
        ({"checkpoint_every": "1"}, r"Job\(checkpoint_every=\): expected a number above 0"),
        ({"checkpoint_every": float("nan")}, r"Job\(checkpoint_every=\): expected a number above 0"),
        ({"checkpoint_every": float("inf")}, r"Job\(checkpoint_every=\): expected a number above 0"),
        ({"checkpoint_every": True}, r"Job\(checkpoint_every=\): expected a number above 0"),
        ({"clip_norm": 0}, r"Job\(clip_norm=\): expected a number above 0"),
        ({"strategy": "downpour"}, r"Job\(strategy=\): expected squall.Downpour"),
        ({"cluster": 3}, r"Job\(cluster=\)"),
        ({"batch_size": 2.5}, r"Job\(batch_size=\): expected a whole number"),
        ({"time_s": -1}, r"Job\(time_s=\): expected a number above 0"),
    ],
)
def test_wrong_requests_are_refused_before_anything_starts(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(squall.ConfigError, match=said):
        fit(network(), data(), **settings)


def test_a_model_without_anything_to_train_or_of_the_wrong_kind_is_refused() -> None:
    frozen = network().requires_grad_(False)
    with pytest.raises(squall.ModelError, match="requires_grad"):
        fit(frozen, data())
    with pytest.raises(squall.ConfigError, match="the class Linear"):
        fit(nn.Linear, data())
    with pytest.raises(squall.ConfigError, match=r"a torch\.nn\.Module to be returned"):
        fit(lambda: 3, data())


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    expected = (torch.rand(1), np.random.rand())
    torch.manual_seed(5)
    np.random.seed(5)
    fit(network, data())
    assert (torch.rand(1), np.random.rand()) == expected


def test_more_shards_than_parameters_are_legal() -> None:
    """B06"""
    run = fit(nn.Linear(4, 1), (data()[0], data()[0][:, :1]), loss="mse", shards=20)
    assert run.metrics["why"] == "epochs"
