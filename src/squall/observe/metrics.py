"""``metrics.jsonl``: what was measured when, one JSON object a line, readable while the run writes it."""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from squall.closes import Closes
from squall.errors import CorruptError
from squall.observe.events import Event, as_record
from squall.observe.files import write_whole
from squall.observe.meter import ProgressMeter


class MetricsLog(Closes):
    """Appends one line for each event; the only writer of its file.

    Each line is handed to the operating system at once, so it survives the death of this process. A file
    that is there already is continued: a line torn by an earlier death is cut off first.

    Args:
        path: the file; its directory must exist.

    >>> import tempfile
    >>> from squall.observe.events import Joined
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = Path(directory) / "metrics.jsonl"
    ...     with MetricsLog(path) as log:
    ...         log.append(Joined(time_s=0.5, role="replica0.0", incarnation=1))
    ...     read_history(path)
    [{'event': 'Joined', 'time_s': 0.5, 'role': 'replica0.0', 'incarnation': 1}]
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            _cut_torn_line(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def append(self, event: Event) -> None:
        line = json.dumps(as_record(event), allow_nan=False, separators=(",", ":")) + "\n"
        write_whole(self._file, line.encode())

    def close(self) -> None:
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_history(path: Path) -> list[dict[str, Any]]:
    """Read the events that a `MetricsLog` wrote, as dicts, in their order.

    A last line without an end, left by a writer that died or is still writing, is left out.

    Raises:
        CorruptError: another line is no JSON object.
        FileNotFoundError: there is no such file.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise CorruptError(
            subject=f"{path}, line {number}",
            expected="one JSON object",
            got=repr(line[:60]),
            remedy="The file was altered: restore it from a copy, or delete that line.",
        )
    return record


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


__all__ = ["MetricsLog", "ProgressMeter", "read_history"]
