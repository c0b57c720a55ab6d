"""What things cost: machines that partitions run on, what two partitions of one share, and seconds of an op."""

from dataclasses import dataclass

from squall.errors import ConfigError
from squall.keywords import named

COMPUTE_SHARED, MEMORY_SHARED = 0.08, 1.0
"""How much longer work takes for each other process that works on the host: products and convolutions, and the rest.

Measured on two cores: 1.05 to 1.1 for convolution, about 2 for what is bound by memory (docs/plans.md).
"""


@named
@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where one partition runs.

    Attributes:
        host: partitions with the same host share its cores and its memory's speed.
        speed: how fast it computes, as a multiple of the machine on which the plan is made.
        memory_bytes: what a partition may use there; None: not looked at.
        cores: of the host; None: as many as are asked for.
        bytes_per_s, latency_s: of its line to other hosts. Partitions of one host are linked by `LOCAL`.

    Raises:
        ConfigError: a figure that is not above zero.

    >>> Machine(host="b", speed=0.5, memory_bytes=2_000_000_000).host
    'b'
    """

    host: str = "this host"
    speed: float = 1.0
    memory_bytes: int | None = None
    cores: int | None = None
    bytes_per_s: float = 1e9 / 8
    latency_s: float = 2e-4

    def __post_init__(self) -> None:
        for name in ("speed", "memory_bytes", "cores", "bytes_per_s"):
            figure = getattr(self, name)
            if figure is not None and not figure > 0:
                raise ConfigError(subject=f"Machine({name}=)", expected="a number above 0", got=str(figure))

    def link_to(self, other: "Machine") -> tuple[float, float]:
        """Seconds before the first byte of a message to another machine, and bytes a second from then on."""
        if self.host == other.host:
            return LOCAL
        return max(self.latency_s, other.latency_s), min(self.bytes_per_s, other.bytes_per_s)


LOCAL = (1e-4, 8e9)
"""Between processes of one host: seconds before the first byte, bytes a second.

Measured between two processes that answer one another over shared memory, on two cores with other work beside: a message
of 4 KiB takes 0.1 to 0.2 ms until it is heard (0.03 of them to say it); of 0.5, 2 and 8 MiB it is copied by the sender at 9
to 13 GB/s, in a run at 7 to 8. The receiver copies nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Seconds that one node takes for the whole example.

    Attributes:
        is_compute: whether it is bound by arithmetic rather than by memory.
    """

    forward_s: float
    backward_s: float
    is_compute: bool

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s
