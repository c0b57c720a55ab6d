"""What the workers of one replica say to one another.

    lead                                       every other worker
      Step         -------------------------->            compute your share of this minibatch
                   <--------------------------  Stepped    my share of it is done
      Settle       -------------------------->            (where gradients are clipped) scale yours by this
                   <--------------------------  Settled
      Relay        -------------------------->            send this to a shard
                   <--------------------------  Relayed    what it answered
                   <--------------------------  Line       unasked: it was killed, or has come back
      SwapTo       -------------------------->            take the parameters from this buffer from now on
      Join         -------------------------->            take the model's buffers from what is left
      Dismiss      -------------------------->            the work is done

    worker                                     worker
      Moved        -------------------------->            tensors of this step lie in the memory that we share

No message carries a tensor. Where each tensor of a step lies follows from the program that both have, so
nothing of that is told. Memory is written anew in the next step only, which begins when every worker has `Stepped`.
"""

from typing import TypeAlias

from squall.nouns import Noun
from squall.wire.messages import Fetch, Fetched, Push, Pushed


class Step(Noun, frozen=True, kw_only=True, tag=201):
    """Lead -> worker: the lead's wish for one minibatch, field by field that of its loop."""

    epoch: int
    position: int
    is_first: bool
    is_last: bool
    buffer: int
    local_step: bool
    minibatches: int


class Settled(Noun, frozen=True, kw_only=True, tag=202):
    """Worker -> lead: my part of the gradient is added to the block's.

    Attributes:
        absent: at the end of a block, tensors for which this worker has no gradient.
        not_finite: at the end of a block, the first tensor whose gradient is not finite.
    """

    absent: tuple[int, ...] = ()
    not_finite: str = ""


class Stepped(Noun, frozen=True, kw_only=True, tag=203):
    """Worker -> lead: my share of the minibatch is computed.

    Attributes:
        loss: its share of the mean loss.
        norm: of its part of the gradient, where gradients are clipped.
        settled: None where it waits for the factor.
    """

    loss: float
    norm: float
    settled: Settled | None


class Settle(Noun, frozen=True, kw_only=True, tag=204):
    """Lead -> worker: multiply your part of the minibatch's gradient by this, and add it to the block's."""

    scale: float


class Relay(Noun, frozen=True, kw_only=True, tag=205):
    """Lead -> worker: send this request to a shard."""

    shard: int
    request: Fetch | Push


class Relayed(Noun, frozen=True, kw_only=True, tag=206):
    """Worker -> lead: what a shard has answered."""

    shard: int
    reply: Fetched | Pushed


class SwapTo(Noun, frozen=True, kw_only=True, tag=207):
    """Lead -> worker: take the parameters from this buffer from now on."""

    buffer: int


class Join(Noun, frozen=True, kw_only=True, tag=208):
    """Lead -> worker: the model's buffers, which lie in memory that we share, are those to begin with."""


class Dismiss(Noun, frozen=True, kw_only=True, tag=209):
    """Lead -> worker: nothing is left to do."""


class Moved(Noun, frozen=True, kw_only=True, tag=210):
    """Worker -> worker: some regions of one value, or the gradient of them, are in the memory that we share.

    Attributes:
        value: its number in the program.
        micro: the microbatch; None for what lasts for the step.
    """

    value: int
    micro: int | None
    is_gradient: bool


class Line(Noun, frozen=True, kw_only=True, tag=211):
    """Worker -> lead, unasked: a shard that I talk to is gone, or has been started anew.

    Attributes:
        is_open: it is back; what it had not answered is to be sent again.
    """

    shard: int
    is_open: bool


Crew: TypeAlias = Step | Stepped | Settle | Settled | Relay | Relayed | SwapTo | Join | Dismiss | Moved | Line
