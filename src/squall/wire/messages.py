"""Everything that roles say to one another while a run goes on.

Read it as a conversation::

    replica                                    shard
      Fetch        -------------------------->
                   <--------------------------  Fetched
      Push         -------------------------->            one message a step and shard; the gradient
                   <--------------------------  Pushed     itself lies in memory that both can see

    replica                                    coordinator
      Ask          -------------------------->            "I finished this; what next?"
                   <--------------------------  Lease      a block of work
                   <--------------------------  Leave      no more work: say goodbye
                   <--------------------------  Recall     unasked: abandon what you have not pushed
      Goodbye      -------------------------->
      Bundle       <------------------------->            several of these at once

    coordinator                                shard
      Refuse       -------------------------->            nobody can compute this block: settle it
                   <--------------------------  Refused
                   <--------------------------  Diverged   unasked: an update made my slice non-finite
                   <--------------------------  Returned   unasked: I was killed; this is what I have
      Hold         -------------------------->            for a checkpoint: admit these blocks and no new ones
                   <--------------------------  Held       what my slices hold; again whenever it has changed
      Release      -------------------------->            all hold the same: store that, and go on
                   <--------------------------  Released

After the coordinator was lost, another of a higher epoch begins with::

    coordinator                                shard
      Inquire      -------------------------->            what do you have?
                   <--------------------------  Books

    replica                                    coordinator
      Resume       -------------------------->            what I hold, and have done; then each open Ask again

A message is frozen and knows nothing of sockets; `squall.wire.codec` turns it into bytes. The tag of its class
stands for it there: part of the protocol, never given to another. Every
request carries a number that rises with each new request of its sender (per incarnation); a resend repeats
the number, and the reply names it. So a late duplicate is recognised and a lost reply is sent again.
No message carries a tensor.
"""

from typing import TypeAlias

from squall.blocks import Block
from squall.blocks import Outcome as Outcome
from squall.nouns import Noun


class SliceState(Noun, frozen=True, kw_only=True):
    """Which state of a slice a reply speaks of.

    Attributes:
        slice: the slice's number in the layout.
        version: updates applied to it since the run began [updates].
        minibatches: minibatches in those updates: what a learning-rate schedule counts [minibatches].
        incarnation: which start of the shard: one that has come back may count versions again from an older state.
    """

    slice: int
    version: int
    minibatches: int
    incarnation: int = 0


class Fetch(Noun, frozen=True, kw_only=True, tag=1):
    """Replica -> shard: write your slices as they are now into my buffer `into`, which I am not reading."""

    request: int
    into: int


class Fetched(Noun, frozen=True, kw_only=True, tag=2):
    """Shard -> replica: my slices lie in the buffer that you named; one version of each, never torn."""

    request: int
    incarnation: int
    states: tuple[SliceState, ...]


class Push(Noun, frozen=True, kw_only=True, tag=3):
    """Replica -> shard: apply this block's gradient, which lies in my gradient buffer, to your slices.

    Attributes:
        block: the work that the gradient is of; whole or not at all.
        attempt: the how-many-th time that the coordinator handed this block out, from 1.
        minibatches, examples: how much the summed gradient stands for.
        based_on: per slice of this shard, the oldest version used in the block [updates].
        incarnation: of the shard whose versions these are.
        absent: tensors (by number in the parameter space) for which there was no gradient.
        not_finite: the first tensor whose gradient is not finite; empty if all are finite.
        buffer: which of my gradient buffers it lies in: always 0, unless pushes overlap with computing.
        scale: multiply the gradient by this before anything else; below 1 if it is to be clipped.
        into: the parameter buffer to write the slices into right after this push is settled; None: no fetch.
    """

    request: int
    block: Block
    attempt: int
    minibatches: int
    examples: int
    based_on: tuple[int, ...]
    absent: tuple[int, ...]
    not_finite: str
    buffer: int = 0
    scale: float = 1.0
    into: int | None
    incarnation: int = 0


class Pushed(Noun, frozen=True, kw_only=True, tag=4):
    """Shard -> replica: what became of your push, slice by slice, and the state right after it was settled."""

    request: int
    incarnation: int
    outcomes: tuple[Outcome, ...]
    states: tuple[SliceState, ...]


class Finished(Noun, frozen=True, kw_only=True):
    """How a leased block ended at a replica.

    Attributes:
        block, attempt: the lease.
        outcome: APPLIED if every slice has it now (from this push or an earlier one), NOT_FINITE if it must
            come from someone else, REFUSED if a slice will never take it.
        not_finite: the first tensor whose gradient was not finite; empty if all were finite.
        loss_sum: sum over the minibatches of their mean losses.
        examples: examples computed.
        staleness: of the push, mean over the slices that applied it [updates].
        lives: by whom: (shard, its incarnation) of each that answered the push.
    """

    block: Block
    attempt: int
    outcome: Outcome
    not_finite: str
    loss_sum: float
    examples: int
    staleness: float
    lives: tuple[tuple[int, int], ...] = ()


class Ask(Noun, frozen=True, kw_only=True, tag=5):
    """Replica -> coordinator: I have fetched and can work; `finished` tells how my last block ended."""

    request: int
    finished: Finished | None


class Lease(Noun, frozen=True, kw_only=True, tag=6):
    """Coordinator -> replica: compute this block.

    Attributes:
        refresh: fetch before you start, because you have been waiting.
    """

    request: int
    block: Block
    attempt: int
    refresh: bool


class Leave(Noun, frozen=True, kw_only=True, tag=7):
    """Coordinator -> replica: there is no more work for you."""

    request: int
    why: str


class Recall(Noun, frozen=True, kw_only=True, tag=8):
    """Coordinator -> replica, unasked: abandon what you have not pushed yet, and say goodbye."""

    why: str


class Goodbye(Noun, frozen=True, kw_only=True, tag=9):
    """Replica -> coordinator: every push of mine is acknowledged; I hold nothing and leave."""


class Refuse(Noun, frozen=True, kw_only=True, tag=10):
    """Coordinator -> shard: nobody can compute this block; keep it as settled without applying it."""

    request: int
    block: Block


class Refused(Noun, frozen=True, kw_only=True, tag=11):
    """Shard -> coordinator: the block is settled; per slice REFUSED, or REPEATED where it was applied before."""

    request: int
    block: Block
    outcomes: tuple[Outcome, ...]


class Diverged(Noun, frozen=True, kw_only=True, tag=12):
    """Shard -> coordinator, unasked: applying this block left a tensor that is not finite."""

    block: Block
    tensor: int


class Returned(Noun, frozen=True, kw_only=True, tag=17):
    """Shard -> coordinator, the first word of a shard that was killed and started anew.

    Attributes:
        everywhere: ranges of positions that every slice of it has; None: it has no slices.
    """

    incarnation: int
    everywhere: tuple[Block, ...] | None


class Hold(Noun, frozen=True, kw_only=True, tag=13):
    """Coordinator -> shard: from now on, let pushes wait whose blocks are neither settled nor admitted here.

    Attributes:
        request: number of the hold; the same in everything that is said of it.
        admitted: ranges of positions that some slice of the cluster has already, and all are to have.
    """

    request: int
    admitted: tuple[Block, ...]


class Held(Noun, frozen=True, kw_only=True, tag=14):
    """Shard -> coordinator: what my slices hold, while I admit no more than I was told.

    Attributes:
        anywhere: ranges of positions that some slice of this shard has settled.
        everywhere: those that every slice of it has; of a shard without slices, all that was admitted.
    """

    request: int
    anywhere: tuple[Block, ...]
    everywhere: tuple[Block, ...]


class Release(Noun, frozen=True, kw_only=True, tag=15):
    """Coordinator -> shard: the hold is over; store the checkpoint of this name first, unless it is empty."""

    request: int
    name: str


class Released(Noun, frozen=True, kw_only=True, tag=16):
    """Shard -> coordinator: pushes are admitted again; what was to be stored is copied."""

    request: int


class Inquire(Noun, frozen=True, kw_only=True, tag=18):
    """Coordinator -> shard: I follow one that was lost. Any hold of its is over; tell me what your slices have.

    Attributes:
        epoch: which start of the coordinator I am; the first is 0 and asks nothing.
    """

    epoch: int


class Books(Noun, frozen=True, kw_only=True, tag=19):
    """Shard -> coordinator: what my slices have settled.

    Attributes:
        epoch: of the coordinator that asked.
        incarnation: of the shard.
        anywhere: ranges of positions that some slice of this shard has settled.
        everywhere: those that every slice of it has; None: it has no slices.
        refused: ranges that some slice has settled as refused.
    """

    epoch: int
    incarnation: int
    anywhere: tuple[Block, ...]
    everywhere: tuple[Block, ...] | None
    refused: tuple[Block, ...]


class Resume(Noun, frozen=True, kw_only=True, tag=20):
    """Replica -> coordinator, its first word to one that follows one that was lost.

    Attributes:
        leases: (block, attempt) of each that it holds, in the order granted.
        done: its latest reports that were answered, in order; those that were not come with their `Ask`.
    """

    leases: tuple[tuple[Block, int], ...]
    done: tuple[Finished, ...]


ToShard: TypeAlias = Fetch | Push | Refuse | Hold | Release | Inquire
FromShard: TypeAlias = Fetched | Pushed | Refused | Diverged | Returned | Held | Released | Books
ToCoordinator: TypeAlias = Ask | Goodbye | Resume | Refused | Diverged | Returned | Held | Released | Books
ToReplica: TypeAlias = Fetched | Pushed | Lease | Leave | Recall


class Bundle(Noun, frozen=True, kw_only=True, tag=21):
    """Replica -> coordinator or back: messages that belong together only in that their reader is woken once for all.

    Attributes:
        messages: in the order in which they would have come one by one.
    """

    messages: tuple[Ask | Goodbye | Resume | Lease | Leave | Recall, ...]


Message: TypeAlias = ToShard | FromShard | ToCoordinator | ToReplica | Bundle
