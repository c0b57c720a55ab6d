"""The bridge between a model and slice vectors: parameters that live in them, gradients that go into them.

A replica holds each slice twice, in two alternative buffers. While it computes on one of them its shard writes
the next version into the other; between two minibatches the parameters are swapped over. A parameter that lies
whole in one slice becomes a view of the vector, so that a swap moves no bytes. One that is split over slices,
or whose memory order is not C order (``channels_last``, transposed), keeps memory of its own, and a swap copies;
so does every parameter of a model that lives on another device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from squall.errors import LocalProtocolError
from squall.model.layout import Layout, Segment, SliceSpec
from squall.model.parameters import TensorSpec, master_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a range of one tensor lies in slice vectors.

    Attributes:
        start, stop: the range, in C order of the tensor's logical shape [elements].
        vector: a view of the slice's vector, shape (stop - start,).
    """

    start: int
    stop: int
    vector: Tensor = field(compare=False, repr=False)


def pieces_of(layout: Layout, vectors: Sequence[Tensor]) -> tuple[tuple[Piece, ...], ...]:
    """Of each tensor of the space, its pieces in order: views of the slices' vectors, ready to be copied to.

    Args:
        layout: says what lies where.
        vectors: one vector per slice, shape (size of the slice,), of the slice's dtype or its masters'.
    Returns:
        One tuple per tensor of the space; an empty one for a zero-sized tensor.
    Raises:
        LocalProtocolError: the vectors are not those of this layout.

    >>> from squall.model.parameters import ParameterSpace
    >>> layout = Layout.balanced(ParameterSpace.of(nn.Linear(3, 2)), num_shards=2)
    >>> pieces_of(layout, [torch.zeros(4), torch.zeros(4)])[1]
    (Piece(start=0, stop=2), Piece(start=2, stop=6))
    """
    _expect_vectors(layout, vectors, or_masters=True)
    pieces: list[list[Piece]] = [[] for _ in layout.space.tensors]
    for spec in layout.slices:
        for segment in spec.segments:
            reach = segment.tensor_range
            view = _view(vectors[spec.slice], segment)
            pieces[segment.tensor].append(Piece(start=reach.start, stop=reach.stop, vector=view))
    return tuple(tuple(sorted(own, key=lambda piece: piece.start)) for own in pieces)


def masters_of(layout: Layout, vectors: Sequence[Tensor]) -> list[Tensor]:
    """What shards keep of these slices' vectors: in float32 what is of lower precision, the others as they are."""
    _expect_vectors(layout, vectors)
    return [
        vector.to(getattr(torch, spec.master_dtype))
        for spec, vector in zip(layout.slices, vectors, strict=True)
    ]


class Bound:
    """Parameters, in the order of a space, that take their values from slice vectors, in one of several buffers.

    Those of a model are made by `install`. The vectors are the caller's; the model's parameters are this object's, and what they held
    before is lost to them. Not to be swapped during a minibatch.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: Layout,
        buffers: Sequence[Sequence[Tensor]],
        *,
        copied: bool = False,
    ) -> None:
        private = _PrivateMemory(parameters, is_kept=copied)
        # By slice, then by buffer: parameters to point at a view, and memory to copy a piece into.
        self._views: list[list[list[tuple[nn.Parameter, Tensor]]]] = []
        self._copies: list[list[list[tuple[Tensor, Tensor]]]] = []
        # By slice: parameters that are not in C order, and the same values in C order, copied to last.
        self._reorders = [private.reorders(spec) for spec in layout.slices]
        for spec in layout.slices:
            views = [s for s in spec.segments if not copied and _is_view(parameters, s)]
            others = [s for s in spec.segments if copied or not _is_view(parameters, s)]
            self._views.append([_views(parameters, views, b[spec.slice]) for b in buffers])
            self._copies.append([private.copies(others, b[spec.slice]) for b in buffers])

    def swap_slice(self, slice: int, buffer: int) -> None:
        """Take the values of one slice from its vector in `buffer`."""
        for parameter, view in self._views[slice][buffer]:
            parameter.data = view
        if copies := self._copies[slice][buffer]:
            self._copy(copies, self._reorders[slice])

    @torch.no_grad()
    def _copy(self, copies: list[tuple[Tensor, Tensor]], reorders: list[tuple[nn.Parameter, Tensor]]) -> None:
        for own, piece in copies:
            own.copy_(piece)
        for parameter, ordered in reorders:
            parameter.copy_(ordered)

    def swap_to(self, buffer: int) -> None:
        """Take the values of all slices from `buffer`."""
        for slice in range(len(self._views)):
            self.swap_slice(slice, buffer)

    @property
    def num_copied(self) -> int:
        """How many elements a swap has to copy; the others move with their memory."""
        return sum(own.numel() for by_buffer in self._copies for own, _ in by_buffer[0])


def install(
    model: nn.Module, layout: Layout, buffers: Sequence[Sequence[Tensor]], *, copied: bool = False
) -> Bound:
    """Bind a model's trainable parameters to slice vectors and take their values from the first buffer.

    Parameter objects stay what they are: optimizers, hooks and ties that hold them go on working, as do shapes,
    strides and ``requires_grad``. Local changes of a parameter that is a view reach the buffer it views.

    Args:
        model: one that fits ``layout.space``; its parameters are written.
        layout: says what lies where.
        buffers: alternative sets of vectors, each with one vector per slice, shape (size of the slice,).
        copied: every parameter keeps memory of its own, where it is now; a swap copies to it.
    Raises:
        ModelError: the model does not fit the space.
        LocalProtocolError: the vectors are not those of this layout.

    >>> from squall.model.parameters import ParameterSpace
    >>> model = nn.Linear(3, 2)
    >>> layout = Layout.balanced(ParameterSpace.of(model), num_shards=1)
    >>> bound = install(model, layout, [[torch.zeros(8)], [torch.arange(8.0)]])
    >>> bound.swap_to(1)
    >>> model.bias.tolist(), model.weight.tolist()
    ([0.0, 1.0], [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]])
    """
    for vectors in buffers:
        _expect_vectors(layout, vectors)
    bound = Bound(layout.space.parameters_of(model), layout, buffers, copied=copied)
    bound.swap_to(0)
    return bound


def split(layout: Layout, flat: Mapping[str, Tensor]) -> list[Tensor]:
    """Cut the flat vector of each dtype, of its values or of its masters, into fresh vectors, one per slice.

    >>> from squall.model.parameters import ParameterSpace
    >>> model = nn.Linear(3, 2)
    >>> space = ParameterSpace.of(model)
    >>> vectors = split(Layout.balanced(space, num_shards=3), {"float32": space.flat(model, "float32")})
    >>> [len(vector) for vector in vectors]
    [3, 2, 3]
    """
    for dtype in layout.space.dtypes:
        size = layout.space.numel(dtype)
        _expect_vector(f"flat vector of {dtype}", flat[dtype], size, dtype, True)
    return [flat[spec.dtype][spec.start : spec.stop].clone() for spec in layout.slices]


def assemble(layout: Layout, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Rebuild every trainable tensor from the slices' vectors: the trained part of a state dict.

    Returns:
        A fresh contiguous tensor per name, in float32 if the vectors are masters of lower precision. Tied names
        share one, as they do in ``model.state_dict()``.
    """
    tensors: dict[str, Tensor] = {}
    for spec, pieces in zip(layout.space.tensors, pieces_of(layout, vectors), strict=True):
        own = _joined(spec, pieces)
        if spec.part is None:
            tensors |= dict.fromkeys((spec.name, *spec.aliases), own if len(pieces) != 1 else own.clone())
            continue
        if spec.name not in tensors:
            tensors |= dict.fromkeys((spec.name, *spec.aliases), own.new_empty(spec.whole_shape))
        spec.part.put_(tensors[spec.name], own)
    return tensors


@torch.no_grad()
def load_values(layout: Layout, vectors: Sequence[Tensor], into: Mapping[str, Tensor]) -> None:
    """Copy the slices' vectors, or masters, into whole tensors by name, which are written; one at a time."""
    for spec, pieces in zip(layout.space.tensors, pieces_of(layout, vectors), strict=True):
        own = _joined(spec, pieces)
        if spec.part is None:
            into[spec.name].copy_(own)
        else:
            spec.part.put_(into[spec.name], own)


def _joined(spec: TensorSpec, pieces: Sequence[Piece]) -> Tensor:
    """A tensor of its pieces; of a single one no copy."""
    if len(pieces) == 1:
        return pieces[0].vector.view(spec.shape)
    empty = torch.empty(0, dtype=getattr(torch, spec.dtype))
    return (torch.cat([piece.vector for piece in pieces]) if pieces else empty).view(spec.shape)


class _PrivateMemory:
    """The memory of parameters that are no views of a slice's vector.

    Args:
        is_kept: none of them ever was one, so they are written where they are.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, is_kept: bool) -> None:
        self._parameters, self._is_kept = parameters, is_kept
        self._ordered: dict[int, Tensor] = {}

    def copies(self, segments: Sequence[Segment], vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of memory in C order and the piece of the slice's vector that belongs there."""
        pairs = []
        for segment in segments:
            reach = segment.tensor_range
            pairs.append((self._memory(segment.tensor)[reach.start : reach.stop], _view(vector, segment)))
        return pairs

    def reorders(self, spec: SliceSpec) -> list[tuple[nn.Parameter, Tensor]]:
        """The slice's parameters in another memory order, each with its values in C order and logical shape."""
        strange = [s.tensor for s in spec.segments if not self._parameters[s.tensor].is_contiguous()]
        return [
            (self._parameters[tensor], self._memory(tensor).view(self._parameters[tensor].shape))
            for tensor in strange
        ]

    def _memory(self, tensor: int) -> Tensor:
        """A parameter's own memory if that is in C order, else a vector of its size to be reordered from."""
        if tensor not in self._ordered:
            parameter = self._parameters[tensor]
            if parameter.is_contiguous() and not self._is_kept:
                # Fresh memory: what it has now may be part of a slice that it was bound to before.
                parameter.data = parameter.detach().clone()
            self._ordered[tensor] = parameter.detach().contiguous().view(-1)
        return self._ordered[tensor]


def _is_view(parameters: Sequence[nn.Parameter], segment: Segment) -> bool:
    parameter = parameters[segment.tensor]
    return segment.size == parameter.numel() and parameter.is_contiguous()


def _views(
    parameters: Sequence[nn.Parameter], segments: Sequence[Segment], vector: Tensor
) -> list[tuple[nn.Parameter, Tensor]]:
    owners = [parameters[segment.tensor] for segment in segments]
    return [(own, _view(vector, seg).view(own.shape)) for own, seg in zip(owners, segments, strict=True)]


def _view(vector: Tensor, segment: Segment) -> Tensor:
    return vector[segment.start : segment.stop]


def _expect_vectors(layout: Layout, vectors: Sequence[Tensor], *, or_masters: bool = False) -> None:
    if len(vectors) != len(layout.slices):
        raise LocalProtocolError(
            reason=f"slice vectors: expected {len(layout.slices)} of them, but got {len(vectors)}"
        )
    for spec, vector in zip(layout.slices, vectors, strict=True):
        _expect_vector(f"vector of slice {spec.slice}", vector, spec.size, spec.dtype, or_masters)


def _expect_vector(what: str, vector: Tensor, size: int, dtype: str, or_masters: bool) -> None:
    got = (tuple(vector.shape), str(vector.dtype).removeprefix("torch."), vector.is_contiguous())
    is_of_masters = or_masters and got[1] == master_dtype(dtype)
    if got != ((size,), got[1] if is_of_masters else dtype, True):
        raise LocalProtocolError(
            reason=f"{what}: expected shape ({size},), {dtype}, contiguous, but got shape {got[0]}, {got[1]}, "
            f"{'contiguous' if got[2] else 'with gaps'}"
        )
