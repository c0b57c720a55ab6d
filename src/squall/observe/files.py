"""Files of a run directory: written whole or not at all, numbered without a race, named by their hash."""

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file as a whole: after a crash at any moment `path` holds the old content or the new.

    The bytes and the directory's entry are on disk when this returns. Text is written as UTF-8.

    Raises:
        OSError: the directory is missing, full or not writable; the old content stays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write_atomic(Path(directory) / "result.json", "{}")
    ...     [(file.name, file.read_text()) for file in Path(directory).iterdir()]
    [('result.json', '{}')]
    """
    with replaced(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to be written instead of `path`, which it becomes at the end of the block, as a whole and on disk.

    Raises:
        OSError: as of `write_atomic`.
    """
    # In the same directory, since a replace across file systems is no replace.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_whole(file: FileIO, content: bytes) -> None:
    """Hand all of it to the operating system: a raw file may take less than it is given (a full disk, a signal)."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def sync_directory(directory: Path) -> None:
    """Bring a directory's entries to disk; where a directory cannot be opened (Windows), do nothing."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def next_numbered(parent: Path, prefix: str) -> Path:
    """Make the directory ``parent/prefix-N`` for the lowest N above all that are there, and return it.

    Several processes may ask at once: each gets a directory of its own. `parent` is made if it is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     [next_numbered(Path(directory) / "runs", "demo").name for _ in range(2)]
    ['demo-1', 'demo-2']
    """
    parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(re.escape(prefix) + r"-([0-9]+)")
    taken = [int(match[1]) for entry in parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    number = max(taken, default=0) + 1
    while True:
        path = parent / f"{prefix}-{number}"
        try:
            path.mkdir()
        except FileExistsError:  # another process was faster
            number += 1
        else:
            return path


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, as 64 hexadecimal digits; reads it in pieces.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     sha256_file(Path(file.name))[:16]
    'e3b0c44298fc1c14'
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
