"""What can run when: pieces wait for exactly their inputs, policies order what is ready, and everything gets done."""

import random

import pytest

from squall.partition import planner
from squall.partition.agenda import Agenda, Arrived, BackwardFirst, Event, FillDrain, Job, Policy
from squall.partition.compiler import program_of
from squall.partition.program import Part, Program
from tests.partition.whole import case, loss_of


def program(parts: int = 3) -> Program:
    graph = case("mlp")[0].graph
    return program_of(graph, planner.horizontal(graph, parts), 2, loss_of(graph))


def sent_by(made: Program, part: Part, job: Job) -> list[tuple[int, Arrived]]:
    """The messages that a job causes, to whom, in a chain of layers."""
    me, piece, micro = part.partition, part.pieces[job.piece], job.micro
    if not job.is_backward:
        return [
            (receiver, Arrived(value, me, False, micro))
            for value in piece.gives
            for receiver in part.sends.get(value, ())
        ]
    return [
        (sender, Arrived(value, me, True, micro))
        for value in piece.reads
        for sender in part.receives.get(value, ())
        if (value, sender) in part.returns
    ]


def run(made: Program, num_micro: int, policy: Policy, seed: int) -> list[tuple[int, Job]]:
    """All jobs in the order in which they ran, with messages and turns in a random order."""
    rng, agendas = random.Random(seed), [Agenda(part, num_micro, policy) for part in made.parts]
    pending: list[tuple[int, Event]] = []
    log: list[tuple[int, Job]] = []
    while not all(agenda.is_finished for agenda in agendas):
        if pending and rng.random() < 0.5:
            to, event = pending.pop(rng.randrange(len(pending)))
            agendas[to].happened(event)
            continue
        p = rng.randrange(len(agendas))
        job = agendas[p].next()
        if job is not None:
            log.append((p, job))
            agendas[p].happened(job)
            pending += sent_by(made, made.parts[p], job)
    return log


@pytest.mark.parametrize("policy", [FillDrain(), BackwardFirst(1), BackwardFirst(3), BackwardFirst(None)])
@pytest.mark.parametrize("seed", range(5))
def test_every_job_runs_once_and_none_before_what_it_needs(policy: Policy, seed: int) -> None:
    made = program()
    log = run(made, 4, policy, seed)
    jobs = sum(len(part.pieces) * 2 for part in made.parts) * 4
    assert len(log) == len(set(log)) == jobs
    place = {entry: at for at, entry in enumerate(log)}
    for p, job in log:
        if job.is_backward:
            assert place[p, Job(job.micro, job.piece)] < place[p, job]
            if p < 2:
                assert place[p + 1, Job(job.micro, 0, True)] < place[p, job]
        elif p:
            assert place[p - 1, Job(job.micro, 0)] < place[p, job]


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_no_more_microbatches_are_begun_than_the_limit(limit: int, seed: int) -> None:
    begun: dict[int, set[int]] = {}
    most = 0
    for p, job in run(program(), 6, BackwardFirst(limit), seed):
        mine = begun.setdefault(p, set())
        (mine.discard if job.is_backward else mine.add)(job.micro)
        most = max(most, len(mine))
    assert most == limit


def test_fill_and_drain_ends_all_forward_work_before_backward_work_that_could_wait() -> None:
    made = program(1)
    log = [job for _, job in run(made, 3, FillDrain(), 0)]
    assert log == [*(Job(m, 0) for m in range(3)), *(Job(m, 0, True) for m in range(3))]


def test_backward_first_takes_one_forward_and_one_backward_in_turn() -> None:
    log = [job for _, job in run(program(1), 3, BackwardFirst(1), 0)]
    assert log == [job for m in range(3) for job in (Job(m, 0), Job(m, 0, True))]


def test_without_training_nothing_runs_backward() -> None:
    agenda = Agenda(program(1).parts[0], 1, FillDrain(), trains=False)
    job = agenda.next()
    assert job == Job(0, 0)
    agenda.happened(job)
    assert agenda.is_finished
    assert agenda.next() is None
