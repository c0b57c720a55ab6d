"""What holds something that is to be given back: closed by hand, or at the end of a ``with`` block."""

from abc import ABC, abstractmethod
from typing import Self


class Closes(ABC):
    """Base of what is used in a ``with`` block, and closed at its end whatever happens there.

    >>> class Door(Closes):
    ...     def close(self) -> None:
    ...         print("closed")
    >>> with Door():
    ...     print("open")
    open
    closed
    """

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
