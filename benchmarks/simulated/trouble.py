"""What one slow and one dead replica cost, in throughput; nothing but the protocol has to run for that."""

from typing import Any

import squall
from benchmarks.simulated.common import SPEED, draw, nothing, rounded, run, save

COUNTS = (4, 8, 16)
SECONDS = 200.0


def trouble() -> dict[str, Any]:
    rows = []
    for count in COUNTS:
        whole = _throughput(count)
        slow = _throughput(count, speeds=(SPEED / 10, *[SPEED] * (count - 1)))
        dead = _throughput(count, faults="kill:replica0@t=0.05")
        for kind, got, left in (("slow", slow, count - 0.9), ("dead", dead, count - 1.0)):
            rows.append(
                {
                    "replicas": count,
                    "one_is": kind,
                    "minibatches_per_s": rounded(got, 2),
                    "minibatches_per_s_of_all": rounded(whole, 2),
                    "loss": rounded(1 - got / whole, 4),
                    "loss_expected": rounded(1 - left / count, 4),
                }
            )
    draw("throughput", lambda axes: _paint(axes, rows))
    return save("trouble", rows, seconds=SECONDS, speed=SPEED)


def _throughput(count: int, *, speeds: tuple[float, ...] = (SPEED,), faults: str = "") -> float:
    job = nothing(int(2 * SPEED * SECONDS * count), replicas=count, time_s=SECONDS)
    cluster = squall.Simulated(seed=0, speeds=speeds, faults=faults, compute="modelled")
    return float(run(job, cluster=cluster).metrics["samples_per_second"])


def _paint(axes: Any, rows: list[dict[str, Any]]) -> None:
    for shift, kind in ((-0.2, "slow"), (0.2, "dead")):
        mine = [row for row in rows if row["one_is"] == kind]
        at = [place + shift for place in range(len(mine))]
        words = "one ten times slower" if kind == "slow" else "one dead"
        axes.bar(at, [100 * row["loss"] for row in mine], width=0.35, label=words)
        axes.scatter(at, [100 * row["loss_expected"] for row in mine], color="black", marker="_", s=400)
    axes.set_xticks(range(len(COUNTS)), [f"{count} replicas" for count in COUNTS])
    axes.set_ylabel("throughput lost [%]; lines: its share of the work")
    axes.legend(frameon=False)
