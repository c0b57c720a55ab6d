"""Models bound to slice vectors, against the flat vector that `ParameterSpace.flat` reads off the model.

Planted faults, each seen to fail a test here: a split parameter made a view of its first piece; pieces not
sorted; a parameter in another memory order viewed all the same; the private copy of a split parameter shared with
the buffer it was bound to before; the reordering left out of a swap; every swap taking buffer 0; `swap_slice`
swapping all slices; aliases left out of `assemble`; `split` returning views; sizes of vectors not checked;
`copied` not looked at.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from squall.errors import LocalProtocolError, ModelError
from squall.model.install import assemble, install, pieces_of, split
from squall.model.layout import Layout
from squall.model.parameters import ParameterSpace


class Mixed(nn.Module):
    """Every kind of tensor that a space may hold, and a forward that reads them all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.wide = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.conv(x).mean((2, 3)) * self.scale + self.empty.sum()
        mixed: Tensor = self.two(self.one(pooled))
        return mixed @ self.turned + self.wide.sum().float()


def flats(layout: Layout, model: nn.Module) -> dict[str, Tensor]:
    return {dtype: layout.space.flat(model, dtype) for dtype in layout.space.dtypes}


def fresh_vectors(layout: Layout, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(spec.size, generator=generator, dtype=getattr(torch, spec.dtype))
        for spec in layout.slices
    ]


def grads_of(model: nn.Module) -> list[Tensor]:
    """The gradients in the order of the parameters' names, tied ones once."""
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


def holds(layout: Layout, model: nn.Module, vectors: Sequence[Tensor]) -> bool:
    """Whether the model's values are exactly those of the vectors."""
    return all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(split(layout, flats(layout, model)), vectors, strict=True)
    )


def mixed(num_shards: int) -> tuple[Mixed, Layout]:
    torch.manual_seed(0)
    model = Mixed()
    return model, Layout.balanced(ParameterSpace.of(model), num_shards)


@pytest.mark.parametrize("num_shards", [1, 3, 7, 40])
def test_a_swap_gives_the_model_exactly_the_buffers_values(num_shards: int) -> None:
    model, layout = mixed(num_shards)
    buffers = [fresh_vectors(layout, 1), fresh_vectors(layout, 2)]

    bound = install(model, layout, buffers)

    for buffer in (0, 1, 0, 1, 1):
        bound.swap_to(buffer)
        assert holds(layout, model, buffers[buffer])


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_a_swap_reads_what_the_buffer_holds_now(num_shards: int) -> None:
    model, layout = mixed(num_shards)
    buffers = [fresh_vectors(layout, 1), fresh_vectors(layout, 2)]
    bound = install(model, layout, buffers)

    for vector, new in zip(buffers[1], fresh_vectors(layout, 3), strict=True):
        vector.copy_(new)
    bound.swap_to(1)

    assert holds(layout, model, buffers[1])


def test_one_slice_can_be_swapped_without_the_others() -> None:
    model, layout = mixed(3)
    buffers = [fresh_vectors(layout, 1), fresh_vectors(layout, 2)]
    bound = install(model, layout, buffers)

    bound.swap_slice(1, 1)

    assert holds(layout, model, [buffers[slice == 1][slice] for slice in range(len(layout.slices))])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_installing_keeps_parameter_objects_shapes_strides_and_ties(num_shards: int) -> None:
    model, layout = mixed(num_shards)
    before = {
        name: (id(p), p.shape, p.stride()) for name, p in model.named_parameters(remove_duplicate=False)
    }

    install(model, layout, [fresh_vectors(layout, 1)])

    after = {name: (id(p), p.shape, p.stride()) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_whole_parameters_in_c_order_move_no_bytes() -> None:
    model, layout = mixed(1)
    vectors = fresh_vectors(layout, 1)

    bound = install(model, layout, [vectors])

    inside = range(vectors[0].data_ptr(), vectors[0].data_ptr() + layout.slices[0].num_bytes)
    assert model.one.weight.data_ptr() in inside
    assert model.scale.data_ptr() in inside
    assert bound.num_copied == model.conv.weight.numel() + model.turned.numel()


def test_only_the_split_parameter_is_copied() -> None:
    model = nn.Linear(32, 32)
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=2)

    bound = install(model, layout, [fresh_vectors(layout, 1)])

    assert bound.num_copied == model.weight.numel()


def test_binding_anew_leaves_the_former_buffers_alone() -> None:
    model = nn.Linear(32, 32)
    whole = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    halves = Layout.balanced(ParameterSpace.of(model), num_shards=2)
    former = fresh_vectors(whole, 1)
    install(model, whole, [former])

    install(model, halves, [fresh_vectors(halves, 2)])

    assert torch.equal(former[0], fresh_vectors(whole, 1)[0])


def test_a_bound_model_computes_what_a_plain_one_with_the_same_values_does() -> None:
    model, layout = mixed(3)
    plain, _ = mixed(3)
    buffers = [fresh_vectors(layout, 1), fresh_vectors(layout, 2)]
    bound = install(model, layout, buffers)
    x = torch.randn(2, 3, 5, 5)

    for buffer in (0, 1, 0):
        bound.swap_to(buffer)
        plain.load_state_dict(assemble(layout, buffers[buffer]))
        outputs = []
        for each in (model, plain):
            each.zero_grad()
            outputs.append(each(x))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        assert all(torch.equal(*pair) for pair in zip(grads_of(model), grads_of(plain), strict=True))


def test_local_steps_go_on_from_the_swapped_values_and_the_next_swap_forgets_them() -> None:
    model, layout = mixed(3)
    buffers = [fresh_vectors(layout, 1), fresh_vectors(layout, 2)]
    bound = install(model, layout, buffers)
    expected = {dtype: flat - 1 for dtype, flat in flats(layout, model).items()}

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1)

    assert all(torch.equal(flats(layout, model)[dtype], expected[dtype]) for dtype in expected)
    bound.swap_to(1)
    assert holds(layout, model, buffers[1])


@pytest.mark.parametrize("num_shards", [1, 3, 7, 40])
def test_pieces_take_every_gradient_to_its_place_in_the_slices(num_shards: int) -> None:
    model, layout = mixed(num_shards)
    model(torch.randn(2, 3, 5, 5)).square().sum().backward()
    vectors = [torch.full_like(vector, float("nan")) for vector in fresh_vectors(layout, 1)]

    for parameter, pieces in zip(layout.space.parameters_of(model), pieces_of(layout, vectors), strict=True):
        assert parameter.grad is not None
        for piece in pieces:
            piece.vector.copy_(parameter.grad.reshape(-1)[piece.start : piece.stop])

    flat = [grad.flatten() for grad in grads_of(model)]
    dense = {
        "float32": torch.cat([grad for grad in flat if grad.dtype == torch.float32]),
        "float64": torch.cat([grad for grad in flat if grad.dtype == torch.float64]),
    }
    for mine, theirs in zip(vectors, split(layout, dense), strict=True):
        assert torch.equal(mine, theirs)


def test_pieces_of_a_tensor_are_in_order_and_cover_it() -> None:
    _, layout = mixed(40)

    for spec, pieces in zip(layout.space.tensors, pieces_of(layout, fresh_vectors(layout, 1)), strict=True):
        places = [place for piece in pieces for place in range(piece.start, piece.stop)]
        assert places == list(range(spec.numel))


@pytest.mark.parametrize("num_shards", [1, 3, 7])
def test_assembling_what_was_split_gives_the_models_own_values_under_all_names(num_shards: int) -> None:
    model, layout = mixed(num_shards)

    state = assemble(layout, split(layout, flats(layout, model)))

    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert state["one.weight"] is state["two.weight"]
    assert all(value.is_contiguous() for value in state.values())


def test_splitting_and_assembling_copy() -> None:
    model, layout = mixed(1)
    flat = flats(layout, model)
    vectors = split(layout, flat)
    state = assemble(layout, vectors)

    for vector in vectors:
        vector.zero_()

    assert flat["float32"].abs().sum() > 0
    assert state["one.weight"].abs().sum() > 0


def test_a_model_of_another_shape_is_refused() -> None:
    _, layout = mixed(1)

    with pytest.raises(ModelError, match="no parameter of that name"):
        install(nn.Linear(2, 2), layout, [fresh_vectors(layout, 1)])


@pytest.mark.parametrize(
    ("vectors", "got"),
    [
        ([], "expected 1 of them, but got 0"),
        ([torch.zeros(5)], r"shape \(5,\)"),
        ([torch.zeros(6, dtype=torch.float64)], "float64"),
        ([torch.zeros(12)[::2]], "with gaps"),
        ([torch.zeros(6, 1)], r"shape \(6, 1\)"),
    ],
)
def test_vectors_that_are_not_the_layouts_are_refused_and_the_model_is_left_as_it_was(
    vectors: list[Tensor], got: str
) -> None:
    model = nn.Linear(2, 2)
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    before = layout.space.flat(model, "float32")

    with pytest.raises(LocalProtocolError, match=got):
        install(model, layout, [[torch.zeros(6)], vectors])

    assert torch.equal(layout.space.flat(model, "float32"), before)


def test_a_flat_vector_of_the_wrong_length_is_not_split() -> None:
    _, layout = mixed(1)

    with pytest.raises(LocalProtocolError, match="flat vector of float32"):
        split(layout, {"float32": torch.zeros(3), "float64": torch.zeros(15, dtype=torch.float64)})


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_model_that_is_copied_to_shares_no_memory_with_any_buffer(num_shards: int) -> None:
    torch.manual_seed(0)
    model = Mixed()
    layout = Layout.balanced(ParameterSpace.of(model), num_shards=num_shards)
    buffers = [fresh_vectors(layout, seed) for seed in (1, 2)]
    before = [vector.clone() for buffer in buffers for vector in buffer]
    strides = [parameter.stride() for parameter in model.parameters()]

    bound = install(model, layout, buffers, copied=True)
    for buffer in (0, 1, 0):
        bound.swap_to(buffer)
        assert holds(layout, model, buffers[buffer])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    vectors = [vector for buffer in buffers for vector in buffer]
    assert all(torch.equal(vector, was) for vector, was in zip(vectors, before, strict=True))
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert bound.num_copied == sum(spec.size for spec in layout.slices)
