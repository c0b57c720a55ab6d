"""Memory that a shard over TCP has beside its slices: bounded sets of vectors, and who reads which values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from squall.model.layout import SliceSpec
from squall.wire.bulk import Outgoing, bytes_of

Vectors = dict[int, Tensor]
"""By slice, shape (S,)."""


class VectorPool:
    """Sets of one vector per slice: at most so many at once, and kept for the next user.

    Attributes:
        most: of sets.
        num_out: sets that are in use.
        num_made: sets that take memory.

    >>> pool = VectorPool((), most=1)
    >>> vectors = pool.take()
    >>> pool.has_room, pool.num_out
    (False, 1)
    >>> pool.give(vectors)
    >>> pool.has_room
    True
    """

    def __init__(self, specs: Sequence[SliceSpec], most: int) -> None:
        self._specs = specs
        self.most = most
        self._free: list[Vectors] = []
        self.num_out = self.num_made = 0

    @property
    def has_room(self) -> bool:
        return self.num_out < self.most

    def take(self) -> Vectors:
        assert self.has_room, "whoever takes has looked"
        self.num_out += 1
        if self._free:
            return self._free.pop()
        self.num_made += 1
        return {spec.slice: torch.empty(spec.size, dtype=getattr(torch, spec.dtype)) for spec in self._specs}

    def give(self, vectors: Vectors) -> None:
        self.num_out -= 1
        self._free.append(vectors)


@dataclass(eq=False)
class _Copy:
    vectors: Vectors
    num_readers: int


class Readers:
    """Fetches that are being sent: from the live slices while these do not change, else from one copy a version.

    Whoever reads the live slices reads the newest version, so one copy serves all of them when an update comes. Only
    what the slowest of them has not sent yet is copied.

    Args:
        specs: the shard's slices.
        live: their values, shape (S,) each; only read.
        most_copies: at once.
    """

    def __init__(self, specs: Sequence[SliceSpec], live: Vectors, most_copies: int) -> None:
        self._specs = specs
        self._live = live
        self.copies = VectorPool(specs, most_copies)
        self._reading: dict[Outgoing, _Copy | None] = {}  # None: the live slices

    def begin(self, request: int) -> Outgoing:
        """Begin to send every slice as it is now."""
        outgoing = Outgoing(request, [bytes_of(self._as_sent(spec)) for spec in self._specs])
        self._reading[outgoing] = None
        return outgoing

    def _as_sent(self, spec: SliceSpec) -> Tensor:
        """A slice's values in the dtype that travels: rounded to it, in memory of their own, if it has masters."""
        return self._live[spec.slice].to(getattr(torch, spec.dtype))

    def end(self, outgoing: Outgoing) -> None:
        """All is sent, or the reader is gone."""
        copy = self._reading.pop(outgoing)
        if copy is not None:
            copy.num_readers -= 1
            if not copy.num_readers:
                self.copies.give(copy.vectors)

    @property
    def may_change(self) -> bool:
        """Whether the live slices can be changed now: nobody reads them, or there is room for a copy."""
        return self.copies.has_room or not self._of_live()

    def before_change(self) -> None:
        """Leave the live slices: they are about to change."""
        readers = self._of_live()
        if not readers:
            return
        copy = _Copy(self.copies.take(), len(readers))
        self._copy(copy.vectors, min(reader.body.num_done for reader in readers))
        views = [bytes_of(copy.vectors[spec.slice]) for spec in self._specs]
        for reader in readers:
            reader.body.replace(views)
            self._reading[reader] = copy

    def _of_live(self) -> list[Outgoing]:
        return [outgoing for outgoing, copy in self._reading.items() if copy is None]

    def _copy(self, vectors: Vectors, first_byte: int) -> None:
        for spec in self._specs:
            item = vectors[spec.slice].element_size()
            start = min(max(first_byte, 0) // item, spec.size)
            vectors[spec.slice][start:].copy_(self._live[spec.slice][start:])
            first_byte -= spec.num_bytes
