"""Fills the tables of ``docs/staleness.md`` from the newest results."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.simulated.common import ROOT, newest

PAGE = ROOT / "docs" / "staleness.md"
Row = Mapping[str, Any]
Cells = Mapping[str, Callable[[Row], Any]]


def fill() -> dict[str, Any]:
    PAGE.write_text(filled(PAGE.read_text()))
    return {"page": PAGE.relative_to(ROOT).as_posix(), "tables": sorted(TABLES)}


def filled(text: str) -> str:
    """The page with each table between its marks, ``<!-- NAME -->`` and ``<!-- end -->``, written anew."""
    return re.sub(
        r"<!-- (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- {found[1]} -->\n{table(found[1])}<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def table(name: str) -> str:
    told = newest(name)
    cells = TABLES[name]
    lines = [list(cells), ["---"] * len(cells)]
    lines += [[_text(cell(row)) for cell in cells.values()] for row in told["rows"]]
    body = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{body}\n{told['date']}, commit {told['commit']}: `python -m benchmarks.simulated {name}`\n"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return "never" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _field(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def _percent(name: str) -> Callable[[Row], str]:
    return lambda row: "diverged" if row[name] is None else f"{100 * row[name]:.1f} %"


def _percents(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{100 * value:.1f}" for value in values)


TABLES: dict[str, Cells] = {
    "cost": {
        "task": _field("task"),
        "replicas": _field("replicas"),
        "n - 1": _field("staleness_expected"),
        "mean staleness": _field("staleness_mean"),
        "deviation": _field("staleness_deviation"),
        "most": _field("staleness_most"),
        "test loss": _field("test_loss"),
        "test accuracy": _percent("test_accuracy"),
        "virtual s": _field("virtual_s"),
    },
    "overlap": {
        "replicas": _field("replicas"),
        "overlap": lambda row: "yes" if row["overlap"] else "no",
        "expected": _field("staleness_expected"),
        "mean staleness": _field("staleness_mean"),
        "most": _field("staleness_most"),
        "pushes": _field("pushes"),
    },
    "bound": {
        "replicas": _field("replicas"),
        "max_staleness": lambda row: "none" if row["max_staleness"] is None else str(row["max_staleness"]),
        "stalest push": _field("staleness_most"),
        "mean staleness": _field("staleness_mean"),
        "of the slow one": _field("staleness_of_the_slow_one"),
        "blocks": _field("blocks"),
        "of the slow one's": _field("blocks_of_the_slow_one"),
        "minibatches / virtual s": _field("minibatches_per_s"),
    },
    "rules": {
        "rule, at its best rate": _field("arm"),
        "virtual s to the target, by seed": _field("times_s"),
        "in time": lambda row: f"{row['in_time']} of {row['seeds']}",
        "accuracy at the end, by seed [%]": lambda row: _percents(row["final_accuracy"]),
    },
    "trouble": {
        "replicas": _field("replicas"),
        "one is": lambda row: "ten times slower" if row["one_is"] == "slow" else "dead",
        "minibatches / virtual s": _field("minibatches_per_s"),
        "all sound": _field("minibatches_per_s_of_all"),
        "lost": _percent("loss"),
        "its share of the work": _percent("loss_expected"),
    },
    "buffers": {
        "replicas": _field("replicas"),
        "test accuracy, by seed [%]": lambda row: _percents(row["accuracies"]),
        "mean": _percent("mean"),
    },
    "real": {
        "replicas": _field("replicas"),
        "staleness, real (twice)": lambda row: [row["staleness_real"], row["staleness_real_again"]],
        "simulated": _field("staleness_simulated"),
        "its deviation, real": _field("deviation_real"),
        "deviation, simulated": _field("deviation_simulated"),
        "test loss, real": _field("loss_real"),
        "test loss, simulated": _field("loss_simulated"),
        "mean distance of the curves": _field("loss_difference_mean"),
        "of two real runs": _field("loss_difference_of_two_real"),
    },
    "scale": {
        "replicas": _field("replicas"),
        "shards": _field("shards"),
        "minibatches": _field("minibatches"),
        "pushes settled": _field("pushes_settled"),
        "real s": _field("wall_s"),
        "processor s": _field("processor_s"),
        "peak memory [MB]": _field("peak_MB"),
        "virtual s": _field("virtual_s"),
        "mean staleness": _field("staleness_mean"),
    },
}
