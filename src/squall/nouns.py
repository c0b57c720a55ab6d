"""What frozen data is made of: the base of messages, blocks, events and effects.

A noun is a `msgspec.Struct`: made and compared in C, for a run makes dozens of them for each minibatch; and
one that is sent turns into bytes and back by its annotations alone, strictly (`squall.wire.codec`).
"""

import msgspec


class Noun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Frozen data, compared by what it says. A subclass names its fields as a dataclass does.

    Fields hold frozen data, too: the garbage collector does not look at nouns, so that none may be part of a
    cycle.

    >>> class Greeting(Noun, frozen=True, kw_only=True):
    ...     words: str
    ...     times: int = 1
    >>> Greeting(words="hello"), Greeting(words="hello") == Greeting(words="hello", times=2)
    (Greeting(words='hello', times=1), False)
    """
