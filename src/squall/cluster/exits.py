"""How roles end: the codes that they exit with, and what these mean to a person."""

import signal

EXIT_FAILED = 1
EXIT_LOST = 3
EXIT_OUT_OF_MEMORY = 4

_SAID = {EXIT_LOST: "lost a peer and left", EXIT_OUT_OF_MEMORY: "ran out of memory"}


def in_words(returncode: int | None) -> str:
    """How a process ended, as in "was killed by SIGKILL".

    >>> in_words(-9), in_words(1), in_words(4), in_words(None)
    ('was killed by SIGKILL', 'exited with 1', 'ran out of memory', 'is gone')
    """
    if returncode is None:
        return "is gone"
    if returncode < 0:
        known = {int(number): number.name for number in signal.Signals}
        return f"was killed by {known.get(-returncode, f'signal {-returncode}')}"
    return _SAID.get(returncode, f"exited with {returncode}")


def is_death(returncode: int | None) -> bool:
    """Whether a role died: it did not leave in order, and no exception did it, which another would run into as well.

    >>> [is_death(code) for code in (-9, EXIT_OUT_OF_MEMORY, EXIT_LOST, EXIT_FAILED, 0, None)]
    [True, True, True, False, False, False]
    """
    return returncode not in (0, EXIT_FAILED, None)
