"""Do a recorded run's updates again, in float64, and see whether the shards did them right.

It shares no code with the shards: the updates are torch.optim's. What it reads is the run directory, `pushes/` and
the ledger, and for a learning-rate schedule the run's recipe, since a directory can only name a function.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from squall.errors import ConfigError, CorruptError
from squall.observe.ledger import Ledger, Outcome, read_ledger
from squall.training.checkpoint import newest_checkpoint
from squall.training.directory import RunDirectory

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Sgd": torch.optim.SGD,
    "Momentum": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}
"""Ours by torch's: all settings but the learning rate have the same names."""


def replay(path: Path) -> dict[str, float]:
    """Apply the recorded pushes in the ledger's order, and compare with the model that the run left.

    A recorded gradient has zeros for a tensor that the push had none for. So a tensor's part of a slice whose
    recorded gradient is zero throughout is left alone by that push, as if there had been none.

    bfloat16 and float16 tensors are compared with their float32 masters in the newest checkpoint, if these round to
    what the model has.

    Returns:
        tensor name to the largest absolute difference of an element.
    Raises:
        ConfigError: the run did not record, is not over, or has a rule that cannot be replayed.
        CorruptError: pushes and ledger do not fit one another.
    """
    directory = RunDirectory.open(path)
    told = directory.read_json(directory.job)
    _expect_recorded(directory, told)
    rules = rules_of(told)
    layout = directory.read_json(directory.pushes / "layout.json")
    initial = _read(directory.pushes / "initial.safetensors")
    tensors = {row["tensor"]: initial[row["tensor"]].double().reshape(-1) for row in layout}
    ledger = read_ledger(directory.ledger)
    for number in sorted({row["slice"] for row in layout}):
        rows = [row for row in layout if row["slice"] == number]
        _replay_slice(directory, rows, [Segment.of(row, tensors, rules) for row in rows], ledger)
    trained = _trained(directory, tensors)
    return {name: _distance(tensors[name], trained[name]) for name in sorted(tensors)}


def _trained(directory: RunDirectory, names: Iterable[str]) -> dict[str, Tensor]:
    """The values that the run left: the model's, or unrounded where they are masters of the model's."""
    model = _read(directory.model)
    if not any(model[name].dtype in (torch.bfloat16, torch.float16) for name in names):
        return model
    masters = newest_checkpoint(directory.checkpoints).tensors()
    rounded = {name: torch.equal(masters[name].to(model[name].dtype), model[name]) for name in names}
    return {name: masters[name] if rounded[name] else model[name] for name in names}


def _expect_recorded(directory: RunDirectory, told: dict[str, Any]) -> None:
    if not told.get("record") or not (directory.pushes / "layout.json").exists():
        raise ConfigError(
            subject=f"the run {str(directory.path)!r}",
            expected="recorded pushes",
            got="a run that did not record",
            remedy="Train with --set record=True, or squall.fit(..., record=True).",
        )
    if not directory.model.exists():
        raise ConfigError(
            subject=f"the run {str(directory.path)!r}",
            expected="a run that is over",
            got="no model to compare with",
            remedy=f"Finish it first: squall resume {directory.path}.",
        )


# Rules ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One update rule, and whom it is for.

    Attributes:
        pattern: of the tensors' names.
        kind: its class, as in ``"Adagrad"``.
        settings: all but the learning rate.
        rate: from the minibatches applied before to the learning rate.
    """

    pattern: str
    kind: str
    settings: dict[str, Any]
    rate: Callable[[int], float]

    def optimizer(self, params: Tensor) -> torch.optim.Optimizer:
        """torch's, with fresh state, for `params`; written by its steps."""
        return OPTIMIZERS[self.kind]([params], lr=self.rate(0), **self.settings)


def rules_of(told: dict[str, Any]) -> list[Replayed]:
    """The rules that a run's description names, in the order in which a tensor looks for its own.

    >>> told = {"strategy": {"rule": {"rule": "Sgd", "learning_rate": 0.5, "weight_decay": 0.0}}}
    >>> [(rule.pattern, rule.kind, rule.settings, rule.rate(7)) for rule in rules_of(told)]
    [('*', 'Sgd', {'weight_decay': 0.0}, 0.5)]
    """
    described = told["strategy"]["rule"]
    entries = described["entries"] if described["rule"] == "Rules" else [{"pattern": "*"} | described]
    return [_rule(entry, at, told) for at, entry in enumerate(entries)]


def _rule(entry: dict[str, Any], at: int, told: dict[str, Any]) -> Replayed:
    if entry["rule"] not in OPTIMIZERS:
        raise ConfigError(
            subject="replay", expected=f"a rule out of {', '.join(OPTIMIZERS)}", got=entry["rule"]
        )
    settings = {
        name: value for name, value in entry.items() if name not in ("pattern", "rule", "learning_rate")
    }
    return Replayed(
        pattern=entry["pattern"],
        kind=entry["rule"],
        settings=settings,
        rate=_rate(entry["learning_rate"], at, told),
    )


def _rate(described: Any, at: int, told: dict[str, Any]) -> Callable[[int], float]:
    """A number holds always; a schedule is the `at`-th of the recipe's rules."""
    if isinstance(described, int | float):
        return lambda minibatches: described
    if told.get("recipe") is None:
        raise ConfigError(
            subject="replay",
            expected="a learning rate that is a number, or a run of a recipe",
            got=f"the schedule {described!r} of a script",
            remedy="Only its name is in the run directory: replay it in a script that has the function.",
        )
    from squall.training.recipe import job_of

    rule: Any = job_of(told["recipe"]).strategy.rule
    schedule = getattr(rule, "entries", [("*", rule)])[at][1].learning_rate
    assert callable(schedule)
    return schedule  # type: ignore[no-any-return]


# Pushes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A tensor's part of one slice, being trained.

    Attributes:
        params: shape (N,), float64, the very memory of the tensor; written.
        where: its place in the slice.
    """

    params: Tensor
    where: slice
    rule: Replayed
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, row: dict[str, Any], tensors: dict[str, Tensor], rules: list[Replayed]) -> "Segment":
        names = (row["tensor"], *row["aliases"])
        rule = next(rule for rule in rules if any(fnmatchcase(name, rule.pattern) for name in names))
        params = tensors[row["tensor"]][row["tensor_start"] : row["tensor_stop"]]
        return cls(
            params=params,
            where=slice(row["start"], row["stop"]),
            rule=rule,
            optimizer=rule.optimizer(params),
        )

    def update_(self, gradient: Tensor, minibatches: int) -> None:
        """Apply one push; `minibatches` had been applied before."""
        part = gradient[self.where]
        if not part.any():
            return
        self.optimizer.param_groups[0]["lr"] = self.rule.rate(minibatches)
        self.params.grad = part
        self.optimizer.step()


def _replay_slice(
    directory: RunDirectory, rows: list[dict[str, Any]], segments: list[Segment], ledger: Ledger
) -> None:
    """Bring the tensors' parts that lie in one slice from their first to their last values."""
    number, size = rows[0]["slice"], max(row["stop"] for row in rows)
    chosen = (ledger["slice"] == number) & (ledger["outcome"] == str(Outcome.APPLIED))
    applied = np.sort(ledger[chosen], order="version")
    before = np.cumsum(applied["minibatches"]) - applied["minibatches"]
    pushes = _pushes(directory.pushes / f"slice{number}.bin", size, np.dtype(rows[0]["dtype"]), applied)
    for gradient, minibatches in zip(pushes, before.tolist(), strict=True):
        for segment in segments:
            segment.update_(gradient, minibatches)


def _pushes(file: Path, size: int, dtype: np.dtype[Any], applied: Ledger) -> Iterator[Tensor]:
    """A slice's applied gradients in the order of versions: the one that made version v lies at v - 1."""
    num_bytes = file.stat().st_size if file.exists() else 0
    num_kept, rest = divmod(num_bytes, size * dtype.itemsize)
    if rest or not np.array_equal(applied["version"], np.arange(1, num_kept + 1)):
        raise CorruptError(
            subject=str(file),
            expected=f"one push for each of the ledger's {len(applied):,} versions of the slice",
            got=f"{num_kept:,} pushes and {rest} bytes",
            remedy="A run that was killed and resumed from an older checkpoint cannot be replayed.",
        )
    if num_kept:
        kept: NDArray[Any] = np.memmap(file, dtype.newbyteorder("<"), mode="r", shape=(num_kept, size))
        for gradient in kept:
            yield torch.from_numpy(gradient.astype(np.float64))


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CorruptError(
            subject=str(file), expected="tensors of a run", got=f"{type(error).__name__}: {error}"
        ) from error


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs.double().reshape(-1)).abs().max().item() if ours.numel() else 0.0
