"""How soon `squall train digits` pushes for the first time, against the time of `import torch, torch.optim` alone.

The promise (docs/contract.md): at most a second later.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from squall.bench.figure import Ratio, Report, Settings, series_of
from squall.bench.place import Place
from squall.bench.rounds import alternate
from squall.observe.ledger import read_ledger

MOST_S = 1.0


def measure(settings: Settings, place: Place) -> Report:
    """Measure; see the top of this file. There is nothing smaller to be quick with, and nothing may be warm."""
    rounds = alternate([import_alone, first_push], settings.rounds)
    over = tuple(one["first push"] - one["import alone"] for one in rounds)
    return Report(
        series=series_of(rounds, ("import alone", "first push"), "s"),
        ratios={"first push - import alone, in s": Ratio(values=over, target=MOST_S, at_most=True)},
    )


def import_alone() -> Mapping[str, float]:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch.optim"], check=True)
    return {"import alone": time.monotonic() - began}


def first_push() -> Mapping[str, float]:
    """From the start of the command to the first applied push, by the ledger."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        began = time.time()
        subprocess.run(
            [sys.executable, "-m", "squall", "train", "digits", "--set", "epochs=1", "--out", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # The run's clock ends when its result is written, which is the latest that both clocks know.
        result = path / "result.json"
        run_began: float = result.stat().st_mtime - json.loads(result.read_text())["wall_s"]
        first: float = read_ledger(path / "ledger")["time_s"].min().item()
        return {"first push": run_began - began + first}
