"""The parameter space: which tensors of a model are trained, under which names, in which order.

Everything that is learned by a run is one flat vector per dtype. The order is that of the qualified names, so
that two processes which built the same model agree without ever comparing the order of their dictionaries.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from squall.errors import CorruptError, ModelError
from squall.model.parts import Part

ITEM_SIZES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by the dtypes that can be trained."""

LOW_PRECISION = ("bfloat16", "float16")
"""Dtypes in which small updates would be rounded away: what adds up over time is kept in float32."""


def master_dtype(dtype: str) -> str:
    """In which dtype shards keep, and update, parameters of `dtype`: these are its masters.

    >>> master_dtype("bfloat16"), master_dtype("float64")
    ('float32', 'float64')
    """
    return "float32" if dtype in LOW_PRECISION else dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One trainable tensor, or the part of one that a partition of a cut model owns.

    Attributes:
        name: qualified name, as in ``"encoder.0.weight"``; of a tied tensor the alphabetically first.
        aliases: its other names, sorted; empty unless it is tied.
        shape: its logical shape; ``()`` for a scalar.
        dtype: one of `ITEM_SIZES`, as in ``"float32"``.
        partition: whose it is; 0 unless the model is cut.
        part: which part of the tensor it is; None for all of it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    dtype: str
    partition: int = 0
    part: Part | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ModelError(
                subject=f"parameter {self.name!r}",
                expected=f"dtype {' or '.join(ITEM_SIZES)}",
                got=self.dtype,
                remedy="Keep trainable parameters real floating-point numbers.",
            )

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a scalar, 0 if a dimension is 0."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_SIZES[self.dtype]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor that it is a part of."""
        return self.shape if self.part is None else self.part.whole

    def of(self, whole: Tensor) -> Tensor:
        """Itself, out of the tensor that it is a part of."""
        return whole if self.part is None else self.part.of(whole)


@dataclass(frozen=True, kw_only=True)
class ParameterSpace:
    """All trainable tensors of a model, sorted by name; of a cut model by partition, and then by name.

    Of each dtype there is one flat vector: its tensors one after another in this order, each in C order of its
    logical shape, however it lies in memory.

    >>> from torch import nn
    >>> space = ParameterSpace.of(nn.Linear(3, 2))
    >>> [(tensor.name, tensor.shape) for tensor in space.tensors], space.numel("float32")
    ([('bias', (2,)), ('weight', (2, 3))], 8)
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        keys = [(tensor.partition, tensor.name) for tensor in self.tensors]
        if keys != sorted(set(keys)):
            raise ModelError(
                subject="parameter space",
                expected="tensors sorted by name, each name once",
                got=", ".join(repr(name) for _, name in keys),
                remedy="Make it with ParameterSpace.of(model).",
            )

    @classmethod
    def of(cls, model: nn.Module, *, is_deferred: bool = False) -> "ParameterSpace":
        """Read the space off a model.

        Tied parameters (one Parameter object under several names) count once; frozen ones
        (``requires_grad=False``) are left out.

        Args:
            is_deferred: parameters may be on the meta device, since their values are made elsewhere.

        Raises:
            ModelError: a parameter is uninitialised, on the meta device, sparse, or of a dtype that cannot be
                trained; different parameters share memory; or there is nothing to train.
        """
        refuse_lazy(model)
        groups = _trainable(model)
        if not groups:
            raise ModelError(
                subject=f"model {type(model).__name__}",
                expected="at least one parameter with requires_grad=True",
                got="none",
                remedy="Unfreeze what is to be trained: parameter.requires_grad_(True).",
            )
        tensors = tuple(_spec(names, parameter, is_deferred) for names, parameter in groups)
        _refuse_overlaps(model, groups)
        return cls(tensors=tensors)

    @cached_property
    def schema_hash(self) -> str:
        """SHA-256 (hex) of names, shapes and dtypes: equal when and only when two spaces fit one another."""
        rows: list[list[Any]] = [
            [tensor.name, list(tensor.shape), tensor.dtype, *_place_of(tensor).values()]
            for tensor in self.tensors
        ]
        text = json.dumps(rows, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Where a tensor is in `tensors`, by its name or any alias."""
        return {name: at for at, tensor in enumerate(self.tensors) for name in (tensor.name, *tensor.aliases)}

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that occur, sorted."""
        return tuple(sorted({tensor.dtype for tensor in self.tensors}))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Of each tensor, where it begins in the flat vector of its dtype [elements]."""
        ends = dict.fromkeys(self.dtypes, 0)
        begins = []
        for tensor in self.tensors:
            begins.append(ends[tensor.dtype])
            ends[tensor.dtype] += tensor.numel
        return tuple(begins)

    @cached_property
    def members(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Of each dtype, (offset, index in `tensors`) of its tensors that are not empty, in order."""
        placed = [
            (o, i, t) for i, (t, o) in enumerate(zip(self.tensors, self.offsets, strict=True)) if t.numel
        ]
        return {dtype: tuple((o, i) for o, i, t in placed if t.dtype == dtype) for dtype in self.dtypes}

    def numel(self, dtype: str) -> int:
        """Length of the flat vector of `dtype` [elements]; 0 if there is no such tensor."""
        return sum(tensor.numel for tensor in self.tensors if tensor.dtype == dtype)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def parameters_of(self, model: nn.Module) -> tuple[nn.Parameter, ...]:
        """The model's Parameter objects in the order of `tensors`, whole also where these are parts.

        Raises:
            ModelError: the model lacks one of them, or has it in another shape or dtype.
        """
        by_name = dict(model.named_parameters(remove_duplicate=False))
        return tuple(_matching(by_name.get(tensor.name), tensor) for tensor in self.tensors)

    def flat(self, model: nn.Module, dtype: str) -> Tensor:
        """Copy the model's values of `dtype` into one fresh contiguous vector, shape (numel(dtype),).

        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> ParameterSpace.of(model).flat(model, "float32").shape
        torch.Size([3])
        """
        parameters = zip(self.tensors, self.parameters_of(model), strict=True)
        return self.flat_of({tensor.name: parameter.detach() for tensor, parameter in parameters}, dtype)

    def flat_of(self, wholes: Mapping[str, Tensor], dtype: str) -> Tensor:
        """The same of whole tensors by name, which may be masters."""
        pieces = [t.of(wholes[t.name]).reshape(-1) for t in self.tensors if t.dtype == dtype]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=getattr(torch, dtype))

    def to_json(self) -> dict[str, Any]:
        """A value that `json.dumps` takes and `from_json` turns back into an equal space."""
        rows = [
            {
                "name": t.name,
                "aliases": list(t.aliases),
                "shape": list(t.shape),
                "dtype": t.dtype,
                **_place_of(t),
            }
            for t in self.tensors
        ]
        return {"schema_hash": self.schema_hash, "tensors": rows}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ParameterSpace":
        """Rebuild a space from `to_json`'s value.

        Raises:
            CorruptError: names, shapes and dtypes are not those that the stored hash was made of.
        """
        space = cls(
            tensors=tuple(
                TensorSpec(
                    name=row["name"],
                    aliases=tuple(row["aliases"]),
                    shape=tuple(row["shape"]),
                    dtype=row["dtype"],
                    partition=row.get("partition", 0),
                    part=Part.from_json(row["part"]) if row.get("part") else None,
                )
                for row in value["tensors"]
            )
        )
        if space.schema_hash != value["schema_hash"]:
            raise CorruptError(
                subject="parameter space",
                expected=f"tensors with schema hash {value['schema_hash']}",
                got=space.schema_hash,
                remedy="The description was altered after it was written: take it from an intact copy.",
            )
        return space


def _place_of(tensor: TensorSpec) -> dict[str, Any]:
    """Whose part of what it is, as JSON; nothing for a whole tensor of a model that is not cut."""
    if not tensor.partition and tensor.part is None:
        return {}
    return {"partition": tensor.partition, "part": tensor.part and tensor.part.to_json()}


def _matching(parameter: nn.Parameter | None, tensor: TensorSpec) -> nn.Parameter:
    shape = tensor.whole_shape
    wanted = f"shape {shape} and dtype {tensor.dtype}"
    if parameter is None:
        got = "no parameter of that name"
    elif (tuple(parameter.shape), _dtype_name(parameter)) != (shape, tensor.dtype):
        got = f"shape {tuple(parameter.shape)} and dtype {_dtype_name(parameter)}"
    else:
        return parameter
    raise ModelError(
        subject=f"parameter {tensor.name!r}",
        expected=wanted,
        got=got,
        remedy="Use the model that the run was started with.",
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _trainable(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Each trainable Parameter object once, with all its names sorted; sorted by the first of them."""
    names: dict[int, list[str]] = {}
    objects: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
            objects[id(parameter)] = parameter
    return sorted(((sorted(names[key]), objects[key]) for key in objects), key=lambda group: group[0])


def _spec(names: Sequence[str], parameter: nn.Parameter, is_deferred: bool) -> TensorSpec:
    """Describe one parameter, or say why it cannot be trained."""
    subject = f"parameter {names[0]!r}"
    if parameter.layout is not torch.strided:
        raise ModelError(
            subject=subject,
            expected="a dense tensor",
            got=f"layout {parameter.layout}",
            remedy="Keep trainable parameters dense.",
        )
    if parameter.is_meta and not is_deferred:
        raise ModelError(
            subject=subject,
            expected="a tensor with values",
            got="one on the meta device",
            remedy="Give it values first: model.to_empty(device='cpu'), then initialise it.",
        )
    return TensorSpec(
        name=names[0], aliases=tuple(names[1:]), shape=tuple(parameter.shape), dtype=_dtype_name(parameter)
    )


def refuse_lazy(model: nn.Module) -> None:
    """Raise a ModelError that names a parameter or buffer whose shape is not known yet, if there is one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                subject=f"parameter {name!r}",
                expected="a tensor with a shape",
                got="an uninitialised lazy one",
                remedy="Run one batch through the model first: model(inputs).",
            )


# Distinct tensors in the same memory. A run would train them as two, whatever the model says, so it is refused.


@dataclass(frozen=True, slots=True)
class _Extent:
    """The bytes from a tensor's first to its last element, with gaps if it has some."""

    start: int
    stop: int
    name: str
    tensor: Tensor
    is_trained: bool


def _refuse_overlaps(model: nn.Module, groups: Sequence[tuple[list[str], nn.Parameter]]) -> None:
    for names, parameter in groups:
        if _lies_on_itself(parameter):
            raise ModelError(
                subject=f"parameter {names[0]!r}",
                expected="every element in memory of its own",
                got=f"shape {tuple(parameter.shape)} with strides {parameter.stride()}",
                remedy="Make the Parameter of the small tensor and expand it in forward.",
            )
    near: list[_Extent] = []
    for extent in sorted(_extents(model, groups), key=lambda extent: extent.start):
        near = [other for other in near if other.stop > extent.start]
        for other in near:
            if (extent.is_trained or other.is_trained) and _share_memory(extent, other):
                first, second = sorted((extent.name, other.name))
                raise ModelError(
                    subject=f"{first!r} and {second!r}",
                    expected="different tensors in different memory",
                    got="two tensors that overlap",
                    remedy="Use the same Parameter object under both names, or one parameter and "
                    "F.linear(x, weight.t()) in forward.",
                )
        near.append(extent)


def _extents(model: nn.Module, groups: Sequence[tuple[list[str], nn.Parameter]]) -> Iterator[_Extent]:
    """Trained parameters, frozen ones and buffers, each object once, those with elements in memory only."""
    trained = {id(parameter): (names[0], parameter) for names, parameter in groups}
    frozen = {id(t): (name, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    for key, (name, tensor) in {**frozen, **trained}.items():
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            yield _Extent(start, start + (last + 1) * tensor.element_size(), name, tensor, key in trained)


def _lies_on_itself(tensor: Tensor) -> bool:
    """Whether a step along one dimension may land on an element that smaller steps reach too."""
    if not tensor.numel():
        return False
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += (size - 1) * step
    return False


def _share_memory(one: _Extent, other: _Extent) -> bool:
    """Exact to the byte: two columns of one matrix have meeting extents and no common byte."""
    marked, read = (one, other) if one.is_trained else (other, one)
    start = min(one.start, other.start)
    bytes_B = torch.zeros(max(one.stop, other.stop) - start, dtype=torch.bool)
    _bytes_of(marked, bytes_B, start).fill_(True)
    return bool(_bytes_of(read, bytes_B, start).any())


def _bytes_of(extent: _Extent, bytes_B: Tensor, start: int) -> Tensor:
    tensor, item = extent.tensor, extent.tensor.element_size()
    steps = (*(step * item for step in tensor.stride()), 1)
    return bytes_B.as_strided((*tensor.shape, item), steps, extent.start - start)
