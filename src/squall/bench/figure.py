"""The nouns of a benchmark: what was asked for, what was measured round by round, and the ratios that come of it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Round: TypeAlias = Mapping[str, float]
"""What one round measured: name to value."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for.

    Attributes:
        rounds: how often each side is measured.
        quick: whether to use small sizes, which show that a figure works and nothing else.
        data: files that a figure may read, as in the idx files of Fashion-MNIST.
    """

    rounds: int = 5
    quick: bool = False
    data: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Series:
    """One side's values, a round each.

    Attributes:
        values: in the order of the rounds.
        unit: as in "examples/s", "s" or "bytes".
    """

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One comparison, a round each: both values are of the same round, so that a busy moment is one for both.

    Attributes:
        values: in the order of the rounds.
        target: the bound that the median is to keep; None: it stands beside others for comparison.
        at_most: whether the target is an upper bound.

    >>> Ratio(values=(1.0, 1.3, 1.1), target=1.2).is_met, Ratio(values=(1.1,), target=1.2, at_most=True).is_met
    (False, True)
    """

    values: tuple[float, ...]
    target: float | None = None
    at_most: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the target; None without one."""
        if self.target is None:
            return None
        return self.median <= self.target if self.at_most else self.median >= self.target


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a figure came to.

    Attributes:
        series: each side's values by name.
        ratios: the comparisons by name.
        sizes: of what was measured: networks, batch sizes, steps.
        notes: what a reader has to know, as in what was left out and why.
    """

    series: Mapping[str, Series]
    ratios: Mapping[str, Ratio]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def as_json(self, *, judged: bool = True) -> dict[str, Any]:
        """Everything as what `json.dumps` takes, medians beside all values; None where there is no number, as for a run that diverged.

        Args:
            judged: whether to say which targets are met; toys cannot meet any.
        """
        return {
            "sizes": dict(self.sizes),
            "series": {
                name: {
                    "unit": one.unit,
                    "median": _known(one.median),
                    "values": [_known(value) for value in one.values],
                }
                for name, one in self.series.items()
            },
            "ratios": {
                name: {
                    "median": _known(one.median),
                    "lowest": _known(min(one.values)),
                    "highest": _known(max(one.values)),
                    "values": [_known(value) for value in one.values],
                    "target": one.target,
                    "target_is": "at most" if one.at_most else "at least",
                    "met": one.is_met if judged else None,
                }
                for name, one in self.ratios.items()
            },
            "notes": list(self.notes),
        }


def _known(value: float) -> float | None:
    """JSON knows neither infinity nor what is no number."""
    return value if math.isfinite(value) else None


def series_of(rounds: Sequence[Round], names: Sequence[str], unit: str) -> dict[str, Series]:
    """The values of some names, over all rounds."""
    return {name: Series(values=tuple(one[name] for one in rounds), unit=unit) for name in names}


def ratio_of(
    rounds: Sequence[Round], above: str, below: str, *, target: float | None = None, at_most: bool = False
) -> Ratio:
    """One name's value over another's, round by round.

    >>> ratio_of([{"a": 3.0, "b": 2.0}, {"a": 1.0, "b": 1.0}], "a", "b").values
    (1.5, 1.0)
    """
    # What took for ever is not faster than what did, too.
    values = tuple(0.0 if math.isinf(one[below]) else one[above] / one[below] for one in rounds)
    return Ratio(values=values, target=target, at_most=at_most)
