"""Turns frozen message dataclasses into bytes and back: strict, and without pickle.

A message on the wire, little-endian and unaligned::

    byte   0       1         2      3            7
           'S'     version   code   num_bytes    the record of the class that `code` names
           uint8   uint8     uint8  uint32

A record is first its fields of fixed size, in the order of the dataclass and as one run, then the others in order:

    int            8 bytes, signed            str             uint16 length, UTF-8
    float          8 bytes                    bytes           uint32 length
    bool           1 byte, 0 or 1             tuple[X, ...]   uint32 count, then each X
    Enum           1 byte, index of member    tuple[X, Y]     X, then Y
    a dataclass    its record                 X | Y | None    1 byte, 0 for None or 1, 2, ... for the member, then it

There is one way to write a value, and `Codec.decode` takes no other. Both ends must have been made from the same
classes: a field that one of them does not know is a malformed message, never a field that is passed over.
"""

import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from operator import attrgetter
from typing import Any, NewType, Protocol, TypeAlias, Union, get_args, get_origin, get_type_hints

from squall.errors import ConfigError, LocalProtocolError, RemoteProtocolError, SquallError

Data: TypeAlias = bytes | memoryview

VERSION = 1
MAGIC = ord("S")
HEADER = struct.Struct("<BBBI")
MAX_STR_BYTES = 0xFFFF

_NUM_SHORT = 32  # tuples of fewer numbers are written without compiling a format
_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")


class Codec:
    """Encodes and decodes the messages of one conversation.

    Args:
        message_types: the frozen dataclasses, by the code (0 to 255) that names each on the wire.

    Raises:
        ConfigError: a class has a field that cannot be sent.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Fetch:
    ...     replica: int
    ...     slices: tuple[int, ...]
    >>> codec = Codec({3: Fetch})
    >>> data = codec.encode(Fetch(replica=7, slices=(0, 2)))
    >>> len(data), codec.decode(data)
    (35, Fetch(replica=7, slices=(0, 2)))
    """

    def __init__(self, message_types: Mapping[int, type]) -> None:
        self._readers: dict[int, _Record] = {}
        self._writers: dict[type, tuple[int, _Record]] = {}
        for code, message_type in message_types.items():
            if not 0 <= code <= 0xFF or message_type in self._writers:
                raise _unsendable(message_type, "one code from 0 to 255", f"code {code!r}, or a second one")
            record = _record_of(message_type, ())
            self._readers[code] = record
            self._writers[message_type] = code, record

    def encode(self, message: object) -> bytes:
        """Return the bytes of `message`.

        Raises:
            LocalProtocolError: its class has no code, or a field holds what its annotation does not allow.
        """
        try:
            code, record = self._writers[type(message)]
            parts = [b""]
            record.write(message, parts)
            num_bytes = HEADER.size + sum(map(len, parts))
            parts[0] = HEADER.pack(MAGIC, VERSION, code, num_bytes)
            return b"".join(parts)
        except (struct.error, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise LocalProtocolError(
                reason=f"{type(message).__name__}: expected fields as annotated in a class of this codec, "
                f"but got {error!r} while writing {message!r:.500}"
            ) from error

    def decode(self, data: Data) -> object:
        """Return the message that `data` holds, whole and with nothing behind it.

        Raises:
            RemoteProtocolError: anything else; memory is allocated only for what is really there.
        """
        try:
            record = self._readers[self._checked_code(data)]
            message, stop = record.read(data, HEADER.size)
            if stop != len(data):
                raise ValueError(f"expected the message to end at byte {stop}, but got {len(data)} bytes")
        except (struct.error, LookupError, ValueError, SquallError) as error:
            raise RemoteProtocolError(
                reason=f"malformed message of {len(data)} bytes ({bytes(data[:16]).hex(' ')} ...): {error}"
            ) from error
        return message

    def _checked_code(self, data: Data) -> int:
        magic, version, code, num_bytes = HEADER.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError(f"expected Squall's wire version {VERSION}, but got bytes {magic}, {version}")
        if num_bytes != len(data):
            raise ValueError(f"the header promises {num_bytes} bytes")
        if code not in self._readers:
            raise ValueError(f"unknown code {code}")
        return int(code)


class _Spec(Protocol):
    """How values of one type are written and read."""

    @property
    def min_bytes(self) -> int:
        """What the smallest value takes, so that a count can be checked before anything is allocated."""
        ...

    def write(self, value: Any, parts: list[bytes]) -> None: ...

    def read(self, data: Data, at: int) -> tuple[Any, int]:
        """Return the value at byte `at`, and the byte behind it."""
        ...


class _Leaf:
    """A value of fixed size that takes part in the one `struct.Struct` of its record.

    Attributes:
        pack_format, unpack_format: of one size; a bool is packed by truth and unpacked as a number to be checked.
        to_wire: turns the value into what `struct` packs; None where it does so itself.
        gather: takes the value off an iterator over unpacked numbers.
    """

    def __init__(
        self,
        pack_format: str,
        unpack_format: str = "",
        *,
        to_wire: Callable[[Any], Any] | None = None,
        gather: Callable[[Iterator[Any]], Any] = next,
    ) -> None:
        self.pack_format, self.unpack_format = pack_format, unpack_format or pack_format
        self.to_wire, self.gather = to_wire, gather
        self.pack, self.unpack = _struct(self.pack_format), _struct(self.unpack_format)
        self.min_bytes = self.pack.size
        self.is_plain = to_wire is None and gather is next

    def write(self, value: Any, parts: list[bytes]) -> None:
        parts.append(self.pack.pack(value if self.to_wire is None else self.to_wire(value)))

    def read(self, data: Data, at: int) -> tuple[Any, int]:
        return self.gather(iter(self.unpack.unpack_from(data, at))), at + self.min_bytes


class _Record:
    """A dataclass: its fields of fixed size as one run, then the others."""

    def __init__(self, record_type: type, specs: dict[str, _Spec]) -> None:
        self.record_type = record_type
        self.fixed = {n: s for n, s in specs.items() if _is_fixed(s)}
        self.others = {n: s for n, s in specs.items() if not _is_fixed(s)}
        self.names = (*self.fixed, *self.others)
        leaves = [leaf for name, spec in self.fixed.items() for leaf in _leaves(name, spec)]
        self.leaves = leaves
        self.pack = _struct("".join(leaf.pack_format for _, leaf in leaves))
        self.unpack = _struct("".join(leaf.unpack_format for _, leaf in leaves))
        self.min_bytes = self.pack.size + sum(spec.min_bytes for spec in self.others.values())
        self._get = _getter([path for path, _ in leaves])
        self._to_wire = [(at, leaf.to_wire) for at, (_, leaf) in enumerate(leaves) if leaf.to_wire]
        self._gathers = [spec.gather for spec in self.fixed.values() if isinstance(spec, _Leaf | _Record)]
        self._writes = [(attrgetter(name), spec.write) for name, spec in self.others.items()]
        self._reads = [spec.read for spec in self.others.values()]
        self._is_plain = all(isinstance(spec, _Leaf) and spec.is_plain for spec in self.fixed.values())
        self._make = _maker(record_type, self.names)

    def write(self, value: Any, parts: list[bytes]) -> None:
        if type(value) is not self.record_type:
            raise TypeError(f"expected a {self.record_type.__name__}, but got {value!r:.200}")
        numbers = self._get(value)
        if self._to_wire:
            numbers = list(numbers)
            for at, to_wire in self._to_wire:
                numbers[at] = to_wire(numbers[at])
        parts.append(self.pack.pack(*numbers))
        for get, write in self._writes:
            write(get(value), parts)

    def read(self, data: Data, at: int) -> tuple[Any, int]:
        numbers = iter(self.unpack.unpack_from(data, at))
        values = [gather(numbers) for gather in self._gathers]
        at += self.unpack.size
        for read in self._reads:
            value, at = read(data, at)
            values.append(value)
        return self._make(values), at

    def gather(self, numbers: Iterator[Any]) -> Any:
        """Take a record without other fields off an iterator over unpacked numbers."""
        if self._is_plain:
            return self._make(islice(numbers, len(self._gathers)))
        return self._make([gather(numbers) for gather in self._gathers])


class _Bytes:
    min_bytes = _U32.size

    def write(self, value: bytes, parts: list[bytes]) -> None:
        if type(value) is not bytes:
            raise TypeError(f"expected bytes, but got {type(value).__name__}")
        parts += (_U32.pack(len(value)), value)

    def read(self, data: Data, at: int) -> tuple[bytes, int]:
        start, stop = _span(data, at, _U32)
        return bytes(data[start:stop]), stop


class _Str:
    min_bytes = _U16.size

    def write(self, value: str, parts: list[bytes]) -> None:
        encoded = value.encode()
        if len(encoded) > MAX_STR_BYTES:
            raise ValueError(f"expected at most {MAX_STR_BYTES} bytes of text, but got {len(encoded)}")
        parts += (_U16.pack(len(encoded)), encoded)

    def read(self, data: Data, at: int) -> tuple[str, int]:
        start, stop = _span(data, at, _U16)
        return str(data[start:stop], "utf-8"), stop


class _Numbers:
    """``tuple[int, ...]`` or ``tuple[float, ...]``: one `struct` call for all of them."""

    min_bytes = _U32.size

    def __init__(self, letter: str) -> None:
        self.letter, self.size = letter, struct.calcsize(letter)
        self.short = [_struct(f"{count}{letter}") for count in range(_NUM_SHORT)]

    def write(self, value: tuple[Any, ...], parts: list[bytes]) -> None:
        count = _count_of(value)
        parts += (_U32.pack(count), self._struct(count).pack(*value))

    def read(self, data: Data, at: int) -> tuple[tuple[Any, ...], int]:
        count = _checked_count(data, at, self.size)
        at += 4
        return self._struct(count).unpack_from(data, at), at + count * self.size

    def _struct(self, count: int) -> struct.Struct:
        return self.short[count] if count < _NUM_SHORT else _struct(f"{count}{self.letter}")


class _Tuple:
    """``tuple[X, ...]``."""

    min_bytes = _U32.size

    def __init__(self, element: _Spec) -> None:
        self.element = element

    def write(self, value: tuple[Any, ...], parts: list[bytes]) -> None:
        parts.append(_U32.pack(_count_of(value)))
        for element in value:
            self.element.write(element, parts)

    def read(self, data: Data, at: int) -> tuple[tuple[Any, ...], int]:
        count = _checked_count(data, at, self.element.min_bytes)
        at += _U32.size
        values = []
        for _ in range(count):
            value, at = self.element.read(data, at)
            values.append(value)
        return tuple(values), at


class _Row:
    """``tuple[X, Y]``: as many values as there are types."""

    def __init__(self, elements: Sequence[_Spec]) -> None:
        self.elements = elements
        self.min_bytes = sum(element.min_bytes for element in elements)

    def write(self, value: tuple[Any, ...], parts: list[bytes]) -> None:
        if _count_of(value) != len(self.elements):
            raise ValueError(f"expected {len(self.elements)} values, but got {value!r:.200}")
        for element, spec in zip(value, self.elements, strict=True):
            spec.write(element, parts)

    def read(self, data: Data, at: int) -> tuple[tuple[Any, ...], int]:
        values = []
        for spec in self.elements:
            value, at = spec.read(data, at)
            values.append(value)
        return tuple(values), at


class _Union:
    """``X | Y | None``: a byte that tells which, then the value."""

    min_bytes = 1

    def __init__(self, members: Mapping[type, _Spec], *, is_optional: bool) -> None:
        self.tags = {member: tag for tag, member in enumerate(members, start=1)}
        self.specs = (_Nothing(), *members.values())
        self.first_tag = 0 if is_optional else 1
        if is_optional:
            self.tags[types.NoneType] = 0

    def write(self, value: Any, parts: list[bytes]) -> None:
        tag = self.tags[type(value)]
        parts.append(_U8.pack(tag))
        self.specs[tag].write(value, parts)

    def read(self, data: Data, at: int) -> tuple[Any, int]:
        tag = data[at]
        if not self.first_tag <= tag < len(self.specs):
            raise ValueError(f"expected a tag from {self.first_tag} to {len(self.specs) - 1}, but got {tag}")
        return self.specs[tag].read(data, at + 1)


class _Nothing:
    min_bytes = 0

    def write(self, value: None, parts: list[bytes]) -> None:
        pass

    def read(self, data: Data, at: int) -> tuple[None, int]:
        return None, at


def _spec_of(annotation: Any, path: tuple[type, ...]) -> _Spec:
    """Compile one annotation; `path` is the dataclasses that it is nested in."""
    if isinstance(annotation, NewType):
        return _spec_of(annotation.__supertype__, path)
    if annotation in _SCALARS:
        return _SCALARS[annotation]()
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        members = {_run_time_class(a): _spec_of(a, path) for a in arguments if a is not types.NoneType}
        is_optional = types.NoneType in arguments
        if len(members) + is_optional == len(arguments):
            return _Union(members, is_optional=is_optional)
    elif origin is tuple and arguments[-1] is Ellipsis:
        return _tuple_of(_spec_of(arguments[0], path), path)
    elif origin is tuple:
        return _Row([_spec_of(argument, path) for argument in arguments])
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum_of(annotation)
    elif isinstance(annotation, type) and is_dataclass(annotation):
        return _record_of(annotation, path)
    raise _unsendable(path[-1], "fields of the types that squall.wire.codec names", repr(annotation))


def _record_of(record_type: type, path: tuple[type, ...]) -> _Record:
    if not is_dataclass(record_type) or not record_type.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise _unsendable(record_type, "a frozen dataclass", "another class")
    if record_type in path:
        raise _unsendable(record_type, "records of bounded depth", "one that holds itself")
    hints = get_type_hints(record_type)
    if any(not field.init for field in fields(record_type)):
        raise _unsendable(record_type, "fields that its constructor takes", "one with init=False")
    specs = {field.name: _spec_of(hints[field.name], (*path, record_type)) for field in fields(record_type)}
    return _Record(record_type, specs)


def _tuple_of(element: _Spec, path: tuple[type, ...]) -> _Spec:
    if element.min_bytes == 0:
        raise _unsendable(path[-1], "elements of at least one byte", "a tuple of nothings, without bound")
    if isinstance(element, _Leaf) and element.is_plain:
        return _Numbers(element.pack_format)
    return _Tuple(element)


def _enum_of(enum_type: type[Enum]) -> _Leaf:
    members = tuple(enum_type)
    if not 0 < len(members) <= 0x100:
        raise _unsendable(enum_type, "1 to 256 members", str(len(members)))
    index = {member: at for at, member in enumerate(members)}
    return _Leaf("B", to_wire=index.__getitem__, gather=lambda numbers: members[next(numbers)])


def _gather_bool(numbers: Iterator[int]) -> bool:
    number = next(numbers)
    if number > 1:
        raise ValueError(f"expected a bool as 0 or 1, but got {number}")
    return number == 1


_SCALARS: dict[Any, Callable[[], _Spec]] = {
    int: lambda: _Leaf("q"),
    float: lambda: _Leaf("d"),
    bool: lambda: _Leaf("?", "B", gather=_gather_bool),
    str: _Str,
    bytes: _Bytes,
}


def _is_fixed(spec: _Spec) -> bool:
    return isinstance(spec, _Leaf) or (isinstance(spec, _Record) and not spec.others)


def _leaves(path: str, spec: _Spec) -> list[tuple[str, _Leaf]]:
    """The leaves of a fixed spec, each with the dotted path that `attrgetter` reads it by."""
    if isinstance(spec, _Leaf):
        return [(path, spec)]
    assert isinstance(spec, _Record)
    return [(f"{path}.{below}", leaf) for below, leaf in spec.leaves]


def _getter(paths: list[str]) -> Callable[[Any], Sequence[Any]]:
    """`attrgetter`, which returns no tuple for one path and refuses none."""
    if len(paths) > 1:
        return attrgetter(*paths)
    if not paths:
        return lambda value: ()
    get = attrgetter(paths[0])
    return lambda value: (get(value),)


def _maker(record_type: type, names: Sequence[str]) -> Callable[[Iterable[Any]], Any]:
    """Return a function from the values, in the order of `names`, to an instance that has been checked."""
    slots = [getattr(record_type, name, None) for name in names]
    if not all(isinstance(slot, types.MemberDescriptorType) for slot in slots):
        return lambda values: record_type(**dict(zip(names, values, strict=True)))
    # A frozen dataclass's own constructor looks each field up by name three times: most of what decoding costs.
    setters = [slot.__set__ for slot in slots if slot is not None]
    check = getattr(record_type, "__post_init__", None)

    def make(values: Iterable[Any]) -> Any:
        message: Any = object.__new__(record_type)
        for setter, value in zip(setters, values, strict=True):
            setter(message, value)
        if check is not None:
            check(message)
        return message

    return make


def _struct(letters: str) -> struct.Struct:
    return struct.Struct(f"<{letters}")


def _run_time_class(annotation: Any) -> type:
    if isinstance(annotation, NewType):
        return _run_time_class(annotation.__supertype__)
    return get_origin(annotation) or annotation  # type: ignore[no-any-return]


def _count_of(value: tuple[Any, ...]) -> int:
    if type(value) is not tuple:
        raise TypeError(f"expected a tuple, but got {type(value).__name__}")
    return len(value)


def _checked_count(data: Data, at: int, element_bytes: int) -> int:
    (count,) = _U32.unpack_from(data, at)
    if count * element_bytes > len(data) - at - _U32.size:
        raise ValueError(f"a count of {count} elements is more than the message can hold")
    return int(count)


def _span(data: Data, at: int, prefix: struct.Struct) -> tuple[int, int]:
    (num_bytes,) = prefix.unpack_from(data, at)
    start = at + prefix.size
    if start + num_bytes > len(data):
        raise ValueError(f"a length of {num_bytes} bytes is more than the message can hold")
    return start, start + num_bytes


def _unsendable(message_type: type, expected: str, got: str) -> ConfigError:
    return ConfigError(subject=f"message {message_type.__name__}", expected=expected, got=got)
