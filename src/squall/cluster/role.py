"""Where every role's process begins: unpack what the launcher sent, serve, and say what went wrong."""

import contextlib
import ctypes
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from squall.cluster.exits import EXIT_FAILED, EXIT_LOST, EXIT_OUT_OF_MEMORY
from squall.cluster.first import first_values
from squall.cluster.payload import Payload, pack, unpack
from squall.coordinator import server as coordinator
from squall.errors import ConfigError, LostError, SquallError, UserCodeError
from squall.loop import door
from squall.model.deferred import ModelInParts
from squall.replica import runner as replica
from squall.replica.data_worker import Packing
from squall.rules.apply import SliceState
from squall.shard import server as shard
from squall.shard.first import first_states
from squall.training import evaluator
from squall.training.prepare import build_like
from squall.wire.connection import Connection
from squall.wire.control import Failed


def main(arguments: bytes, fds: list[int]) -> None:
    """Be the role that `arguments` (JSON) names; called in a fresh fork of the zygote.

    Args:
        fds: the payload's memory, the connection to the launcher, and what the role's own `serve` wants.
    """
    settings = json.loads(arguments)
    launcher = Connection.from_fd(fds[1], "launcher")
    name = settings["name"]
    try:
        own = fds[2:]
        load = _load(settings, fds[0], own.pop(0) if "first" in settings else None)
        _SERVE[settings["role"]](settings, load, launcher, own)
    except LostError as error:
        print(error, flush=True)
        raise SystemExit(EXIT_LOST) from None
    except MemoryError as error:
        print(f"{name} ran out of memory: {error}", flush=True)
        raise SystemExit(EXIT_OUT_OF_MEMORY) from None
    except SquallError as error:
        launcher.send(_failed(name, error))
        raise SystemExit(EXIT_FAILED) from None
    except ConnectionError as error:
        print(f"{name} lost a peer: {error}", flush=True)
        raise SystemExit(EXIT_LOST) from None
    except Exception as error:  # the whole of it goes to the log
        with contextlib.suppress(ConnectionError):
            launcher.send(_raised(name, error))
        raise


def _load(settings: dict[str, Any], fd: int, first: int | None) -> dict[str, Any]:
    payload = Payload(fd=fd, header=bytes.fromhex(settings["header"]))
    try:
        load = unpack(payload)
        payload.close()
        if first is not None:
            load["made"] = _made(load, first_values(settings["first"], first).__getitem__)
        return _with_model(load)
    except SquallError:
        raise
    except Exception as error:
        raise UserCodeError.of(error, role=settings["name"], step="") from error


def _with_model(load: dict[str, Any]) -> dict[str, Any]:
    """Make the model here, if what came is a function that makes it; of a deferred one a worker or shard its own share."""
    if "recipe_for_states" in load:
        recipe = load.pop("recipe_for_states")
        load["made"] = _made(load, recipe["function"](recipe["seed"]).value)
    if "recipe_for_model" in load:
        recipe = load.pop("recipe_for_model")
        if "task" in load and load["task"].cut is not None and isinstance(recipe["function"], ModelInParts):
            made = recipe["function"](recipe["seed"])
            model = made.with_buffers(recipe["fixed"])
            load["task"] = replace(load["task"], model=model, value=made.value)
            return load
        model = build_like(**recipe)
        if "task" in load:
            load["task"] = replace(load["task"], model=model)
        else:
            load["model"] = model
    return load


def _made(load: Mapping[str, Any], value: Callable[[str], Tensor]) -> list[SliceState]:
    """A shard's states as before any update."""
    specs = [load["layout"].slices[book.slice] for book in load["books"]]
    made = first_states(load["layout"], specs, load["rule"], value)
    _give_back_memory()
    return made


def _give_back_memory() -> None:
    """Return to the system what the allocator has free of the whole tensors that were here; glibc keeps it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _failed(name: str, error: SquallError) -> Failed:
    if isinstance(error, UserCodeError):
        return Failed(
            kind="user",
            role=error.role,
            step=error.step,
            line=error.line,
            error=error.error,
            traceback=error.traceback,
        )
    kind = "config" if isinstance(error, ConfigError) else "other"
    return Failed(kind=kind, role=name, step="", line="", error=str(error), traceback="")


def _raised(name: str, error: Exception) -> Failed:
    told = UserCodeError.of(error, role=name, step="")
    words = f"{told.error} ({told.line})"
    return Failed(kind="raised", role=name, step="", line=told.line, error=words, traceback=told.traceback)


def _pack_minibatch(minibatch: Any) -> tuple[bytes, int]:
    payload = pack(minibatch, name="minibatch")
    return payload.header, payload.fd


def _unpack_minibatch(header: bytes, fd: int) -> Any:
    """Only what a data worker packed, which is a fork of this very process."""
    payload = Payload(fd=fd, header=header)
    try:
        return unpack(payload)
    finally:
        payload.close()


_SERVE: dict[str, Callable[[dict[str, Any], dict[str, Any], Connection, list[int]], None]] = {
    "shard": shard.serve,
    "replica": partial(replica.serve, packing=Packing(pack=_pack_minibatch, unpack=_unpack_minibatch)),
    "coordinator": coordinator.serve,
    "evaluator": evaluator.serve,
    "door": door.serve,
}
