"""How replicas teach one another: a strategy is a value."""

from dataclasses import dataclass, field

from squall.errors import ConfigError
from squall.keywords import named
from squall.rules.adagrad import Adagrad
from squall.rules.patterns import Rules
from squall.rules.rule import Rule
from squall.rules.sgd import Sgd


@named
@dataclass(frozen=True, kw_only=True)
class Downpour:
    """Asynchronous stochastic gradient descent over sharded parameter servers.

    Attributes:
        n_fetch: fetch parameters every so many minibatches of a replica, at least 1.
        n_push: push the summed gradient of so many minibatches, at least 1; one push is one block.
        warm_start: blocks that one replica computes alone before the others start, at least 0.
        max_staleness: no push may be staler than this [updates]; None: no bound. It is kept by starting blocks later,
            never by throwing work away, and needs n_fetch <= n_push and no overlap.
        overlap: push and fetch while the next block is computed. Faster where links are slow; staleness tends to
            2 n - 1 updates with n replicas, instead of n - 1.
        local: rule of a replica's own steps between fetches. None: the shards' rule if that is `Sgd`; with any
            other rule the replica takes no steps, and all gradients until the next fetch are of the same point.
        steps: minibatches of this stage, over all replicas; None: the job's bounds hold.
        rule: how a push changes a shard's slice; `Rules` for different ones by parameter names.

    Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1 and Algorithm 1.1.

    >>> Downpour(n_push=5, rule=Sgd(learning_rate=0.1)).local_rule
    Sgd(learning_rate=0.1, weight_decay=0.0)
    >>> Downpour().local_rule is None
    True
    """

    n_fetch: int = 1
    n_push: int = 1
    warm_start: int = 0
    max_staleness: int | None = None
    overlap: bool = False
    local: Sgd | None = None
    steps: int | None = None
    rule: Rule | Rules = field(default_factory=lambda: Adagrad(learning_rate=0.05))

    def __post_init__(self) -> None:
        for name, least in (("n_fetch", 1), ("n_push", 1), ("warm_start", 0)):
            expect_whole(f"Downpour({name}=)", getattr(self, name), least)
        if self.steps is not None:
            expect_whole("Downpour(steps=)", self.steps, 1)
        if not isinstance(self.rule, Rule | Rules):
            raise ConfigError(
                subject="Downpour(rule=)",
                expected="an update rule, as in squall.Adagrad(learning_rate=0.05)",
                got=repr(self.rule),
            )
        if self.local is not None and not isinstance(self.local, Sgd):
            raise ConfigError(
                subject="Downpour(local=)",
                expected="squall.Sgd(learning_rate=...) or None",
                got=repr(self.local),
                remedy="Only Sgd has no state that would drift from the shards'.",
            )
        if self.max_staleness is not None:
            expect_whole("Downpour(max_staleness=)", self.max_staleness, 0)
            if self.overlap or self.n_fetch > self.n_push:
                raise ConfigError(
                    subject="Downpour(max_staleness=)",
                    expected="overlap=False and n_fetch <= n_push, so that each block begins with a fetch",
                    got=f"overlap={self.overlap}, n_fetch={self.n_fetch}, n_push={self.n_push}",
                )

    @property
    def local_rule(self) -> Rule | None:
        """The rule of local steps; None if gradients accumulate at the fetched point."""
        if self.local is not None:
            return self.local
        return self.rule if isinstance(self.rule, Sgd) else None


def expect_whole(subject: str, value: object, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(subject=subject, expected=f"a whole number of at least {least}", got=repr(value))


def not_built(subject: str, default: str) -> ConfigError:
    """The error for a part of the contract that is not there yet."""
    return ConfigError(
        subject=subject,
        expected=default,
        got="something else",
        remedy="This version does not have it yet: leave it out.",
    )
