"""The parameter space, against what PyTorch itself says of small models.

Planted faults, each seen to fail a test here: tied names counted twice; frozen parameters kept; the order of
registration instead of that of names; memory order instead of C order in `flat`; extents instead of bytes in the
overlap check; no overlap check of buffers; only neighbours in memory compared; frozen tensors refused for
overlapping one another; empty tensors kept among the members; aliases lost in JSON; shapes left out of the hash; a
lazy parameter that is not refused.
"""

import json

import pytest
import torch
from torch import nn

from squall.errors import CorruptError, ModelError
from squall.model.parameters import ParameterSpace, TensorSpec


class Holder(nn.Module):
    """A module with exactly the given parameters."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))


def names(model: nn.Module) -> list[str]:
    return [tensor.name for tensor in ParameterSpace.of(model).tensors]


def test_tensors_are_sorted_by_name_whatever_the_order_of_registration() -> None:
    one = Holder(b=torch.zeros(2), a=torch.zeros(3))
    other = Holder(a=torch.zeros(3), b=torch.zeros(2))

    assert names(one) == ["a", "b"]
    assert ParameterSpace.of(one) == ParameterSpace.of(other)


def test_shapes_dtypes_and_sizes_are_those_of_the_model() -> None:
    model = Holder(a=torch.zeros(()), b=torch.zeros(2, 0, dtype=torch.float64), c=torch.zeros(2, 3, 4))

    space = ParameterSpace.of(model)

    assert [(t.shape, t.dtype, t.numel, t.num_bytes) for t in space.tensors] == [
        ((), "float32", 1, 4),
        ((2, 0), "float64", 0, 0),
        ((2, 3, 4), "float32", 24, 96),
    ]
    assert (space.numel("float32"), space.numel("float64"), space.num_bytes) == (25, 0, 100)
    assert space.dtypes == ("float32", "float64")


def test_a_tied_parameter_counts_once_and_keeps_its_other_names() -> None:
    model = nn.ModuleDict({"out": nn.Linear(4, 4, bias=False), "embed": nn.Embedding(4, 4)})
    model["out"].weight = model["embed"].weight

    space = ParameterSpace.of(model)

    assert [(tensor.name, tensor.aliases) for tensor in space.tensors] == [("embed.weight", ("out.weight",))]
    assert space.index == {"embed.weight": 0, "out.weight": 0}
    assert space.num_bytes == 4 * 4 * 4


def test_a_module_under_two_names_is_tied_in_all_its_parameters() -> None:
    shared = nn.Linear(2, 2)

    space = ParameterSpace.of(nn.ModuleDict({"x": shared, "y": shared}))

    assert [(t.name, t.aliases) for t in space.tensors] == [
        ("x.bias", ("y.bias",)),
        ("x.weight", ("y.weight",)),
    ]


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)

    assert names(model) == ["weight"]


def test_flat_is_one_fresh_vector_in_c_order_of_the_logical_shapes() -> None:
    torch.manual_seed(0)
    conv = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    turned, scalar, wide = torch.randn(3, 2).t(), torch.randn(()), torch.randn(2, dtype=torch.float64)
    model = Holder(b=conv, a=turned, c=scalar, d=wide, e=torch.zeros(0))

    flat = ParameterSpace.of(model).flat(model, "float32")

    expected = [*turned.flatten().tolist(), *conv.flatten().tolist(), scalar.item()]
    assert flat.tolist() == expected
    assert flat.is_contiguous()
    assert not flat.requires_grad
    assert ParameterSpace.of(model).flat(model, "float64").tolist() == wide.tolist()


def test_flat_does_not_share_memory_with_the_model() -> None:
    value = torch.ones(3)
    model = Holder(a=value)

    ParameterSpace.of(model).flat(model, "float32").zero_()

    assert value.tolist() == [1, 1, 1]


def test_offsets_count_within_each_dtype() -> None:
    space = ParameterSpace.of(
        Holder(a=torch.zeros(3), b=torch.zeros(5, dtype=torch.float64), c=torch.zeros(0), d=torch.zeros(2))
    )

    assert space.offsets == (0, 0, 3, 3)
    assert space.members == {"float32": ((0, 0), (3, 3)), "float64": ((0, 1),)}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Holder(a=torch.zeros(2, dtype=torch.complex64)), ("'a'", "complex64")),
        (Holder(a=torch.zeros(2, device="meta")), ("'a'", "meta device", "to_empty")),
        (Holder(a=torch.zeros(1).expand(3)), ("'a'", "strides (0,)", "expand it in forward")),
        (nn.Linear(2, 2).requires_grad_(False), ("Linear", "requires_grad", "none")),
        (nn.ReLU(), ("ReLU", "none")),
        (nn.LazyLinear(3), ("'weight'", "lazy", "one batch")),
        (nn.LazyBatchNorm1d(affine=False), ("'running_mean'", "lazy", "one batch")),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_way_out(
    model: nn.Module, words: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        ParameterSpace.of(model)

    assert [word for word in words if word not in str(caught.value)] == []


def test_a_frozen_parameter_may_be_of_any_dtype() -> None:
    model = Holder(
        a=torch.zeros(2), b=nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    )

    assert names(model) == ["a"]


def overlapping() -> list[nn.Module]:
    weight = nn.Parameter(torch.zeros(3, 4))
    storage = torch.zeros(10)
    with_buffer, with_frozen = Holder(one=weight), Holder(one=weight)
    with_buffer.register_buffer("other", weight.detach().t())
    with_frozen.register_parameter("other", nn.Parameter(weight.detach()[0], requires_grad=False))
    return [
        Holder(one=weight, other=nn.Parameter(weight.detach().t())),
        Holder(other=storage[4:], one=storage[:5]),
        Holder(one=storage[::2], other=storage[4:5]),
        Holder(one=storage[::2], between=storage[1:2], other=storage[4:5]),
        with_buffer,
        with_frozen,
    ]


@pytest.mark.parametrize("model", overlapping())
def test_different_tensors_in_the_same_memory_are_refused_by_both_names(model: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"'one' and 'other'.*same Parameter object.*F\.linear"):
        ParameterSpace.of(model)


def test_neighbours_in_one_storage_are_fine() -> None:
    storage, matrix = torch.zeros(10), torch.zeros(4, 6)
    model = Holder(a=storage[:5], b=storage[5:], even=matrix[:, ::2], odd=matrix[:, 1::2], none=storage[2:2])

    assert names(model) == ["a", "b", "even", "none", "odd"]


def test_frozen_tensors_may_overlap_one_another() -> None:
    model = Holder(a=torch.zeros(2))
    positions = torch.arange(4).expand(3, 4)
    model.register_buffer("positions", positions)
    model.register_buffer("again", positions[0])

    assert names(model) == ["a"]


def test_the_hash_depends_on_names_shapes_and_dtypes_and_on_nothing_else() -> None:
    def hash_of(name: str, value: torch.Tensor) -> str:
        return ParameterSpace.of(Holder(**{name: value})).schema_hash

    hashes = {
        hash_of("a", torch.zeros(6)),
        hash_of("b", torch.zeros(6)),
        hash_of("a", torch.zeros(2, 3)),
        hash_of("a", torch.zeros(3, 2)),
        hash_of("a", torch.zeros(6, dtype=torch.float64)),
    }

    assert len(hashes) == 5
    assert hash_of("a", torch.ones(3, 2).t()) == hash_of("a", torch.zeros(2, 3))
    assert all(len(bytes.fromhex(text)) == 32 for text in hashes)


def test_the_hash_is_the_same_in_every_release() -> None:
    space = ParameterSpace(tensors=(TensorSpec(name="a.weight", shape=(2, 3), dtype="float32"),))

    # printf '%s' '[["a.weight",[2,3],"float32"]]' | sha256sum
    assert space.schema_hash == "bfb4ec5f6eaaa0c00c5dbf3631bd20bc3b867932ea8df2b02accc0fbd487aaa4"


def test_a_space_survives_json() -> None:
    shared = nn.Linear(2, 2)
    space = ParameterSpace.of(nn.ModuleDict({"x": shared, "y": shared, "z": nn.Linear(1, 1).double()}))

    again = ParameterSpace.from_json(json.loads(json.dumps(space.to_json())))

    assert again == space
    assert again.schema_hash == space.schema_hash


def test_altered_json_is_refused() -> None:
    value = ParameterSpace.of(nn.Linear(2, 2)).to_json()
    value["tensors"][0]["shape"] = [3]

    with pytest.raises(CorruptError, match="schema hash"):
        ParameterSpace.from_json(value)


def test_tensors_that_are_not_sorted_or_not_unique_are_refused() -> None:
    a, b = (TensorSpec(name=name, shape=(1,), dtype="float32") for name in "ab")

    for tensors in ((b, a), (a, a)):
        with pytest.raises(ModelError, match="sorted by name"):
            ParameterSpace(tensors=tensors)


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (Holder(other=torch.zeros(2)), "no parameter of that name"),
        (Holder(a=torch.zeros(3)), r"shape \(3,\)"),
        (Holder(a=torch.zeros(2, dtype=torch.float64)), "float64"),
    ],
)
def test_another_model_does_not_fit_the_space(model: nn.Module, got: str) -> None:
    space = ParameterSpace.of(Holder(a=torch.zeros(2)))

    with pytest.raises(ModelError, match=got):
        space.parameters_of(model)
