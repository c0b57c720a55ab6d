"""A relay of one link, for tests: stands between two ends of TCP connections, counts, slows, holds and cuts."""

from squall.cluster.relay import TO_CALLEE, TO_CALLER, Relays


class Relay:
    """Passes on what comes to `address` to another address.

    Attributes:
        address: to connect to.
    """

    def __init__(self, target: str, *, bytes_per_s: float | None = None) -> None:
        self._relays = Relays()
        self.address = self._relays.between("caller", "callee", target, bytes_per_s=bytes_per_s)
        self._link = self._relays.links["caller", "callee"]

    @property
    def to_target(self) -> int:
        """Bytes passed on so far."""
        return self._link.passed[TO_CALLEE]

    @property
    def to_caller(self) -> int:
        return self._link.passed[TO_CALLER]

    @property
    def num_connections(self) -> int:
        """Accepted so far."""
        return self._link.num_connections

    def cut(self) -> None:
        """End every connection that there is; new ones are let through."""
        self._relays.cut(self._link)

    def cut_after(self, num_bytes: int) -> None:
        """Cut when so many more bytes have gone either way."""
        self._relays.cut_after(self._link, num_bytes)

    def hold(self, *, after: int = 0, answers_only: bool = False) -> None:
        """Leave everything open, but pass on nothing any more, or no answers, when so many more bytes have passed."""
        self._relays.hold(self._link, after=after, answers_only=answers_only)

    def release(self) -> None:
        self._relays.release(self._link)

    def close(self) -> None:
        self._relays.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
