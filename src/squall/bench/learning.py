"""What is learned until a held-out loss is reached: data sets, a plain loop that learns them, and the time that it took."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import squall
from squall.data import Source
from squall.errors import ConfigError, DivergedError
from squall.model.deferred import ModelInParts
from squall.recipes import digits
from squall.rules.rule import Rule
from squall.training.recipe import find

TEST_BATCH = 256
FASHION_EXAMPLES = 60_000
"""Of the whole training set; a part of it reaches no loss as low."""

RULES: Mapping[str, tuple[Callable[..., Rule], Callable[..., torch.optim.Optimizer]]] = {
    "Adagrad": (squall.Adagrad, torch.optim.Adagrad),
    "Sgd": (squall.Sgd, torch.optim.SGD),
}
"""Name -> the rule of the shards, and the same for a plain loop."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What is to be learned.

    Attributes:
        model: makes the network.
        train, test: (inputs, labels).
        target: cross-entropy on the test set that ends the time.
        epochs: at which a run gives up.
        evaluate_every: epochs between evaluations.
    """

    model: Callable[[], nn.Module]
    train: Source
    test: Source
    batch_size: int
    target: float
    epochs: int
    evaluate_every: float


def lesson(name: str, files: Iterable[str] = (), *, quick: bool = False) -> Lesson:
    """The lesson of a data set: "digits", "fashion" or "fsdd".

    Args:
        files: of "fashion", in this order: training images and labels, test images and labels; of "fsdd", the zip file
            of the recordings, anywhere among them.
        quick: ask for little, soon.

    Raises:
        ConfigError: the data set is not there.
    """
    if name == "digits":
        train, test = squall.data.digits()
        target, epochs, every = (1.5, 4, 0.25) if quick else (0.25, 20, 0.5)
        return Lesson(
            model=digits.network,
            train=train,
            test=test,
            batch_size=digits.BATCH_SIZE,
            target=target,
            epochs=epochs,
            evaluate_every=every,
        )
    recordings = [file for file in files if file.endswith(".zip")]
    if name == "fashion":
        return _fashion([file for file in files if file not in recordings])
    return _of_recipe(name, [("data", file) for file in recordings[:1]])


def _fashion(files: list[str]) -> Lesson:
    if len(files) != 4:
        raise ConfigError(
            subject="--data",
            expected="the four idx files of Fashion-MNIST: training images and labels, test images and labels",
            got=f"{len(files)} files",
        )
    train = squall.data.read(files[0], files[1], classes=10)
    is_part = train.num_examples < FASHION_EXAMPLES
    return Lesson(
        model=_flat_network,
        train=train,
        test=squall.data.read(files[2], files[3], classes=10),
        batch_size=64,
        target=0.5 if is_part else 0.38,
        epochs=40 if is_part else 8,
        evaluate_every=0.5,
    )


def _of_recipe(name: str, settings: Sequence[tuple[str, str]]) -> Lesson:
    """What a recipe that comes with Squall trains; its loss must be cross-entropy."""
    job = find(name, settings)
    assert not isinstance(job.model, ModelInParts)
    batch_size = job.batch_size
    train, test = (squall.data.as_source(data, batch_size).source for data in (job.train, job.test))
    return Lesson(
        model=job.model,
        train=train,
        test=test,
        batch_size=batch_size,
        target=1.3,
        epochs=8,
        evaluate_every=0.5,
    )


def _flat_network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *digits.network().children())


def plain_loop(settings: dict[str, Any]) -> dict[str, Any]:
    """Train in an ordinary loop until the loss is reached, on the same minibatches in the same order as Squall.

    Args:
        settings: "lesson", the arguments of `lesson`; "seed"; "rule", a name of `RULES`; "rate"; "threads"; and, unless
            it may take for ever, "limit_s", after which it gives up [seconds].

    Returns:
        "seconds" from the first step on, evaluations included; "reached", whether the loss was.
    """
    torch.set_num_threads(settings["threads"])
    task = lesson(**settings["lesson"])
    torch.manual_seed(settings["seed"])
    model = task.model()
    _, optimizer_of = RULES[settings["rule"]]
    optimizer = optimizer_of(model.parameters(), lr=settings["rate"], fused=True)
    count = task.train.num_examples
    every, seen, due = task.evaluate_every * count, 0, task.evaluate_every * count
    limit_s = settings.get("limit_s", math.inf)
    began = time.perf_counter()
    for epoch in range(task.epochs):
        order = squall.data.order(count, settings["seed"], epoch)
        for start in range(0, count, task.batch_size):
            x, y = task.train.batch(order[start : start + task.batch_size])
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen += len(y)
            if seen >= due:
                due += every
                reached = _test_loss(model, task.test) <= task.target
                seconds = time.perf_counter() - began
                if reached or seconds > limit_s:
                    return {"seconds": seconds, "reached": reached}
    return {"seconds": time.perf_counter() - began, "reached": False}


@torch.no_grad()
def _test_loss(model: nn.Module, test: Source) -> float:
    model.eval()
    total = 0.0
    for start in range(0, test.num_examples, TEST_BATCH):
        x, y = test.batch(np.arange(start, min(start + TEST_BATCH, test.num_examples)))
        total += cross_entropy(model(x), y, reduction="sum").item()
    model.train()
    return total / test.num_examples


def downpour(
    cluster: Any,
    task: Lesson,
    folder: Path,
    *,
    seed: int,
    rule: str,
    rate: float,
    every: int,
    overlap: bool,
    limit_s: float = math.inf,
) -> tuple[float, bool]:
    """Train with two replicas until the loss is reached.

    Args:
        rule: a name of `RULES`.
        limit_s: give up after so long [seconds].

    Returns:
        seconds from when the first replica was there, evaluations included, and whether the loss was reached. A run that
        diverged never reached it, however long it might have gone on.
    """
    rule_of, _ = RULES[rule]
    handle = squall.start(
        task.model,
        task.train,
        test=task.test,
        strategy=squall.Downpour(
            n_fetch=every, n_push=every, overlap=overlap, rule=rule_of(learning_rate=rate)
        ),
        replicas=2,
        batch_size=task.batch_size,
        epochs=task.epochs,
        evaluate_every=task.evaluate_every,
        threads=1,
        seed=seed,
        cluster=cluster,
        out=folder / "run",
        progress=False,
    )
    began = math.inf
    for event in handle.events():
        if isinstance(event, squall.Joined):
            began = min(began, event.time_s)
        if not isinstance(event, squall.Evaluated):
            continue
        if event.metrics["test_loss"] <= task.target or event.time_s - began > limit_s:
            handle.stop()
    try:
        return time_to(handle.result().history, task.target)
    except DivergedError:
        return math.inf, False


def time_to(history: Iterable[Mapping[str, Any]], target: float) -> tuple[float, bool]:
    """When a loss was first seen, from when the first replica joined; of one that never was, the time of the last event.

    >>> time_to([{"event": "Joined", "role": "replica1.0", "time_s": 0.5},
    ...          {"event": "Evaluated", "time_s": 2.0, "metrics": {"test_loss": 0.2}}], target=0.3)
    (1.5, True)
    """
    began: float | None = None
    last = 0.0
    for record in history:
        last = record["time_s"]
        if began is None and record["event"] == "Joined" and record["role"].startswith("replica"):
            began = last
        if record["event"] == "Evaluated" and record["metrics"]["test_loss"] <= target:
            return last - (began or 0.0), True
    return last - (began or 0.0), False
