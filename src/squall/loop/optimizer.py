"""`squall.DownpourOptimizer`: shards of `squall.serve` behind the face of a torch optimizer."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import nn

from squall.errors import ConfigError
from squall.keywords import named
from squall.loop.client import LoopClient
from squall.loop.line import DoorLine, rule_of
from squall.loop.promises import Promises, setting_of_the_rule
from squall.rules.rule import Rule
from squall.rules.sgd import Sgd

PATIENCE_S = 300.0


@named
class DownpourOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameters and rule live on the shards of `squall.serve`.

    Use it in any number of processes, however they were started, each with a model of its own. Making one overwrites
    the model's trainable parameters with the servers'; buffers and frozen parameters stay the model's own. `step` takes
    the gradients of one minibatch; when a push is due it is sent, and when a fetch is due `step` returns with fetched
    parameters. What `step` does not touch is `.grad`: zero it, or go on accumulating, as with any optimizer.

    Args:
        model: of the same trainable tensors as the one that is served.
        address: the servers' door, as in ``"127.0.0.1:4000"``.
        token: the servers'.
        n_fetch: fetch every so many steps.
        n_push: push the sum of so many steps.
        local: rule of the model's own steps between fetches. None: the servers' rule if that is `Sgd` with a constant
            rate; with any other, gradients accumulate at the fetched point.
        patience_s: how long to wait for servers that are not there yet, or are away [seconds].

    Attributes:
        refused: gradients that were not finite and changed nothing.

    Raises:
        ConfigError: wrong token, version or setting.
        ModelError: the model is not what is served; names the first tensor that differs.
        LostError: the servers did not answer in time.
    Source: Dean et al., NIPS 2012, Algorithm 1.1.

    >>> import squall
    >>> model = nn.Linear(2, 1)
    >>> with squall.serve(model, rule=squall.Sgd(learning_rate=0.5)) as servers:
    ...     optimizer = DownpourOptimizer(model, servers.address, token=servers.token)
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     before = model.bias.item()
    ...     optimizer.step()
    ...     round(before - model.bias.item(), 6), optimizer.version
    ...     optimizer.close()
    (0.5, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        *,
        token: str,
        n_fetch: int = 1,
        n_push: int = 1,
        local: Sgd | None = None,
        patience_s: float = PATIENCE_S,
        **of_the_rule: Any,
    ) -> None:
        if of_the_rule:
            raise setting_of_the_rule(f"DownpourOptimizer({next(iter(of_the_rule))}=)")
        _expect_settings(model, n_fetch, n_push, local, patience_s)
        line = DoorLine(address, token, patience_s)
        try:
            rule = rule_of(line.served)
            self._client = LoopClient(
                model,
                line,
                n_fetch=n_fetch,
                n_push=n_push,
                local=local or _local_rule(rule, n_fetch),
                patience_s=patience_s,
            )
        except BaseException:
            line.close()
            raise
        self._is_made = False
        group = {"params": list(self._client.parameters), "lr": _rate(rule)}
        super().__init__([group], defaults={"lr": group["lr"]})
        self._is_made = True
        parameters = dict(zip(self._client.names, self._client.parameters, strict=True))
        self._promises = Promises(model, parameters, self.param_groups)

    @property
    def staleness(self) -> float:
        """Of the last push: updates that came in between, mean over slices [updates]."""
        return self._client.staleness

    @property
    def version(self) -> int:
        """Of the fetched parameters: updates that every slice of them has had [updates]."""
        return self._client.version

    @property
    def refused(self) -> int:
        """Gradients that were not finite, and changed nothing."""
        return self._client.refused

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the gradients of one minibatch; push and fetch if that is due.

        Args:
            closure: computes the loss and its gradients first, as with any torch optimizer.

        Returns:
            What the closure returned.
        Raises:
            ConfigError: a learning rate, another setting or a group was changed here; the model's parameters are not
                those any more that it was made with; or this process is a fork of the one that made it.
            DivergedError: three gradients in a row, or the servers' parameters, were not finite.
            LostError: the servers have ended, or stayed away for longer than `patience_s`.
        """
        self._promises.check(self.param_groups)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._client.step()
        return loss

    def flush(self) -> None:
        """Push what `n_push` has accumulated so far, if anything, and fetch."""
        self._promises.check(self.param_groups)
        self._client.flush()

    def fetch(self) -> None:
        """Fetch the newest parameters now; what is accumulated is pushed before."""
        self._promises.check(self.param_groups)
        self._client.fetch()

    def close(self) -> None:
        """Push what is accumulated, and leave. Twice does nothing, nor does a fork: the connections are its parent's."""
        self._leave(flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(flush=error is None)

    def _leave(self, *, flush: bool) -> None:
        if self._promises.is_at_home:
            self._client.close(flush=flush)

    def __getstate__(self) -> NoReturn:
        """Refused: a copy would be a second owner of one session."""
        raise ConfigError(
            subject="DownpourOptimizer",
            expected="to stay where it was made",
            got="copy.deepcopy, pickle or torch.save, or a process that it was handed to",
            remedy="Hand on the servers' address and token, and make one there. Of the model, copies are welcome.",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what is trained is what is served."""
        if getattr(self, "_is_made", True):
            raise ConfigError(
                subject="DownpourOptimizer.add_param_group",
                expected="the parameters that are served, which are all there",
                got="another group",
                remedy='Give groups a rule by name where they are served: squall.Rules({"head.*": ..., "*": ...}).',
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refused: the state is the servers'."""
        raise ConfigError(
            subject="DownpourOptimizer.load_state_dict",
            expected="no state, for parameters and the rule's state are the servers'",
            got="a state_dict",
            remedy="Load the model's state_dict, and give that model to squall.serve.",
        )


def _expect_settings(
    model: nn.Module, n_fetch: int, n_push: int, local: Rule | None, patience_s: float
) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            subject="DownpourOptimizer(model)",
            expected="an nn.Module, whose parameters have names",
            got=type(model).__name__,
            remedy="Give it the model, not model.parameters().",
        )
    for name, value in (("n_fetch", n_fetch), ("n_push", n_push)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                subject=f"DownpourOptimizer({name}=)", expected="a whole number above 0", got=repr(value)
            )
    if not isinstance(patience_s, int | float) or isinstance(patience_s, bool) or not patience_s > 0:
        raise ConfigError(
            subject="DownpourOptimizer(patience_s=)", expected="seconds above 0", got=repr(patience_s)
        )
    if local is not None and not isinstance(local, Sgd):
        raise ConfigError(subject="DownpourOptimizer(local=)", expected="a squall.Sgd", got=repr(local))


def _rate(rule: Mapping[str, Any]) -> float | None:
    """The one learning rate of the servers' rule; None if it is a schedule, or there are several."""
    entries = rule.get("entries", [rule])
    rates = {entry.get("learning_rate") for entry in entries}
    rate = rates.pop() if len(rates) == 1 else None
    return float(rate) if isinstance(rate, int | float) else None


def _local_rule(rule: Mapping[str, Any], n_fetch: int) -> Rule | None:
    """The rule of steps between fetches, by the rule of the servers: as of `squall.Downpour`."""
    if rule.get("rule") != "Sgd" or n_fetch == 1:
        return None
    rate = _rate(rule)
    if rate is None:
        raise ConfigError(
            subject="DownpourOptimizer(local=)",
            expected=f"a rule for the steps between fetches, of which there are {n_fetch - 1}",
            got="none, and the servers' schedule does not travel",
            remedy="Give it the same: local=squall.Sgd(learning_rate=...).",
        )
    return Sgd(learning_rate=rate, weight_decay=rule["weight_decay"])
