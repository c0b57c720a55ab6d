"""What the launcher and all processes under it hold of this machine's memory, watched while a run goes on."""

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD_S = 0.02
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)\s*(.*)")
_OURS = "/memfd:squall"


def weigh(pid: int, shared: dict[int, int]) -> int:
    """Own memory of a process as PSS [bytes], files apart; memory shared by descriptor goes to `shared`, by inode.

    Of that it counts whether anyone has it open, for all of it is taken from the system when it is made.
    """
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if (found := _HEAD.match(line)) is not None:
            start, stop, _, inode, path = found.groups()
            counts = not path.startswith("/")
            if path.startswith(_OURS):
                shared[int(inode)] = int(stop, 16) - int(start, 16)
        elif (counts and line.startswith("Pss:")) or (
            line.startswith("Private_Dirty:") and not counts and not path.startswith(_OURS)
        ):
            total += int(line.split()[1]) * 1024
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(entry.path).startswith(_OURS):
                told = os.stat(entry.path)
                shared[told.st_ino] = told.st_blocks * 512
    return total


def family(pid: int) -> list[int]:
    """A process and all that it, and those under it, have started."""
    found = [pid]
    for thread in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
            found += family(int(child))
    return found


class Weighing:
    """Within its block, weighs this process and all below it again and again.

    Attributes:
        peak: the most that they held together [bytes].
        roles: how much each held then, by name, and "shared": what lay in memory shared by descriptor [bytes].
    """

    def __init__(self) -> None:
        self.peak = 0
        self.roles: dict[str, int] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weighing", daemon=True)

    def _watch(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(OSError):  # one has ended meanwhile
                self._look()
            time.sleep(PERIOD_S)

    def _look(self) -> None:
        shared: dict[int, int] = {}
        roles = {}
        for pid in family(os.getpid()):
            name = "launcher" if pid == os.getpid() else Path(f"/proc/{pid}/comm").read_text().strip()
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                roles[name] = weigh(pid, shared)
        roles["shared"] = sum(shared.values())
        if (total := sum(roles.values())) > self.peak:
            self.peak, self.roles = total, roles

    def told(self, unit: float, of: str) -> str:
        """The peak and who held what, as times `unit`."""
        parts = ", ".join(f"{name} {size / unit:.2f}" for name, size in self.roles.items())
        return f"at most {self.peak / unit:.2f} times {of} ({self.peak / 1e9:.2f} GB): {parts}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
