"""What a shard does with tensors: it runs the update rule on its slices and writes new values through.

The gradient is read where the worker left it, and the new values are written, chunk by chunk as the rule
produces them, into the worker's parameter buffer that is not in use. Nothing else copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from squall.rules.apply import SliceState, apply_
from squall.rules.patterns import RulePerTensor
from squall.rules.rule import Rule
from squall.shard.events import Applied, Apply, NotFinite, Worker, WriteOut
from squall.shard.store import copied


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Where a worker's gradients are read and its values are written, by slice.

    Attributes:
        gradients: one or two sets, written by the worker, read here while its push is pending.
        buffers: the two parameter buffers, written here; empty where the worker's are out of reach.
    """

    gradients: Sequence[Mapping[int, Tensor]]
    buffers: Sequence[Mapping[int, Tensor]]


class ShardTensors:
    """The slices of one shard and the only code that writes them.

    Args:
        states: the slices; taken over.
        rule: how a push changes them.
        recorder: keeps every applied gradient, if the run records.

    Attributes:
        applied: the gradients of the last `apply`, as the rule had them, slice by slice; good until it is answered.
    """

    def __init__(
        self,
        *,
        states: Sequence[SliceState],
        rule: Rule | RulePerTensor,
        recorder: "PushRecorder | None" = None,
    ) -> None:
        self.states = {state.spec.slice: state for state in states}
        self._rule = rule
        self._recorder = recorder
        self._memory: dict[tuple[int, int], WorkerMemory] = {}
        self._scaled: dict[int, Tensor] = {}
        self.applied: list[Tensor] = []

    def attach(self, worker: Worker, memory: WorkerMemory) -> None:
        self._memory[worker.place] = memory

    def detach(self, worker: Worker) -> None:
        self._memory.pop(worker.place, None)
        self.applied = []  # views of its memory, perhaps the last

    def states_kept(self) -> list[SliceState]:
        """The slices as they are, in memory of their own."""
        return [copied(state) for state in self.states.values()]

    def put_back(self, states: Sequence[SliceState], versions: Mapping[int, int]) -> None:
        """Go on from an earlier state.

        Args:
            states: taken over.
            versions: by slice, as of then.
        """
        self.states = {state.spec.slice: state for state in states}
        if self._recorder is not None:
            self._recorder.put_back(versions)

    def apply(self, effect: Apply) -> Applied | NotFinite:
        push = effect.push
        memory = self._memory[effect.sender.place]
        absent = frozenset(push.absent)
        self.applied = []
        for number in effect.slices:
            gradient = memory.gradients[push.buffer][number]
            if push.scale != 1.0:
                # Not in place: if this process dies, the push comes again, from the same memory.
                gradient = torch.mul(gradient, push.scale, out=self._scratch(number, gradient))
            bad = apply_(
                self.states[number],
                self._rule,
                gradient,
                absent=absent,
                minibatches=push.minibatches,
                out=None if push.into is None else memory.buffers[push.into].get(number),
            )
            if bad is not None:
                return NotFinite(tensor=bad)
            self.applied.append(gradient)
            if self._recorder is not None:
                self._recorder.keep(number, gradient, self._missing(number, absent))
        return Applied()

    def _scratch(self, number: int, like: Tensor) -> Tensor:
        if number not in self._scaled:
            self._scaled[number] = torch.empty_like(like)
        return self._scaled[number]

    def _missing(self, number: int, absent: frozenset[int]) -> list[slice]:
        segments = self.states[number].spec.segments
        return [slice(segment.start, segment.stop) for segment in segments if segment.tensor in absent]

    def write_out(self, effect: WriteOut) -> None:
        buffers = self._memory[effect.to.place].buffers
        for number in effect.slices:
            buffers[effect.into][number].copy_(self.states[number].params)


def push_file(number: int) -> str:
    """The name of the file with a slice's recorded pushes."""
    return f"slice{number}.bin"


class PushRecorder:
    """Appends each applied gradient to one raw little-endian file per slice: row v - 1 made version v.

    What a push had no gradient for is written as zeros; bfloat16 and float16, which NumPy does not all know, as
    float32, which has all their values. Files that are there already are continued, at the
    versions that the slices have now: what came later belongs to a state that was lost.

    Args:
        versions: by slice, its version.
        sizes: by slice, bytes of one gradient as written.
    """

    def __init__(self, directory: Path, versions: Mapping[int, int], sizes: Mapping[int, int]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[int, BinaryIO] = {}
        for number in versions:
            self._files[number] = open(directory / push_file(number), "ab")  # noqa: SIM115
        self._sizes = sizes
        self.put_back(versions)

    def put_back(self, versions: Mapping[int, int]) -> None:
        """Forget what came after these versions."""
        for number, version in versions.items():
            self._files[number].truncate(version * self._sizes[number])

    def keep(self, number: int, gradient: Tensor, missing: Sequence[slice]) -> None:
        if missing:
            gradient = gradient.clone()
            for part in missing:
                gradient[part] = 0
        if gradient.dtype in (torch.bfloat16, torch.float16):
            gradient = gradient.float()
        self._files[number].write(gradient.numpy().data.cast("B"))

    def flush(self) -> None:
        """Hand what is kept so far to the operating system, which outlives this process."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
