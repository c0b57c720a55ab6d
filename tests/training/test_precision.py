"""Parameters in bfloat16 and float16, and autocast, against plain PyTorch loops that keep float32 masters.

Nothing here uses Squall's rules or layout to compute what is expected.

Planted faults, each seen to fail a test here: masters in the parameters' dtype; masters rounded at each update; the
master checked instead of what is written; a block summed in the parameters' dtype; its sum never copied out; an
overflow in rounding it not seen; local steps in low precision; local copies kept over a fetch; norms in the gradient's
dtype; pushes recorded as raw 16 bits; the replay compared with rounded values; layout.json telling the tensor's dtype;
no autocast in training, in evaluation, in predict; the precision not in job.json.
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
from squall.cli.replay import replay
from squall.training.checkpoint import newest_checkpoint

torch.set_num_threads(1)
BATCH, NUM_EXAMPLES, STEPS, SEED = 16, 200, 30, 3  # 13 minibatches an epoch, the last one short
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Net(nn.Module):
    """Two layers, each in a dtype of its own; a last one in float32."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 7).to(first)
        self.second = nn.Linear(7, 6).to(second)
        self.third = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.third(torch.tanh(self.second(hidden.to(self.second.weight.dtype))).float())  # type: ignore[no-any-return]


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(NUM_EXAMPLES, 5, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(dim=1) > 0).long()


def minibatches(steps: int) -> list[tuple[int, Tensor, Tensor]]:
    """(epoch, inputs, targets), in the published order."""
    x, y = data()
    told = []
    for step in range(steps):
        epoch, position = divmod(step, -(-NUM_EXAMPLES // BATCH))
        chosen = squall.data.order(NUM_EXAMPLES, SEED, epoch)[position * BATCH : (position + 1) * BATCH]
        told.append((epoch, x[chosen], y[chosen]))
    return told


def blocks(steps: int, length: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Minibatches in blocks of `length`, shorter at the end of an epoch."""
    parts: list[list[tuple[Tensor, Tensor]]] = []
    before = -1
    for epoch, x, y in minibatches(steps):
        if epoch != before or len(parts[-1]) == length:
            parts.append([])
        before = epoch
        parts[-1].append((x, y))
    return parts


Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def loop_with_masters(
    model: nn.Module, optimizer_of: Optimizer, *, length: int = 1, local_rate: float | None = None
) -> dict[str, Tensor]:
    """Train `model`, and return its masters. A block's gradient is summed in float32, and rounded once."""
    params = dict(model.named_parameters())
    masters = {name: p.detach().to(torch.promote_types(p.dtype, F32)) for name, p in params.items()}
    masters = {name: master.clone().requires_grad_() for name, master in masters.items()}
    optimizer = optimizer_of(list(masters.values()))
    for block in blocks(STEPS, length):
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        local = {name: p.detach().to(masters[name].dtype, copy=True) for name, p in params.items()}
        for x, y in block:
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for name, p in params.items():
                assert p.grad is not None
                sums[name] += p.grad
                if local_rate is not None:
                    local[name].sub_(p.grad.to(local[name].dtype), alpha=local_rate)
                    p.data.copy_(local[name])
        for name, master in masters.items():
            master.grad = sums[name].to(params[name].dtype).to(master.dtype)
        optimizer.step()
        for name, p in params.items():
            p.data.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def fit(model: nn.Module, rule: Any, shards: int = 1, n: int = 1, **settings: Any) -> squall.Run:
    defaults: dict[str, Any] = {"cluster": squall.InProcess(), "replicas": 1, "steps": STEPS}
    return squall.fit(
        model,
        data(),
        batch_size=BATCH,
        shards=shards,
        strategy=squall.Downpour(n_fetch=n, n_push=n, rule=rule),
        seed=SEED,
        threads=1,
        progress=False,
        **defaults | settings,
    )


def expect_equal(run: squall.Run, model: nn.Module) -> None:
    """The same dtypes; bit by bit where they are of 16 bits, to 1e-6 elsewhere."""
    got, want = run.model.state_dict(), model.state_dict()
    assert {name: value.dtype for name, value in got.items()} == {n: v.dtype for n, v in want.items()}
    for name, value in want.items():
        if value.element_size() == 2:
            assert torch.equal(got[name], value), name
        else:
            assert (got[name] - value).abs().max() <= 1e-6, name


def masters_of(run: squall.Run) -> dict[str, Tensor]:
    return newest_checkpoint(run.path / "checkpoints").tensors()


RULES: dict[str, tuple[Any, Optimizer]] = {
    "sgd": (squall.Sgd(learning_rate=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (squall.Momentum(learning_rate=0.05), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "adagrad": (squall.Adagrad(learning_rate=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    "adam": (squall.Adam(learning_rate=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (squall.AdamW(learning_rate=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
}


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, torch.float64), (BF16, F16)])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_one_replica_equals_a_plain_loop_with_float32_masters(
    rule: str, shards: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    ours, theirs = RULES[rule]
    run = fit(Net(*dtypes), ours, shards)

    model = Net(*dtypes)
    masters = loop_with_masters(model, theirs)

    expect_equal(run, model)
    for name, value in masters_of(run).items():
        assert value.dtype == masters[name].dtype
        assert (value - masters[name]).abs().max() <= 1e-6


@pytest.mark.parametrize("rule", [name for name in RULES if name != "sgd"])
def test_a_block_of_five_is_summed_in_float32_and_rounded_once(rule: str) -> None:
    ours, theirs = RULES[rule]
    run = fit(Net(BF16, F16), ours, 3, n=5)

    model = Net(BF16, F16)
    loop_with_masters(model, theirs, length=5)

    expect_equal(run, model)


def test_local_steps_move_float32_copies_of_what_was_fetched() -> None:
    ours, theirs = RULES["sgd"]
    run = fit(Net(BF16, F16), ours, 3, n=5)

    model = Net(BF16, F16)
    loop_with_masters(model, theirs, length=5, local_rate=0.1)

    expect_equal(run, model)


@pytest.mark.processes
@pytest.mark.parametrize(("rule", "n"), [("adagrad", 1), ("sgd", 5)])
def test_processes_do_the_same(local: Any, rule: str, n: int) -> None:
    ours, theirs = RULES[rule]
    run = fit(Net(BF16, F16), ours, 3, n=n, cluster=local)

    model = Net(BF16, F16)
    loop_with_masters(model, theirs, length=n, local_rate=0.1 if rule == "sgd" else None)

    expect_equal(run, model)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    """At 1.0 a step of 1e-4 is a fortieth of what bfloat16 tells apart."""
    model = nn.ParameterDict({"w": torch.ones(4, dtype=BF16)})
    run = squall.fit(
        model,
        torch.zeros(100, 1),
        step=lambda model, batch: model["w"].sum(),
        strategy=squall.Downpour(rule=squall.Sgd(learning_rate=1e-4)),
        batch_size=1,
        replicas=1,
        cluster=squall.InProcess(),
        progress=False,
    )

    assert torch.equal(run.model.state_dict()["w"], torch.full((4,), 0.99, dtype=BF16))


def test_what_float16_cannot_hold_ends_the_run() -> None:
    """The gradient and the float32 master, 72,000 after the second step, are finite; float16 ends at 65,504."""
    model = nn.ParameterDict({"w": torch.zeros(4, dtype=F16)})
    with pytest.raises(squall.DivergedError, match="w"):
        squall.fit(
            model,
            torch.zeros(10, 1),
            step=lambda model, batch: -model["w"].sum(),
            strategy=squall.Downpour(rule=squall.Sgd(learning_rate=36_000.0)),
            batch_size=1,
            replicas=1,
            cluster=squall.InProcess(),
            progress=False,
        )


@pytest.mark.parametrize("n", [1, 2])
def test_a_float16_gradient_that_overflows_is_refused(n: int) -> None:
    """Alone, or as a sum of two of which neither does."""
    factor = 70_000.0 if n == 1 else 40_000.0
    model = nn.ParameterDict({"w": torch.zeros(4, dtype=F16)})
    run = squall.fit(
        model,
        torch.zeros(4, 1),
        step=lambda model, batch: (model["w"].float() * factor).sum(),
        strategy=squall.Downpour(n_push=n, n_fetch=n, rule=squall.Adagrad()),
        batch_size=2,
        replicas=1,
        cluster=squall.InProcess(),
        progress=False,
    )

    assert run.metrics["blocks_refused"] == 2 // n


def test_a_gradient_whose_norm_float16_cannot_hold_is_clipped() -> None:
    model = nn.ParameterDict({"w": torch.zeros(4, dtype=F16)})
    run = squall.fit(
        model,
        torch.zeros(1, 1),
        step=lambda model, batch: (model["w"].float() * 50_000).sum(),
        strategy=squall.Downpour(rule=squall.Sgd(learning_rate=1.0)),
        clip_norm=1.0,
        batch_size=1,
        replicas=1,
        cluster=squall.InProcess(),
        progress=False,
    )

    assert run.model.state_dict()["w"].tolist() == [-0.5] * 4


@pytest.mark.parametrize("shards", [3, 2])
def test_a_resumed_run_is_the_uninterrupted_one(shards: int, tmp_path: Path) -> None:
    """Bit by bit; to rounding on another number of shards, where torch's vector loops have their rests elsewhere."""
    whole = fit(Net(BF16, F16), RULES["adam"][0], shards)

    fit(Net(BF16, F16), RULES["adam"][0], 3, out=tmp_path / "run", steps=11)
    resumed = fit(Net(BF16, F16), RULES["adam"][0], shards, out=tmp_path / "run", resume=True)

    masters, bound = masters_of(whole), 0.0 if shards == 3 else 1e-6
    for name, value in masters_of(resumed).items():
        assert value.dtype == F32
        assert (value - masters[name]).abs().max() <= bound
    expect_equal(resumed, whole.model)


@pytest.mark.parametrize("rule", ["adagrad", "sgd"])
def test_a_recorded_run_is_replayed_with_numpy_alone(rule: str, tmp_path: Path) -> None:
    run = fit(Net(BF16, F16), RULES[rule][0], 2, out=tmp_path / "run", record=True, replicas=3, clip_norm=0.5)

    rows = json.loads((run.path / "pushes" / "layout.json").read_text())
    initial = load_file(run.path / "pushes" / "initial.safetensors")
    got = run.model.state_dict()
    for row in rows:
        size = max(other["stop"] for other in rows if other["slice"] == row["slice"])
        pushes = np.fromfile(run.path / "pushes" / row["file"], dtype=row["dtype"]).reshape(-1, size)
        part = slice(row["tensor_start"], row["tensor_stop"])
        values = initial[row["tensor"]].double().flatten()[part].numpy()
        squares = np.zeros_like(values)
        for push in pushes[:, row["start"] : row["stop"]].astype(np.float64):
            squares += push**2
            step = push / (np.sqrt(squares) + 1e-10) if rule == "adagrad" else push
            values = values - 0.1 * step
        theirs = got[row["tensor"]].flatten()[part]
        assert np.abs(theirs.double().numpy() - values).max() <= np.abs(values).max() * 2.0**-8

    assert max(replay(run.path).values()) <= 1e-5


# Autocast --------------------------------------------------------------------------------------------------


def under_autocast(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    for _, x, y in minibatches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


@pytest.mark.parametrize("cluster", ["in process", pytest.param("local", marks=pytest.mark.processes)])
def test_precision_bfloat16_is_a_plain_loop_under_autocast(
    cluster: str, request: pytest.FixtureRequest
) -> None:
    where = squall.InProcess() if cluster == "in process" else request.getfixturevalue("local")
    run = fit(plain(), RULES["adagrad"][0], 3, precision="bfloat16", test=data(), cluster=where)

    model = plain()
    under_autocast(model, torch.optim.Adagrad(model.parameters(), lr=0.1))

    for name, value in run.model.state_dict().items():
        assert value.dtype == F32
        assert (value - model.state_dict()[name]).abs().max() <= 1e-6
    x, y = data()
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        output = model(x)
        loss = nn.functional.cross_entropy(output, y).item()
    assert run.metrics["test_loss"] == pytest.approx(loss, abs=1e-6)
    assert torch.equal(run.predict(x), output.float())
    assert torch.equal(squall.load(run.path, plain()).predict(x), output.float())
    with torch.no_grad():
        assert not torch.equal(output.float(), model(x))  # so that the test can fail


@pytest.mark.parametrize("precision", ["float16", "float32", "bf16-mixed", 16, torch.bfloat16])
def test_any_other_precision_is_refused_with_what_is_possible(precision: Any) -> None:
    with pytest.raises(squall.ConfigError, match=r'expected None .* or "bfloat16" .*, but got'):
        squall.Job(plain(), None, precision=precision)
