"""Tests of squall.model.parts, and of what is laid out and put together by parts, against NumPy.

Faults planted by hand, each seen to fail a test here: axes with gaps taken as one range · runs that go on over a gap · slices of
the first partition only · parts that are not put into their tensor · the hash without the part · rows of layout.json
that count in the part.
"""

import itertools
import json

import numpy as np
import torch
from torch import nn

from squall.model.install import assemble, split
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace, TensorSpec
from squall.model.parts import Part

GAPPY = Part(whole=(5, 4), axes=(((0, 2), (4, 5)), ((1, 2), (3, 4))))


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).view(shape)


def test_a_part_is_what_numpy_takes() -> None:
    whole = numbers((5, 4))
    assert GAPPY.of(whole).tolist() == whole.numpy()[np.ix_([0, 1, 4], [1, 3])].tolist()
    assert GAPPY.shape == (3, 2)
    scalar = Part(whole=(), axes=())
    assert scalar.of(torch.tensor(3.0)).item() == 3.0
    assert scalar.is_whole


def test_a_part_is_written_where_it_was_taken_from_and_nowhere_else() -> None:
    whole = torch.zeros(5, 4)
    GAPPY.put_(whole, torch.ones(3, 2))
    expected = np.zeros((5, 4))
    expected[np.ix_([0, 1, 4], [1, 3])] = 1
    assert whole.tolist() == expected.tolist()


def test_runs_of_a_part_name_its_elements_in_the_whole_tensor() -> None:
    flat = numbers((5, 4)).reshape(-1)
    mine = GAPPY.of(numbers((5, 4))).reshape(-1)
    for start, stop in itertools.combinations(range(7), 2):
        found = torch.cat([flat[at : at + length] for _, at, length in GAPPY.runs(start, stop)])
        assert found.tolist() == mine[start:stop].tolist()
        assert next(at for at, _, _ in GAPPY.runs(start, stop)) == start


def cut_space() -> tuple[nn.Module, ParameterSpace]:
    """A linear layer of which partition 1 has two rows with a gap, and partition 0 the rest and the bias."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    rows = ((0, 1), (2, 3)), ((1, 2), (3, 4))
    parts = [Part(whole=(4, 3), axes=(mine, ((0, 3),))) for mine in rows]
    tensors = (
        TensorSpec(name="bias", shape=(4,), dtype="float32"),
        TensorSpec(name="weight", shape=(2, 3), dtype="float32", partition=0, part=parts[0]),
        TensorSpec(name="weight", shape=(2, 3), dtype="float32", partition=1, part=parts[1]),
    )
    return model, ParameterSpace(tensors=tensors)


def test_slices_are_of_one_partition_each_and_lie_in_its_order() -> None:
    _, space = cut_space()
    for num_shards in range(1, 6):
        layout = Layout.balanced(space, num_shards)
        for spec in layout.slices:
            owners = {space.tensors[segment.tensor].partition for segment in spec.segments}
            assert owners == {spec.partition}
        assert {shard for shard in range(num_shards) if layout.slices_of(shard, 1)} == set(
            layout.shards_of(1)
        )
        both = [spec for p in (0, 1) for shard in range(num_shards) for spec in layout.slices_of(shard, p)]
        assert sorted(spec.slice for spec in both) == list(range(len(layout.slices)))
    assert [spec.partition for spec in Layout.balanced(space, 1).slices] == [0, 1]


def test_a_model_is_put_together_from_the_parts_that_it_was_cut_into() -> None:
    model, space = cut_space()
    for num_shards in (1, 2, 3):
        layout = Layout.balanced(space, num_shards)
        tensors = assemble(layout, split(layout, {"float32": space.flat(model, "float32")}))
        assert torch.equal(tensors["weight"], model.weight)
        assert torch.equal(tensors["bias"], model.bias)


def test_the_rows_of_a_layout_read_a_cut_model_with_no_knowledge_of_parts() -> None:
    model, space = cut_space()
    layout = Layout.balanced(space, 2)
    vectors = split(layout, {"float32": space.flat(model, "float32")})
    found = {"weight": torch.zeros(12), "bias": torch.zeros(4)}
    for row in layout.layout_json():
        into, vector = found[row["tensor"]], vectors[row["slice"]]
        into[row["tensor_start"] : row["tensor_stop"]] = vector[row["start"] : row["stop"]]
        assert row["shape"] == ([4, 3] if row["tensor"] == "weight" else [4])
    assert torch.equal(found["weight"].view(4, 3), model.weight)
    assert torch.equal(found["bias"], model.bias)


def test_a_cut_space_survives_json_and_is_another_than_the_whole_one() -> None:
    model, space = cut_space()
    layout = Layout.balanced(space, 2)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert space.schema_hash != ParameterSpace.of(model).schema_hash
    other = TensorSpec(name="weight", shape=(2, 3), dtype="float32", partition=1, part=space.tensors[1].part)
    assert ParameterSpace(tensors=(*space.tensors[:2], other)).schema_hash != space.schema_hash
