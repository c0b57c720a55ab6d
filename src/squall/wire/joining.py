"""What a role says of itself on a new TCP connection, once both sides have proved the cluster's token.

    worker, evaluator                          shard
      JoinShard    -------------------------->            on the connection for messages
                   <--------------------------  Welcome   with the number of this link, or Unwelcome
      JoinBulk     -------------------------->            on a second connection, for tensors
                   <--------------------------  Welcome
                   <--------------------------  Alive     unasked, while a request waits

    replica, shard                             coordinator
      JoinCoordinator  ---------------------->
                   <--------------------------  Welcome, or Unwelcome

    user's own loop                            door of `squall.serve`
      JoinLoop     -------------------------->
                   <--------------------------  Welcome, then Served; or Unwelcome
                   <--------------------------  Farewell  unasked: there is nothing more to be had here

The first message of a connection has at most 4 KiB.
"""

from typing import TypeAlias

from squall.nouns import Noun


class JoinShard(Noun, frozen=True, kw_only=True, tag=51):
    """Worker -> shard: serve me.

    Attributes:
        name: as traffic calls it: "replica0.1", "evaluator".
        replica, partition, incarnation: who it is; a later incarnation ends an earlier one.
        schema: hash of the parameter space that it has.
        num_slices, num_bytes: of this shard's slices, as the worker knows them.
    """

    name: str
    replica: int
    partition: int
    incarnation: int
    schema: str
    num_slices: int
    num_bytes: int


class JoinBulk(Noun, frozen=True, kw_only=True, tag=52):
    """Worker -> shard: this is the second connection of the link that you gave this number."""

    link: int


class JoinCoordinator(Noun, frozen=True, kw_only=True, tag=53):
    """Replica or shard -> coordinator: I belong to this run.

    Attributes:
        role: "replica" or "shard".
        epoch: the least that the coordinator may have; one that has less was followed by another, and ends.
    """

    role: str
    number: int
    incarnation: int
    epoch: int = 0


class Welcome(Noun, frozen=True, kw_only=True, tag=54):
    """You are in.

    Attributes:
        link: names this link to a second connection, and is a secret of the two ends.
        epoch: of the coordinator, if it is one that says so.
    """

    link: int
    epoch: int = 0


class Unwelcome(Noun, frozen=True, kw_only=True, tag=55):
    """You are not, and this is why; trying again would not help."""

    reason: str


class Alive(Noun, frozen=True, kw_only=True, tag=56):
    """Shard -> worker, now and then while a request of theirs waits: I am here, and have not forgotten you."""


class JoinLoop(Noun, frozen=True, kw_only=True, tag=57):
    """Loop -> door: tell me where the shards are, and give me a session.

    Attributes:
        life, session: what `Served` said before, to go on with the same; life 0: a new one.
    """

    life: int
    session: int


class ServedTensor(Noun, frozen=True, kw_only=True):
    """A trainable tensor: `squall.model.parameters.TensorSpec`."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


class ServedSlice(Noun, frozen=True, kw_only=True):
    """A slice, numbered by its place: `squall.model.layout.SliceSpec`."""

    shard: int
    dtype: str
    start: int
    stop: int


class Served(Noun, frozen=True, kw_only=True, tag=58):
    """Door -> loop: all that you need to train what is served here.

    Attributes:
        life: of these servers, drawn when they were started; above 0.
        session: yours; counts from 0.
        shards: their addresses, by number.
        rule: how the shards update, as `Rule.describe` says it, in JSON.
    """

    life: int
    session: int
    tensors: tuple[ServedTensor, ...]
    slices: tuple[ServedSlice, ...]
    shards: tuple[str, ...]
    rule: str


class Farewell(Noun, frozen=True, kw_only=True, tag=59):
    """Door -> loop: no push will be taken any more.

    Attributes:
        why: in words.
        tensor: number of the one that an update made non-finite; -1 if that is not why.
        block: of that update, in words.
    """

    why: str
    tensor: int = -1
    block: str = ""


Introduction: TypeAlias = JoinShard | JoinBulk | JoinCoordinator | JoinLoop

Joining: TypeAlias = Introduction | Welcome | Unwelcome | Alive | Served | Farewell
