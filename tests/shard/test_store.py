"""Tests of squall.shard.store: what a shard writes, in which order. (What is read back: tests/training/test_checkpoint.py.)

Planted faults, each seen to fail: an order that comes late written all the same · `wait` that does not · tied tensors
written as one memory · a file that is written where the old one is.
"""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from squall.shard import store
from squall.shard.books import SliceBook
from squall.shard.store import SliceWriter, write_tensors


def test_of_two_checkpoints_the_later_counts_and_an_order_that_comes_late_is_passed_over(
    tmp_path: Path,
) -> None:
    writer = SliceWriter()
    for name in ("000009", "000011", "000010"):
        writer.write(name, tmp_path / name / "shard0.safetensors", [], ())
    writer.close()
    assert list(writer.written()) == ["000009", "000011"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000009", "000011"]


def test_waiting_lasts_until_what_is_being_written_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Path] = []

    def slowly(path: Path, states: object, books: object) -> None:
        sleeps.wait(0.05)
        done.append(path)

    sleeps = threading.Event()
    monkeypatch.setattr(store, "write_slices", slowly)
    writer = SliceWriter()
    writer.wait()
    writer.write("000001", tmp_path / "shard0.safetensors", [], (SliceBook.new(0, 0),))

    writer.wait()

    assert done == [tmp_path / "shard0.safetensors"]
    writer.close()
    assert list(writer.written()) == ["000001"]


def test_tensors_are_written_whole_or_not_at_all_and_tied_ones_each(tmp_path: Path) -> None:
    path, weight = tmp_path / "model.safetensors", torch.arange(6.0).view(2, 3)
    write_tensors(path, {"weight": weight, "tied": weight, "turned": weight.t(), "none": torch.zeros(0)})

    with pytest.raises(TypeError):
        write_tensors(path, {"weight": torch.ones(1)}, {"version": 1})  # type: ignore[dict-item]

    found = load_file(path)
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["tied"], weight)
    assert torch.equal(found["turned"], weight.t())
    assert found["none"].numel() == 0
    assert [one.name for one in tmp_path.iterdir()] == ["model.safetensors"]
