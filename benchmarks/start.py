"""How soon does `squall train digits` push? Against the time of `import torch, torch.optim` alone.

Each round measures both, one after the other, so that a busy machine is busy for both. Prints one JSON object, in
seconds. The promise (docs/contract.md) is an `over_import_s` of at most 1.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from squall.observe.ledger import read_ledger

ROUNDS = 5


def main() -> None:
    rounds = [(import_s(), first_push_s()) for _ in range(ROUNDS)]
    imports, pushes = zip(*rounds, strict=True)
    told = {
        "benchmark": "start",
        "import_s": round(statistics.median(imports), 3),
        "first_push_s": round(statistics.median(pushes), 3),
        "over_import_s": round(statistics.median(push - alone for alone, push in rounds), 3),
        "rounds": ROUNDS,
    }
    print(json.dumps(told))


def import_s() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, torch.optim"], check=True)
    return time.monotonic() - began


def first_push_s() -> float:
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
        return run_began - began + first


if __name__ == "__main__":
    main()
