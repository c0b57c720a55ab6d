"""``squall bench``: figures as tables for people, and as JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from squall.bench.catalogue import chosen, described
from squall.errors import ConfigError


def lines() -> list[str]:
    """One line a figure: its name, and what it measures."""
    told = described()
    width = max(map(len, told))
    return [f"{name:<{width}}  {words}" for name, words in told.items()]


def bench(
    names: Sequence[str], *, rounds: int, quick: bool, data: Sequence[Path], out: Path | None, as_json: bool
) -> None:
    """Measure figures and show each as soon as it is there.

    Args:
        names: which; empty for all.
        out: where each is kept as a JSON file; None: nowhere.
        as_json: end standard output with one JSON object, {"figures": [...]}; tables go to standard error then.

    Raises:
        ConfigError: there is no such figure, or no such file; nothing was measured.
    """
    wanted = chosen(list(names))
    for file in data:
        if not file.is_file():
            raise ConfigError(subject="--data", expected="a file", got=repr(str(file)))
    from rich.console import Console

    from squall.bench.figure import Settings
    from squall.bench.session import figures, keep

    console = Console(stderr=as_json)
    done = []
    for told in figures(wanted, Settings(rounds=rounds, quick=quick, data=tuple(data))):
        done.append(told)
        show(told, console)
        if out is not None:
            console.print(f"kept as {keep(told, out)}", soft_wrap=True)
    if as_json:
        print(json.dumps({"figures": done}), flush=True)
    sys.stdout.flush()


def show(told: dict[str, Any], console: Any) -> None:
    """One figure as two tables, what was measured and how it compares, and what a reader has to know."""
    from rich.table import Table

    console.print(f"\n{told['figure']}: {told['rounds']} rounds, {told['wall_s']:.0f} s", style="bold")
    measured = Table("measured", "median", "lowest", "highest", "unit")
    for name, one in told["series"].items():
        values = [one["median"], min(one["values"]), max(one["values"])]
        measured.add_row(name, *map(_number, values), one["unit"])
    compared = Table("compared", "median", "lowest", "highest", "target", "")
    for name, one in told["ratios"].items():
        values = [one["median"], one["lowest"], one["highest"]]
        target = "" if one["target"] is None else f"{one['target_is']} {one['target']:g}"
        compared.add_row(name, *(f"{value:.3f}" for value in values), target, _met(one["met"]))
    console.print(measured)
    if told["ratios"]:
        console.print(compared)
    if told["quick"]:
        console.print("quick: the sizes are toys, and the figures mean nothing")
    for note in (*told["notes"], told["quiet"]["warning"]):
        if note:
            console.print(note, style="yellow", markup=False)


def _met(is_met: bool | None) -> str:
    return "" if is_met is None else "met" if is_met else "not met"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
