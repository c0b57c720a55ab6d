"""``squall plan``: a recipe's model over partitions, told as tables, drawn, or kept in a file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from squall.cli.runs import table
from squall.cli.training import made_by, setting_of
from squall.errors import ConfigError
from squall.model.objective import pair
from squall.observe.units import human_bytes
from squall.partition.model_plan import Plan
from squall.partition.planning import plan as make
from squall.training.prepare import Prepared, build, prepare
from squall.training.recipe import find


def plan(
    request: str,
    settings: Sequence[str],
    partitions: int,
    how: str,
    *,
    svg: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Make a plan for what a recipe trains, and tell it.

    Args:
        request: ``NAME``, ``FILE.py`` or either with ``:FUNCTION``.
        settings: ``"batch_size=32"`` and the like.
        how: as for `squall.plan`; sizes of teams as ``"1,3"``.

    Raises:
        ConfigError: there is no such recipe, or it cannot be cut so.
    """
    pairs = [setting_of(text) for text in settings]
    job = made_by(lambda: find(request, pairs), request)
    prepared = prepare(job)
    model = build(job) if prepared.deferred is None else prepared.model  # one that can be computed
    made = make(model, _inputs(prepared), partitions=partitions, how=_how(how))
    if svg is not None:
        made.svg(svg)
    if out is not None:
        made.save(out)
    if as_json:
        print(json.dumps(_figures(made, svg, out)))
        return
    for line in lines_of(made):
        print(line)
    for name, file in (("picture", svg), ("plan", out)):
        if file is not None:
            print(f"{name}: {file}")


def lines_of(made: Plan) -> list[str]:
    """A plan for people: each partition, each link, and each parameter."""
    told = made.predicted
    assert told is not None
    parts = f" in {told.microbatches} parts" if told.microbatches > 1 else ""
    rows = [
        (
            str(p),
            human_bytes(told.parameter_bytes[p]),
            human_bytes(told.memory_bytes[p]),
            f"{told.busy_s[p] * 1000:.3g} ms",
        )
        for p in range(made.partitions)
    ]
    links = [(f"{a} to {b}", human_bytes(size)) for (a, b), size in sorted(told.links.items())]
    return [
        *str(made).split("\n"),
        "",
        f"predicted: {told.step_s * 1000:.3g} ms for {told.batch} examples{parts}",
        *table(("partition", "parameters", "memory", "computes"), rows),
        *(f"one microbatch, since {reason}" for reason in made.couplings[:3]),
        *(["", *table(("link", "bytes a step"), links)] if links else []),
    ]


def _figures(made: Plan, svg: Path | None, out: Path | None) -> dict[str, Any]:
    assert made.predicted is not None
    return {
        "partitions": made.partitions,
        "how": made.how,
        "predicted": made.predicted.to_json(),
        "svg": svg and str(svg),
        "out": out and str(out),
    }


def _how(text: str) -> str | list[int]:
    if not text.replace(",", "").isdigit():
        return text
    return [int(size) for size in text.split(",") if size]


def _inputs(prepared: Prepared) -> Any:
    """The inputs of the first minibatch."""
    if prepared.job.step is not None:
        raise ConfigError(
            subject="squall plan",
            expected="a recipe with loss=, whose batches are (inputs, targets)",
            got="one with step=",
            remedy="Make the plan in Python: squall.plan(model, example_inputs, partitions=...).",
        )
    batch, _ = prepared.minibatches.load(0, 0)
    inputs, _ = pair(batch)
    return inputs
