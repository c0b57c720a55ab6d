"""A keyword that does not exist is answered with the one that was meant."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

from squall.errors import ConfigError

Named = TypeVar("Named", bound=Callable[..., Any])


def named(target: Named) -> Named:
    """Have a class or a function refuse keywords that it does not know, with a hint; its signature stays as it was.

    >>> @named
    ... def start(*, replicas: int = 1) -> None: ...
    >>> start(replica=2)
    Traceback (most recent call last):
        ...
    squall.errors.ConfigError: start(replica=): expected one of its arguments, but got 'replica'. Did you mean replicas=?
    """
    inner: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    parameters = inspect.signature(inner).parameters.values()
    known = [one.name for one in parameters if one.name != "self" and one.kind is not one.VAR_KEYWORD]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)  # and answers by itself

    @wraps(inner)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords.keys() - set(known):
            if takes_any and not meant(name, known):
                continue
            raise ConfigError(
                subject=f"{target.__name__}({name}=)",
                expected="one of its arguments",
                got=repr(name),
                remedy=meant(name, known, "{}=") or f"They are {', '.join(known)}.",
            )
        return inner(*args, **keywords)

    if not isinstance(target, type):
        return checked  # type: ignore[return-value]
    target.__init__ = checked  # type: ignore[misc]
    return target


def meant(name: str, known: Iterable[str], form: str = "{}") -> str:
    """ "Did you mean x?", if one that is known looks like it; else ""."""
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {form.format(close[0])}?" if close else ""
