"""A checkpoint: the files of all shards, and a manifest that is written last and says what they must be."""

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from squall.blocks import BlockSet
from squall.errors import MISFITS, ConfigError, CorruptError
from squall.model.install import assemble, split
from squall.model.layout import Layout
from squall.observe.files import sha256_file, sync_directory, write_atomic
from squall.rules.apply import SliceState
from squall.shard.books import SliceBook
from squall.shard.store import read_slices, shard_file, write_tensors

MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint in memory.

    Attributes:
        layout: of the run that wrote it.
        states, books: one for each of its slices, in order.
        buffers: one set for the model.
        minibatches: done at that point.
        time_s: of the run at that point [seconds].
        identity: what decides which examples a position means; a resumed run must have the same.
        starts: how often the run had been started before.
    """

    layout: Layout
    states: tuple[SliceState, ...]
    books: tuple[SliceBook, ...]
    buffers: Mapping[str, Tensor]
    minibatches: int
    time_s: float
    identity: Mapping[str, Any]
    starts: int

    @property
    def settled(self) -> BlockSet:
        """Positions that every slice has: what a resumed run need not do again."""
        if not self.books:
            return BlockSet()
        first, *others = (book.settled for book in self.books)
        return reduce(
            BlockSet.common, others, BlockSet(first.entries())
        )  # a shard goes on writing to its own

    def tensors(self) -> dict[str, Tensor]:
        """The trained tensors by name."""
        return assemble(self.layout, [state.params for state in self.states])


def finish_checkpoint(
    folder: Path,
    *,
    layout: Layout,
    buffers: Mapping[str, Tensor],
    minibatches: int,
    time_s: float,
    identity: Mapping[str, Any],
    starts: int,
) -> None:
    """Write buffers, and the manifest over all files, those that the shards have written to `folder` included."""
    write_tensors(folder / BUFFERS, buffers)
    files = {path.name: sha256_file(path) for path in sorted(folder.glob("*.safetensors"))}
    manifest = {
        "format": "squall-checkpoint",
        "version": 1,
        "minibatches": minibatches,
        "time_s": time_s,
        "identity": dict(identity),
        "starts": starts,
        "layout": layout.to_json(),
        "files": files,
    }
    text = json.dumps(manifest, indent=1)
    seal = hashlib.sha256(text.encode()).hexdigest()
    write_atomic(folder / MANIFEST, json.dumps({"sha256": seal, "manifest": manifest}, indent=1))
    sync_directory(folder.parent)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Load a checkpoint after checking every byte of it.

    Raises:
        CorruptError: something is missing, torn or altered; named.
    """
    manifest = _read_manifest(folder / MANIFEST)
    layout: Layout = manifest["layout"]
    states: list[SliceState] = []
    books: list[SliceBook] = []
    for shard in range(layout.num_shards):
        specs = layout.slices_of(shard)
        if not specs:
            continue
        path = folder / shard_file(shard)
        _check_sum(path, manifest["files"].get(path.name))
        own_states, own_books = read_slices(path, specs)
        for state, book in zip(own_states, own_books, strict=True):
            state.minibatches = book.minibatches
        states += own_states
        books += own_books
    _check_sum(folder / BUFFERS, manifest["files"].get(BUFFERS))
    order = sorted(range(len(states)), key=lambda index: states[index].spec.slice)
    return Checkpoint(
        layout=layout,
        states=tuple(states[index] for index in order),
        books=tuple(books[index] for index in order),
        buffers=load((folder / BUFFERS).read_bytes()),
        minibatches=manifest["minibatches"],
        time_s=manifest["time_s"],
        identity=manifest["identity"],
        starts=manifest["starts"],
    )


def verify_checkpoint(folder: Path) -> None:
    """Check every byte of a checkpoint without loading it.

    Raises:
        CorruptError: something is missing, torn or altered; named.
    """
    manifest = _read_manifest(folder / MANIFEST)
    for name, expected in manifest["files"].items():
        _check_sum(folder / name, expected)


def newest_checkpoint(checkpoints: Path) -> Checkpoint:
    """The newest whole checkpoint of a run; of a damaged one that is passed over, a warning is given.

    Raises:
        ConfigError: none was ever complete.
        CorruptError: every complete one has been altered; the newest is named.
    """
    complete = sorted(
        (path.parent for path in checkpoints.glob(f"*/{MANIFEST}")), key=lambda path: -int(path.name)
    )
    if not complete:
        raise ConfigError(
            subject=f"{checkpoints}",
            expected="a complete checkpoint",
            got="none",
            remedy="The run ended before it could write one: start it anew with another out=.",
        )
    damaged: list[CorruptError] = []
    for folder in complete:
        try:
            checkpoint = read_checkpoint(folder)
        except CorruptError as error:
            damaged.append(error)
            continue
        for passed_over in damaged:
            warnings.warn(f"{passed_over} The run goes on from {folder} instead.", stacklevel=2)
        return checkpoint
    raise damaged[0]


_KINDS = {"minibatches": int, "time_s": int | float, "identity": dict, "starts": int, "files": dict}
_NO_MANIFEST = (OSError, *MISFITS, ConfigError)


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest with its layout rebuilt."""
    try:
        outer = json.loads(path.read_text())
        manifest = outer["manifest"]
        if hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its checksum does not fit")
        if manifest["format"] != "squall-checkpoint" or manifest["version"] != 1:
            raise ValueError(f"format {manifest['format']!r}, version {manifest['version']!r}")
        if strange := [name for name, kind in _KINDS.items() if not isinstance(manifest[name], kind)]:
            raise ValueError(f"another kind of value for {strange[0]!r}")
        layout = Layout.from_json(manifest["layout"])
    except _NO_MANIFEST as error:
        raise CorruptError(
            subject=str(path), expected="a checkpoint's manifest", got=f"{type(error).__name__}: {error}"
        ) from error
    return {**manifest, "layout": layout}


def _check_sum(path: Path, expected: str | None) -> None:
    try:
        got = sha256_file(path)
    except OSError as error:
        got = f"{type(error).__name__}"
    if got != expected:
        raise CorruptError(
            subject=str(path), expected=f"the checksum {expected} that the manifest lists", got=got
        )


def relaid(checkpoint: Checkpoint, layout: Layout) -> tuple[list[SliceState], list[SliceBook]]:
    """The checkpoint's slices cut anew, for another number of shards, or another cut over partitions.

    Raises:
        ConfigError: its slices hold different blocks, so that a new cut would belong to no one state.
    """
    old = checkpoint.layout
    if old == layout:
        return list(checkpoint.states), list(checkpoint.books)
    settled = {book.settled.entries() for book in checkpoint.books}
    if len(settled) > 1:
        raise ConfigError(
            subject="resuming with another number of shards",
            expected="a checkpoint whose slices all hold the same blocks",
            got="one that was written while a block was under way",
            remedy=f"Resume with shards={old.num_shards} until the run has ended, then change the number.",
        )
    names = sorted({name for state in checkpoint.states for name in state.slots})
    params = _cut_anew(old, layout, [state.params for state in checkpoint.states])
    slots = {
        name: _cut_anew(old, layout, [_slot(state, name) for state in checkpoint.states]) for name in names
    }
    steps = {
        old.space.tensors[segment.tensor].name: int(count)
        for state in checkpoint.states
        for segment, count in zip(state.spec.segments, state.steps, strict=True)
    }
    book = checkpoint.books[0]
    states = []
    for spec in layout.slices:
        state = SliceState(
            spec=spec,
            params=params[spec.slice],
            slots={name: slots[name][spec.slice] for name in names},
            steps=torch.tensor(
                [steps[layout.space.tensors[segment.tensor].name] for segment in spec.segments],
                dtype=torch.int64,
            ).numpy(),
            minibatches=book.minibatches,
        )
        states.append(state)
    version = max(own.version for own in checkpoint.books)
    books = [
        SliceBook(
            spec.slice, spec.partition, version, book.minibatches, book.copy().settled, book.copy().refused
        )
        for spec in layout.slices
    ]
    return states, books


def _slot(state: SliceState, name: str) -> Tensor:
    """A slot of a slice; zeros if none of its tensors needs it, as with rules by name."""
    return state.slots[name] if name in state.slots else torch.zeros_like(state.params)


def _cut_anew(old: Layout, new: Layout, vectors: Sequence[Tensor]) -> list[Tensor]:
    wholes = assemble(old, vectors)
    return split(new, {dtype: new.space.flat_of(wholes, dtype) for dtype in new.space.dtypes})
