"""The protocol of the coordinator, without any I/O: who is a member, and who computes which block.

It hands out blocks as leases, takes them back from replicas that are lost or overdue, settles blocks that
nobody can compute, holds the shards still for a checkpoint, and says when a stage is over. It never sees a parameter, a gradient or an example.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from heapq import heappop, heappush
from itertools import islice
from statistics import median
from typing import Any, ClassVar

from squall.blocks import Block, BlockSet
from squall.coordinator.events import (
    Checkpoint,
    Closed,
    CoordinatorEffect,
    Copied,
    Diverging,
    Ended,
    Found,
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
from squall.coordinator.gate import StalenessGate
from squall.coordinator.hold import Holds, Stage
from squall.coordinator.line import WaitingLine
from squall.coordinator.lives import ShardLives
from squall.coordinator.members import Member, Patience
from squall.coordinator.recovery import Inheritance, Recovery, reports_of
from squall.coordinator.work import Rhythm, WorkPlan
from squall.machines import Machine, key_of
from squall.observe.events import Joined as JoinedRun
from squall.observe.events import Left as LeftRun
from squall.observe.events import Recovered, Redone
from squall.observe.events import Refused as RefusedBlock
from squall.slices import Cover
from squall.wire.messages import (
    Ask,
    Books,
    Diverged,
    Finished,
    Goodbye,
    Held,
    Lease,
    Leave,
    Outcome,
    Recall,
    Refuse,
    Refused,
    Released,
    Resume,
    Returned,
)

TERMINAL_REFUSALS_IN_A_ROW = 3
STRIKES = 3
FORGIVEN_AFTER = 20


class Phase(Enum):
    RECOVERING = "recovering"
    """It follows one that was lost, and asks what is done, and who holds what; nothing is granted yet."""
    STARTING = "starting"
    """No lease is granted until every replica has fetched, or the start time-out."""
    RUNNING = "running"
    LEAVING = "leaving"
    """No more leases: replicas say goodbye, or are given up after a grace."""
    ENDED = "ended"


REMEMBERED_REQUESTS = 32


class CoordinatorMachine(Machine):
    """Decides for the whole run: one event in, effects out.

    Args:
        plan: the blocks of this stage.
        num_replicas, num_shards: how many are expected. Only shards that hold a slice count.
        settled: blocks that all slices have already (a resumed run); taken over.
        max_staleness: grant a lease only while no push can become staler than this [updates]; None: no bound.
        inheritance: what is known if it follows one that was lost; None: it is the first.
        rhythm: of the only replica: checkpoints and stops wait until its parameters are those of the shards, so
            that a resumed run goes on as if nothing had been. None: they do not wait.
    """

    TABLE: ClassVar[Mapping[tuple[Enum, type], str]] = {
        (Phase.RECOVERING, Joined): "_joined",
        (Phase.RECOVERING, Resume): "_resumed_early",
        (Phase.RECOVERING, Ask): "_asked_early",
        (Phase.RECOVERING, Goodbye): "_goodbye_early",
        (Phase.RECOVERING, Lost): "_lost_early",
        (Phase.RECOVERING, Tick): "_tick_recovering",
        (Phase.RECOVERING, Stop): "_put_off",
        (Phase.RECOVERING, Refused): "_ignore",
        (Phase.RECOVERING, Diverged): "_put_off",
        (Phase.RECOVERING, ShardLost): "_shard_lost_early",
        (Phase.RECOVERING, Returned): "_shard_returned_early",
        (Phase.RECOVERING, Books): "_books",
        (Phase.RECOVERING, Checkpoint): "_put_off",
        (Phase.RECOVERING, Copied): "_ignore",
        (Phase.RECOVERING, Held): "_ignore",
        (Phase.RECOVERING, Released): "_ignore",
        (Phase.STARTING, Joined): "_joined",
        (Phase.STARTING, Ask): "_asked",
        (Phase.STARTING, Resume): "_resumed",
        (Phase.STARTING, Books): "_ignore",
        (Phase.STARTING, Goodbye): "_goodbye",
        (Phase.STARTING, Lost): "_lost",
        (Phase.STARTING, Tick): "_tick_starting",
        (Phase.STARTING, Stop): "_stop",
        (Phase.STARTING, Diverged): "_diverged",
        (Phase.STARTING, ShardLost): "_shard_lost",
        (Phase.STARTING, Returned): "_shard_returned",
        (Phase.STARTING, Checkpoint): "_checkpoint",
        (Phase.RUNNING, Joined): "_joined",
        (Phase.RUNNING, Ask): "_asked",
        (Phase.RUNNING, Resume): "_resumed",
        (Phase.RUNNING, Books): "_ignore",
        (Phase.RUNNING, Goodbye): "_goodbye",
        (Phase.RUNNING, Lost): "_lost",
        (Phase.RUNNING, Tick): "_tick_running",
        (Phase.RUNNING, Stop): "_stop",
        (Phase.RUNNING, Refused): "_refused",
        (Phase.RUNNING, Diverged): "_diverged",
        (Phase.RUNNING, ShardLost): "_shard_lost",
        (Phase.RUNNING, Returned): "_shard_returned",
        (Phase.RUNNING, Checkpoint): "_checkpoint",
        (Phase.RUNNING, Copied): "_copied",
        (Phase.RUNNING, Held): "_held",
        (Phase.RUNNING, Released): "_released",
        (Phase.LEAVING, Joined): "_joined_late",
        (Phase.LEAVING, Ask): "_asked",
        (Phase.LEAVING, Resume): "_resumed",
        (Phase.LEAVING, Books): "_ignore",
        (Phase.LEAVING, Goodbye): "_goodbye",
        (Phase.LEAVING, Lost): "_lost",
        (Phase.LEAVING, Tick): "_tick_leaving",
        (Phase.LEAVING, Stop): "_ignore",
        (Phase.LEAVING, Refused): "_refused",
        (Phase.LEAVING, Diverged): "_diverged",
        (Phase.LEAVING, ShardLost): "_shard_lost",
        (Phase.LEAVING, Returned): "_shard_returned",
        (Phase.LEAVING, Checkpoint): "_ignore",
        (Phase.LEAVING, Copied): "_ignore",
        (Phase.LEAVING, Held): "_ignore",
        (Phase.LEAVING, Released): "_released",
        (Phase.ENDED, Joined): "_joined_late",
        (Phase.ENDED, Ask): "_ignore",
        (Phase.ENDED, Resume): "_ignore",
        (Phase.ENDED, Books): "_ignore",
        (Phase.ENDED, Goodbye): "_ignore",
        (Phase.ENDED, Lost): "_ignore",
        (Phase.ENDED, Tick): "_ignore",
        (Phase.ENDED, Stop): "_ignore",
        (Phase.ENDED, Refused): "_ignore",
        (Phase.ENDED, Diverged): "_ignore",
        (Phase.ENDED, ShardLost): "_ignore",
        (Phase.ENDED, Returned): "_ignore",
        (Phase.ENDED, Checkpoint): "_ignore",
        (Phase.ENDED, Copied): "_ignore",
        (Phase.ENDED, Held): "_ignore",
        (Phase.ENDED, Released): "_ignore",
    }

    def __init__(
        self,
        *,
        plan: WorkPlan,
        num_replicas: int,
        num_shards: int,
        settled: BlockSet,
        max_staleness: int | None = None,
        rhythm: Rhythm | None = None,
        patience: Patience | None = None,
        inheritance: Inheritance | None = None,
    ) -> None:
        super().__init__(Phase.STARTING if inheritance is None else Phase.RECOVERING)
        self.plan = plan
        self.num_replicas = num_replicas
        self.num_shards = num_shards
        self.settled = settled
        self.refused: dict[Block, str] = {}  # terminal ones, with what was not finite
        self.members: dict[int, Member] = {}
        self.why = ""
        self._patience = patience or Patience()
        self._began: float | None = None  # when the first replica joined
        self._gate = StalenessGate(max_staleness)
        self._rhythm = rhythm
        self._holds = Holds(num_shards, self._patience.hold_s)
        self._stop_asked: Stop | None = None  # and put off
        self._refusals_in_a_row = 0
        self._awaited = set(range(num_replicas))  # by the start: expected, not lost, and not heard of
        self._leaving_since = 0.0
        self._shards = ShardLives()
        self._begun_with = BlockSet(settled.entries())
        self._recovery: Recovery | None = None
        if inheritance is not None:
            self._recovery = Recovery(inheritance, num_shards, self._patience.recover_s)
            self._refusals_in_a_row = inheritance.refused_in_a_row
            self._awaited = set(inheritance.expected)
        self._untold: set[Block] = set()  # found to be done, and to be told once their holders have reported
        self._reopened: set[Block] = set()  # closed before, and lost by a shard since
        self._fresh: Iterator[Block] = plan.blocks(settled)
        self._next_fresh: Block | None = next(self._fresh, None)
        self._line = WaitingLine()
        self._lowest: list[int] = []  # a heap of replicas; who has gone or is overdue is dropped at the top
        self._returned: OrderedDict[Block, None] = OrderedDict()  # taken back, to be handed out again
        self._leased: set[Block] = set()  # that a member holds; no block has two holders
        self._attempts: dict[Block, int] = {}  # of blocks handed out and not settled
        self._tries: dict[Block, int] = {}  # of settled ones that took more than one
        self._why_again: dict[Block, str] = {}
        self._not_finite: dict[Block, list[int]] = {}  # who found a block not finite
        self._tensor: dict[Block, str] = {}
        self._settling: dict[Block, set[int]] = {}  # shards that have not answered yet
        self._settle_mixed: set[Block] = set()
        self._settle_requests: dict[Block, int] = {}
        self._requests = 0
        self._turns = 0
        self._handed_out = self._handed_out_minibatches = 0
        self._warm_left = plan.warm_start

    # What a person may ask ------------------------------------------------------------------------------

    def waits(self, now: float) -> tuple[str, ...]:
        """Who waits for whom, in words."""
        waits: list[str] = []
        if self._recovery is not None and self.phase is Phase.RECOVERING:
            waits.extend(self._recovery.waits())
        if self.phase is Phase.STARTING:
            missing = [
                f"replica{replica}" for replica in range(self.num_replicas) if not self._has_asked(replica)
            ]
            waits.append(f"the start waits for {', '.join(missing)}")
        for member in self.members.values():
            if member.is_overdue:
                waits.append(f"{member.name} has been silent for {now - member.heard:.0f} s")
        for block, shards in self._settling.items():
            waits.append(
                f"{block} waits to be settled by {', '.join(f'shard{shard}' for shard in sorted(shards))}"
            )
        waits.extend(
            f"the run waits for shard{shard} to come back, since {now - since:.0f} s"
            for shard, since in self._shards.away.items()
        )
        waits.extend(self._holds.waits())
        if self.phase is Phase.RUNNING and not self.members:
            waits.append("the run waits for a replica: none is left")
        if self.phase is Phase.LEAVING and self.members:
            waits.append(
                f"the end waits for {', '.join(member.name for member in self.members.values())} to leave"
            )
        return tuple(waits)

    def check_invariants(self) -> None:
        open_blocks = [block for member in self.members.values() for block in member.leases]
        for block in self._returned:
            assert self.settled.cover(block) is Cover.DISJOINT, "a settled block is not handed out again"
        for block in open_blocks:
            assert self._attempts.get(block, 0) >= 1 or self.settled.cover(block) is Cover.CONTAINED
        assert len(open_blocks) == len(self._leased) == len(self._leased & set(open_blocks)), "one holder"
        assert set(self._attempts) <= {*self._leased, *self._returned, *self._settling}, "no block is lost"
        assert not self._leased & set(self._returned)
        assert self.phase is not Phase.ENDED or not self.members
        for block in self.refused:
            assert self.settled.cover(block) is Cover.CONTAINED or block in self._settling
        for block in self._reopened:
            assert block in self._attempts, "what a shard has lost is done again"
        for block in (*self._attempts, *self._why_again, *self._not_finite, *self._tensor):
            assert self.settled.cover(block) is Cover.DISJOINT, "what is settled is forgotten"

    # Members --------------------------------------------------------------------------------------------

    def _joined(self, event: Joined) -> tuple[CoordinatorEffect, ...]:
        if self._began is None:
            self._began = event.now
        known = self.members.get(event.replica)
        if known is not None and known.incarnation >= event.incarnation:
            return ()
        effects: tuple[CoordinatorEffect, ...] = ()
        if known is not None:
            effects = self._lose(known, event.now, "replaced by a later start")
        self.members[event.replica] = Member(event.replica, event.incarnation, event.now)
        heappush(self._lowest, event.replica)
        self._awaited.add(event.replica)
        joined = JoinedRun(time_s=event.now, role=f"replica{event.replica}", incarnation=event.incarnation)
        return (*effects, Report(event=joined), *self._go_on(event.now))

    def _joined_late(self, event: Joined) -> tuple[CoordinatorEffect, ...]:
        recall = Recall(why=self.why)
        return (ToReplica(replica=event.replica, incarnation=event.incarnation, message=recall),)

    def _member(self, event: FromReplica | Lost) -> Member | None:
        member = self.members.get(event.replica)
        return member if member is not None and member.incarnation == event.incarnation else None

    def _has_asked(self, replica: int) -> bool:
        member = self.members.get(replica)
        return member is not None and member.newest > 0

    def _lost(self, event: Lost) -> tuple[CoordinatorEffect, ...]:
        if (member := self._member(event)) is None:
            return ()
        return self._lose(member, event.now, event.why) + self._go_on(event.now)

    def _goodbye(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        if (member := self._member(event)) is None:
            return ()
        if self.phase is Phase.LEAVING:
            self._drop(member, self.why)  # as everybody does at the end
            return self._end_if_empty()
        return self._lose(member, event.now, "asked to leave") + self._go_on(event.now)

    def _lose(self, member: Member, now: float, why: str) -> tuple[CoordinatorEffect, ...]:
        """Take the blocks back of a member that is gone before the end."""
        self._awaited.discard(member.replica)
        self._drop(member, why)
        left = LeftRun(time_s=now, role=member.name, why=why, incarnation=member.incarnation)
        return (Report(event=left),)

    def _drop(self, member: Member, why: str) -> None:
        """Forget a member and take its blocks back."""
        del self.members[member.replica]
        self._take_all_back(member, f"{member.name}: {why}")

    def _take_all_back(self, member: Member, why: str) -> None:
        blocks = list(member.leases)
        member.leases.clear()
        self._leased.difference_update(blocks)
        for block in blocks:
            self._take_back(block, why)

    def _take_back(self, block: Block, why: str) -> None:
        if self.settled.cover(block) is not Cover.DISJOINT or block in self._settling:
            return
        if block in self._returned or block in self._leased:
            return
        self._returned[block] = None
        self._why_again[block] = why

    # Asking and granting --------------------------------------------------------------------------------

    def _asked(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        member = self._member(event)
        ask = event.message
        assert isinstance(ask, Ask)
        if member is None:
            leave = Leave(request=ask.request, why=self.why or "no longer a member")
            return (ToReplica(replica=event.replica, incarnation=event.incarnation, message=leave),)
        if ask.request in member.seen or ask.request <= member.newest - REMEMBERED_REQUESTS:
            return self._asked_again(member, ask.request, event.now)
        self._remember(member, ask.request)
        effects: tuple[CoordinatorEffect, ...] = ()
        if ask.finished is not None:
            effects = self._finished(member, ask.finished, event.now)
        self._awaited.discard(member.replica)
        member.heard = event.now
        self._turns += 1
        member.parked.append((self._turns, ask.request))
        self._heard_again(member)
        self._line.take_place(member)
        return effects + self._go_on(event.now, asked_now=(member, ask.request))

    def _asked_again(self, member: Member, request: int, now: float) -> tuple[CoordinatorEffect, ...]:
        """A resend: its sender lives, and may not have had the answer."""
        self._heard_again(member)
        reply = member.replies.get(request)
        answered = () if reply is None else (self._send(member, reply),)
        return answered + self._go_on(now)

    def _heard_again(self, member: Member) -> None:
        if member.is_overdue:
            member.is_overdue = False
            heappush(self._lowest, member.replica)
            self._line.take_place(member)

    def _remember(self, member: Member, request: int) -> None:
        member.newest = max(member.newest, request)
        member.seen.add(request)
        for old in [number for number in member.seen if number <= member.newest - REMEMBERED_REQUESTS]:
            member.seen.discard(old)
            member.replies.pop(old, None)

    def _send(self, member: Member, message: Lease | Leave | Recall) -> ToReplica:
        return ToReplica(replica=member.replica, incarnation=member.incarnation, message=message)

    def _go_on(
        self, now: float, asked_now: tuple[Member, int] | None = None
    ) -> tuple[CoordinatorEffect, ...]:
        """Whatever has changed: open the start, grant what can be granted, end what is over."""
        if self.phase is Phase.STARTING and self._all_have_asked():
            self._start(now)
        if self.phase is Phase.RUNNING:
            granted = self._tell_found() + self._grant(now, asked_now)
            return granted + self._begin_hold(now) + self._stop_at_rest() + self._end_if_done(now)
        if self.phase is Phase.LEAVING:
            asking = () if asked_now is None else asked_now[:1]  # all others were dismissed when this began
            return self._dismiss(asking) + self._end_if_empty()
        return ()

    def _all_have_asked(self) -> bool:
        return bool(self.members) and not self._awaited

    def _start(self, now: float) -> None:
        self.phase = Phase.RUNNING
        for member in self.members.values():
            member.heard = now

    def _grant(self, now: float, asked_now: tuple[Member, int] | None) -> tuple[CoordinatorEffect, ...]:
        effects: list[CoordinatorEffect] = []
        while granted := self._grant_round(now, asked_now):
            effects.extend(granted)
        return tuple(effects)

    def _grant_round(self, now: float, asked_now: tuple[Member, int] | None) -> list[CoordinatorEffect]:
        """Grant a lease to each member that waits, in the order of their line, as long as there is a block."""
        effects: list[CoordinatorEffect] = []
        met: list[Member] = []
        while self._has_work() and (member := self._next_waiting(met)) is not None:
            met.append(member)
            if (block := self._choose(member)) is None:
                continue
            _, request = member.parked.popleft()
            is_idle = not member.leases and (asked_now is None or asked_now != (member, request))
            effects.extend(self._lease(member, request, block, now, refresh=is_idle))
        for member in met:
            self._line.take_place(member)
        return effects

    def _next_waiting(self, met: list[Member]) -> Member | None:
        if self._warm_left == 0:
            return self._line.pop(self.members)
        alone = self._warm_member()
        return alone if alone is not None and alone.parked and not met else None

    def _has_work(self) -> bool:
        """There is a block that some member might have."""
        return bool(self._returned) or self._fresh_block() is not None

    def _fresh_block(self) -> Block | None:
        """The next block that nobody has had, if it may be handed out now."""
        is_warm_over = self._warm_left == 0 or self._handed_out < self.plan.warm_start
        fresh = self._next_fresh
        if fresh is None or not is_warm_over or self._is_resting() or not self._gate.may_start(fresh):
            return None
        return fresh

    def _choose(self, member: Member) -> Block | None:
        """The next block for this member: one that came back, else a fresh one."""
        for block in self._returned:
            may_try = member.replica not in self._not_finite.get(block, ()) or self._is_alone(member)
            if may_try and self._gate.may_start(block):
                del self._returned[block]
                return block
        return None if self._fresh_block() is None else self._take_fresh()

    def _take_fresh(self) -> Block:
        fresh = self._next_fresh
        assert fresh is not None
        self._next_fresh = next(self._fresh, None)
        self._handed_out += 1
        self._handed_out_minibatches += fresh.num_minibatches
        return fresh

    def _warm_member(self) -> Member | None:
        """Who works alone during a warm start: the lowest that is not overdue."""
        while self._lowest:
            member = self.members.get(self._lowest[0])
            if member is not None and not member.is_overdue:
                return member
            heappop(self._lowest)
        return None

    def _is_alone(self, member: Member) -> bool:
        """No other replica could take over what this one could not compute."""
        if self._warm_left > 0:
            return member is self._warm_member()
        return all(other is member or other.is_overdue for other in self.members.values())

    def _lease(
        self, member: Member, request: int, block: Block, now: float, refresh: bool
    ) -> list[CoordinatorEffect]:
        attempt = self._attempts[block] = self._attempts.get(block, 0) + 1
        if not member.leases:
            member.heard = now
        member.leases[block] = attempt
        self._leased.add(block)
        self._gate.granted(block)
        lease = Lease(request=request, block=block, attempt=attempt, refresh=refresh)
        member.replies[request] = lease
        effects: list[CoordinatorEffect] = [self._send(member, lease)]
        if attempt > 1:
            why = self._why_again.pop(block, "not finite the first time")
            again = Redone(time_s=now, block=block, attempt=attempt, replica=member.replica, why=why)
            effects.append(Report(event=again))
        return effects

    # Blocks that come to an end -------------------------------------------------------------------------

    def _finished(self, member: Member, report: Finished, now: float) -> tuple[CoordinatorEffect, ...]:
        block = report.block
        if self._recovery is not None:  # leased by the coordinator before, which may have told nobody
            self._reach(block)
        if member.leases.pop(block, None) is not None:
            self._leased.discard(block)
            if member.is_measured:
                member.durations.append(now - member.heard)
            member.is_measured = True
        if block in self._untold and report.outcome is Outcome.APPLIED:
            self._untold.discard(block)
            return (Closed(replica=member.replica, report=report),)
        if self.settled.cover(block) is not Cover.DISJOINT or block in self._settling:
            return ()
        if report.outcome is Outcome.APPLIED and not self._shards.vouch(block, report.lives):
            self._take_back(block, "a shard has come back without it")
            return ()
        match report.outcome:
            case Outcome.APPLIED:
                return self._close(member, report, now)
            case Outcome.NOT_FINITE:
                self._tensor[block] = report.not_finite
                finders = self._not_finite.setdefault(block, [])
                finders.append(member.replica)
                if len(set(finders)) > 1 or (len(finders) > 1 and self._is_alone(member)):
                    return self._settle(block, now)
                self._take_back(block, f"{member.name}: {report.not_finite} was not finite")
                return ()
            case _:
                return self._settle(block, now)

    def _close(self, member: Member, report: Finished, now: float) -> tuple[CoordinatorEffect, ...]:
        block = report.block
        self.settled.add(block)
        self._gate.settled(block, is_applied=True)
        self._returned.pop(block, None)
        if block in self._reopened:  # and was told to be done
            self._forget(block)
            return ()
        self._refusals_in_a_row = 0
        self._warm_left = max(0, self._warm_left - 1)
        member.good_in_a_row += 1
        if member.good_in_a_row >= FORGIVEN_AFTER:
            member.strikes = 0
        blamed = self._not_finite.get(block, [])
        self._forget(block)
        return (Closed(replica=member.replica, report=report), *self._strike(blamed, member, now))

    def _forget(self, block: Block) -> None:
        if (tries := self._attempts.pop(block, 1)) > 1:
            self._tries[block] = tries
        self._why_again.pop(block, None)
        self._not_finite.pop(block, None)
        self._tensor.pop(block, None)
        self._reopened.discard(block)

    def _strike(self, blamed: list[int], finisher: Member, now: float) -> tuple[CoordinatorEffect, ...]:
        """Count against a replica what was not finite from it and finite from another; quarantine it at last."""
        effects: list[CoordinatorEffect] = []
        for replica in blamed:
            member = self.members.get(replica)
            if member is None or member is finisher:
                continue
            member.strikes += 1
            member.good_in_a_row = 0
            if member.strikes >= STRIKES:
                why = f"quarantined: {STRIKES} blocks were not finite from it and finite from others"
                effects.append(self._send(member, Recall(why=why)))
                effects.extend(self._lose(member, now, why))
        return tuple(effects)

    def _settle(self, block: Block, now: float) -> tuple[CoordinatorEffect, ...]:
        """Nobody can compute this block: have every shard keep it as refused."""
        self._returned.pop(block, None)
        self._requests += 1
        self._settle_requests[block] = self._requests
        self._settling[block] = set(range(self.num_shards))
        return self._holds.call_off(now) + self._ask_to_settle(block)

    def _ask_to_settle(self, block: Block) -> tuple[CoordinatorEffect, ...]:
        request = Refuse(request=self._settle_requests[block], block=block)
        return tuple(ToShard(shard=shard, message=request) for shard in sorted(self._settling[block]))

    def _refused(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        assert isinstance(event.message, Refused)
        block = event.message.block
        waiting = self._settling.get(block)
        if waiting is None or event.shard not in waiting:
            return ()
        waiting.discard(event.shard)
        if Outcome.REPEATED in event.message.outcomes:
            self._settle_mixed.add(block)
        if waiting:
            return ()
        return self._settled_as_refused(block, event.now) + self._go_on(event.now)

    def _settled_as_refused(self, block: Block, now: float) -> tuple[CoordinatorEffect, ...]:
        del self._settling[block], self._settle_requests[block]
        if block in self.refused:  # settled before, and lost by a shard since
            self.settled.add(block)
            self._forget(block)
            return ()
        tensor = self._tensor.get(block, "")
        why = f"the gradient of {tensor!r} was not finite" if tensor else "a shard has a part of it already"
        if block in self._settle_mixed:
            why += "; some slices had applied it"
        self.settled.add(block)
        self._gate.settled(block, is_applied=False)
        self.refused[block] = why
        self._warm_left = max(0, self._warm_left - 1)
        self._refusals_in_a_row += 1
        self._forget(block)
        effects: list[CoordinatorEffect] = [Report(event=RefusedBlock(time_s=now, block=block, why=why))]
        if self._refusals_in_a_row >= TERMINAL_REFUSALS_IN_A_ROW and self.phase is Phase.RUNNING:
            effects.append(Diverging(what="the gradient", tensor=tensor, block=block))
            effects.extend(self._leave(now, "diverged"))
        return tuple(effects)

    def _diverged(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        assert isinstance(event.message, Diverged)
        told = Diverging(what="the update", tensor=event.message.tensor, block=event.message.block)
        if self.phase is Phase.LEAVING:
            return (told,)
        return (told, *self._leave(event.now, "diverged"), *self._end_if_empty())

    # Shards that were killed ------------------------------------------------------------------------------

    def _shard_lost(self, event: ShardLost) -> tuple[CoordinatorEffect, ...]:
        self._shards.away.setdefault(event.shard, event.now)
        return ()

    def _shard_returned(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        """Have done again what it has come back without; or say so, for the run to be resumed."""
        lost = self._lost_by(event)
        if lost is None:
            return ()
        if lost.num_minibatches and self.phase is Phase.LEAVING:
            self.why = f"shard{event.shard} came back without {lost.num_minibatches} minibatches"
        again = self._reopen(event.shard) if lost.num_minibatches else ()
        for member in self.members.values():
            member.heard = event.now  # it may have waited for this shard
        told = self._told_of(event, lost)
        return (*told, *self._holds.shard_returned(event.now), *again, *self._go_on(event.now))

    def _lost_by(self, event: FromShard) -> BlockSet | None:
        """What was settled and is not any more, since a shard has come back without it; None if that is known."""
        told = event.message
        assert isinstance(told, Returned)
        had = self.settled if told.everywhere is None else BlockSet.union(told.everywhere)
        if not self._shards.returned(event.shard, told.incarnation, had):
            return None
        for block, waiting in self._settling.items():
            if told.everywhere is not None and had.cover(block) is not Cover.CONTAINED:
                waiting.add(event.shard)  # it may have settled it before
        lost = BlockSet.union(part for block in self.settled.blocks() for part in had.missing(block))
        self.settled = self.settled.common(had)
        return lost

    def _told_of(self, event: FromShard, lost: BlockSet) -> tuple[CoordinatorEffect, ...]:
        assert isinstance(event.message, Returned)
        recovered = Recovered(
            time_s=event.now,
            role=f"shard{event.shard}",
            incarnation=event.message.incarnation,
            lost=lost.num_minibatches,
        )
        return (Report(event=recovered),)

    def _reopen(self, shard: int) -> tuple[CoordinatorEffect, ...]:
        """Hand out again what was settled before; under the same names, so that other slices know it."""
        effects: list[CoordinatorEffect] = []
        for block in islice(self.plan.blocks(self._begun_with), self._handed_out):
            if block in self._attempts or self.settled.cover(block) is Cover.CONTAINED:
                continue
            self._attempts[block] = self._tries.get(block, 1)
            if block in self.refused:
                self._requests += 1
                self._settle_requests[block], self._settling[block] = self._requests, {shard}
                effects.extend(self._ask_to_settle(block))
                continue
            self._reopened.add(block)
            if (
                block not in self._leased
            ):  # else whoever holds it, though another has finished it, does it again
                self._returned[block] = None
                self._why_again[block] = f"shard{shard} came back without it"
        return tuple(effects)

    # After a coordinator that was lost --------------------------------------------------------------------

    def _put_off(self, event: Any) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        self._recovery.put_off.append(event)
        return ()

    def _resumed_early(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        assert isinstance(event.message, Resume)
        member = self._member(event)
        if member is None or member.has_resumed:
            return ()
        member.has_resumed = True
        self._recovery.resumed(event.replica, event.message)
        return self._go_on_if_recovered(event.now)

    def _asked_early(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        """Who asks without having said what it holds holds nothing: it has just begun."""
        assert self._recovery is not None
        if self._member(event) is not None:
            self._recovery.waiting.discard(event.replica)
        return (*self._put_off(event), *self._go_on_if_recovered(event.now))

    def _goodbye_early(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        if self._member(event) is not None:
            self._recovery.left(event.replica)
        return (*self._put_off(event), *self._go_on_if_recovered(event.now))

    def _lost_early(self, event: Lost) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        if (member := self._member(event)) is None:
            return ()
        self._recovery.left(event.replica)
        return (*self._lose(member, event.now, event.why), *self._go_on_if_recovered(event.now))

    def _shard_lost_early(self, event: ShardLost) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        self._recovery.forget(event.shard)
        return self._shard_lost(event)

    def _shard_returned_early(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        """What it has come back with is asked for like that of the others."""
        assert self._recovery is not None
        self._recovery.forget(event.shard)
        return self._recovery.ask()

    def _books(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        assert isinstance(event.message, Books)
        self._recovery.heard(event.shard, event.message)
        return self._go_on_if_recovered(event.now)

    def _tick_recovering(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        assert self._recovery is not None
        return self._recovery.ask() + self._go_on_if_recovered(event.now)

    def _go_on_if_recovered(self, now: float) -> tuple[CoordinatorEffect, ...]:
        """Once all have spoken: make the books, and take up what was put off."""
        recovery = self._recovery
        assert recovery is not None
        if not recovery.is_over(now):
            return ()
        effects = [*self._shards_found(recovery, now), *self._make_books(recovery, now)]
        if self._handed_out:
            self._start(now)
        else:  # the one before was lost at its start
            self.phase, self._began = Phase.STARTING, now
            self._awaited = {*recovery.inheritance.expected, *self.members}
        for replica, report in reports_of(recovery.resumes()):
            if (member := self.members.get(replica)) is not None:
                effects.extend(self._finished(member, report, now))
        for event in recovery.put_off:
            effects.extend(getattr(self, self.TABLE[self.phase, key_of(event)])(event))
        return (*effects, *self._go_on(now))

    def _shards_found(self, recovery: Recovery, now: float) -> Iterator[CoordinatorEffect]:
        for shard in range(self.num_shards):
            had, lost = recovery.had(shard), recovery.lost_since_told(shard)
            incarnation = recovery.incarnation(shard)
            self._shards.returned(shard, incarnation, recovery.everywhere if had is None else had)
            if lost is not None:
                role = f"shard{shard}"
                yield Report(event=Recovered(time_s=now, role=role, incarnation=incarnation, lost=lost))

    def _make_books(self, recovery: Recovery, now: float) -> Iterator[CoordinatorEffect]:
        """Go through all that was handed out: what is done, what is held, and what must be done again."""
        held: dict[Block, tuple[Member, int]] = {}
        for replica, resume in recovery.resumes():
            if (member := self.members.get(replica)) is not None:
                for block, attempt in resume.leases:
                    held.setdefault(block, (member, attempt))
        left = recovery.num_handed_out(self._begun_with)
        while left > 0 and self._next_fresh is not None:
            block = self._take_fresh()
            left -= recovery.num_known(block)
            yield from self._take_over(block, recovery, now)
            if block in held:
                self._hold_lease(block, *held[block])

    def _take_over(self, block: Block, recovery: Recovery, now: float) -> tuple[CoordinatorEffect, ...]:
        """Put one block into the books, as shards and launcher know it."""
        was_told, is_refused = recovery.was_told(block), recovery.refused.cover(block) is not Cover.DISJOINT
        if (why := recovery.inheritance.refused.get(block)) is not None:
            self.refused[block] = why
        is_settled = recovery.everywhere.cover(block) is Cover.CONTAINED
        is_done = is_settled and (not is_refused or block in self.refused)
        if is_done or was_told or block in self.refused:
            self._warm_left = max(0, self._warm_left - 1)
        if is_done:
            self.settled.add(block)
            if not (was_told or block in self.refused):
                self._untold.add(block)
            return ()
        self._attempts[block] = 1
        if was_told:
            self._reopened.add(block)
        else:
            self._gate.taken_over(block)
        if is_refused or block in self.refused:
            return self._settle(block, now)
        self._take_back(block, "the coordinator was lost")
        return ()

    def _hold_lease(self, block: Block, member: Member, attempt: int) -> None:
        """A member says that it holds a block: it does, unless another was given it since."""
        if block in self._leased or block in self._settling:
            return
        if self.settled.cover(block) is Cover.DISJOINT:
            if block not in self._returned:
                return
            del self._returned[block]
            self._gate.taken_over(block)
            self._why_again.pop(block, None)
            self._attempts[block] = max(self._attempts[block], attempt)
        member.leases[block] = attempt
        member.is_measured = False
        self._leased.add(block)

    def _resumed(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        """A replica speaks that was not waited for any longer."""
        member, resume = self._member(event), event.message
        assert isinstance(resume, Resume)
        if member is None or member.has_resumed or self._recovery is None:
            return ()
        member.has_resumed, member.heard = True, event.now
        effects: list[CoordinatorEffect] = []
        for block, attempt in resume.leases:
            self._reach(block)
            self._hold_lease(block, member, attempt)
        for report in resume.done:
            effects.extend(self._finished(member, report, event.now))
        return (*effects, *self._go_on(event.now))

    def _reach(self, block: Block) -> None:
        """Take all blocks up to this one as handed out: somebody speaks of it."""
        while self._next_fresh is not None and (self._next_fresh <= block):
            fresh = self._take_fresh()
            self._attempts[fresh] = 0
            self._gate.taken_over(fresh)
            self._returned[fresh] = None

    def _tell_found(self) -> tuple[CoordinatorEffect, ...]:
        """What is done, and cannot be reported any more since nobody holds it."""
        found = sorted(self._untold - self._leased) if self._untold else ()
        self._untold.difference_update(found)
        return (Found(blocks=tuple(found)),) if found else ()

    # Checkpoints ----------------------------------------------------------------------------------------

    def _checkpoint(self, event: Checkpoint) -> tuple[CoordinatorEffect, ...]:
        if self._holds.wanted is None:  # else one is under way
            self._holds.wanted = event.name
        return self._go_on(event.now)

    def _is_resting(self) -> bool:
        """Whether nothing fresh is to be begun, since the only replica has just fetched and is waited for."""
        if self._rhythm is None or (self._holds.wanted is None and self._stop_asked is None):
            return False
        return self._rhythm.is_at_rest(self._handed_out, self._handed_out_minibatches)

    def _begin_hold(self, now: float) -> tuple[CoordinatorEffect, ...]:
        if self._settling or not self._holds.may_begin(now, self.settled):
            return ()
        if self._rhythm is not None and (not self._is_resting() or self._attempts):
            return ()
        return self._holds.begin(now)

    def _held(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        assert isinstance(event.message, Held)
        return self._holds.heard(event.shard, event.message)

    def _copied(self, event: Copied) -> tuple[CoordinatorEffect, ...]:
        return self._holds.copied(event.request) + self._go_on(event.now)

    def _released(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        assert isinstance(event.message, Released)
        self._holds.let_go(event.shard, event.message.request)
        return self._go_on(event.now)

    def _tick_hold(self, now: float) -> tuple[CoordinatorEffect, ...]:
        """Send again what may be lost; call a hold off that lacks what no living replica has in hand."""
        if self._holds.stage is not Stage.GATHERING:
            return self._holds.again()
        leases = (
            block for member in self.members.values() if not member.is_overdue for block in member.leases
        )
        in_hand = BlockSet.union((*self.settled.blocks(), *leases))
        if self._holds.is_stuck(now, in_hand):
            return self._holds.call_off(now)
        return self._holds.again()

    # Time -----------------------------------------------------------------------------------------------

    def _tick_starting(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        if self._began is None or event.now - self._began < self._patience.start_s:
            return ()
        if not any(map(self._has_asked, self.members)):
            return ()
        self._start(event.now)
        missing = [replica for replica in range(self.num_replicas) if not self._has_asked(replica)]
        why = f"did not fetch within {self._patience.start_s:g} s; the run starts without it"
        named = (LeftRun(time_s=event.now, role=f"replica{replica}", why=why) for replica in missing)
        return (*(Report(event=left) for left in named), *self._go_on(event.now))

    def _tick_running(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        for member in () if self._shards.away else self.members.values():
            is_due = bool(member.leases) or not member.parked
            if is_due and not member.is_overdue and event.now - member.heard > self._deadline(member):
                self._overdue(member, event.now)
        again = [effect for block in self._settling for effect in self._ask_to_settle(block)]
        return (*again, *self._tick_hold(event.now), *self._stop_late(event.now), *self._go_on(event.now))

    def _deadline(self, member: Member) -> float:
        patience = self._patience
        if not member.durations:
            return patience.first_s
        return max(patience.least_s, patience.factor * median(member.durations))

    def _overdue(self, member: Member, now: float) -> None:
        """Hand its blocks to others; it stays a member and may be heard of again."""
        member.is_overdue = True
        self._take_all_back(member, f"{member.name} has been silent for {now - member.heard:.0f} s")

    # The end --------------------------------------------------------------------------------------------

    def _end_if_done(self, now: float) -> tuple[CoordinatorEffect, ...]:
        if self._next_fresh is not None or self._attempts or self.phase is not Phase.RUNNING:
            return ()
        total = self.plan.total
        by_steps = self.plan.steps is not None and total == self.plan.steps
        return self._leave(now, "steps" if by_steps else "epochs") + self._end_if_empty()

    def _stop(self, event: Stop) -> tuple[CoordinatorEffect, ...]:
        if self._rhythm is not None and self.phase is Phase.RUNNING and self.members:
            self._stop_asked = self._stop_asked or event
            return self._go_on(event.now)
        return self._leave(event.now, event.why) + self._end_if_empty()

    def _stop_at_rest(self) -> tuple[CoordinatorEffect, ...]:
        """Carry out a stop that was put off, when the only replica has come to rest."""
        stop = self._stop_asked
        if stop is None or not self._is_resting() or self._attempts or self.phase is not Phase.RUNNING:
            return ()
        return self._leave(stop.now, stop.why) + self._end_if_empty()

    def _stop_late(self, now: float) -> tuple[CoordinatorEffect, ...]:
        """Carry it out all the same, if that takes too long."""
        stop = self._stop_asked
        if stop is None or now - stop.now < self._patience.leave_s:
            return ()
        return self._leave(now, stop.why) + self._end_if_empty()

    def _leave(self, now: float, why: str) -> tuple[CoordinatorEffect, ...]:
        """Grant nothing more: answer who asks, recall who holds a lease."""
        self.phase = Phase.LEAVING
        self.why = why
        self._leaving_since = now
        recalls = tuple(
            self._send(member, Recall(why=why))
            for member in self.members.values()
            if member.leases or not member.parked
        )
        return self._holds.call_off(now) + recalls + self._dismiss(self.members.values())

    def _dismiss(self, members: Iterable[Member]) -> tuple[CoordinatorEffect, ...]:
        effects: list[CoordinatorEffect] = []
        for member in members:
            while member.parked:
                _, request = member.parked.popleft()
                reply = Leave(request=request, why=self.why)
                member.replies[request] = reply
                effects.append(self._send(member, reply))
        return tuple(effects)

    def _tick_leaving(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        effects: list[CoordinatorEffect] = list(self._holds.again())
        if event.now - self._leaving_since < self._patience.leave_s:
            recalls = (self._send(member, Recall(why=self.why)) for member in self.members.values())
            return (*effects, *recalls)
        for member in list(self.members.values()):
            why = f"did not leave within {self._patience.leave_s:g} s"
            effects.extend(self._lose(member, event.now, why))
        return (*effects, *self._end_if_empty())

    def _end_if_empty(self) -> tuple[CoordinatorEffect, ...]:
        if self.members or self.phase is not Phase.LEAVING:
            return ()
        self.phase = Phase.ENDED
        return (*self._tell_found(), Ended(why=self.why))

    def _ignore(self, event: Any) -> tuple[CoordinatorEffect, ...]:
        return ()
