"""What the coordinator must do, said a second time and in another way: one life story for each block.

`CoordinatorRules` predicts every effect of a `CoordinatorMachine`; it shares nothing with it but the messages.
Its waiting times and bounds are written out here again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from squall.blocks import Block, Outcome
from squall.coordinator.events import (
    Checkpoint,
    Closed,
    Copied,
    Cut,
    Diverging,
    Ended,
    FromReplica,
    FromShard,
    Joined,
    Lost,
    Report,
    ShardLost,
    Stop,
    Tick,
    ToReplica,
    ToShard,
)
from squall.coordinator.machine import CoordinatorMachine
from squall.observe import events
from squall.wire.messages import (
    Ask,
    Diverged,
    Finished,
    Held,
    Hold,
    Lease,
    Leave,
    Recall,
    Refuse,
    Refused,
    Release,
    Released,
    Resume,
    Returned,
)
from tests.simulated.shard_rules import positions, runs


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How long the coordinator must wait [seconds]."""

    start_s: float = 60.0
    leave_s: float = 5.0
    first_s: float = 60.0
    least_s: float = 5.0
    factor: float = 10.0
    hold_s: float = 2.0


@dataclass
class _Fate:
    """One block from its first lease to its end."""

    holders: list[int] = field(default_factory=list)
    num_leases: int = 0
    why_again: str = "not finite the first time"
    finders: list[int] = field(default_factory=list)
    tensor: str = ""
    request: int = 0
    shards_left: list[int] | None = None
    is_mixed: bool = False
    done_before: int = 0
    """Blocks that were done when it was first leased."""
    end: str = ""
    is_out: bool = False
    """Leased, and not ended since."""
    ended_before: str = ""
    """How it had ended, if a shard has lost it since."""


Places = frozenset[tuple[int, int, int]]
"""Positions as (stage, epoch, position)."""


@dataclass
class _Holding:
    """One hold, from the shards' being asked to their going on."""

    number: int
    began: float
    told: dict[int, tuple[Places, Places]] = field(default_factory=dict)
    """By shard, what some slice of it has, and what all have."""
    let_in: Places = frozenset()
    lacking: Places = frozenset()
    is_reached: bool = False
    name: str | None = None
    """What is to be stored; None while that is not decided."""
    to_go: list[int] = field(default_factory=list)


@dataclass
class _Replica:
    number: int
    incarnation: int
    heard: float
    asked: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # when each of them came
    answers: dict[int, Lease | Leave] = field(default_factory=dict)
    held: list[Block] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    is_silent: bool = False
    strikes: int = 0
    good: int = 0

    @property
    def name(self) -> str:
        return f"replica{self.number}"


class CoordinatorRules:
    """Follows the coordinator event by event.

    Args:
        blocks: all blocks of the stage, in order, those left out that are done already.
        why_done: what the stage says when all of them are done.
        rests_at: after how many blocks the only replica is as after a start; None: that does not matter.
    """

    def __init__(
        self,
        *,
        blocks: Sequence[Block],
        why_done: str,
        num_replicas: int,
        num_shards: int,
        warm_start: int,
        waiting: Waiting,
        settled: Iterable[tuple[int, int, int]] = (),
        max_staleness: int | None = None,
        rests_at: frozenset[int] | None = None,
    ) -> None:
        self.fresh = list(blocks)
        self.back: list[Block] = []
        self.fates = {block: _Fate() for block in blocks}
        self.why_done = why_done
        self.num_replicas, self.num_shards = num_replicas, num_shards
        self.warm_start, self.warm_ended = warm_start, 0
        self.waiting = waiting
        self.max_staleness = max_staleness
        self.replicas: dict[int, _Replica] = {}
        self.gone_early: set[int] = set()
        self.began: float | None = None
        self.state = "starting"
        self.why = ""
        self.leaving_since = 0.0
        self.num_waits = 0
        self.num_fresh = self.num_refuse_requests = self.refusals_in_a_row = 0
        self.rests_at = rests_at
        self.wish: str | None = None
        self.holding: _Holding | None = None
        self.num_holds = 0
        self.hold_s = waiting.hold_s
        self.hold_after = 0.0
        self.lacked: Places = frozenset()
        self.done_places: Places = frozenset(settled)
        self.stop: Stop | None = None
        self.away: dict[int, float] = {}
        self.lives: dict[int, tuple[int, Places | None]] = {}
        self.acknowledged: set[tuple[int, int, tuple[int, int, int]]] = set()  # shard, its life, place
        self.num_done = 0
        self.is_short = False  # a shard has lost something when nobody could do it again
        self.out: list[Any] = []

    def see(self, machine: CoordinatorMachine, event: Any, effects: tuple[Any, ...]) -> None:
        self.out = []
        if self.began is None and isinstance(event, Joined):
            self.began = event.now
        self._take(event)
        assert list(effects) == self.out, f"coordinator, {event}: {effects} instead of {self.out}"
        if isinstance(event, Tick):
            assert machine.waits(event.now) == tuple(self._waits(event.now))

    def end(self, machine: CoordinatorMachine) -> None:
        ended = {block for block, fate in self.fates.items() if fate.end}
        if not self.is_short:
            assert machine.settled.num_minibatches >= sum(block.num_minibatches for block in ended)
        assert set(machine.refused) == {block for block, fate in self.fates.items() if fate.end == "refused"}

    def _take(self, event: Any) -> None:
        match event:
            case Joined() if self.state in ("leaving", "ended"):
                self._say(event.replica, event.incarnation, Recall(why=self.why))
            case _ if self.state == "ended":
                pass
            case Joined():
                self._joined(event)
            case FromReplica(message=Ask() as ask):
                self._asked(event, ask)
            case FromReplica(message=Resume()):
                pass  # the first coordinator knows what is held
            case FromReplica() | Lost():
                self._gone(event)
            case FromShard(message=Refused() as told):
                self._refused(event, told)
            case FromShard(message=Diverged() as told):
                self.out.append(Diverging(what="the update", tensor=told.tensor, block=told.block))
                if self.state != "leaving":
                    self._leave(event.now, "diverged")
            case ShardLost():
                self.away.setdefault(event.shard, event.now)
            case FromShard(message=Returned() as told):
                self._returned(event, told)
            case Tick():
                getattr(self, f"_tick_{self.state}")(event.now)
            case Stop() if self.state == "running" and self.rests_at is not None and self.replicas:
                self.stop = self.stop or event
                self._go_on(event.now)
            case Stop() if self.state != "leaving":
                self._leave(event.now, event.why)
            case Checkpoint() if self.state != "leaving":
                self.wish = self.wish or event.name
                self._go_on(event.now)
            case Copied() if self.state != "leaving":
                self._copied(event)
            case FromShard(message=Released() as told):
                self._let_go(event, told)
            case FromShard(message=Held() as told) if self.state != "leaving":
                self._held(event, told)

    # Shards that were killed ------------------------------------------------------------------------------

    def _returned(self, event: FromShard, told: Returned) -> None:
        self.away.pop(event.shard, None)
        known = self.lives.get(event.shard)
        if known is not None and known[0] >= told.incarnation:
            return
        had = None if told.everywhere is None else _places(told.everywhere)
        if (
            had is not None
        ):  # and what it has acknowledged since, or a later life of it, as replicas have told
            had |= {
                place
                for shard, life, place in self.acknowledged
                if shard == event.shard and life >= told.incarnation and life == self._last_life(shard)
            }
        self.lives[event.shard] = (told.incarnation, had)
        lost = frozenset() if had is None else self._done_places() - had
        self.out.append(
            Report(
                event=events.Recovered(
                    time_s=event.now,
                    role=f"shard{event.shard}",
                    incarnation=told.incarnation,
                    lost=len(lost),
                )
            )
        )
        holding = self.holding
        if holding is not None and holding.is_reached and holding.name is None:
            self.wish = None
        self._call_off(event.now)
        if had is not None:
            self._lose_places(event.shard, had, lost)
        for replica in self.replicas.values():
            replica.heard = event.now
        self._go_on(event.now)

    def _lose_places(self, shard: int, had: Places, lost: Places) -> None:
        if self.state == "leaving" and lost:
            self.is_short = True
        for block, fate in self.fates.items():
            if positions(block) <= had:
                continue
            if fate.shards_left is not None:
                fate.shards_left = sorted({*fate.shards_left, shard})
            elif fate.end:
                fate.ended_before, fate.end = fate.end, ""
                fate.finders, fate.tensor = [], ""
                if fate.ended_before == "refused":
                    self.num_refuse_requests += 1
                    fate.request, fate.shards_left = self.num_refuse_requests, [shard]
                    self._ask_shards(block)
                elif not fate.holders:
                    self.back.append(block)
                    fate.why_again = f"shard{shard} came back without it"

    def _is_kept(self, report: Finished) -> bool:
        """Every shard that acknowledged the block has it, as far as is known."""
        for shard, incarnation in report.lives:
            newest, had = self.lives.get(shard, (0, None))
            if had is not None and incarnation < newest and not positions(report.block) <= had:
                return False
        for shard, incarnation in report.lives:
            self.acknowledged |= {(shard, incarnation, place) for place in positions(report.block)}
        return True

    def _last_life(self, shard: int) -> int:
        return max(life for other, life, _ in self.acknowledged if other == shard)

    # Checkpoints ----------------------------------------------------------------------------------------

    def _ask_to_hold(self) -> None:
        assert self.holding is not None
        message = Hold(request=self.holding.number, admitted=_runs(self.holding.let_in))
        self.out += [ToShard(shard=shard, message=message) for shard in range(self.num_shards)]

    def _held(self, event: FromShard, told: Held) -> None:
        holding = self.holding
        if (
            holding is None
            or holding.number != told.request
            or holding.is_reached
            or holding.name is not None
        ):
            return
        holding.told[event.shard] = _places(told.anywhere), _places(told.everywhere)
        self._compare(holding)

    def _compare(self, holding: _Holding) -> None:
        if len(holding.told) < self.num_shards:
            return
        every = frozenset[tuple[int, int, int]]().union(*(some for some, _ in holding.told.values()))
        holding.lacking = frozenset().union(*(every - all_ for _, all_ in holding.told.values()))
        if not holding.lacking:
            assert self.wish is not None
            holding.is_reached = True
            self.out.append(Cut(request=holding.number, name=self.wish, settled=_runs(every)))
        elif holding.let_in != every:
            holding.let_in = every
            self._ask_to_hold()

    def _copied(self, event: Copied) -> None:
        holding = self.holding
        if (
            holding is not None
            and holding.is_reached
            and holding.name is None
            and event.request == holding.number
        ):
            assert self.wish is not None
            holding.name, self.wish, self.lacked = self.wish, None, frozenset()
            self._let_all_go(holding)
        self._go_on(event.now)

    def _let_all_go(self, holding: _Holding) -> None:
        holding.to_go = list(range(self.num_shards))
        self._ask_to_go(holding)
        if not holding.to_go:
            self.holding = None

    def _ask_to_go(self, holding: _Holding) -> None:
        message = Release(request=holding.number, name=holding.name or "")
        self.out += [ToShard(shard=shard, message=message) for shard in holding.to_go]

    def _let_go(self, event: FromShard, told: Released) -> None:
        holding = self.holding
        if holding is not None and holding.number == told.request and event.shard in holding.to_go:
            holding.to_go.remove(event.shard)
            if not holding.to_go:
                self.holding = None
        if self.state == "running":
            self._go_on(event.now)
        elif self.state == "leaving":
            self._dismiss()

    def _call_off(self, now: float) -> None:
        holding = self.holding
        if holding is None or holding.name is not None:
            return
        self.hold_after = now + (now - holding.began)
        self.hold_s *= 2
        self.lacked = holding.lacking
        holding.name = ""
        self._let_all_go(holding)

    def _is_at_rest(self) -> bool:
        is_asked = self.wish is not None or self.stop is not None
        return self.rests_at is not None and is_asked and self.num_fresh in self.rests_at

    def _is_any_open(self) -> bool:
        return any(fate.num_leases and not fate.end for fate in self.fates.values())

    def _begin_hold(self, now: float) -> None:
        settling = any(fate.shards_left is not None for fate in self.fates.values())
        if self.wish is None or self.holding is not None or settling or now < self.hold_after:
            return
        if not self.lacked <= self._done_places():
            return
        if self.rests_at is not None and (not self._is_at_rest() or self._is_any_open()):
            return
        self.num_holds += 1
        self.holding = _Holding(self.num_holds, now)
        self.lacked = frozenset()
        self._ask_to_hold()
        self._compare(self.holding)

    def _done_places(self) -> Places:
        ended = (block for block, fate in self.fates.items() if fate.end)
        return self.done_places | _places(tuple(ended))

    def _tick_hold(self, now: float) -> None:
        holding = self.holding
        if holding is None or (holding.is_reached and holding.name is None):
            return
        if holding.name is not None:
            self._ask_to_go(holding)
            return
        held = [
            block for replica in self.replicas.values() if not replica.is_silent for block in replica.held
        ]
        if now - holding.began > self.hold_s or holding.lacking - self._done_places() - _places(tuple(held)):
            self._call_off(now)
        else:
            self._ask_to_hold()

    def _say(self, replica: int, incarnation: int, message: Any) -> None:
        self.out.append(ToReplica(replica=replica, incarnation=incarnation, message=message))

    def _tell(self, replica: _Replica, message: Any) -> None:
        self._say(replica.number, replica.incarnation, message)

    # Members --------------------------------------------------------------------------------------------

    def _joined(self, event: Joined) -> None:
        known = self.replicas.get(event.replica)
        if known is not None:
            if known.incarnation >= event.incarnation:
                return
            self._lose(known, event.now, "replaced by a later start")
        self.replicas[event.replica] = _Replica(event.replica, event.incarnation, event.now)
        self.gone_early.discard(event.replica)
        name = f"replica{event.replica}"
        self.out.append(
            Report(event=events.Joined(time_s=event.now, role=name, incarnation=event.incarnation))
        )
        self._go_on(event.now)

    def _gone(self, event: FromReplica | Lost) -> None:
        replica = self.replicas.get(event.replica)
        if replica is None or replica.incarnation != event.incarnation:
            return
        if isinstance(event, Lost):
            self._lose(replica, event.now, event.why)
        elif self.state == "leaving":
            del self.replicas[replica.number]
        else:
            self._lose(replica, event.now, "asked to leave")
        self._go_on(event.now)

    def _lose(self, replica: _Replica, now: float, why: str) -> None:
        del self.replicas[replica.number]
        if self.state == "starting":
            self.gone_early.add(replica.number)
        self._give_back(replica, f"{replica.name}: {why}")
        left = events.Left(time_s=now, role=replica.name, why=why, incarnation=replica.incarnation)
        self.out.append(Report(event=left))

    def _give_back(self, replica: _Replica, why: str) -> None:
        for block in replica.held:
            fate = self.fates[block]
            if replica.number in fate.holders:
                fate.holders.remove(replica.number)
            self._return(block, why)
        replica.held = []

    def _return(self, block: Block, why: str) -> None:
        fate = self.fates[block]
        if not fate.end and fate.shards_left is None and not fate.holders and block not in self.back:
            self.back.append(block)
            fate.why_again = why

    # Asking ---------------------------------------------------------------------------------------------

    def _asked(self, event: FromReplica, ask: Ask) -> None:
        replica = self.replicas.get(event.replica)
        if replica is None or replica.incarnation != event.incarnation:
            why = self.why or "no longer a member"
            self._say(event.replica, event.incarnation, Leave(request=ask.request, why=why))
            return
        newest = max(replica.asked, default=0)
        if ask.request in replica.asked or ask.request <= newest - 32:
            replica.is_silent = False
            if ask.request in replica.answers and ask.request > newest - 32:
                self._tell(replica, replica.answers[ask.request])
            self._go_on(event.now)
            return
        replica.asked.append(ask.request)
        if ask.finished is not None:
            self._finished(replica, ask.finished, event.now)
        replica.heard, replica.is_silent = event.now, False
        replica.waiting.append(ask.request)
        self.num_waits += 1
        replica.turns.append(self.num_waits)
        self._go_on(event.now, (replica, ask.request))

    def _finished(self, replica: _Replica, report: Finished, now: float) -> None:
        block, fate = report.block, self.fates[report.block]
        if block in replica.held:
            replica.held.remove(block)
            fate.holders.remove(replica.number)
            replica.durations.append(now - replica.heard)
        if fate.end or fate.shards_left is not None:
            return
        if report.outcome is Outcome.APPLIED and not self._is_kept(report):
            self._return(block, "a shard has come back without it")
        elif report.outcome is Outcome.APPLIED:
            self._done(replica, report, now)
        elif report.outcome is Outcome.NOT_FINITE:
            fate.tensor = report.not_finite
            fate.finders.append(replica.number)
            is_twice_alone = len(fate.finders) >= 2 and self._is_alone(replica)
            if is_twice_alone or any(finder != fate.finders[0] for finder in fate.finders):
                self._settle(block, now)
            else:
                self._return(block, f"{replica.name}: {report.not_finite} was not finite")
        else:
            self._settle(block, now)

    def _done(self, replica: _Replica, report: Finished, now: float) -> None:
        fate = self.fates[report.block]
        fate.end, fate.is_out = "done", False
        self.num_done += 1
        self.back = [block for block in self.back if block != report.block]
        if fate.ended_before:
            return
        self.warm_ended += 1
        self.refusals_in_a_row = 0
        replica.good += 1
        if replica.good >= 20:
            replica.strikes = 0
        self.out.append(Closed(replica=replica.number, report=report))
        for finder in fate.finders:
            blamed = self.replicas.get(finder)
            if blamed is None or blamed is replica:
                continue
            blamed.good = 0
            blamed.strikes += 1
            if blamed.strikes >= 3:
                why = "quarantined: 3 blocks were not finite from it and finite from others"
                self._tell(blamed, Recall(why=why))
                self._lose(blamed, now, why)

    # Blocks that nobody can compute ---------------------------------------------------------------------

    def _settle(self, block: Block, now: float) -> None:
        self.back = [other for other in self.back if other != block]
        self.num_refuse_requests += 1
        fate = self.fates[block]
        fate.request = self.num_refuse_requests
        fate.shards_left = list(range(self.num_shards))
        self._call_off(now)
        self._ask_shards(block)

    def _ask_shards(self, block: Block) -> None:
        fate = self.fates[block]
        for shard in fate.shards_left or ():
            self.out.append(ToShard(shard=shard, message=Refuse(request=fate.request, block=block)))

    def _refused(self, event: FromShard, told: Refused) -> None:
        fate = self.fates[told.block]
        if fate.shards_left is None or event.shard not in fate.shards_left:
            return
        fate.shards_left.remove(event.shard)
        fate.is_mixed |= Outcome.REPEATED in told.outcomes
        if fate.shards_left:
            return
        fate.end, fate.shards_left, fate.is_out = "refused", None, False
        if fate.ended_before == "refused":
            self._go_on(event.now)
            return
        self.warm_ended += 1
        self.refusals_in_a_row += 1
        why = (
            f"the gradient of {fate.tensor!r} was not finite"
            if fate.tensor
            else "a shard has a part of it already"
        )
        why += "; some slices had applied it" if fate.is_mixed else ""
        self.out.append(Report(event=events.Refused(time_s=event.now, block=told.block, why=why)))
        if self.refusals_in_a_row >= 3 and self.state == "running":
            self.out.append(Diverging(what="the gradient", tensor=fate.tensor, block=told.block))
            self._leave(event.now, "diverged")
        else:
            self._go_on(event.now)

    # Going on -------------------------------------------------------------------------------------------

    def _go_on(self, now: float, asked: tuple[_Replica, int] | None = None) -> None:
        expected = [number for number in range(self.num_replicas) if number not in self.gone_early]
        if self.state == "starting" and expected and all(map(self._has_asked, expected)):
            self._start(now)
        if self.state == "running":
            self._grant(now, asked)
            self._begin_hold(now)
            if self.stop is not None and self._is_at_rest() and not self._is_any_open():
                self._leave(self.stop.now, self.stop.why)
            elif not self.fresh and all(fate.end for fate in self.fates.values()):
                self._leave(now, self.why_done)
        elif self.state == "leaving":
            self._dismiss()

    def _has_asked(self, number: int) -> bool:
        return number in self.replicas and bool(self.replicas[number].asked)

    def _start(self, now: float) -> None:
        self.state = "running"
        for replica in self.replicas.values():
            replica.heard = now

    def _grant(self, now: float, asked: tuple[_Replica, int] | None) -> None:
        has_granted = True
        while has_granted:
            has_granted = False
            asking = [
                replica for replica in self.replicas.values() if replica.waiting and not replica.is_silent
            ]
            for replica in sorted(asking, key=lambda replica: (len(replica.held), replica.turns[0])):
                if block := self._pick(replica):
                    self._lease(replica, block, now, asked)
                    has_granted = True

    def _pick(self, replica: _Replica) -> Block | None:
        is_warm = self.warm_ended < self.warm_start
        if is_warm and replica is not self._first():
            return None
        for block in self.back:
            is_for_it = replica.number not in self.fates[block].finders or self._is_alone(replica)
            if is_for_it and self._is_fresh_enough(block):
                self.back.remove(block)
                return block
        if not self.fresh or (is_warm and self.num_fresh >= self.warm_start) or self._is_at_rest():
            return None
        if not self._is_fresh_enough(self.fresh[0]):
            return None
        self.num_fresh += 1
        return self.fresh.pop(0)

    def _is_fresh_enough(self, block: Block) -> bool:
        """No push can become staler than the bound if this block is started too."""
        if self.max_staleness is None or self.fates[block].is_out:
            return True
        out = [fate for fate in self.fates.values() if fate.is_out]
        return len(out) <= self.max_staleness and all(
            self.num_done - fate.done_before + len(out) <= self.max_staleness for fate in out
        )

    def _first(self) -> _Replica | None:
        loud = [replica for replica in self.replicas.values() if not replica.is_silent]
        return min(loud, key=lambda replica: replica.number) if loud else None

    def _is_alone(self, replica: _Replica) -> bool:
        if self.warm_ended < self.warm_start:
            return replica is self._first()
        return not any(other is not replica and not other.is_silent for other in self.replicas.values())

    def _lease(self, replica: _Replica, block: Block, now: float, asked: tuple[_Replica, int] | None) -> None:
        request = replica.waiting.pop(0)
        replica.turns.pop(0)
        has_waited = asked is None or asked[0] is not replica or asked[1] != request
        refresh = has_waited and not replica.held
        if not replica.held:
            replica.heard = now
        fate = self.fates[block]
        if not fate.is_out:
            fate.done_before, fate.is_out = self.num_done, True
        fate.num_leases += 1
        fate.holders.append(replica.number)
        replica.held.append(block)
        lease = Lease(request=request, block=block, attempt=fate.num_leases, refresh=refresh)
        replica.answers[request] = lease
        self._tell(replica, lease)
        if fate.num_leases > 1:
            again = events.Redone(
                time_s=now, block=block, attempt=fate.num_leases, replica=replica.number, why=fate.why_again
            )
            self.out.append(Report(event=again))

    # Time -----------------------------------------------------------------------------------------------

    def _tick_starting(self, now: float) -> None:
        assert self.began is not None
        if now - self.began < self.waiting.start_s or not any(r.asked for r in self.replicas.values()):
            return
        self._start(now)
        why = f"did not fetch within {self.waiting.start_s:g} s; the run starts without it"
        for number in range(self.num_replicas):
            if not self._has_asked(number):
                self.out.append(Report(event=events.Left(time_s=now, role=f"replica{number}", why=why)))
        self._go_on(now)

    def _tick_running(self, now: float) -> None:
        for replica in [] if self.away else self.replicas.values():
            recent = replica.durations[-16:]
            patience = (
                max(self.waiting.least_s, self.waiting.factor * median(recent))
                if recent
                else self.waiting.first_s
            )
            owes = replica.held or not replica.waiting
            if owes and not replica.is_silent and now - replica.heard > patience:
                replica.is_silent = True
                self._give_back(replica, f"{replica.name} has been silent for {now - replica.heard:.0f} s")
        asked_for = [block for block, fate in self.fates.items() if fate.shards_left is not None]
        for block in sorted(asked_for, key=lambda block: self.fates[block].request):
            self._ask_shards(block)
        self._tick_hold(now)
        if self.stop is not None and now - self.stop.now >= self.waiting.leave_s:
            self._leave(now, self.stop.why)
            return
        self._go_on(now)

    def _tick_leaving(self, now: float) -> None:
        if self.holding is not None:
            self._ask_to_go(self.holding)
        for replica in list(self.replicas.values()):
            if now - self.leaving_since < self.waiting.leave_s:
                self._tell(replica, Recall(why=self.why))
            else:
                self._lose(replica, now, f"did not leave within {self.waiting.leave_s:g} s")
        self._end_if_empty()

    # The end --------------------------------------------------------------------------------------------

    def _leave(self, now: float, why: str) -> None:
        self.state, self.why, self.leaving_since = "leaving", why, now
        self._call_off(now)
        for replica in self.replicas.values():
            if replica.held or not replica.waiting:
                self._tell(replica, Recall(why=why))
        self._dismiss()

    def _dismiss(self) -> None:
        for replica in self.replicas.values():
            for request in replica.waiting:
                replica.answers[request] = Leave(request=request, why=self.why)
                self._tell(replica, replica.answers[request])
            replica.waiting = []
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if not self.replicas:
            self.state = "ended"
            undone = [
                block for block, fate in self.fates.items() if fate.ended_before == "done" and not fate.end
            ]
            if undone:
                self.why += f", and a shard came back without {sum(len(positions(block)) for block in undone)} minibatches that were not done again"
            self.out.append(Ended(why=self.why))

    def _waits(self, now: float) -> list[str]:
        waits = []
        if self.state == "starting":
            missing = [f"replica{n}" for n in range(self.num_replicas) if not self._has_asked(n)]
            waits.append(f"the start waits for {', '.join(missing)}")
        for replica in self.replicas.values():
            if replica.is_silent:
                waits.append(f"{replica.name} has been silent for {now - replica.heard:.0f} s")
        settling = [(fate.request, block, fate) for block, fate in self.fates.items() if fate.shards_left]
        for _, block, fate in sorted(settling, key=lambda entry: entry[0]):
            shards = ", ".join(f"shard{shard}" for shard in fate.shards_left or ())
            waits.append(f"{block} waits to be settled by {shards}")
        for shard, since in self.away.items():
            waits.append(f"the run waits for shard{shard} to come back, since {now - since:.0f} s")
        if self.holding is not None and self.holding.name is not None:
            names = ", ".join(f"shard{shard}" for shard in self.holding.to_go)
            waits.append(f"the checkpoint is over, but not heard of by {names}")
        elif self.holding is not None and not self.holding.is_reached:
            silent = [f"shard{shard}" for shard in range(self.num_shards) if shard not in self.holding.told]
            lacking = [str(block) for block in _runs(self.holding.lacking)]
            waits.append(f"the checkpoint waits for {', '.join(silent or lacking)}")
        if self.state == "running" and not self.replicas:
            waits.append("the run waits for a replica: none is left")
        if self.state == "leaving" and self.replicas:
            names = ", ".join(replica.name for replica in self.replicas.values())
            waits.append(f"the end waits for {names} to leave")
        return waits


def _places(blocks: tuple[Block, ...]) -> Places:
    return frozenset(place for block in blocks for place in positions(block))


def _runs(places: Places) -> tuple[Block, ...]:
    return tuple(runs(sorted(places)))
