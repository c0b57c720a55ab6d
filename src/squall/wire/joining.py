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
    """

    role: str
    number: int
    incarnation: int


class Welcome(Noun, frozen=True, kw_only=True, tag=54):
    """You are in; `link` names this link to a second connection, and is a secret of the two ends."""

    link: int


class Unwelcome(Noun, frozen=True, kw_only=True, tag=55):
    """You are not, and this is why; trying again would not help."""

    reason: str


class Alive(Noun, frozen=True, kw_only=True, tag=56):
    """Shard -> worker, now and then while a request of theirs waits: I am here, and have not forgotten you."""


Introduction: TypeAlias = JoinShard | JoinBulk | JoinCoordinator

Joining: TypeAlias = Introduction | Welcome | Unwelcome | Alive
