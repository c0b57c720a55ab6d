"""The checkpoints of one run: when the next is due, what belongs to it, when it is whole, and which may go."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from squall.blocks import Block, BlockSet
from squall.errors import CorruptError
from squall.training.checkpoint import MANIFEST, finish_checkpoint, verify_checkpoint
from squall.training.prepare import Prepared


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A checkpoint that is whole on disk, holding so much work."""

    path: Path
    minibatches: int


@dataclass
class _Pending:
    """A checkpoint that is on the way: what goes with it, once the cut is reached, and who has stored."""

    name: str
    minibatches: int = 0
    buffers: Mapping[str, Tensor] | None = None
    time_s: float = 0.0
    saved: set[str] = field(default_factory=set)


class CheckpointKeeper:
    """Keeps the checkpoints of one run.

    Args:
        folder: where they lie, each in a folder that is called by its number.
        prepared: the run.
    """

    def __init__(self, folder: Path, prepared: Prepared) -> None:
        self._folder = folder
        self._prepared = prepared
        self._shards = {f"shard{shard}" for shard in range(prepared.layout.num_shards)}
        self._number = max((int(path.name) for path in _numbered(folder)), default=0)
        every = prepared.job.checkpoint_every
        self._every = None if every is None else every * prepared.plan.minibatches_per_epoch
        self._last = float(prepared.settled.num_minibatches)
        self._kept = prepared.job.keep_checkpoints
        self._pending: _Pending | None = None
        self._whole: set[Path] = set()  # known to be: sealed or read by this process

    def new_name(self) -> str:
        """The name of another checkpoint, which is begun now."""
        self._number += 1
        self._pending = _Pending(f"{self._number:06d}")
        return self._pending.name

    def due(self, minibatches: int) -> str | None:
        """The name of the checkpoint to begin, now that so many are done; None if it is not time, or one is begun."""
        if self._every is None or self._pending is not None or minibatches < self._last + self._every:
            return None
        total = self._prepared.plan.total
        if total is not None and minibatches >= total:
            return None  # the end brings one of its own
        # From where it should have been, so that lateness does not add up.
        self._last += (minibatches - self._last) // self._every * self._every
        return self.new_name()

    def reached(
        self, name: str, settled: Iterable[Block], buffers: Mapping[str, Tensor], time_s: float
    ) -> None:
        """The cut is reached: these positions, and these buffers as of them."""
        if self._pending is not None and self._pending.name == name:
            self._pending.minibatches = BlockSet.union(settled).num_minibatches
            self._pending.buffers, self._pending.time_s = buffers, time_s

    def saved(self, name: str, shard: str) -> None:
        """A shard has written its slices."""
        if self._pending is not None and self._pending.name == name:
            self._pending.saved.add(shard)

    def lost(self, shard: str) -> None:
        """A shard has come back. If it was to write a checkpoint and has not, that will never be whole."""
        pending = self._pending
        if pending is not None and pending.buffers is not None and shard not in pending.saved:
            self._pending = None

    def give_up(self) -> None:
        """The coordinator was lost: if the cut was reached, nobody knows who was told to store it; else it can be had."""
        if self._pending is not None and self._pending.buffers is not None:
            self._pending = None

    def begun_anew(self) -> str | None:
        """The name of the checkpoint that is begun and has no cut yet, for another coordinator; None if there is none."""
        return None if self._pending is None or self._pending.buffers is not None else self._pending.name

    @property
    def missing(self) -> set[str]:
        """Shards that have not written their slices of the newest checkpoint."""
        return set() if self._pending is None else self._shards - self._pending.saved

    def seal(self) -> Sealed | None:
        """Write the manifest, if all that it speaks of is there, and clear away what it replaces."""
        pending = self._pending
        if pending is None or pending.buffers is None or self.missing:
            return None
        self._pending = None
        path = self._folder / pending.name
        path.mkdir(exist_ok=True)  # without slices, no shard has made it
        finish_checkpoint(
            path,
            layout=self._prepared.layout,
            buffers=pending.buffers,
            minibatches=pending.minibatches,
            time_s=pending.time_s,
            identity=self._prepared.identity,
            starts=self._prepared.starts,
        )
        self._whole.add(path)
        self._clear()
        return Sealed(path=path, minibatches=pending.minibatches)

    def _clear(self) -> None:
        """Remove all that is older than the newest whole ones; a damaged one counts for nothing and stays.

        The newest has just been sealed, which reads all of its files: one that is whole is always left. One older
        than it without a manifest was given up, and shards write in order: nobody is about to write to it.
        """
        kept = 0
        for path in sorted(_numbered(self._folder), reverse=True, key=lambda path: int(path.name)):
            if kept < self._kept and (path / MANIFEST).exists():
                kept += self._is_whole(path)
            else:
                shutil.rmtree(path)

    def _is_whole(self, path: Path) -> bool:
        if path not in self._whole:
            try:
                verify_checkpoint(path)
            except CorruptError:
                return False
            self._whole.add(path)
        return True


def _numbered(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdigit()]
