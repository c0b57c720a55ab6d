"""One shard's slices on disk: values, rule state and books in one file, whole or not at all."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from squall.blocks import BlockSet
from squall.errors import MISFITS, CorruptError
from squall.model.layout import SliceSpec
from squall.observe.files import replaced
from squall.rules.apply import SliceState
from squall.shard.background import Background
from squall.shard.books import SliceBook

FORMAT = "squall-slices"


def shard_file(shard: int) -> str:
    """The name of a shard's file in a checkpoint."""
    return f"shard{shard}.safetensors"


def write_slices(path: Path, states: Sequence[SliceState], books: Sequence[SliceBook]) -> None:
    """Write slices with their books; `path` holds the old file or the new one, never a part."""
    by_number = {book.slice: book for book in books}
    tensors: dict[str, Tensor] = {}
    told: list[dict[str, Any]] = []
    for state in states:
        number = state.spec.slice
        tensors[f"{number}.params"] = state.params
        tensors[f"{number}.steps"] = torch.from_numpy(state.steps)
        for name, slot in state.slots.items():
            tensors[f"{number}.slot.{name}"] = slot
        told.append(_book_to_json(by_number[number]) | {"slots": sorted(state.slots)})
    metadata = {"format": FORMAT, "version": "1", "books": json.dumps(told)}
    write_tensors(path, tensors, metadata)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as safetensors, from where they are; `path` holds the old file or the new one, never a part.

    Args:
        tensors: those of one memory, such as tied ones, are written one by one.
    """
    apart: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        if own.numel() and own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        apart[name] = own
    with replaced(path) as temporary:
        save_file(apart, temporary, None if metadata is None else dict(metadata))


def copied(state: SliceState) -> SliceState:
    """The state in memory of its own."""
    return SliceState(
        spec=state.spec,
        params=state.params.clone(),
        slots={name: slot.clone() for name, slot in state.slots.items()},
        steps=state.steps.copy(),
        minibatches=state.minibatches,
    )


class SliceWriter:
    """Writes slices in a thread, one checkpoint after another; readable once one is on disk.

    Of two that were begun the later counts: an order to write the earlier, which comes late, is passed over.
    What cannot be written ends the process, at the next `written` or `close`.
    """

    def __init__(self) -> None:
        self._background = Background("checkpoints")
        self._newest = 0

    def fileno(self) -> int:
        return self._background.fileno()

    def write(self, name: str, path: Path, states: list[SliceState], books: tuple[SliceBook, ...]) -> None:
        """Write these slices, which nobody may change any more, to `path`, for the checkpoint `name`."""
        if int(name) < self._newest:
            return
        self._newest = int(name)

        def work() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if books:
                write_slices(path, states, books)

        self._background.start(name, work)

    def written(self) -> Iterator[str]:
        """The checkpoints that have been written since the last time.

        Raises:
            OSError: one could not be.
        """
        for name, error in self._background.finished():
            if error is not None:
                raise error
            yield name

    def wait(self) -> None:
        """Wait until nothing is being written, and the slices may change again."""
        self._background.wait()

    def close(self) -> None:
        """Wait for what is being written."""
        self._background.close()


def read_slices(path: Path, specs: Sequence[SliceSpec]) -> tuple[list[SliceState], list[SliceBook]]:
    """Read what `write_slices` wrote.

    Args:
        specs: the slices that the file must hold, as the checkpoint's layout has them.

    Raises:
        CorruptError: the file is torn, foreign, or holds other slices.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("format") != FORMAT or metadata.get("version") != "1":
            raise ValueError(f"format {metadata.get('format')!r}, version {metadata.get('version')!r}")
        told = {entry["slice"]: entry for entry in json.loads(metadata["books"])}
        states = [_state(spec, tensors, told[spec.slice]["slots"]) for spec in specs]
        books = [_book_from_json(told[spec.slice]) for spec in specs]
    except (OSError, SafetensorError, *MISFITS) as error:
        raise CorruptError(
            subject=str(path),
            expected=f"the slices {[spec.slice for spec in specs]} of a shard",
            got=f"{type(error).__name__}: {error}",
        ) from error
    return states, books


def _state(spec: SliceSpec, tensors: dict[str, Tensor], slots: list[str]) -> SliceState:
    number = spec.slice
    params = tensors[f"{number}.params"]
    if params.shape != (spec.size,) or str(params.dtype) != f"torch.{spec.master_dtype}":
        raise ValueError(f"slice {number} has shape {tuple(params.shape)} and {params.dtype}")
    return SliceState(
        spec=spec,
        params=params,
        slots={name: tensors[f"{number}.slot.{name}"] for name in slots},
        steps=np.array(tensors[f"{number}.steps"].numpy(), dtype=np.int64),
        minibatches=0,
    )


def _book_to_json(book: SliceBook) -> dict[str, Any]:
    return {
        "slice": book.slice,
        "partition": book.partition,
        "version": book.version,
        "minibatches": book.minibatches,
        "settled": book.settled.entries(),
        "refused": book.refused.entries(),
    }


def _book_from_json(told: dict[str, Any]) -> SliceBook:
    return SliceBook(
        slice=told["slice"],
        partition=told["partition"],
        version=told["version"],
        minibatches=told["minibatches"],
        settled=BlockSet(tuple(tuple(entry) for entry in told["settled"])),
        refused=BlockSet(tuple(tuple(entry) for entry in told["refused"])),
    )
