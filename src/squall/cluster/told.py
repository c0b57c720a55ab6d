"""What roles tell their launcher, in the words of those who read it: events, errors, traffic and rates."""

from collections.abc import Mapping

from squall.errors import RunError, SquallError, UserCodeError
from squall.observe.events import Evaluated, Event, Joined, Left, Link, Recovered, Redone, Refused
from squall.training.execution import TrafficCount
from squall.wire.control import Failed, Happened, LinkCount, Measured


class Rates:
    """Bytes per second of each link, from totals that are told now and then."""

    def __init__(self) -> None:
        self.links: tuple[Link, ...] = ()
        self._at = 0.0
        self._before: dict[tuple[str, str], int] = {}

    def update(self, now: float, traffic: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        seconds = now - self._at
        if seconds < 1.0:
            return
        totals = {link: num_bytes for link, (num_bytes, _) in traffic.items()}
        self.links = tuple(
            Link(
                sender=sender,
                receiver=receiver,
                bytes_per_second=(total - self._before.get((sender, receiver), 0)) / seconds,
            )
            for (sender, receiver), total in totals.items()
        )
        self._at, self._before = now, totals


def traffic_of(counts: Mapping[str, tuple[LinkCount, ...]]) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes and messages of each link, from what each role has counted."""
    total = TrafficCount()
    for links in counts.values():
        for link in links:
            total.add(link.sender, link.receiver, link.num_bytes, link.messages)
    return total.total()


def evaluated_of(told: Measured, now: float) -> Evaluated:
    """What an evaluator has measured."""
    return Evaluated(
        time_s=now,
        epoch=told.epoch,
        minibatches=told.minibatches,
        metrics=dict(zip(told.names, told.values, strict=True)),
        versions=told.versions,
    )


def event_of(told: Happened) -> Event:
    """The event that a coordinator told of, as observers know it."""
    role, time_s, why = f"{told.role}.0", told.time_s, told.why
    if told.kind == "Recovered":
        return Recovered(time_s=time_s, role=told.role, incarnation=told.number, lost=told.lost)
    if told.kind == "Joined":
        return Joined(time_s=time_s, role=role, incarnation=told.number)
    if told.kind == "Left":
        return Left(time_s=time_s, role=role, why=why, incarnation=told.number)
    assert told.block is not None
    if told.kind == "Redone":
        return Redone(time_s=time_s, block=told.block, attempt=told.number, replica=int(told.role), why=why)
    return Refused(time_s=time_s, block=told.block, why=why)


def error_of(told: Failed) -> SquallError:
    """Why a role could not go on."""
    if told.kind == "user":
        return UserCodeError(
            role=told.role, step=told.step, line=told.line, error=told.error, traceback=told.traceback
        )
    return RunError(reason=f"{told.role}: {told.error}")
