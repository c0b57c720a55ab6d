"""Figures of what staleness costs: `python -m benchmarks.simulated NAME`, one name an experiment.

Each prints one JSON object, keeps it in ``benchmarks/results/``, and draws its figure into ``docs/figures/``; `page`
then fills the tables of ``docs/staleness.md``. Seconds are virtual, but for those of `scale` and `real`.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.simulated import buffers, page, real, replicas, rules, scale, trouble

EXPERIMENTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "cost": lambda asked: replicas.cost(asked.fsdd),
    "overlap": lambda asked: replicas.overlap(),
    "bound": lambda asked: replicas.bound(),
    "rules": lambda asked: rules.rules(),
    "trouble": lambda asked: trouble.trouble(),
    "buffers": lambda asked: buffers.buffers(),
    "real": lambda asked: real.real(),
    "scale": lambda asked: scale.scale(),
    "page": lambda asked: page.fill(),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__)
    parser.add_argument("name", choices=EXPERIMENTS)
    parser.add_argument("--fsdd", type=Path, help="fsdd_train.zip, for the FSDD half of `cost`")
    asked = parser.parse_args()
    print(json.dumps(EXPERIMENTS[asked.name](asked)))


if __name__ == "__main__":
    main()
