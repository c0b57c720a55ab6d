"""Do a recorded run's updates again, in float64, and see whether the shards did them right.

It shares no code with the shards: the update rules are written out here once more, in NumPy. What it reads is the
run directory: `pushes/` and the ledger.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from squall.errors import ConfigError, CorruptError
from squall.observe.ledger import Ledger, Outcome, read_ledger
from squall.training.directory import RunDirectory

Vector = NDArray[np.float64]
Update = Callable[[Vector, Vector], None]
"""Changes parameters, shape (S,), by one gradient, shape (S,)."""


def replay(path: Path) -> dict[str, float]:
    """Apply the recorded pushes in the ledger's order, and compare with the model that the run left.

    Returns:
        tensor name to the largest absolute difference of an element.
    Raises:
        ConfigError: the run did not record, is not over, or has a rule that cannot be replayed.
        CorruptError: pushes and ledger do not fit one another.
    Note:
        What a push had no gradient for is recorded as zeros; with a weight decay or a decay of the rate a tensor
        that some pushes left out is replayed as if its gradient had been zero.
    """
    directory = RunDirectory.open(path)
    told = directory.read_json(directory.job)
    if not told.get("record") or not (directory.pushes / "layout.json").exists():
        raise ConfigError(
            subject=f"the run {str(path)!r}",
            expected="recorded pushes",
            got="a run that did not record",
            remedy="Train with --set record=True, or squall.fit(..., record=True).",
        )
    if not directory.model.exists():
        raise ConfigError(
            subject=f"the run {str(path)!r}",
            expected="a run that is over",
            got="no model to compare with",
            remedy=f"Finish it first: squall resume {path}.",
        )
    rule = told["strategy"]["rule"]
    make_update(rule)  # refuses before anything large is read
    layout = directory.read_json(directory.pushes / "layout.json")
    tensors = {
        name: value.astype(np.float64).reshape(-1) for name, value in _read(_initial(directory)).items()
    }
    ledger = read_ledger(directory.ledger)
    for number in sorted({row["slice"] for row in layout}):
        rows = [row for row in layout if row["slice"] == number]
        _replay_slice(directory, number, rows, tensors, rule, ledger)
    trained = _read(directory.model)
    names = {row["tensor"] for row in layout}
    return {name: _distance(tensors[name], trained[name]) for name in sorted(names)}


def make_update(rule: dict[str, Any]) -> Update:
    """The rule that a run's description names, with fresh state.

    >>> params = np.array([1.0])
    >>> update = make_update({"rule": "Sgd", "learning_rate": 0.5, "weight_decay": 0.0})
    >>> update(params, np.array([1.0]))
    >>> params
    array([0.5])
    """
    if not isinstance(rule.get("learning_rate"), int | float):
        raise ConfigError(
            subject="replay",
            expected="a learning rate that is a number",
            got=f"the schedule {rule.get('learning_rate')!r}",
            remedy="Only its name is in the run directory: replay it in a script that has the function.",
        )
    match rule["rule"]:
        case "Sgd":
            return _sgd(rule)
        case "Adagrad":
            return _adagrad(rule)
        case name:
            raise ConfigError(subject="replay", expected="the rule Sgd or Adagrad", got=repr(name))


def _sgd(rule: dict[str, Any]) -> Update:
    def update(params: Vector, grad: Vector) -> None:
        params -= rule["learning_rate"] * (grad + rule["weight_decay"] * params)

    return update


def _adagrad(rule: dict[str, Any]) -> Update:
    total: Vector | float = float(rule["initial_accumulator_value"])
    step = 0

    def update(params: Vector, grad: Vector) -> None:
        nonlocal total, step
        step += 1
        grad = grad + rule["weight_decay"] * params
        total = total + grad * grad
        rate = rule["learning_rate"] / (1 + (step - 1) * rule["lr_decay"])
        with np.errstate(invalid="ignore", divide="ignore"):
            change = rate * grad / (np.sqrt(total) + rule["eps"])
        params -= np.where(grad == 0, 0.0, change)

    return update


def _replay_slice(
    directory: RunDirectory,
    number: int,
    rows: list[dict[str, Any]],
    tensors: dict[str, Vector],
    rule: dict[str, Any],
    ledger: Ledger,
) -> None:
    """Bring the tensors' parts that lie in one slice from their first to their last values."""
    size = max(row["stop"] for row in rows)
    params = np.zeros(size)
    for row in rows:
        params[row["start"] : row["stop"]] = tensors[row["tensor"]][row["tensor_start"] : row["tensor_stop"]]
    update = make_update(rule)
    for grad in _pushes(directory, number, size, np.dtype(rows[0]["dtype"]), ledger):
        update(params, grad)
    for row in rows:
        tensors[row["tensor"]][row["tensor_start"] : row["tensor_stop"]] = params[row["start"] : row["stop"]]


def _pushes(
    directory: RunDirectory, number: int, size: int, dtype: np.dtype[Any], ledger: Ledger
) -> Iterator[Vector]:
    """A slice's applied gradients in the ledger's order: the one that made version v lies at v - 1."""
    file = directory.pushes / f"slice{number}.bin"
    applied = ledger[(ledger["slice"] == number) & (ledger["outcome"] == str(Outcome.APPLIED))]
    versions = np.sort(applied["version"])
    num_bytes = file.stat().st_size if file.exists() else 0
    num_kept, rest = divmod(num_bytes, size * dtype.itemsize)
    if rest or num_kept != len(versions) or not np.array_equal(versions, np.arange(1, num_kept + 1)):
        raise CorruptError(
            subject=str(file),
            expected=f"one push for each of the ledger's {len(versions):,} versions of slice {number}",
            got=f"{num_kept:,} pushes and {rest} bytes",
            remedy="A run that was killed and resumed from an older checkpoint cannot be replayed.",
        )
    if not num_kept:
        return
    kept = np.memmap(file, dtype.newbyteorder("<"), mode="r", shape=(num_kept, size))
    for version in versions.tolist():
        yield kept[version - 1].astype(np.float64)


def _initial(directory: RunDirectory) -> Path:
    return directory.pushes / "initial.safetensors"


def _read(file: Path) -> dict[str, NDArray[Any]]:
    try:
        return load_file(file)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CorruptError(
            subject=str(file), expected="tensors of a run", got=f"{type(error).__name__}: {error}"
        ) from error


def _distance(ours: Vector, theirs: NDArray[Any]) -> float:
    if not ours.size:
        return 0.0
    return float(np.abs(ours - theirs.astype(np.float64).reshape(-1)).max())
