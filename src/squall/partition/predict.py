"""What a step under a plan will take: its jobs played through in virtual time, and its bytes and memory counted.

The same `Agenda` that orders a worker's jobs orders them here; a job takes what its ops were measured to take, times the
part of each that it computes. Nothing here runs.
"""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from squall.errors import ConfigError
from squall.partition.agenda import Agenda, Arrived, FillDrain, Job, Policy
from squall.partition.cost import COMPUTE_SHARED, MEMORY_SHARED, Machine, OpTime
from squall.partition.program import Cut, Merge, Part, Program, Share, Task

Links = Mapping[tuple[int, int], int]
BEGIN_S, LAUNCH_S = 2e-5, 5e-5
"""What a job costs beside its ops: to be chosen, and its tensors to be put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is expected to cost.

    Attributes:
        batch: for so many examples a step, in `microbatches` parts.
        step_s: seconds from the first job to the last gradient.
        busy_s: of which each partition computes.
        links: (sender, receiver) -> bytes a step: activations, gradients, and parameters that others read.
        parameter_bytes: what each partition owns of parameters and buffers.
        memory_bytes: what each needs in all: parameters, their gradients, what it is sent, and what backward needs.
        is_measured: whether op times were measured, or guessed from shapes.
    """

    batch: int
    microbatches: int
    step_s: float
    busy_s: tuple[float, ...]
    links: Links
    parameter_bytes: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    is_measured: bool

    @property
    def bytes(self) -> int:
        """All that travels in a step."""
        return sum(self.links.values())

    def to_json(self) -> dict[str, Any]:
        """As plain data; a link is ``"sender-receiver"``."""
        return {
            "batch": self.batch,
            "microbatches": self.microbatches,
            "step_s": self.step_s,
            "busy_s": list(self.busy_s),
            "links": {f"{a}-{b}": size for (a, b), size in sorted(self.links.items())},
            "parameter_bytes": list(self.parameter_bytes),
            "memory_bytes": list(self.memory_bytes),
            "is_measured": self.is_measured,
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> "Prediction":
        """What `to_json` gave."""
        links = {
            (int(link.split("-")[0]), int(link.split("-")[1])): int(size)
            for link, size in described["links"].items()
        }
        return cls(
            batch=int(described["batch"]),
            microbatches=int(described["microbatches"]),
            step_s=float(described["step_s"]),
            busy_s=tuple(map(float, described["busy_s"])),
            links=links,
            parameter_bytes=tuple(map(int, described["parameter_bytes"])),
            memory_bytes=tuple(map(int, described["memory_bytes"])),
            is_measured=bool(described["is_measured"]),
        )


def predict(
    program: Program,
    times: Sequence[OpTime],
    machines: Sequence[Machine],
    *,
    measured_at: int,
    microbatches: int = 1,
    policy: Policy | None = None,
    is_measured: bool = True,
) -> Prediction:
    """Play a step through.

    Args:
        program: for one microbatch.
        times: of each node of its graph, for `measured_at` examples.
        machines: one for each partition.
    """
    policy = policy or FillDrain()
    scaled = program.batch / measured_at
    step = _Step(program, times, machines, microbatches, policy, scaled)
    step_s = step.run()
    return Prediction(
        batch=program.batch * microbatches,
        microbatches=microbatches,
        step_s=step_s,
        busy_s=tuple(step.busy),
        links=links_of(program, microbatches),
        parameter_bytes=tuple(owned_bytes(part) for part in program.parts),
        memory_bytes=tuple(
            memory_of(program, part, min(microbatches, policy.in_flight or microbatches))
            for part in program.parts
        ),
        is_measured=is_measured,
    )


def refuse_what_does_not_fit(prediction: Prediction, machines: Sequence[Machine]) -> None:
    """Raise ConfigError, with the machine and the bytes, if a partition needs more memory than its machine has."""
    for p, (machine, need) in enumerate(zip(machines, prediction.memory_bytes, strict=True)):
        if machine.memory_bytes is not None and need > machine.memory_bytes:
            raise ConfigError(
                subject=f"partition {p} on machine {machine.host!r}",
                expected=f"at most {machine.memory_bytes:,} bytes of memory",
                got=f"a need of {need:,} bytes, of which {prediction.parameter_bytes[p]:,} are parameters",
                remedy="Take more partitions, a smaller batch, or a machine with more memory.",
            )


def links_of(program: Program, microbatches: int = 1) -> dict[tuple[int, int], int]:
    """(sender, receiver) -> bytes in one step, of both passes."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for lasting, times in ((False, microbatches), (True, 1)):
        for link, size in program.bytes_up(lasting).items():
            found[link] += size * times
        for (sender, receiver), size in program.bytes_down(lasting).items():
            found[receiver, sender] += size * times
    return dict(found)


def owned_bytes(part: Part) -> int:
    """Bytes of the parameters and buffers that a partition owns."""
    return sum(
        datum.owners[part.partition].size * datum.itemsize
        for datum in part.data
        if datum.lasts and part.partition < len(datum.owners)
    )


def memory_of(program: Program, part: Part, in_flight: int) -> int:
    """Bytes that a partition needs at most, about: what lasts and its gradients once, all else for each microbatch."""
    lasting = moving = 0
    for value, held in part.holds.items():
        datum = program.data[value]
        size = sum(each.region.size for each in held) * datum.itemsize
        if datum.lasts:
            lasting += size * (2 if datum.has_gradient else 1)
        else:
            moving += size
    return lasting + moving * in_flight


class _Step:
    """One step in virtual time."""

    def __init__(
        self,
        program: Program,
        times: Sequence[OpTime],
        machines: Sequence[Machine],
        microbatches: int,
        policy: Policy,
        scale: float,
    ) -> None:
        self._program, self._machines, self._micros = program, machines, microbatches
        self._trains = program.loss is not None
        self._agendas = [Agenda(part, microbatches, policy, self._trains) for part in program.parts]
        self._seconds = [
            [_piece_seconds(program, piece.tasks, times, scale) for piece in part.pieces]
            for part in program.parts
        ]
        self._now = 0.0
        self._events: list[tuple[float, int, int, Any]] = []
        self._numbered = 0
        self._line_free = [0.0] * len(machines)
        self._works_on: list[Job | None] = [None] * len(machines)
        self._back: list[dict[tuple[int, int | None], int]] = [defaultdict(int) for _ in machines]
        self.busy = [0.0] * len(machines)

    def run(self) -> float:
        for part in self._program.parts:
            for value in part.sends:
                if self._program.data[value].lasts:
                    self._send(part, value, None)
                elif value not in part.makers:
                    for micro in range(self._micros):
                        self._send(part, value, micro)
        for p in range(len(self._machines)):
            self._take(p)
        while self._events:
            self._now, _, p, event = heapq.heappop(self._events)
            if isinstance(event, Job):
                self._works_on[p] = None
                self._tell(p, event)
            self._agendas[p].happened(event)
            self._take(p)
        assert all(agenda.is_finished for agenda in self._agendas), "a program that cannot end"
        return self._now

    def _at(self, when: float, p: int, event: Any) -> None:
        self._numbered += 1
        heapq.heappush(self._events, (when, self._numbered, p, event))

    def _take(self, p: int) -> None:
        if self._works_on[p] is not None or (job := self._agendas[p].next()) is None:
            return
        took = self._duration(p, job)
        self._works_on[p], self.busy[p] = job, self.busy[p] + took
        self._at(self._now + took, p, job)

    def _duration(self, p: int, job: Job) -> float:
        """Seconds of a job, given who else works on the host as it begins."""
        machine = self._machines[p]
        others = sum(
            self._machines[q].host == machine.host and q != p and working is not None
            for q, working in enumerate(self._works_on)
        )
        compute, memory = self._seconds[p][job.piece][job.is_backward]
        took = compute * (1 + COMPUTE_SHARED * others) + memory * (1 + MEMORY_SHARED * others)
        crowd = max(1.0, (others + 1) / machine.cores) if machine.cores else 1.0
        return (took * crowd + LAUNCH_S) / machine.speed + BEGIN_S

    def _tell(self, p: int, job: Job) -> None:
        """Send what a job that is done has made."""
        part = self._program.parts[p]
        if not job.is_backward:
            for value in part.pieces[job.piece].gives:
                if value in part.sends:
                    self._send(part, value, job.micro)
            return
        for value, readers in part.readers.items():
            if job.piece in readers:
                self._came_back(part, value, len(readers), job.micro)

    def _came_back(self, part: Part, value: int, readers: int, micro: int) -> None:
        lasts = self._program.data[value].lasts
        key, wanted = (value, None if lasts else micro), readers * (self._micros if lasts else 1)
        back = self._back[part.partition]
        back[key] += 1
        if back[key] == wanted:
            for sender in part.receives.get(value, ()):
                if (value, sender) in part.returns:
                    size = sum(each.region.size for each in part.holds[value] if each.sender == sender)
                    self._message(
                        part.partition, sender, value, size, Arrived(value, part.partition, True, key[1])
                    )

    def _send(self, part: Part, value: int, micro: int | None) -> None:
        for receiver, regions in part.sends[value].items():
            size = sum(region.size for region in regions)
            self._message(part.partition, receiver, value, size, Arrived(value, part.partition, False, micro))

    def _message(self, sender: int, receiver: int, value: int, size: int, event: Arrived) -> None:
        """A machine's line sends one message at a time."""
        latency, rate = self._machines[sender].link_to(self._machines[receiver])
        begins = max(self._now, self._line_free[sender])
        self._line_free[sender] = begins + size * self._program.data[value].itemsize / rate
        self._at(self._line_free[sender] + latency, receiver, event)


def _piece_seconds(
    program: Program, tasks: Sequence[Task], times: Sequence[OpTime], scale: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(bound by arithmetic, bound by memory) seconds of a piece: forward, and backward."""
    found = [[0.0, 0.0], [0.0, 0.0]]
    for task in tasks:
        op = times[task.node]
        part = _fraction(program, task, op.is_compute) * scale
        flows = any(program.data[value].has_gradient for value in task.makes)
        found[0][not op.is_compute] += op.forward_s * part
        found[1][not op.is_compute] += op.backward_s * part * flows
    return (found[0][0], found[0][1]), (found[1][0], found[1][1])


def _fraction(program: Program, task: Task, is_compute: bool) -> float:
    """Which part of its node a task computes, about."""
    work = task.work
    if isinstance(work, Cut):
        made = sum(index is not None for index in program.graph.nodes[task.node].outputs)
        return work.out.size / max(prod(work.call.shape), 1) / made
    if isinstance(work, Share):
        is_addition = work.stage.combine is None and is_compute  # of a bias, to products that are done
        return 0.0 if is_addition else work.share.size / max(prod(work.stage.space), 1)
    return 0.0 if isinstance(work, Merge) else 1.0
