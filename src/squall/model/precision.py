"""Computing in lower precision than the parameters have: torch's autocast around forward and loss."""

from contextlib import AbstractContextManager, nullcontext

import torch

from squall.errors import ConfigError

PRECISIONS = ("bfloat16",)
"""What a job's `precision` can be, beside None: the model's own dtypes."""


def check_precision(precision: object) -> None:
    """Refuse what cannot be computed in.

    Raises:
        ConfigError: it is neither None nor one of `PRECISIONS`.

    >>> check_precision("float64")
    Traceback (most recent call last):
        ...
    squall.errors.ConfigError: Job(precision=): expected None (the model's own dtypes) or "bfloat16" (autocast), \
but got 'float64'.
    """
    if precision is None or precision in PRECISIONS:
        return
    of_float16 = (
        "torch has autocast to float16, on a CPU too, but small gradients vanish in it unless the loss is scaled up, "
        'which Squall does not do: use "bfloat16".'
    )
    raise ConfigError(
        subject="Job(precision=)",
        expected='None (the model\'s own dtypes) or "bfloat16" (autocast)',
        got=repr(precision),
        remedy=of_float16 if precision == "float16" else "",
    )


def computing_in(precision: str | None, device: torch.device) -> AbstractContextManager[object]:
    """Within it torch computes on `device` in this precision what it deems safe; None changes nothing.

    >>> with computing_in("bfloat16", torch.device("cpu")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
