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

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinShard:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBulk:
    """Worker -> shard: this is the second connection of the link that you gave this number."""

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCoordinator:
    """Replica or shard -> coordinator: I belong to this run.

    Attributes:
        role: "replica" or "shard".
    """

    role: str
    number: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """You are in; `link` names this link to a second connection, and is a secret of the two ends."""

    link: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwelcome:
    """You are not, and this is why; trying again would not help."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Shard -> worker, now and then while a request of theirs waits: I am here, and have not forgotten you."""


Introduction: TypeAlias = JoinShard | JoinBulk | JoinCoordinator

JOINING_CODES: dict[int, type] = {
    51: JoinShard,
    52: JoinBulk,
    53: JoinCoordinator,
    54: Welcome,
    55: Unwelcome,
    56: Alive,
}
