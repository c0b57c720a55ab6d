"""Tests of squall.training.keeping: when a checkpoint is due, when it is whole, and which are cleared away.

Faults planted, each caught: sealed before the last shard has written · one without a cut sealed · a damaged one
counted as whole · one given up left lying · another begun while one is on its way · lateness that adds up · one begun with the last minibatch.
"""

from pathlib import Path

import pytest
import torch

import squall
from squall.blocks import Block
from squall.shard.store import shard_file, write_slices
from squall.training.keeping import CheckpointKeeper
from squall.training.prepare import prepare


@pytest.fixture
def keeper(tmp_path: Path) -> CheckpointKeeper:
    data = torch.randn(40, 3), torch.zeros(40, dtype=torch.int64)
    job = squall.Job(
        torch.nn.Linear(3, 2), data, shards=2, batch_size=4, epochs=3, checkpoint_every=0.5, progress=False
    )
    return CheckpointKeeper(tmp_path, prepare(job))


def store(keeper: CheckpointKeeper, folder: Path, name: str) -> None:
    """Have all shards write their slices."""
    prepared = keeper._prepared
    (folder / name).mkdir()
    for shard in range(2):
        numbers = [spec.slice for spec in prepared.layout.slices_of(shard)]
        states, books = prepared.states_of(shard), [prepared.books[n] for n in numbers]
        write_slices(folder / name / shard_file(shard), states, books)
        keeper.saved(name, f"shard{shard}")


def test_one_is_due_every_so_many_minibatches_and_none_while_another_is_on_its_way(
    keeper: CheckpointKeeper, tmp_path: Path
) -> None:
    assert keeper.due(4) is None
    assert keeper.due(8) == "000001"
    assert keeper.due(12) is None
    keeper.reached("000001", [Block(0, 0, 0, 9)], {}, 1.0)
    store(keeper, tmp_path, "000001")
    sealed = keeper.seal()
    assert sealed is not None
    assert sealed.minibatches == 9
    assert keeper.due(9) is None
    assert keeper.due(10) == "000002"  # from where the first should have been


def test_none_is_due_when_the_end_brings_one(keeper: CheckpointKeeper) -> None:
    assert keeper.due(30) is None
    assert keeper.due(29) == "000001"


def test_it_is_whole_when_the_cut_is_reached_and_every_shard_has_written(
    keeper: CheckpointKeeper, tmp_path: Path
) -> None:
    name = keeper.new_name()
    keeper.saved(name, "shard0")
    keeper.reached(name, [], {}, 1.0)
    assert keeper.seal() is None
    assert keeper.missing == {"shard1"}
    other = keeper.new_name()
    keeper.saved(name, "shard1")
    store(keeper, tmp_path, other)
    assert keeper.seal() is None
    keeper.reached(name, [], {}, 1.0)
    assert keeper.seal() is None
    keeper.reached(other, [], {}, 1.0)
    assert keeper.seal() is not None
    assert keeper.seal() is None


def test_the_newest_two_whole_ones_are_kept_and_a_damaged_one_does_not_count(
    keeper: CheckpointKeeper, tmp_path: Path
) -> None:
    for number in range(1, 7):
        name = keeper.new_name()
        store(keeper, tmp_path, name)
        keeper.reached(name, [], {}, 1.0)
        keeper.seal()
        if number == 3:  # another process finds the files of this one damaged
            (tmp_path / name / shard_file(0)).unlink()
            keeper._whole.clear()
        if number == 4:
            left = sorted(path.name for path in tmp_path.iterdir())
            assert left == ["000002", "000003", "000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000005", "000006"]


def test_one_that_was_given_up_goes_with_the_next_that_is_whole(
    keeper: CheckpointKeeper, tmp_path: Path
) -> None:
    for number in range(1, 6):
        name = keeper.new_name()
        store(keeper, tmp_path, name)
        if number % 2:  # the others never get a cut: the run is stopped, or somebody lost
            keeper.reached(name, [], {}, 1.0)
            assert keeper.seal() is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000003", "000005"]


@pytest.mark.parametrize("kept", [1, 3])
def test_as_many_whole_ones_are_kept_as_the_job_says(kept: int, tmp_path: Path) -> None:
    data = torch.randn(40, 3), torch.zeros(40, dtype=torch.int64)
    job = squall.Job(
        torch.nn.Linear(3, 2), data, shards=2, batch_size=4, keep_checkpoints=kept, progress=False
    )
    keeper = CheckpointKeeper(tmp_path, prepare(job))
    for _ in range(5):
        name = keeper.new_name()
        store(keeper, tmp_path, name)
        before = {path.name for path in tmp_path.iterdir()}
        keeper.reached(name, [], {}, 1.0)
        assert {
            path.name for path in tmp_path.iterdir()
        } == before  # nothing goes before the new one is whole
        keeper.seal()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["000001", "000002", "000003", "000004", "000005"][-kept:]


def test_at_least_one_is_kept() -> None:
    with pytest.raises(
        squall.ConfigError, match=r"Job\(keep_checkpoints=\): expected a whole number of at least 1"
    ):
        squall.Job(torch.nn.Linear(3, 2), None, keep_checkpoints=0)
