"""What a run says when it is over: how good, how fast, what was lost, and what to type next."""

import math
import numbers
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from squall.observe.units import human_bytes, human_rate, human_seconds, one_line


def closing_summary(
    metrics: Mapping[str, Any], path: Path, *, finished: bool = True, plot: Path | None = None
) -> list[str]:
    """Sum a run up in a few lines; what `metrics` does not hold is left out.

    Args:
        metrics: of the run. Read here: ``why`` and ``error`` (text); ``wall_s`` [seconds]; ``train_loss``; every
            name that begins with ``test_``; ``samples_per_second``; ``times_one_replica`` (speed over that of
            one replica); ``partition_bytes`` and ``partition_bytes_planned`` [bytes a minibatch]; ``staleness_mean`` [updates]; ``blocks_redone`` and ``blocks_refused``.
        path: the run's directory.
        finished: whether the run did all it was asked for; if not, the next command is to resume it.
        plot: picture of the loss curve, if there is one.

    >>> for line in closing_summary({"why": "all steps are done", "wall_s": 12.3, "test_accuracy": 0.9312}, Path("runs/a b")):
    ...     print(line)
    ended          all steps are done, after 12.3 s
    test accuracy  93.12 %
    run            runs/a b
    next           squall evaluate 'runs/a b'
    """
    rows = [
        ("ended", _ending(metrics)),
        ("error", one_line(str(metrics.get("error") or ""))),
        *((name.replace("_", " "), _value(name, metrics[name])) for name in _measured(metrics)),
        ("speed", _speed(metrics)),
        ("partitions", _partitions(metrics)),
        ("staleness", _staleness(metrics.get("staleness_mean"))),
        ("blocks", _blocks(metrics)),
        ("run", str(path)),
        ("loss curve", "" if plot is None else str(plot)),
        ("next", f"squall {_next(metrics, finished)} {shlex.quote(str(path))}"),
    ]
    rows = [(name, words) for name, words in rows if words]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {words}" for name, words in rows]


def _next(metrics: Mapping[str, Any], finished: bool) -> str:
    """The command that helps now: without a test set there is nothing to evaluate on."""
    if not finished:
        return "resume"
    return "evaluate" if any(name.startswith("test_") for name in metrics) else "ledger"


def _ending(metrics: Mapping[str, Any]) -> str:
    why = one_line(str(metrics.get("why") or "over"))
    return f"{why}, after {human_seconds(metrics['wall_s'])}" if _is_number(metrics.get("wall_s")) else why


def _measured(metrics: Mapping[str, Any]) -> list[str]:
    """Names of what was measured: accuracy first, then the rest of the test set's, then the training loss."""
    tests = sorted(name for name in metrics if name.startswith("test_"))
    tests.sort(key=lambda name: "accuracy" not in name)
    return tests + [name for name in ("train_loss",) if name in metrics]


def _value(name: str, value: Any) -> str:
    """A measurement as text; a share as per cent; nothing for one that is not known."""
    if not _is_number(value):
        return ""
    return f"{100 * value:.2f} %" if "accuracy" in name else f"{value:.4g}"


def _speed(metrics: Mapping[str, Any]) -> str:
    speed, times = metrics.get("samples_per_second"), metrics.get("times_one_replica")
    words = f"{human_rate(speed)} examples per second" if _is_number(speed) else ""
    if words and _is_number(times):
        words += f", {times:.2f} times one replica"
    return words


def _partitions(metrics: Mapping[str, Any]) -> str:
    sent, planned = metrics.get("partition_bytes"), metrics.get("partition_bytes_planned")
    if not _is_number(sent) or not _is_number(planned):
        return ""
    return f"{human_bytes(sent)} between them a minibatch, {human_bytes(planned)} as planned"


def _staleness(mean: Any) -> str:
    return f"{mean:.2f} updates on average" if _is_number(mean) else ""


def _blocks(metrics: Mapping[str, Any]) -> str:
    counts = {"redone": metrics.get("blocks_redone"), "refused": metrics.get("blocks_refused")}
    return ", ".join(f"{count:,} {word}" for word, count in counts.items() if count is not None)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and math.isfinite(value)
