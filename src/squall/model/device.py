"""The device that a replica computes on: is it there, how to seed it, and how to bring a batch to it.

Parameters, gradients and updates travel between processes in ordinary memory, so a device other than "cpu" means
memory of its own for the model, and copies at each swap and each gradient. Nobody has run this on a GPU yet: what
is tested is that very path of copies, in ordinary memory, under the name "cpu:0".
"""

from typing import Any

import torch

from squall.errors import ConfigError

CPU = torch.device("cpu")


def device_of(name: str | torch.device) -> torch.device:
    """The device of that name, which is there.

    Raises:
        ConfigError: it is not, or the name is none.

    >>> device_of("cpu")
    device(type='cpu')
    >>> device_of("disk")
    Traceback (most recent call last):
        ...
    squall.errors.ConfigError: Job(device=): expected "cpu", "cuda", "cuda:1" or "mps", but got 'disk'.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(
            subject="Job(device=)", expected='"cpu", "cuda", "cuda:1" or "mps"', got=repr(str(name))
        )
    seen = devices_seen()
    if device.type == "cpu" or str(device) in seen:
        return device
    raise ConfigError(
        subject="Job(device=)",
        expected=f"a device that torch sees here ({', '.join(seen)})",
        got=repr(str(name)),
        remedy=_remedy(device, seen),
    )


def devices_seen() -> tuple[str, ...]:
    """What torch can compute on here, by every name that means it."""
    cudas = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if _has_cuda() else []
    mps = ["mps", "mps:0"] if torch.backends.mps.is_available() else []
    return ("cpu", *(["cuda"] if cudas else []), *cudas, *mps)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the device's own generator; the processor's is `seed_everything`'s."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device: in tuples, lists and dicts, and in whatever has a ``to``.

    >>> to_device({"x": torch.ones(2), "names": ["a", "b"]}, CPU)
    {'x': tensor([1., 1.]), 'names': ['a', 'b']}
    """
    # Before the containers: a PackedSequence is a named tuple, one of whose tensors must stay where it is.
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return moved if isinstance(batch, list) else tuple(moved)
    return batch


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _remedy(device: torch.device, seen: tuple[str, ...]) -> str:
    if device.type in seen:
        return f"Take one of these, or device={device.type!r} for the first."
    how = f"torch.{'cuda' if device.type == 'cuda' else 'backends.mps'}.is_available()"
    return (
        f'Leave device="cpu", or install a driver and a build of torch with which {how} is True '
        f"(this is torch {torch.__version__})."
    )
