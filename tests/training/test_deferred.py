"""Models that nobody has whole, trained by `fit`, against plain PyTorch from the same first values.

The oracle is a whole module, filled tensor by tensor, in a loop of its own.

Faults planted by hand, each seen to fail a test here: buffers of a checkpoint forgotten · a slice filled from the start of its
tensors · trained parameters made by workers, too · a tensor of the past taken for what a parameter has become.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.errors import ConfigError
from squall.model.deferred import defer
from squall.partition import made as making
from tests.training import test_cutting as cut

torch.set_num_threads(1)


def function() -> nn.Module:
    return cut.Net().double()


def whole(seed: int = cut.SEED) -> nn.Module:
    """The model as it begins, made by nothing but plain PyTorch and one value after another."""
    deferred, model = defer(function, seed), function()
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, value in values.items():
            value.copy_(deferred.value(name))
    return model


def job(**settings: Any) -> squall.Job:
    return dataclasses.replace(cut.job(cut.network(), **settings), model=squall.deferred(function))


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_twenty_steps_are_those_of_plain_pytorch_whatever_the_cut(partitions: int) -> None:
    expected, _ = cut.plain(whole())
    run = squall.fit(job(partitions=partitions))
    assert cut.furthest(run, expected) < 1e-8
    x, _ = cut.data()
    with torch.no_grad():
        assert torch.allclose(run.predict(x), expected.eval()(x), atol=1e-8)


def test_no_partition_makes_more_than_what_it_has_a_share_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained parameters come from the shards; of the rest each partition makes what it owns any of."""
    made: list[tuple[int, set[int]]] = []
    make = making.made_share

    def watched(graph: Any, plan: Any, partition: int, *args: Any, **settings: Any) -> dict[int, Any]:
        share = make(graph, plan, partition, *args, **settings)
        made.append((partition, set(share)))
        names = {graph.values[at].name.removeprefix("model.") for at in share}
        assert names <= {"frozen", *(name for name, _ in whole().named_buffers())}
        return share

    monkeypatch.setattr("squall.replica.part.made_share", watched)
    squall.fit(job(partitions=3, steps=2))
    assert [partition for partition, _ in made] == [0, 1, 2]


def test_it_goes_on_from_its_checkpoint_over_another_number_of_partitions(tmp_path: Path) -> None:
    expected, _ = cut.plain(whole(), optimizer=torch.optim.Adagrad)
    rule, out = squall.Adagrad(learning_rate=cut.RATE), tmp_path / "run"
    squall.fit(job(rule=rule, partitions=2, steps=7, out=out))
    squall.fit(job(rule=rule, partitions=3, shards=3, steps=13, out=out), resume=True)
    run = squall.fit(job(rule=rule, partitions=1, out=out), resume=True)
    assert cut.furthest(run, expected) < 1e-8


def test_a_plan_of_a_deferred_model_is_made_without_its_memory() -> None:
    x, _ = cut.data()
    plan = squall.plan(squall.deferred(function), x[:4], partitions=2, how="vertical")
    assert not plan.predicted.is_measured  # type: ignore[union-attr]
    expected, _ = cut.plain(whole(), steps=3)
    assert cut.furthest(squall.fit(job(partitions=plan, steps=3)), expected) < 1e-8


def test_a_record_of_the_first_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="record"):
        squall.fit(job(partitions=2, record=True))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x.flatten(1, 2))[0][:, -1])  # type: ignore[no-any-return]


def test_a_module_that_is_kept_whole_is_refused() -> None:
    model = squall.deferred(lambda: Recurrent().double())
    with pytest.raises(ConfigError, match="opaque"):
        squall.fit(dataclasses.replace(job(partitions=2), model=model))
