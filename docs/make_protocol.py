"""Writes docs/protocol.md from the code: the deciders' state tables and the messages' own descriptions.

Run it with ``make docs``; tests/test_docs.py fails while the page and the code disagree.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, get_args
from unittest.mock import patch

from squall.coordinator.machine import CoordinatorMachine
from squall.machines import Machine, key_of
from squall.nouns import Noun
from squall.replica.session import ReplicaSession
from squall.shard.machine import ShardMachine
from squall.wire import crew, joining, messages
from squall.wire.codec import code_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.simulated.directed import DIRECTED
from tests.simulated.schedules import Schedule, random_schedule, run

PAGE = Path(__file__).with_name("protocol.md")
NUM_VARIANTS, NUM_RANDOM = 2, 60
Seen: TypeAlias = dict[tuple[type[Machine], Enum, type], set[Enum]]
MACHINES: tuple[type[Machine], ...] = (ShardMachine, CoordinatorMachine, ReplicaSession)

INTRODUCTION = """# The protocol

This page is written by `make docs` from the code. Change the code, not the page.

Who says what is in the first part; who does what with it, in the second. A decider takes one event at a time. Its
table says which events are legal in which phase, and which method decides; a pair that the table does not list is
refused, and the decider stays as it was. The last column, and the diagrams, say where a pair was seen to lead in the
simulated schedules of `tests/simulated`, with all that goes wrong in them.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Messages\n", conversation(messages), *described(messages.Message)]
    parts += ["## Joining over TCP\n", conversation(joining), *described(joining.Joining)]
    parts += ["## Within a replica of several workers\n", conversation(crew), *described(crew.Crew)]
    led = seen()
    parts += ["## State tables\n", *(machine(kind, led) for kind in MACHINES)]
    return "\n".join(parts).rstrip() + "\n"


def conversation(module: ModuleType) -> str:
    """A module of messages, in its own words."""
    text = inspect.cleandoc(module.__doc__ or "").replace("::\n", ":\n", 1)
    before, diagram, after = _split(text)
    return "\n".join([before, "", "```text", diagram, "```", *(["", after] if after else []), ""])


def _split(text: str) -> tuple[str, str, str]:
    """Text before the indented part, that part without its indent, and the text after."""
    lines = text.split("\n")
    inside = [at for at, line in enumerate(lines) if line.startswith("    ")]
    first, last = inside[0], inside[-1]
    diagram = textwrap.dedent("\n".join(lines[first : last + 1]))
    return "\n".join(lines[:first]).strip(), diagram, "\n".join(lines[last + 1 :]).strip()


def described(conversation: Any) -> Iterator[str]:
    """The messages of a union of them, by their codes."""
    return map(message, sorted(get_args(conversation), key=code_of))


def message(kind: type[Noun]) -> str:
    fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__) or "nothing"
    words = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return f"**{kind.__name__}** (code {code_of(kind)}; carries {fields}). {words}\n"


def machine(kind: type[Machine], led: Seen) -> str:
    """One decider: its table and its diagram."""
    told = inspect.cleandoc(kind.__doc__ or "").split("\n")[0]
    rows = [
        f"| {phase.name} | {event.__name__} | `{method}` | {words(targets(kind, phase, event, led))} |"
        for (phase, event), method in kind.TABLE.items()
    ]
    head = ["| in phase | on | decided by | leads to |", "|---|---|---|---|"]
    title = [f"### {kind.__name__}", "", f"`{kind.__module__}:{kind.__name__}`: {told}", ""]
    return "\n".join([*title, *head, *rows, "", *diagram(kind, led)])


def words(phases: list[Enum]) -> str:
    return ", ".join(phase.name for phase in phases) or "not seen"


def targets(kind: type[Machine], phase: Enum, event: type, led: Seen) -> list[Enum]:
    """Where a pair led, in the order of phases."""
    return [target for target in type(phase) if target in led.get((kind, phase, event), set())]


def diagram(kind: type[Machine], led: Seen) -> list[str]:
    """The changes of phase as a mermaid diagram; events that keep the phase are left out."""
    edges: dict[tuple[str, str], list[str]] = {}
    for phase, event in kind.TABLE:
        for target in targets(kind, phase, event, led):
            if target is not phase:
                edges.setdefault((phase.name, target.name), []).append(event.__name__)
    first = next(iter(type(next(iter(kind.TABLE))[0])))
    lines = [f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in edges.items()]
    return ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}", *lines, "```", ""]


def seen() -> Seen:
    """What each pair of phase and event led to, in a fixed set of simulated schedules."""
    found: Seen = {}
    handle = Machine.handle

    def watched(self: Machine, event: Any) -> tuple[Any, ...]:
        pair = (type(self), self.phase, key_of(event))
        effects = handle(self, event)
        found.setdefault(pair, set()).add(self.phase)
        return effects

    with patch.object(Machine, "handle", watched):
        for schedule in schedules():
            run(schedule)
    return found


def schedules() -> Iterator[Schedule]:
    for make in DIRECTED.values():
        yield from (make(variant) for variant in range(NUM_VARIANTS))
    yield from (random_schedule(seed) for seed in range(NUM_RANDOM))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
