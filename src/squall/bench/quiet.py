"""Is the machine quiet enough for figures to mean anything?"""

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BUSY_LOAD = 0.5
"""Processes that wanted to run during the last minute; before the first figure only, since ours count too."""
BUSY_CORES = 0.1
"""Cores' worth of time that others take while nothing of ours runs."""
SAMPLE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Quiet:
    """How busy others kept the machine while nothing of ours ran.

    Attributes:
        cores_taken: by other processes, in cores; None where the system does not tell.
        load: the load average of the last minute, or None where our own work is in it.
    """

    cores_taken: float | None
    load: float | None

    @property
    def warning(self) -> str:
        """What to tell whoever reads the figures; empty if it is quiet.

        >>> Quiet(cores_taken=0.01, load=0.2).warning
        ''
        """
        if self.cores_taken is not None and self.cores_taken > BUSY_CORES:
            return f"not quiet: other processes take {self.cores_taken:.2f} cores (bound {BUSY_CORES:g})"
        if self.load is not None and self.load > BUSY_LOAD:
            return f"not quiet: the load average is {self.load:.2f} (bound {BUSY_LOAD:g})"
        return ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"warning": self.warning}


def listen(*, is_first: bool, sample_s: float = SAMPLE_S, stat: Path = Path("/proc/stat")) -> Quiet:
    """Do nothing for a moment and see who else works.

    Args:
        is_first: nothing of ours has run before, so that the load average is others' alone.
    """
    before = _busy_s(stat)
    began = time.monotonic()
    time.sleep(sample_s)
    after = _busy_s(stat)
    seconds = time.monotonic() - began
    taken = None if before is None or after is None else (after - before) / seconds
    return Quiet(cores_taken=taken, load=os.getloadavg()[0] if is_first else None)


def _busy_s(stat: Path) -> float | None:
    """Seconds that all cores together have worked since the start."""
    try:
        words = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, *_ = map(int, words[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
