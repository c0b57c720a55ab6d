"""The protocol of the coordinator, without any I/O: which part of it takes up which event, in which phase.

What the parts own, each for itself and without knowing of the machine:

    members, membership, line   who is there, heard of, awaited, and whose turn it is
    book, gate, work            where each block stands: fresh, held, coming back, settled
    granting                    who is given which block
    refusals                    blocks that nobody can compute, until every shard keeps them as refused
    hold                        how the shards come to stand still for a checkpoint
    lives                       which start of each shard is the newest, and what it came back with
    recovery, takeover          what others tell a coordinator that follows one that was lost, and the book from it

The machine has the phase, and what leads from one to the next. It never sees a parameter, a gradient or an example.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, ClassVar

from squall.blocks import Block, BlockSet
from squall.coordinator import takeover
from squall.coordinator.book import BlockBook
from squall.coordinator.events import (
    Checkpoint,
    Closed,
    CoordinatorEffect,
    Copied,
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
)
from squall.coordinator.granting import Granting
from squall.coordinator.hold import Holds, Stage
from squall.coordinator.lives import ShardLives
from squall.coordinator.members import Member, Patience
from squall.coordinator.membership import STRIKES, Membership
from squall.coordinator.recovery import Inheritance, Recovery, reports_of
from squall.coordinator.refusals import Refusals
from squall.coordinator.work import Rhythm, WorkPlan
from squall.machines import Machine, key_of
from squall.observe.events import Joined as JoinedRun
from squall.observe.events import Left as LeftRun
from squall.observe.events import Recovered
from squall.observe.events import Refused as RefusedBlock
from squall.wire.messages import (
    Ask,
    Books,
    Diverged,
    Finished,
    Goodbye,
    Held,
    Leave,
    Outcome,
    Recall,
    Refused,
    Released,
    Resume,
    Returned,
)


class Phase(Enum):
    RECOVERING = "recovering"
    """It follows one that was lost, and asks what is done, and who holds what; nothing is granted yet."""
    STARTING = "starting"
    """No lease is granted until every replica has fetched, or the start time-out."""
    RUNNING = "running"
    LEAVING = "leaving"
    """No more leases: replicas say goodbye, or are given up after a grace."""
    ENDED = "ended"


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
        self.why = ""
        self._patience = patience or Patience()
        self._began: float | None = None  # when the first replica joined
        self._leaving_since = 0.0
        self._rhythm = rhythm
        self._stop_asked: Stop | None = None  # and put off
        self._membership = Membership(range(num_replicas) if inheritance is None else inheritance.expected)
        self._book = BlockBook(plan, settled, max_staleness, rhythm)
        self._refusals = Refusals(num_shards, 0 if inheritance is None else inheritance.refused_in_a_row)
        self._granting = Granting(self._membership, self._book, self._refusals)
        self._holds = Holds(num_shards, self._patience.hold_s)
        self._shards = ShardLives()
        self._recovery: Recovery | None = None
        if inheritance is not None:
            self._recovery = Recovery(inheritance, num_shards, self._patience.recover_s)

    # What a person may ask ------------------------------------------------------------------------------

    @property
    def members(self) -> Mapping[int, Member]:
        """The living replicas."""
        return self._membership.members

    @property
    def settled(self) -> BlockSet:
        """Positions that every slice has, or keeps as refused."""
        return self._book.settled

    @property
    def refused(self) -> Mapping[Block, str]:
        """Blocks that nobody could compute, with what was not finite."""
        return self._refusals.refused

    def waits(self, now: float) -> tuple[str, ...]:
        """Who waits for whom, in words."""
        waits: list[str] = []
        if self._recovery is not None and self.phase is Phase.RECOVERING:
            waits.extend(self._recovery.waits())
        if self.phase is Phase.STARTING:
            missing = [f"replica{replica}" for replica in self._membership.missing(self.num_replicas)]
            waits.append(f"the start waits for {', '.join(missing)}")
        waits.extend(self._membership.overdue_waits(now))
        waits.extend(self._refusals.waits())
        waits.extend(self._shards.waits(now))
        waits.extend(self._holds.waits())
        if self.phase is Phase.RUNNING and not self.members:
            waits.append("the run waits for a replica: none is left")
        if self.phase is Phase.LEAVING and self.members:
            waits.append(
                f"the end waits for {', '.join(member.name for member in self.members.values())} to leave"
            )
        return tuple(waits)

    def check_invariants(self) -> None:
        held = [block for member in self.members.values() for block in member.leases]
        self._book.check_invariants(held, self._refusals.settling)
        self._refusals.check_invariants(self.settled)
        assert self.phase is not Phase.ENDED or not self.members

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
        member = self._membership.join(event.replica, event.incarnation, event.now)
        joined = JoinedRun(time_s=event.now, role=member.name, incarnation=event.incarnation)
        return (*effects, Report(event=joined), *self._go_on(event.now))

    def _joined_late(self, event: Joined) -> tuple[CoordinatorEffect, ...]:
        recall = Recall(why=self.why)
        return (ToReplica(replica=event.replica, incarnation=event.incarnation, message=recall),)

    def _member(self, event: FromReplica | Lost) -> Member | None:
        return self._membership.find(event.replica, event.incarnation)

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
        self._drop(member, why)
        left = LeftRun(time_s=now, role=member.name, why=why, incarnation=member.incarnation)
        return (Report(event=left),)

    def _drop(self, member: Member, why: str) -> None:
        """Forget a member and take its blocks back."""
        self._membership.remove(member)
        self._take_all_back(member, f"{member.name}: {why}")

    def _take_all_back(self, member: Member, why: str) -> None:
        for block in tuple(member.leases):
            del member.leases[block]
            self._book.let_go(block)
            if block not in self._refusals.settling:
                self._book.take_back(block, why)

    # Asking and granting --------------------------------------------------------------------------------

    def _asked(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        member = self._member(event)
        ask = event.message
        assert isinstance(ask, Ask)
        if member is None:
            leave = Leave(request=ask.request, why=self.why or "no longer a member")
            return (ToReplica(replica=event.replica, incarnation=event.incarnation, message=leave),)
        if member.has_asked(ask.request):
            return self._asked_again(member, ask.request, event.now)
        member.remember(ask.request)
        effects: tuple[CoordinatorEffect, ...] = ()
        if ask.finished is not None:
            effects = self._finished(member, ask.finished, event.now)
        self._membership.asked(member, ask.request, event.now)
        return effects + self._go_on(event.now, asked_now=(member, ask.request))

    def _asked_again(self, member: Member, request: int, now: float) -> tuple[CoordinatorEffect, ...]:
        """A resend: its sender lives, and may not have had the answer."""
        self._membership.heard_again(member)
        reply = member.replies.get(request)
        answered = () if reply is None else (member.tell(reply),)
        return answered + self._go_on(now)

    def _go_on(
        self, now: float, asked_now: tuple[Member, int] | None = None
    ) -> tuple[CoordinatorEffect, ...]:
        """Whatever has changed: open the start, grant what can be granted, end what is over."""
        if self.phase is Phase.STARTING and self._membership.all_have_asked():
            self._start(now)
        if self.phase is Phase.RUNNING:
            found = self._book.tell_found()
            granted = self._granting.grant(now, asked_now, must_rest=self._must_rest())
            return found + granted + self._begin_hold(now) + self._stop_at_rest() + self._end_if_done(now)
        if self.phase is Phase.LEAVING:
            asking = () if asked_now is None else asked_now[:1]  # all others were dismissed when this began
            return self._dismiss(asking) + self._end_if_empty()
        return ()

    def _start(self, now: float) -> None:
        self.phase = Phase.RUNNING
        self._membership.all_heard(now)

    # Blocks that come to an end -------------------------------------------------------------------------

    def _finished(self, member: Member, report: Finished, now: float) -> tuple[CoordinatorEffect, ...]:
        block = report.block
        if self._recovery is not None:  # leased by the coordinator before, which may have told nobody
            self._book.reach(block)
        if member.finish(block, now):
            self._book.let_go(block)
        if report.outcome is Outcome.APPLIED and self._book.tell(block):
            return (Closed(replica=member.replica, report=report),)
        if self._book.is_settled(block) or block in self._refusals.settling:
            return ()
        match report.outcome:
            case Outcome.APPLIED if self._shards.vouch(block, report.lives):
                return self._close(member, report, now)
            case Outcome.APPLIED:
                self._book.take_back(block, "a shard has come back without it")
                return ()
            case Outcome.NOT_FINITE:
                tensor, is_alone = report.not_finite, self._granting.is_alone(member)
                if self._refusals.found(block, member.replica, tensor, is_alone=is_alone):
                    return self._settle(block, now)
                self._book.take_back(block, f"{member.name}: {tensor} was not finite")
                return ()
            case _:
                return self._settle(block, now)

    def _close(self, member: Member, report: Finished, now: float) -> tuple[CoordinatorEffect, ...]:
        is_new = self._book.close(report.block)
        blamed = self._refusals.passed(report.block, is_new=is_new)
        if not is_new:
            return ()
        self._membership.praise(member)
        return (Closed(replica=member.replica, report=report), *self._blame(blamed, member, now))

    def _blame(self, blamed: list[int], finisher: Member, now: float) -> tuple[CoordinatorEffect, ...]:
        """Quarantine whoever has sent too much that was not finite, and was finite from another."""
        why = f"quarantined: {STRIKES} blocks were not finite from it and finite from others"
        effects: list[CoordinatorEffect] = []
        for member in self._membership.blame(blamed, finisher):
            effects.append(member.tell(Recall(why=why)))
            effects.extend(self._lose(member, now, why))
        return tuple(effects)

    def _settle(self, block: Block, now: float) -> tuple[CoordinatorEffect, ...]:
        """Nobody can compute this block: have every shard keep it as refused."""
        self._book.withdraw(block)
        return self._holds.call_off(now) + self._refusals.settle(block)

    def _refused(self, event: FromShard) -> tuple[CoordinatorEffect, ...]:
        assert isinstance(event.message, Refused)
        if not self._refusals.answered(event.shard, event.message):
            return ()
        return self._settled_as_refused(event.message.block, event.now) + self._go_on(event.now)

    def _settled_as_refused(self, block: Block, now: float) -> tuple[CoordinatorEffect, ...]:
        tensor = self._refusals.tensor(block)
        why = self._refusals.end(block)
        self._book.refuse(block, is_new=why is not None)
        if why is None:
            return ()
        effects: list[CoordinatorEffect] = [Report(event=RefusedBlock(time_s=now, block=block, why=why))]
        if self._refusals.is_diverging and self.phase is Phase.RUNNING:
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
        """Have done again what it has come back without."""
        told = event.message
        assert isinstance(told, Returned)
        came_with = self.settled if told.everywhere is None else BlockSet.union(told.everywhere)
        had = self._shards.returned(event.shard, told.incarnation, came_with)
        if had is None:
            return ()
        if told.everywhere is not None:
            self._refusals.shard_returned(event.shard, had)
        role, lost = f"shard{event.shard}", self._book.lose(had).num_minibatches
        again = self._reopen(event.shard) if lost else ()
        self._membership.all_heard(event.now)  # they may have waited for this shard
        recovered = Recovered(time_s=event.now, role=role, incarnation=told.incarnation, lost=lost)
        called_off = self._holds.shard_returned(event.now)
        return (Report(event=recovered), *called_off, *again, *self._go_on(event.now))

    def _reopen(self, shard: int) -> tuple[CoordinatorEffect, ...]:
        again = self._book.reopen(self.refused, f"shard{shard} came back without it")
        return tuple(effect for block in again for effect in self._refusals.settle(block, (shard,)))

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
        """Once all have spoken: make the book, and take up what was put off."""
        recovery = self._recovery
        assert recovery is not None
        if not recovery.is_over(now):
            return ()
        effects: list[CoordinatorEffect] = [
            *takeover.shards_found(recovery, self._shards, now),
            *takeover.make_book(recovery, self._membership, self._book, self._refusals),
        ]
        if self._book.num_handed_out:
            self._start(now)
        else:  # the one before was lost at its start
            self.phase, self._began = Phase.STARTING, now
            self._membership.awaited = {*recovery.inheritance.expected, *self.members}
        for replica, report in reports_of(recovery.resumes()):
            if (member := self.members.get(replica)) is not None:
                effects.extend(self._finished(member, report, now))
        for event in recovery.put_off:
            effects.extend(getattr(self, self.TABLE[self.phase, key_of(event)])(event))
        return (*effects, *self._go_on(now))

    def _resumed(self, event: FromReplica) -> tuple[CoordinatorEffect, ...]:
        """A replica speaks that was not waited for any longer."""
        member, resume = self._member(event), event.message
        assert isinstance(resume, Resume)
        if member is None or member.has_resumed or self._recovery is None:
            return ()
        member.has_resumed, member.heard = True, event.now
        effects: list[CoordinatorEffect] = []
        for block, attempt in resume.leases:
            self._book.reach(block)
            takeover.resume_lease(block, member, attempt, self._book, self._refusals)
        for report in resume.done:
            effects.extend(self._finished(member, report, event.now))
        return (*effects, *self._go_on(event.now))

    # Checkpoints ----------------------------------------------------------------------------------------

    def _checkpoint(self, event: Checkpoint) -> tuple[CoordinatorEffect, ...]:
        if self._holds.wanted is None:  # else one is under way
            self._holds.wanted = event.name
        return self._go_on(event.now)

    def _must_rest(self) -> bool:
        """Whether something waits for the only replica to be as after a fresh start."""
        return self._holds.wanted is not None or self._stop_asked is not None

    def _begin_hold(self, now: float) -> tuple[CoordinatorEffect, ...]:
        if self._refusals.settling or not self._holds.may_begin(now, self.settled):
            return ()
        return self._holds.begin(now) if self._book.is_still() else ()

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
        in_hand = BlockSet.union((*self.settled.blocks(), *self._membership.in_hand()))
        if self._holds.is_stuck(now, in_hand):
            return self._holds.call_off(now)
        return self._holds.again()

    # Time -----------------------------------------------------------------------------------------------

    def _tick_starting(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        if self._began is None or event.now - self._began < self._patience.start_s:
            return ()
        if not any(map(self._membership.has_asked, self.members)):
            return ()
        self._start(event.now)
        why = f"did not fetch within {self._patience.start_s:g} s; the run starts without it"
        missing = self._membership.missing(self.num_replicas)
        named = (LeftRun(time_s=event.now, role=f"replica{replica}", why=why) for replica in missing)
        return (*(Report(event=left) for left in named), *self._go_on(event.now))

    def _tick_running(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        """Hand the blocks to others of whom is silent, unless they may wait for a shard; and ask again."""
        for member in () if self._shards.away else self._membership.late(event.now, self._patience):
            self._take_all_back(member, f"{member.name} has been silent for {event.now - member.heard:.0f} s")
        again = self._refusals.again()
        return (*again, *self._tick_hold(event.now), *self._stop_late(event.now), *self._go_on(event.now))

    # The end --------------------------------------------------------------------------------------------

    def _end_if_done(self, now: float) -> tuple[CoordinatorEffect, ...]:
        if not self._book.is_done or self.phase is not Phase.RUNNING:
            return ()
        return self._leave(now, self.plan.why_over) + self._end_if_empty()

    def _stop(self, event: Stop) -> tuple[CoordinatorEffect, ...]:
        if self._rhythm is not None and self.phase is Phase.RUNNING and self.members:
            self._stop_asked = self._stop_asked or event
            return self._go_on(event.now)
        return self._leave(event.now, event.why) + self._end_if_empty()

    def _stop_at_rest(self) -> tuple[CoordinatorEffect, ...]:
        """Carry out a stop that was put off, when the only replica has come to rest."""
        stop = self._stop_asked
        if stop is None or not self._book.is_still() or self.phase is not Phase.RUNNING:
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
            member.tell(Recall(why=why))
            for member in self.members.values()
            if member.leases or not member.parked
        )
        return self._holds.call_off(now) + recalls + self._dismiss(self.members.values())

    def _dismiss(self, members: Iterable[Member]) -> tuple[CoordinatorEffect, ...]:
        effects: list[CoordinatorEffect] = []
        for member in members:
            while member.parked:
                _, request = member.parked.popleft()
                effects.append(member.tell(Leave(request=request, why=self.why)))
        return tuple(effects)

    def _tick_leaving(self, event: Tick) -> tuple[CoordinatorEffect, ...]:
        effects: list[CoordinatorEffect] = list(self._holds.again())
        if event.now - self._leaving_since < self._patience.leave_s:
            recalls = (member.tell(Recall(why=self.why)) for member in self.members.values())
            return (*effects, *recalls)
        for member in list(self.members.values()):
            why = f"did not leave within {self._patience.leave_s:g} s"
            effects.extend(self._lose(member, event.now, why))
        return (*effects, *self._end_if_empty())

    def _end_if_empty(self) -> tuple[CoordinatorEffect, ...]:
        if self.members or self.phase is not Phase.LEAVING:
            return ()
        self.phase = Phase.ENDED
        if undone := self._book.num_undone:
            self.why = (
                f"{self.why}, and a shard came back without {undone} minibatches that were not done again"
            )
        return (*self._book.tell_found(), Ended(why=self.why))

    def _ignore(self, event: Any) -> tuple[CoordinatorEffect, ...]:
        return ()
