"""The whole of it: look, measure, start a process as a run would, and judge."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from squall.cluster.zygote import Zygote
from squall.doctor.facts import Facts, look
from squall.doctor.judge import Finding, Verdict, is_possible, judge
from squall.doctor.speeds import Speeds, measure
from squall.errors import RunError
from squall.wire.waiting import wait

START_S = 60.0
EXIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What a machine is, and what of it is fine.

    Attributes:
        facts, speeds: what was found; speeds are None if they could not be measured.
        findings: a line for each.
        is_possible: whether training in processes of this machine is.
    """

    facts: Facts
    speeds: Speeds | None
    findings: list[Finding]

    @property
    def is_possible(self) -> bool:
        return is_possible(self.findings)

    def as_json(self) -> dict[str, Any]:
        """Everything as what `json.dumps` takes."""
        return {
            "ok": self.is_possible,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": asdict(self.facts),
            "speeds": None if self.speeds is None else asdict(self.speeds),
        }

    def lines(self) -> list[str]:
        """Everything for people: a line for each finding, and its advice below it."""
        width = max(len(finding.name) for finding in self.findings)
        told = []
        for finding in self.findings:
            told.append(f"{finding.verdict.value:<4}  {finding.name:<{width}}  {finding.value}")
            if finding.verdict is not Verdict.OK:
                told.append(f"{'':<{width + 8}}{finding.advice}")
        wrong = "Squall cannot train in processes of this machine: see what is bad above."
        last = "Squall can train here." if self.is_possible else wrong
        return [*told, "", last]


def examine() -> Examination:
    """Examine this machine; takes a few seconds, most of them the import of torch, which it does twice at once."""
    began = time.monotonic()
    zygote = _started()
    facts = look()  # imports torch while the zygote does
    forked = _forked(zygote, began) if isinstance(zygote, Zygote) else zygote
    speeds = measured()
    return Examination(
        facts=facts,
        speeds=None if isinstance(speeds, str) else speeds,
        findings=judge(facts, speeds, forked),
    )


def measured() -> Speeds | str:
    """The speeds, or why they could not be measured."""
    try:
        return measure()
    except (OSError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"


def _started() -> Zygote | str:
    try:
        return Zygote.start(modules=["squall.cluster.role"])
    except (OSError, AttributeError) as error:  # no processes left; a system without epoll, eventfd or pidfd
        return f"{type(error).__name__}: {error}"


def _forked(zygote: Zygote, began: float) -> float | str:
    """Have it fork a role that does nothing; the seconds since `began`, or what went wrong."""
    try:
        zygote.wait_ready(START_S)
        zygote.spawn("doctor", "builtins:print")
        seconds = time.monotonic() - began
        if not wait([zygote], EXIT_S):
            return f"The process that it forked did not end within {EXIT_S:g} s."
        codes = [ended.returncode for ended in zygote.exits()]
        return seconds if codes == [0] else f"The process that it forked ended with {codes}."
    except RunError as error:
        return str(error)
    finally:
        zygote.close()
