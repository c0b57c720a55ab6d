"""How long it takes from `squall train digits` to the first applied push, beside importing torch.

Run: python benchmarks/start.py [RUNS]

Both sides alternate; prints one JSON object with the medians in seconds and their difference.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from squall.observe.ledger import read_ledger

IMPORT = [sys.executable, "-c", "import torch, torch.optim"]


def import_torch() -> float:
    """Seconds that a fresh interpreter takes to import torch and end."""
    began = time.perf_counter()
    subprocess.run(IMPORT, check=True)
    return time.perf_counter() - began


def first_push() -> float:
    """Seconds from the command to the first push that a shard has applied, by its ledger."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "squall", "train", "digits", "--out", str(run)]
        settings = ("replicas=2", "shards=2", "epochs=1")
        began = time.time()
        subprocess.run(
            [*command, *(word for setting in settings for word in ("--set", setting))],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        began_at = json.loads((run / "job.json").read_text())["began_at"]
        ledger = read_ledger(run / "ledger")
        first = ledger[ledger["outcome"] == "applied"]["time_s"].min()
        return float(began_at + first - began)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    imports, pushes = [], []
    for _ in range(runs):
        imports.append(import_torch())
        pushes.append(first_push())
    figures = {
        "runs": runs,
        "import_torch_s": statistics.median(imports),
        "first_push_s": statistics.median(pushes),
    }
    figures["difference_s"] = figures["first_push_s"] - figures["import_torch_s"]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
