"""Measuring figures one after the other, each with the machine's facts and whether it was quiet, and keeping them."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from squall.bench.catalogue import figure
from squall.bench.figure import Settings
from squall.bench.place import open_place
from squall.bench.quiet import SAMPLE_S, listen
from squall.doctor.examination import measured
from squall.doctor.facts import look
from squall.observe.files import write_atomic

QUICK_SAMPLE_S = 0.05


def environment() -> dict[str, Any]:
    """What figures stand on: the facts and speeds that `squall doctor` tells."""
    speeds = measured()
    return {
        "facts": asdict(look()),
        "speeds": {"not measured": speeds} if isinstance(speeds, str) else asdict(speeds),
    }


def figures(names: Sequence[str], settings: Settings) -> Iterator[dict[str, Any]]:
    """Measure figures, each when it is asked for.

    Yields:
        as docs/benchmarks.md says: "figure", "at" (UTC), "quick", "rounds", "wall_s", "series", "ratios", "sizes",
        "notes", "quiet" (before and after, with its "warning"), and "environment".
    """
    sample_s = QUICK_SAMPLE_S if settings.quick else SAMPLE_S
    before = listen(is_first=True, sample_s=sample_s)
    here = environment()
    with open_place() as place:
        for name in names:
            began = time.monotonic()
            told: dict[str, Any] = {"figure": name, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            report = figure(name).measure(settings, place)
            told |= {"quick": settings.quick, "rounds": settings.rounds, "wall_s": time.monotonic() - began}
            after = listen(is_first=False, sample_s=sample_s)
            quiet = {
                "warning": before.warning or after.warning,
                "before": before.as_json(),
                "after": after.as_json(),
            }
            yield {**told, **report.as_json(judged=not settings.quick), "quiet": quiet, "environment": here}
            before = after


def keep(told: dict[str, Any], folder: Path) -> Path:
    """Write a figure to a file of that folder, named by its day and its name; one of the same day is replaced."""
    os.makedirs(folder, exist_ok=True)
    path = folder / f"{told['at'][:10]}-{told['figure']}{'-quick' if told['quick'] else ''}.json"
    write_atomic(path, (json.dumps(told, indent=2) + "\n").encode())
    return path
