"""How a command ends: exit codes, and how an error reads.

=========  =====================================================================================
0          done
1          the run failed, or what it left is damaged
2          the request was wrong; nothing was trained
3          every replica is gone for good; what they did is kept, and `squall resume` goes on from there
130, 143   ended by SIGINT (Ctrl-C) or SIGTERM, after a clean end that leaves a run which resumes
=========  =====================================================================================
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from squall.errors import ConfigError, NoReplicaError, SquallError, UserCodeError

FAILED, WRONG_REQUEST, ALONE = 1, 2, 3


@contextmanager
def outcome() -> Iterator[None]:
    """Turn what the body raises into an exit code and, on standard error, one line that begins with "squall:".

    Only an error in the user's own code has a traceback, since only there it helps; it is shown once. An exception
    that is none of ours is a bug in Squall and passes through.
    """
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    except UserCodeError as error:
        say(error)
        print(error.traceback.rstrip(), file=sys.stderr)
        raise SystemExit(FAILED) from None
    except SquallError as error:
        say(error)
        raise SystemExit(_code_of(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _code_of(error: SquallError) -> int:
    match error:
        case ConfigError():
            return WRONG_REQUEST
        case NoReplicaError():
            return ALONE
        case _:
            return FAILED


def say(error: SquallError) -> None:
    """Show an error as one line."""
    print(f"squall: {' '.join(str(error).split())}", file=sys.stderr)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
