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
    "serve": "squall.cluster.servers",
    "Servers": "squall.cluster.servers",
    "DownpourOptimizer": "squall.loop.optimizer",
    "Run": "squall.training.run",
    "Job": "squall.training.job",
    "Downpour": "squall.training.strategies",
    "Interval": "squall.training.durability",
    "Rule": "squall.rules.rule",
    "Sgd": "squall.rules.sgd",
    "Momentum": "squall.rules.momentum",
    "Adagrad": "squall.rules.adagrad",
    "Adam": "squall.rules.adam",
    "AdamW": "squall.rules.adam",
    "Rules": "squall.rules.patterns",
    "InProcess": "squall.cluster.in_process",
    "Local": "squall.cluster.local",
    "Simulated": "squall.cluster.simulated",
    "Link": "squall.cluster.links",
    "Restarts": "squall.cluster.restarts",
    "TensorBoard": "squall.observe.loggers",
    "Source": "squall.data.source",
    "deferred": "squall.model.deferred",
    "opaque": "squall.model.opaque",
    "plan": "squall.partition.planning",
    "Plan": "squall.partition.model_plan",
    "Machine": "squall.partition.cost",
    "Progress": "squall.observe.events",
    "Evaluated": "squall.observe.events",
    "Joined": "squall.observe.events",
    "Left": "squall.observe.events",
    "Redone": "squall.observe.events",
    "Refused": "squall.observe.events",
    "Checkpointed": "squall.observe.events",
    "Recovered": "squall.observe.events",
    "Unkept": "squall.observe.events",
    "Silent": "squall.observe.events",
    "Disturbed": "squall.observe.events",
    "AlsoFailed": "squall.observe.events",
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
    "NoReplicaError": "squall.errors",
    "CorruptError": "squall.errors",
}
_MODULES = ("data", "errors", "schedules")

__all__ = ["__version__", *_PUBLIC, *_MODULES]

if TYPE_CHECKING:
    # `as` says to type checkers that these are for others to use.
    from squall import data as data
    from squall import errors as errors
    from squall import schedules as schedules
    from squall.api import fit as fit
    from squall.api import start as start
    from squall.cluster.in_process import InProcess as InProcess
    from squall.cluster.links import Link as Link
    from squall.cluster.local import Local as Local
    from squall.cluster.restarts import Restarts as Restarts
    from squall.cluster.servers import Servers as Servers
    from squall.cluster.servers import serve as serve
    from squall.cluster.simulated import Simulated as Simulated
    from squall.data.source import Source as Source
    from squall.errors import ConfigError as ConfigError
    from squall.errors import CorruptError as CorruptError
    from squall.errors import DataError as DataError
    from squall.errors import DivergedError as DivergedError
    from squall.errors import LostError as LostError
    from squall.errors import ModelError as ModelError
    from squall.errors import NoReplicaError as NoReplicaError
    from squall.errors import RunError as RunError
    from squall.errors import RunExistsError as RunExistsError
    from squall.errors import SquallError as SquallError
    from squall.errors import UserCodeError as UserCodeError
    from squall.loop.optimizer import DownpourOptimizer as DownpourOptimizer
    from squall.model.deferred import deferred as deferred
    from squall.model.opaque import opaque as opaque
    from squall.observe.events import AlsoFailed as AlsoFailed
    from squall.observe.events import Checkpointed as Checkpointed
    from squall.observe.events import Disturbed as Disturbed
    from squall.observe.events import Ended as Ended
    from squall.observe.events import Evaluated as Evaluated
    from squall.observe.events import Joined as Joined
    from squall.observe.events import Left as Left
    from squall.observe.events import Progress as Progress
    from squall.observe.events import Recovered as Recovered
    from squall.observe.events import Redone as Redone
    from squall.observe.events import Refused as Refused
    from squall.observe.events import Silent as Silent
    from squall.observe.events import Unkept as Unkept
    from squall.observe.loggers import TensorBoard as TensorBoard
    from squall.partition.cost import Machine as Machine
    from squall.partition.model_plan import Plan as Plan
    from squall.partition.planning import plan as plan
    from squall.rules.adagrad import Adagrad as Adagrad
    from squall.rules.adam import Adam as Adam
    from squall.rules.adam import AdamW as AdamW
    from squall.rules.momentum import Momentum as Momentum
    from squall.rules.patterns import Rules as Rules
    from squall.rules.rule import Rule as Rule
    from squall.rules.sgd import Sgd as Sgd
    from squall.training.durability import Interval as Interval
    from squall.training.job import Job as Job
    from squall.training.run import Run as Run
    from squall.training.run import load as load
    from squall.training.strategies import Downpour as Downpour


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
