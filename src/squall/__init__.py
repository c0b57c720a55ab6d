"""Squall: train one PyTorch model on machines that you cannot trust to be fast, equal, connected or alive.

Importing this package does not import torch; the first use of a name that needs it does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Name -> where it lives.
_PUBLIC = {
    "fit": "squall.api",
    "start": "squall.api",
    "load": "squall.training.run",
    "Run": "squall.training.run",
    "Job": "squall.training.job",
    "Downpour": "squall.training.strategies",
    "Rule": "squall.rules.rule",
    "Sgd": "squall.rules.sgd",
    "Adagrad": "squall.rules.adagrad",
    "InProcess": "squall.cluster.in_process",
    "Local": "squall.cluster.local",
    "Source": "squall.data.source",
    "Progress": "squall.observe.events",
    "Evaluated": "squall.observe.events",
    "Joined": "squall.observe.events",
    "Left": "squall.observe.events",
    "Redone": "squall.observe.events",
    "Refused": "squall.observe.events",
    "Checkpointed": "squall.observe.events",
    "Ended": "squall.observe.events",
    "SquallError": "squall.errors",
    "ConfigError": "squall.errors",
    "DataError": "squall.errors",
    "ModelError": "squall.errors",
    "RunExistsError": "squall.errors",
    "RunError": "squall.errors",
    "UserCodeError": "squall.errors",
    "DivergedError": "squall.errors",
    "LostError": "squall.errors",
    "CorruptError": "squall.errors",
}
_MODULES = ("data", "errors")

__all__ = ["__version__", *_PUBLIC, *_MODULES]

if TYPE_CHECKING:
    from squall import data, errors
    from squall.api import fit, start
    from squall.cluster.in_process import InProcess
    from squall.cluster.local import Local
    from squall.data.source import Source
    from squall.errors import (
        ConfigError,
        CorruptError,
        DataError,
        DivergedError,
        LostError,
        ModelError,
        RunError,
        RunExistsError,
        SquallError,
        UserCodeError,
    )
    from squall.observe.events import Checkpointed, Ended, Evaluated, Joined, Left, Progress, Redone, Refused
    from squall.rules.adagrad import Adagrad
    from squall.rules.rule import Rule
    from squall.rules.sgd import Sgd
    from squall.training.job import Job
    from squall.training.run import Run, load
    from squall.training.strategies import Downpour


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = import_module(f"squall.{name}")
    else:
        raise AttributeError(f"module 'squall' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
