"""What shards begin from, on its way to them: in shared memory, once for all, until each has made its own of it."""

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from squall.cluster.payload import Payload, pack, unpack
from squall.wire.waiting import wait

TAKEN_S = 600.0


class FirstValues:
    """First values of parameters, which every shard maps and takes its own slices from.

    Args:
        values: by name, whole.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._payload = pack(dict(values))

    @property
    def settings(self) -> dict[str, Any]:
        """What a shard is told beside the descriptor."""
        return {"first": self._payload.header.hex()}

    @property
    def fd(self) -> int:
        return self._payload.fd

    def close(self) -> None:
        self._payload.close()


def first_values(header: str, fd: int) -> dict[str, Tensor]:
    """In a shard: the values that its own launcher sent; takes `fd` over."""
    payload = Payload(fd=fd, header=bytes.fromhex(header))
    try:
        values: dict[str, Tensor] = unpack(payload)
        return values
    finally:
        payload.close()


class Taken:
    """Tells the launcher when all shards have their own: each is sent an end of a pipe, and closes it then, or by dying."""

    def __init__(self) -> None:
        self._reader, self.fd = os.pipe()

    def wait(self) -> None:
        """Wait until all have. Call it when every one has been started, and once.

        One that takes too long is not waited for: this is about memory, and nothing depends on it.
        """
        os.close(self.fd)
        self.fd = -1
        wait([self._reader], TAKEN_S)

    def close(self) -> None:
        os.close(self._reader)
        if self.fd >= 0:
            os.close(self.fd)
