"""What must stay as it was when an optimizer was made: its process, the model's trainable tensors, and the groups.

What has changed is refused by name before a step is taken: the servers own the rule and know what it is applied to, and a
change that is made here would otherwise have no effect, and nobody would see that.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from squall.errors import ConfigError

Group = Mapping[str, Any]

_NOT_COMPARED = ("params", "initial_lr")  # the second is a mark that schedulers leave
_OWNER = "The shards own what is trained, and its rule; squall.serve is where either is set."


class Promises:
    """Remembers, and compares.

    Args:
        model: whose trainable tensors are served.
        parameters: these, by name.
        groups: the optimizer's.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, nn.Parameter], groups: Sequence[Group]
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._forms = {name: _form(own) for name, own in parameters.items()}
        self._known = {id(own) for own in parameters.values()}
        self._groups = [(_ids(group), _settings(group)) for group in groups]
        self._pid = os.getpid()

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that the optimizer was made in; a fork has a copy of everything but its threads."""
        return os.getpid() == self._pid

    def check(self, groups: Sequence[Group]) -> None:
        """Refuse what has changed.

        Raises:
            ConfigError: names it.
        """
        if not self.is_at_home:
            raise ConfigError(
                subject="DownpourOptimizer",
                expected="to be used by the process that made it",
                got="a fork of that process",
                remedy="Make one in each process, after the fork.",
            )
        self._check_groups(groups)
        self._check_parameters()

    def _check_groups(self, groups: Sequence[Group]) -> None:
        if [_ids(group) for group in groups] != [ids for ids, _ in self._groups]:
            raise ConfigError(
                subject="DownpourOptimizer.param_groups",
                expected="the group of all parameters that are served",
                got="other groups, or another list of parameters",
                remedy=_OWNER,
            )
        for group, (_, shown) in zip(groups, self._groups, strict=True):
            now = _settings(group)
            for name in (*now, *shown):
                if name not in shown or name not in now or now[name] != shown[name]:
                    got = f"{shown.get(name)!r} changed to {now.get(name)!r}"
                    raise setting_of_the_rule(f"DownpourOptimizer.param_groups: {name!r}", got)
            if "initial_lr" in group and shown["lr"] is None:
                got = "a scheduler, while the servers' rate has a schedule of its own"
                raise setting_of_the_rule("DownpourOptimizer.param_groups: 'lr'", got)

    def _check_parameters(self) -> None:
        there = set()
        for name, parameter in self._model.named_parameters():
            there.add(id(parameter))
            if parameter.requires_grad and id(parameter) not in self._known:
                raise _other(name, "another one, which would not be trained")
        for name, own in self._parameters.items():
            if id(own) not in there:
                raise _other(name, "a model without it")
            if (form := _form(own)) != self._forms[name]:
                raise ConfigError(
                    subject=f"parameter {name!r}",
                    expected=f"shape {tuple(self._forms[name][0])} and {self._forms[name][1]}, as the servers have it",
                    got=f"shape {tuple(form[0])} and {form[1]}",
                    remedy="Bring the model into its form before it is served and the optimizer is made; autocast "
                    "computes in another precision and leaves parameters as they are.",
                )


def setting_of_the_rule(subject: str, got: str = "a setting of the worker's own") -> ConfigError:
    """Refusal of what belongs to the servers' rule."""
    return ConfigError(
        subject=subject,
        expected="the update rule to be set where it runs, on the servers",
        got=got,
        remedy="Give it to squall.serve(rule=...); a rate that changes is a schedule there, as in "
        "squall.Adagrad(learning_rate=squall.schedules.cosine(...)).",
    )


def _other(name: str, got: str) -> ConfigError:
    return ConfigError(
        subject=f"parameter {name!r}",
        expected="the trainable parameters that the optimizer was made with",
        got=got,
        remedy="Unfreeze or replace parameters before squall.serve, and make the optimizer after that.",
    )


def _form(parameter: nn.Parameter) -> tuple[torch.Size, torch.dtype]:
    return parameter.shape, parameter.dtype


def _ids(group: Group) -> list[int]:
    return [id(parameter) for parameter in group.get("params", ())]


def _settings(group: Group) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_COMPARED}
