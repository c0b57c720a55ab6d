"""What the launcher says to the roles that it has started, and they to it. Local to one machine.

    launcher                                   every role
                   <--------------------------  Ready, Failed, Counted

    launcher                                   shard
      AttachWorker -------------------------->            with the worker's connection and memory
      SaveSlices   -------------------------->
                   <--------------------------  Saved, Durability
      Finish       -------------------------->

    launcher                                   coordinator
      AttachReplica, AttachShard ------------>            with their connections
      StopRun      -------------------------->
      TakeCheckpoint ------------------------>
                   <--------------------------  CutReached
      BuffersCopied ------------------------->
                   <--------------------------  Closings, FoundClosed, Happened, Waiting, DivergedRun, EndedRun
      Finish       -------------------------->

    launcher                                   replica, evaluator
      ShardBack    -------------------------->            with its connection
                   <--------------------------  Awaits     replica alone

    launcher                                   replica, shard
      CoordinatorBack ----------------------->            with its connection
      Unheard      -------------------------->            replica alone

    launcher                                   evaluator
      EvaluateNow  -------------------------->
                   <--------------------------  Measured
      Finish       -------------------------->

Descriptors travel beside the message, in the order named there.
"""

from typing import TypeAlias

from squall.blocks import Block
from squall.nouns import Noun


class Ready(Noun, frozen=True, kw_only=True, tag=101):
    """Role -> launcher: I have what I need and am serving."""


class Failed(Noun, frozen=True, kw_only=True, tag=102):
    """Role -> launcher: I cannot go on, because of the user's code (`line` is theirs), a request that is wrong, or else.

    Attributes:
        kind: "user", "config", "other", or "raised": an exception that is none of ours; the run may go on without me.
    """

    kind: str
    role: str
    step: str
    line: str
    error: str
    traceback: str


class LinkCount(Noun, frozen=True, kw_only=True):
    """Bytes and messages from one role to another, from the start."""

    sender: str
    receiver: str
    num_bytes: int
    messages: int


class Counted(Noun, frozen=True, kw_only=True, tag=103):
    """Role -> launcher: what has passed my connections so far, and how many I refused or closed for nonsense."""

    links: tuple[LinkCount, ...]
    refused: int = 0


class AttachWorker(Noun, frozen=True, kw_only=True, tag=104):
    """Launcher -> shard: serve this worker. Descriptors: its connection, the memory shared with it."""

    replica: int
    partition: int
    incarnation: int
    name: str
    num_gradients: int


class SaveSlices(Noun, frozen=True, kw_only=True, tag=105):
    """Launcher -> shard: write your slices to the checkpoint of this name."""

    name: str


class Saved(Noun, frozen=True, kw_only=True, tag=106):
    """Shard -> launcher: they are on disk."""

    name: str


class Durability(Noun, frozen=True, kw_only=True, tag=121):
    """Shard -> launcher: why what I have acknowledged would not survive me; empty: it would again."""

    lost: str


class Finish(Noun, frozen=True, kw_only=True, tag=107):
    """Launcher -> role: the run is over; flush your files and exit."""


class ShardBack(Noun, frozen=True, kw_only=True, tag=122):
    """Launcher -> worker: this shard was killed and started anew. Descriptor: the connection to it; same memory."""

    shard: int


class CoordinatorBack(Noun, frozen=True, kw_only=True, tag=123):
    """Launcher -> replica, shard: the coordinator was lost, and this one follows it; nobody else is to be heard.

    Descriptor: the connection to it. Over TCP there is none: call it where it always was.
    """

    epoch: int


class Unheard(Noun, frozen=True, kw_only=True, tag=125):
    """Launcher -> replica: your line to the coordinator broke, it lives, and goes on without you: leave."""


class AttachReplica(Noun, frozen=True, kw_only=True, tag=108):
    """Launcher -> coordinator: a replica was started. Descriptor: its connection."""

    replica: int
    incarnation: int


class AttachShard(Noun, frozen=True, kw_only=True, tag=109):
    """Launcher -> coordinator: a shard was started. Descriptor: its connection."""

    shard: int


class StopRun(Noun, frozen=True, kw_only=True, tag=110):
    """Launcher -> coordinator: end the run with what is acknowledged."""

    why: str


class TakeCheckpoint(Noun, frozen=True, kw_only=True, tag=118):
    """Launcher -> coordinator: have the shards store a checkpoint of this name, all of one cut."""

    name: str


class CutReached(Noun, frozen=True, kw_only=True, tag=119):
    """Coordinator -> launcher: every slice holds just these positions, and waits for you."""

    request: int
    name: str
    settled: tuple[Block, ...]


class BuffersCopied(Noun, frozen=True, kw_only=True, tag=120):
    """Launcher -> coordinator: I have the models' buffers as of the cut; training may go on."""

    request: int


class ClosedBlock(Noun, frozen=True, kw_only=True):
    """A block that every slice has now."""

    time_s: float
    replica: int
    block: Block
    examples: int
    loss_sum: float
    staleness: float


class Closings(Noun, frozen=True, kw_only=True, tag=111):
    """Coordinator -> launcher: blocks that were closed since the last time."""

    blocks: tuple[ClosedBlock, ...]


class FoundClosed(Noun, frozen=True, kw_only=True, tag=124):
    """Coordinator -> launcher: every slice has these blocks, and who computed them has told nobody that is left."""

    time_s: float
    blocks: tuple[Block, ...]


class Happened(Noun, frozen=True, kw_only=True, tag=112):
    """Coordinator -> launcher: one of observe.events' Joined, Left, Redone, Refused, Recovered, by its fields.

    Attributes:
        kind: the event's class.
        role: of Joined and Left; the replica's name for Redone.
        number: Joined, Left, Recovered: incarnation; Redone: attempt.
        lost: of Recovered [minibatches].
    """

    kind: str
    time_s: float
    role: str
    number: int
    block: Block | None
    why: str
    lost: int = 0


class Waiting(Noun, frozen=True, kw_only=True, tag=113):
    """Coordinator -> launcher: who waits for whom, in words."""

    waits: tuple[str, ...]


class Awaits(Noun, frozen=True, kw_only=True, tag=126):
    """Replica -> launcher: this role has not answered me for so long [seconds]; 0: it has."""

    role: str
    seconds: float


class DivergedRun(Noun, frozen=True, kw_only=True, tag=114):
    """Coordinator -> launcher: `what` of a tensor (a name, or a number in the parameter space) is not finite."""

    what: str
    tensor: str
    number: int
    block: Block


class EndedRun(Noun, frozen=True, kw_only=True, tag=115):
    """Coordinator -> launcher: nothing more will be pushed; these positions are settled."""

    why: str
    settled: tuple[Block, ...]


class EvaluateNow(Noun, frozen=True, kw_only=True, tag=116):
    """Launcher -> evaluator: fetch, and measure the test set."""

    epoch: int
    minibatches: int


class Measured(Noun, frozen=True, kw_only=True, tag=117):
    """Evaluator -> launcher: what was measured, at these versions of the slices."""

    epoch: int
    minibatches: int
    names: tuple[str, ...]
    values: tuple[float, ...]
    versions: tuple[int, ...]


Control: TypeAlias = (
    Ready
    | Failed
    | Counted
    | AttachWorker
    | SaveSlices
    | Saved
    | Durability
    | ShardBack
    | CoordinatorBack
    | Unheard
    | Finish
    | AttachReplica
    | AttachShard
    | StopRun
    | Closings
    | FoundClosed
    | Happened
    | Waiting
    | Awaits
    | DivergedRun
    | EndedRun
    | EvaluateNow
    | Measured
    | TakeCheckpoint
    | CutReached
    | BuffersCopied
)
