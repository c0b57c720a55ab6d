"""Code, model and data on their way from the launcher to its own roles: pickled once, mapped by each.

The one exception to "no pickle": `unpack` takes only what the launcher of this run packed and handed to its own child
by a private socket. Nothing that came from a network or out of a run directory may ever reach it.

Functions and classes of `__main__`, lambdas and closures travel by value (cloudpickle). The bytes of tensors and
arrays lie beside the pickle in one `SharedArena`; each role maps it copy on write, so that a model or a data set is in
memory once whatever the number of roles, and what one role writes no other sees.
"""

import collections
import contextlib
import functools
import io
import itertools
import os
import pickle
import struct
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from squall.errors import ConfigError, ModelError
from squall.wire.memory import SharedArena

_HEADER = struct.Struct("<QQQQ")  # bytes in all, where the pickle lies and its bytes, number of buffers
_PLACE = struct.Struct("<QQ")  # where a buffer lies, its bytes
_ALIGNMENT = 64  # what torch's own allocator gives
_OUT_OF_BAND_BYTES = 1024  # smaller buffers cost less inside the pickle
_MAX_TRIES = 2000
_MAX_DEPTH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A packed object: a descriptor and a few bytes, which is what has to be sent.

    Attributes:
        fd: of the arena; the holder closes it, with `close`.
        header: 32 bytes that say how it is laid out.
    """

    fd: int
    header: bytes

    @property
    def num_bytes(self) -> int:
        """What the object takes in memory, for all roles together [bytes]."""
        return int(_HEADER.unpack(self.header)[0])

    def close(self) -> None:
        os.close(self.fd)


def pack(
    obj: Any,
    *,
    by_value_modules: Iterable[types.ModuleType] = (),
    hollow: Iterable[torch.Tensor] = (),
    name: str = "",
) -> Payload:
    """Pickle `obj` into memory that can be shared; tensors and arrays are copied once, here.

    Args:
        obj: anything. Tensors that share a storage go on sharing it; parameters stay leaves, and tied ones tied.
        by_value_modules: whose functions and classes travel as code, since a role could not import them (or should
            not import them anew); `__main__` always does.
        hollow: tensors of it whose values mean nothing, and do not travel.
        name: what the user calls `obj`, for errors: "model" makes "model.encoder.lock".

    Raises:
        ModelError, ConfigError: a part of it cannot be sent; says which. The former if that lies in an nn.Module.

    >>> weight = torch.zeros(3)
    >>> payload = pack({"weight": weight, "scale": lambda x: 2 * x})
    >>> received = unpack(payload)
    >>> received["weight"] += 1
    >>> received["scale"](received["weight"]), weight
    (tensor([2., 2., 2.]), tensor([0., 0., 0.]))
    >>> payload.close()
    """
    buffers: list[memoryview] = []
    with _sent_by_value(by_value_modules):
        try:
            pickled = _dumps(obj, buffers.append, hollow)
        except Exception as error:
            raise _cannot_send(obj, name, error) from error
    return _placed(pickled, buffers)


def unpack(payload: Payload) -> Any:
    """Return a copy of what was packed, whose tensors and arrays lie in the arena, copy on write.

    Only for what our own launcher packed: this runs code. A tensor's storage cannot be resized in place.
    """
    num_bytes, pickle_at, pickle_bytes, num_buffers = _HEADER.unpack(payload.header)
    arena = SharedArena.attach(os.dup(payload.fd), num_bytes, writable=False, private=True)
    try:
        places = arena.bytes(0, num_buffers * _PLACE.size)
        buffers = [arena.bytes(start, size) for start, size in _PLACE.iter_unpack(places)]
        return pickle.loads(arena.bytes(pickle_at, pickle_bytes), buffers=buffers)
    finally:
        arena.close()  # tensors and arrays keep the mapping


def _placed(pickled: bytes, buffers: list[memoryview]) -> Payload:
    places, at = [], _aligned(len(buffers) * _PLACE.size)
    for buffer in buffers:
        places.append((at, buffer.nbytes))
        at = _aligned(at + buffer.nbytes)
    header = _HEADER.pack(at + len(pickled), at, len(pickled), len(buffers))
    arena = SharedArena.create(at + len(pickled))
    for index, (place, buffer) in enumerate(zip(places, buffers, strict=True)):
        arena.bytes(index * _PLACE.size, _PLACE.size)[:] = _PLACE.pack(*place)
        arena.bytes(*place)[:] = buffer
    arena.bytes(at, len(pickled))[:] = pickled
    fd = os.dup(arena.fd)
    arena.close()
    return Payload(fd=fd, header=header)


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the bytes of tensors out of band and every storage once."""

    def __init__(
        self, file: io.BytesIO, take: Callable[[memoryview], None], hollow: Iterable[torch.Tensor]
    ) -> None:
        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _OUT_OF_BAND_BYTES:
                return True
            take(raw)
            return False

        # Not a method: the pickler would hold itself, and with its memo all that it has sent.
        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        self._hollow = {tensor.untyped_storage()._cdata for tensor in hollow}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage) and _is_on_cpu(obj._untyped_storage):
            return _typed_storage, (self._once(obj._untyped_storage), obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and _is_on_cpu(obj):
            if obj._cdata in self._hollow:
                return torch.UntypedStorage, (obj.nbytes(),)
            return _untyped_storage, (pickle.PickleBuffer(_bytes_of(obj)),)
        if isinstance(obj, types.CodeType):
            return _code(obj)
        return super().reducer_override(obj)

    def _once(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """One object for all wrappers of a storage, so that pickle's own memo keeps views and ties together."""
        return self._storages.setdefault(storage._cdata, storage)


def _code(code: types.CodeType) -> Any:
    """Code with the name of its file, by which errors name the user's own line; cloudpickle leaves it out."""
    make, arguments = cloudpickle.CloudPickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in arguments)


def _dumps(obj: Any, take: Callable[[memoryview], None], hollow: Iterable[torch.Tensor] = ()) -> bytes:
    file = io.BytesIO()
    _Pickler(file, take, hollow).dump(obj)
    return file.getvalue()


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _untyped_storage(data: Any) -> torch.UntypedStorage:
    if not len(data):
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )


@contextlib.contextmanager
def _sent_by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _is_on_cpu(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu"


def _cannot_send(obj: Any, name: str, error: Exception) -> ConfigError:
    """Say which part of `obj` it is: what the pickler says names a type, and a user has many attributes."""
    path, culprit, is_in_module = _culprit(obj, name)
    kind = ModelError if is_in_module else ConfigError
    return kind(
        subject=path.lstrip(".") or _type_name(obj),
        expected="something that can be sent to another process",
        got=f"an object of type {_type_name(culprit)!r} ({error})",
        remedy="Pass a function that returns it: the process that needs it calls the function.",
    )


def _culprit(obj: Any, path: str) -> tuple[str, Any, bool]:
    """Go down to the smallest part that cannot be sent; return its path, itself, and if a module holds it."""
    above, tries = [obj], _MAX_TRIES
    while len(above) < _MAX_DEPTH:
        children = itertools.islice(_children(above[-1]), tries)
        for label, child in children:
            tries -= 1
            if not any(child is one for one in above) and not _can_be_sent(child):
                path += label
                above.append(child)
                break
        else:
            break
    return path, above[-1], any(isinstance(one, torch.nn.Module) for one in above)


def _can_be_sent(obj: Any) -> bool:
    try:
        _dumps(obj, lambda raw: None)
    except Exception:  # whatever a user's __reduce__ raises
        return False
    return True


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    """The parts that a pickle of `obj` holds, each with what it adds to the path."""
    match obj:
        case dict():
            yield from ((f"[{key!r}]", value) for key, value in obj.items())
        case list() | tuple() | set() | frozenset() | collections.deque():
            yield from ((f"[{index}]", value) for index, value in enumerate(obj))
        case types.FunctionType():
            yield from ((f", its variable {name}", value) for name, value in _variables(obj))
        case types.MethodType():
            yield ".__self__", obj.__self__
        case functools.partial():
            yield from ((f".{name}", getattr(obj, name)) for name in ("func", "args", "keywords"))
        case type():
            yield from ((f".{name}", value) for name, value in vars(obj).items())
        case _:
            yield from ((f".{name}", value) for name, value in _state(obj).items())


def _variables(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What the function reads from around it, and its defaults."""
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inside = [(name, cell.cell_contents) for name, cell in closure if not _is_empty(cell)]
    used = [(n, function.__globals__[n]) for n in function.__code__.co_names if n in function.__globals__]
    defaults = [(f"default {index}", value) for index, value in enumerate(function.__defaults__ or ())]
    return inside + used + defaults + list((function.__kwdefaults__ or {}).items())


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _state(obj: Any) -> dict[str, Any]:
    """The attributes that travel; a module's submodules, parameters and buffers under their own names."""
    try:
        state = obj.__getstate__()
    except Exception:  # a user's own: then it is itself what cannot be sent
        return {}
    merged: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        merged |= part if isinstance(part, dict) else {}
    if isinstance(obj, torch.nn.Module):
        for group in ("_modules", "_parameters", "_buffers"):
            merged |= merged.pop(group, {})
    return merged


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
