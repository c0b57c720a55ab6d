"""Tests of squall.shard.store: what a shard writes, in which order. (What is read back: tests/training/test_checkpoint.py.)

Planted fault, seen to fail: an order that comes late written all the same.
"""

from pathlib import Path

from squall.shard.store import SliceWriter


def test_of_two_checkpoints_the_later_counts_and_an_order_that_comes_late_is_passed_over(
    tmp_path: Path,
) -> None:
    writer = SliceWriter()
    for name in ("000009", "000011", "000010"):
        writer.write(name, tmp_path / name / "shard0.safetensors", [], ())
    writer.close()
    assert list(writer.written()) == ["000009", "000011"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000009", "000011"]
