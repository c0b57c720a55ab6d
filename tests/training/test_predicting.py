"""`run.predict` of models that are cut, against plain PyTorch's own forward in eval mode.

The oracle is the user's module with the run's state dict; nothing of the engine computes what is expected.

Faults planted by hand, each seen to fail a test here: captured in training mode · the model itself called · the plan of an
earlier part of the run kept · one example taken for two.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.errors import ConfigError, CorruptError
from squall.partition.together import Together
from tests.training import test_cutting as cut

torch.set_num_threads(1)


def trained(partitions: int | squall.Plan, *, norm: bool = True, **settings: Any) -> squall.Run:
    return squall.fit(cut.job(cut.network(norm=norm), partitions=partitions, steps=5, **settings))


@torch.no_grad()
def expected(run: squall.Run, x: Tensor, *, norm: bool = True) -> Tensor:
    model = cut.network(norm=norm)
    model.load_state_dict(run.state_dict())
    found: Tensor = model.eval()(x)
    return found


def plan(how: str, partitions: int) -> squall.Plan:
    if how == "random":
        return cut.random_plan(cut.network(), partitions, seed=partitions)
    return squall.plan(cut.network(), cut.data()[0][:4], partitions=partitions, how=how)


@pytest.mark.parametrize("partitions", [2, 3])
@pytest.mark.parametrize("how", ["vertical", "horizontal", "random"])
def test_a_cut_model_predicts_what_plain_pytorch_does_in_batches_of_any_size(
    how: str, partitions: int
) -> None:
    run = trained(plan(how, partitions))
    x, _ = cut.data()
    wanted = expected(run, x)
    assert wanted.std() > 1e-3
    for count, batch_size in ((60, 256), (60, 7), (1, 256), (2, 1), (0, 256)):
        found = run.predict(x[:count], batch_size=batch_size)
        assert found.shape == (count, 3)
        assert not found.requires_grad
        assert (found - wanted[:count]).abs().max().item() < 1e-10 if count else True


def test_microbatches_are_of_training_alone() -> None:
    run = trained(3, norm=False, microbatches=4)
    x, _ = cut.data()
    assert (run.predict(x) - expected(run, x, norm=False)).abs().max() < 1e-10


def test_the_partitions_compute_it_and_each_has_its_own_share(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(2)
    made: list[Together] = []
    make = Together.__init__

    def watched(self: Together, *args: Any, **settings: Any) -> None:
        make(self, *args, **settings)
        made.append(self)

    def refused(self: nn.Module, x: Tensor) -> Tensor:
        raise AssertionError("the model itself was called")

    monkeypatch.setattr(Together, "__init__", watched)
    x = cut.data()[0]
    first = run.predict(x[:4])
    monkeypatch.setattr(cut.Net, "forward", refused)

    assert torch.allclose(run.predict(x, batch_size=20)[:4], first, atol=1e-10)

    (together,) = made
    assert {(sender, receiver) for sender, receiver, is_back, _ in together.links if not is_back} == {
        (0, 1),
        (1, 0),
    }
    used = sum(value.numel() for name, value in run.state_dict().items() if name not in ("unused",))
    held = [sum(value.numel() for value in worker.values.values()) for worker in together.workers]
    assert sum(held) <= used
    assert max(held) < 0.7 * used


def test_a_run_that_is_opened_again_predicts_by_its_partitions(tmp_path: Path) -> None:
    run = trained(3, out=tmp_path / "run")
    opened = squall.load(tmp_path / "run", model=cut.network())
    x, _ = cut.data()
    assert squall.Plan.load(tmp_path / "run" / "partitions.json").partitions == 3
    assert torch.equal(opened.predict(x), run.predict(x))


def test_a_plan_in_a_run_that_is_damaged_is_named(tmp_path: Path) -> None:
    run = trained(2, out=tmp_path / "run")
    (tmp_path / "run" / "partitions.json").write_text("{")
    with pytest.raises(CorruptError, match=r"partitions\.json"):
        run.predict(cut.data()[0])


def test_a_model_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    trained(2, out=tmp_path / "run")
    with pytest.raises((ConfigError, RuntimeError), match=r"norm"):
        squall.load(tmp_path / "run", model=cut.network(norm=False)).predict(cut.data()[0])


def test_a_run_that_goes_on_whole_predicts_whole(tmp_path: Path) -> None:
    usual = cut.job(cut.network(), partitions=2, steps=3, out=tmp_path / "run")
    squall.fit(usual)
    run = squall.fit(dataclasses.replace(usual, partitions=1, steps=5), resume=True)
    assert not (tmp_path / "run" / "partitions.json").exists()
    x, _ = cut.data()
    assert torch.equal(run.predict(x), expected(run, x))


class Pair(nn.Module):
    """Two inputs by name, dropout, and outputs in a dict and of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 8), nn.Embedding(5, 8)
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        hidden = self.drop(torch.tanh(self.left(a) + self.right(b)))
        scores = self.out(hidden)
        return {"scores": scores, "best": scores.argmax(dim=1)}


def test_inputs_by_name_and_outputs_of_any_form() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "a": torch.randn(20, 3, generator=generator, dtype=torch.float64),
        "b": torch.randint(5, (20,), generator=generator),
    }
    target = torch.randint(4, (20,), generator=generator)
    torch.manual_seed(0)
    model = Pair().double()
    run = squall.fit(
        model,
        (inputs, target),
        loss=lambda output, y: nn.functional.cross_entropy(output["scores"], y),
        partitions=2,
        steps=4,
        batch_size=5,
        replicas=1,
        cluster=squall.InProcess(),
        progress=False,
    )
    model.load_state_dict(run.state_dict())
    with torch.no_grad():
        wanted = model.eval()(**inputs)

    found = run.predict(inputs, batch_size=6)

    assert (found["scores"] - wanted["scores"]).abs().max() < 1e-10
    assert torch.equal(found["best"], wanted["best"])
