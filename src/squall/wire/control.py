"""What the launcher says to the roles that it has started, and they to it. Local to one machine.

    launcher                                   every role
                   <--------------------------  Ready, Failed, Counted

    launcher                                   shard
      AttachWorker -------------------------->            with the worker's connection and memory
      SaveSlices   -------------------------->
                   <--------------------------  Saved
      Finish       -------------------------->

    launcher                                   coordinator
      AttachReplica, AttachShard ------------>            with their connections
      StopRun      -------------------------->
      TakeCheckpoint ------------------------>
                   <--------------------------  CutReached
      BuffersCopied ------------------------->
                   <--------------------------  Closings, Happened, Waiting, DivergedRun, EndedRun
      Finish       -------------------------->

    launcher                                   evaluator
      EvaluateNow  -------------------------->
                   <--------------------------  Measured
      Finish       -------------------------->

Descriptors travel beside the message, in the order named there.
"""

from dataclasses import dataclass

from squall.blocks import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Role -> launcher: I have what I need and am serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Role -> launcher: I cannot go on, because of the user's code (`line` is theirs) or a request that is wrong.

    Attributes:
        kind: "user" or "config".
    """

    kind: str
    role: str
    step: str
    line: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCount:
    """Bytes and messages from one role to another, from the start."""

    sender: str
    receiver: str
    num_bytes: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Role -> launcher: what has passed my connections so far."""

    links: tuple[LinkCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachWorker:
    """Launcher -> shard: serve this worker. Descriptors: its connection, the memory shared with it."""

    replica: int
    partition: int
    incarnation: int
    name: str
    num_gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSlices:
    """Launcher -> shard: write your slices to the checkpoint of this name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Shard -> launcher: they are on disk."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Launcher -> role: the run is over; flush your files and exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachReplica:
    """Launcher -> coordinator: a replica was started. Descriptor: its connection."""

    replica: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachShard:
    """Launcher -> coordinator: a shard was started. Descriptor: its connection."""

    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """Launcher -> coordinator: end the run with what is acknowledged."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeCheckpoint:
    """Launcher -> coordinator: have the shards store a checkpoint of this name, all of one cut."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutReached:
    """Coordinator -> launcher: every slice holds just these positions, and waits for you."""

    request: int
    name: str
    settled: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersCopied:
    """Launcher -> coordinator: I have the models' buffers as of the cut; training may go on."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedBlock:
    """A block that every slice has now."""

    time_s: float
    replica: int
    block: Block
    examples: int
    loss_sum: float
    staleness: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Closings:
    """Coordinator -> launcher: blocks that were closed since the last time."""

    blocks: tuple[ClosedBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """Coordinator -> launcher: one of observe.events' Joined, Left, Redone, Refused, by its fields.

    Attributes:
        kind: the event's class.
        role: of Joined and Left; the replica's name for Redone.
        number: Joined: incarnation; Redone: attempt.
    """

    kind: str
    time_s: float
    role: str
    number: int
    block: Block | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Coordinator -> launcher: who waits for whom, in words."""

    waits: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergedRun:
    """Coordinator -> launcher: `what` of a tensor (a name, or a number in the parameter space) is not finite."""

    what: str
    tensor: str
    number: int
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """Coordinator -> launcher: nothing more will be pushed; these positions are settled."""

    why: str
    settled: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateNow:
    """Launcher -> evaluator: fetch, and measure the test set."""

    epoch: int
    minibatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Evaluator -> launcher: what was measured, at these versions of the slices."""

    epoch: int
    minibatches: int
    names: tuple[str, ...]
    values: tuple[float, ...]
    versions: tuple[int, ...]


CONTROL_CODES: dict[int, type] = {
    101: Ready,
    102: Failed,
    103: Counted,
    104: AttachWorker,
    105: SaveSlices,
    106: Saved,
    107: Finish,
    108: AttachReplica,
    109: AttachShard,
    110: StopRun,
    111: Closings,
    112: Happened,
    113: Waiting,
    114: DivergedRun,
    115: EndedRun,
    116: EvaluateNow,
    117: Measured,
    118: TakeCheckpoint,
    119: CutReached,
    120: BuffersCopied,
}
