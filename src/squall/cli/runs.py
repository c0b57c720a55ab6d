"""Commands about a run that is over: measure its model, hand its model out, add its ledger up."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from squall.errors import ConfigError
from squall.observe.ledger import Ledger, Outcome, read_ledger
from squall.observe.tally import summarise
from squall.observe.units import human_rate
from squall.training.directory import RunDirectory


def evaluate(path: Path) -> dict[str, Any]:
    """Measure a run's model on the test set of its recipe.

    Returns:
        names as in ``{"test_loss": 0.1, "test_accuracy": 0.97}``.
    Raises:
        ConfigError: the run is not of a recipe, or the recipe has no test set.
        CorruptError: the model's file is damaged.
    """
    directory = RunDirectory.open(path)
    told = directory.read_json(directory.job).get("recipe")
    if told is None:
        raise ConfigError(
            subject=f"the run {str(path)!r}",
            expected="a run of a recipe",
            got="one that a script began, whose model and test set only the script knows",
            remedy="Open it there: squall.load(DIR, model=Net()).",
        )
    _expect_model(directory)

    from squall.training.prepare import prepare
    from squall.training.recipe import job_of
    from squall.training.run import Run

    job = job_of(told)
    evaluation = prepare(job).evaluation
    if evaluation is None:
        raise ConfigError(
            subject=f"the recipe {told['name']!r}",
            expected="a test set to measure on",
            got="none",
            remedy="Give its Job a test=.",
        )
    return evaluation.of_model(Run(directory, job).model)


def export(path: Path, file: Path) -> None:
    """Write a run's model, as its state dict, to a file of its own.

    Args:
        file: must end in ``.safetensors``; replaced if it is there.

    Raises:
        ConfigError: another ending, no such folder, or the run has no model.
        CorruptError: the model's file is damaged.
    """
    if file.suffix != ".safetensors":
        raise ConfigError(
            subject=f"the file {str(file)!r}",
            expected="a name that ends in .safetensors",
            got=repr(file.suffix),
            remedy="Squall writes no pickled files; safetensors.torch.load_file reads these.",
        )
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            subject=f"the file {str(file)!r}", expected="a folder that exists", got=repr(str(file.parent))
        )
    directory = RunDirectory.open(path)
    _expect_model(directory)

    from squall.shard.store import write_tensors
    from squall.training.run import Run

    write_tensors(file, Run(directory, None).state_dict())


def _expect_model(directory: RunDirectory) -> None:
    if not directory.model.exists():
        raise ConfigError(
            subject=f"the run {str(directory.path)!r}",
            expected="one that left a model",
            got="no model.safetensors in it",
            remedy=f"Finish it first: squall resume {directory.path}.",
        )


# The ledger -------------------------------------------------------------------------------------------------


def tally(path: Path) -> dict[str, Any]:
    """Add a run's ledger up.

    Returns:
        the fields of `squall.observe.tally.LedgerSummary`, and "slices": for each its shard, its version and its
        number of rows by outcome. What is not known (a mean over nothing) is None.
    """
    ledger = read_ledger(RunDirectory.open(path).ledger)
    told = {**asdict(summarise(ledger)), "slices": [_of_slice(rows) for rows in _by_slice(ledger)]}
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in told.items()
    }


def tally_lines(told: dict[str, Any]) -> list[str]:
    """The same for people: totals, then a table of replicas and one of slices."""
    mean, variance = told["staleness_mean"], told["staleness_variance"]
    totals = [
        f"blocks     {told['applied']:,} applied, {told['redone']:,} redone, {told['repeated']:,} repeated, "
        f"{told['not_finite']:,} not finite, {told['refused']:,} refused, {told['rolled_back']:,} rolled back",
        f"speed      {human_rate(told['samples_per_second'])} examples per second",
        "staleness  " + ("unknown" if mean is None else f"{mean:.2f} updates, variance {variance:.2f}"),
    ]
    replicas = [
        (
            row["replica"],
            f"{row['blocks']:,}",
            f"{row['minibatches']:,}",
            f"{row['examples']:,}",
            f"{row['staleness_mean']:.2f}",
        )
        for row in told["replicas"]
    ]
    slices = [
        (row["slice"], row["shard"], f"{row['version']:,}", *(f"{row[str(name)]:,}" for name in Outcome))
        for row in told["slices"]
    ]
    return [
        *totals,
        "",
        *table(("replica", "blocks", "minibatches", "examples", "staleness"), replicas),
        "",
        *table(("slice", "shard", "version", *(str(name) for name in Outcome)), slices),
    ]


def _by_slice(ledger: Ledger) -> Iterable[Ledger]:
    for number in np.unique(ledger["slice"]).tolist():
        yield ledger[ledger["slice"] == number]


def _of_slice(rows: Ledger) -> dict[str, int]:
    return {
        "slice": int(rows["slice"][0]),
        "shard": int(rows["shard"][-1]),
        "version": int(rows["version"].max()),
        **{str(name): int((rows["outcome"] == str(name)).sum()) for name in Outcome},
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns under their heads, right-aligned, two spaces apart.

    >>> table(("slice", "version"), [(0, "1,000"), (10, "7")])
    ['slice  version', '    0    1,000', '   10        7']
    """
    cells = [heads, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(heads))]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]


def as_json(value: dict[str, Any], path: Path) -> str:
    """One line for ``--json``."""
    return json.dumps({**value, "path": str(path.absolute())})
