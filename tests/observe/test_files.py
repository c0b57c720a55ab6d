"""Tests of squall.observe.files: whole or not at all, and a number of one's own.

Faults planted here by hand, each seen to fail a test: content written straight into the target · the temporary file
left behind after an error · no fsync of the file · no fsync of the directory · replace before fsync · the count of
directories instead of the highest number · `exist_ok=True` in `next_numbered` · prefix read as a pattern.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from squall.observe.files import next_numbered, sha256_file, write_atomic


@pytest.mark.parametrize("content", ["text \u00e9\n", b"\x00\xff"])
def test_a_file_is_replaced_as_a_whole_and_nothing_else_is_left(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "result.json"
    path.write_text("something much longer than what comes next")

    write_atomic(path, content)

    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_content_reaches_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    seen: list[tuple[str, bool]] = []
    sync = os.fsync

    def watched(handle: int) -> None:
        kind = "directory" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"
        seen.append((kind, path.exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    write_atomic(path, "new")

    assert seen == [("file", False), ("directory", True)]


def test_numbers_go_on_above_the_highest_and_ignore_other_names(tmp_path: Path) -> None:
    for name in ("demo-9", "demo-10", "demo-x", "demo-11-old", "other-50", "xdemo-60"):
        (tmp_path / name).mkdir()
    assert next_numbered(tmp_path, "demo").name == "demo-11"


def test_a_prefix_is_a_word_and_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "axb-4").mkdir()
    assert next_numbered(tmp_path, "a.b").name == "a.b-1"


def test_each_of_many_that_ask_at_once_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: next_numbered(tmp_path / "runs", "demo"), range(40)))
    assert {path.name for path in paths} == {f"demo-{number}" for number in range(1, 41)}


def test_a_faster_process_is_stepped_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other one makes its directory after we have looked and before we make ours.
    look = Path.iterdir

    def looked_too_early(self: Path) -> object:
        entries = list(look(self))
        (self / "demo-1").mkdir()
        return iter(entries)

    monkeypatch.setattr(Path, "iterdir", looked_too_early)
    assert next_numbered(tmp_path, "demo").name == "demo-2"


def test_the_hash_is_that_of_the_whole_content(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(content)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()
