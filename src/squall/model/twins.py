"""Ops that write, and what computes the same without writing."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from squall.model.graph import Ref, Value

aten = torch.ops.aten


class Emits(Protocol):
    """What appends a call to a graph and gives the indices of what it makes."""

    @property
    def fakes(self) -> list[torch.Tensor]: ...

    @property
    def values(self) -> list[Value]: ...

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> list[int | None]: ...


def is_in_place(op: Any) -> bool:
    """Whether an op writes to one of its arguments, as its schema says."""
    return bool(op._schema.is_mutable)


def pure_twin(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any] | None:
    """The op that computes what `op` writes, its arguments, and which argument is written; None if there is none.

    >>> twin = pure_twin(aten.add_.Tensor, ("x", "y"), {})
    >>> str(twin[0]), twin[3]
    ('aten.add.Tensor', 'x')
    >>> twin = pure_twin(aten.div.out, ("x", "y"), {"out": "z"})
    >>> str(twin[0]), twin[1], twin[2], twin[3]
    ('aten.div.Tensor', ('x', 'y'), {}, 'z')
    """
    schema = op._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if len(written) != 1 or len(schema.returns) != 1:
        return None
    name = schema.name.split("::")[1]
    if schema.name.split("::")[0] != "aten" or name in _WITHOUT_TWIN:
        return None
    if written[0].name == "out":
        kwargs = dict(kwargs)
        target = kwargs.pop("out", None)
        twin = _overload_like(name, op)
    else:
        target = args[0]
        twin = _overload_like(_RENAMED.get(name, name.removesuffix("_")), op)
    return None if twin is None or target is None else (twin, args, dict(kwargs), target)


_WITHOUT_TWIN = {"set_", "resize_", "resize_as_", "embedding_renorm_", "rename_", "swapdims_", "as_strided_"}
_RENAMED = {"normal_": "normal_functional", "random_": "random"}


def _overload_like(name: str, op: Any) -> Any:
    """The pure overload of that name whose arguments are those of `op`, without the one called out."""
    packet = getattr(aten, name, None)
    if packet is None:
        return None
    wanted = _signature(op)
    for overload in packet.overloads():
        twin = getattr(packet, overload)
        if not twin._schema.is_mutable and _signature(twin) == wanted:
            return twin
    return None


def _signature(op: Any) -> list[tuple[str, str]]:
    arguments = [a for a in op._schema.arguments if a.name != "out"]
    # The first is called self here and input there.
    return [("" if at == 0 else a.name, str(a.type)) for at, a in enumerate(arguments)]


def unwrite(
    builder: Emits, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], at: int, old: int, new: int
) -> int | None:
    """The value of a viewed tensor after its view was given a new value; None if that cannot be said.

    Args:
        op, args, kwargs: the call that made the view; its first argument is `Ref(old)`.
        at: which of its outputs was written.
        old, new: the viewed value before, and the view's value after.
    """
    fake = builder.fakes[old]
    if op is aten.detach.default:
        return (
            None if builder.values[old].requires_grad else new
        )  # its gradient is that of what it was before the write
    if op in _SAME or (op in _MAYBE_SAME and fake.dtype == builder.fakes[new].dtype):
        return new
    if op in _RESHAPES:
        made = builder.emit(aten.reshape.default, Ref(new), list(fake.shape))
    elif op in (aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default):
        made = builder.emit(op, Ref(new), *args[1:])
    elif op is aten.permute.default:
        made = builder.emit(op, Ref(new), _inverse([dim % fake.dim() for dim in args[1]]))
    elif op in _SCATTERS:
        made = builder.emit(_SCATTERS[op], Ref(old), Ref(new), *args[1:], **kwargs)
    elif op is aten.unbind.int:
        made = builder.emit(aten.select_scatter.default, Ref(old), Ref(new), *(args[1:] or (0,)), at)
    else:
        return None
    return made[0]


def _inverse(dims: list[int]) -> list[int]:
    return [dims.index(at) for at in range(len(dims))]


_SAME = {aten.alias.default, aten.view_as.default, aten.dropout.default, aten.contiguous.default}
_MAYBE_SAME = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.reshape_as.default,
}
_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
