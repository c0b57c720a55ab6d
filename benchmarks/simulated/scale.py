"""Ten thousand replicas, modelled, in one process: how long it takes and how much memory (both real)."""

import json
import subprocess
import sys
from typing import Any

from benchmarks.simulated.common import ROOT, save

REPLICAS = 10_000
BLOCKS = 4
"""Of each replica, on average: 40,000 minibatches of one example are one epoch."""
_PROGRAM = """
import json, resource, sys, time
import squall
from benchmarks.simulated.common import SPEED, nothing
replicas, shards, blocks = map(int, sys.argv[1:])
job = nothing(replicas * blocks, replicas=replicas, shards=shards, progress=False)
cluster = squall.Simulated(seed=0, speeds=(SPEED,), compute="modelled")
began = time.monotonic()
metrics = squall.fit(job, cluster=cluster).metrics
print(json.dumps({
    "replicas": replicas, "shards": shards, "minibatches": replicas * blocks,
    "pushes_settled": replicas * blocks * shards,
    "wall_s": round(time.monotonic() - began, 1), "processor_s": round(time.process_time(), 1),
    "peak_MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    "virtual_s": round(metrics["virtual_s"], 3), "staleness_mean": round(metrics["staleness_mean"], 1),
}))
"""


def scale() -> dict[str, Any]:
    return save("scale", [measured(shards) for shards in (1, 4)])


def measured(shards: int) -> dict[str, Any]:
    # In a process of its own, so that its memory is nobody else's.
    command = [sys.executable, "-c", _PROGRAM, str(REPLICAS), str(shards), str(BLOCKS)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
