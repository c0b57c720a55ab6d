"""The floor plan: which room may import which, what deciders must not touch, and what nobody may use.

Change the table here first, and say why in `docs/design.md`.

Faults planted here by hand, each seen to fail a test: `import time` in a decider · `squall.shard` imported by the
coordinator · `squall.training` imported by `wire` at the top of a function · a relative import · `pickle.loads` in
`training/checkpoint.py` · `torch.load` in `training/run.py` · `from torch import load` there · a room that the table
does not know.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "squall"

GROUND = {"closes", "errors", "faults", "keywords", "nouns", "slices", "blocks", "machines", "observe"}
_WIRE = GROUND | {"wire"}
_MODEL = GROUND | {"model"}
_ROLES_MAY = GROUND | {"model", "wire", "rules", "data"}
_TRAINING_MAY = _ROLES_MAY | {"partition", "shard", "replica", "coordinator"}
_CLUSTER_MAY = _TRAINING_MAY | {"training", "loop"}
# `squall plan` makes and draws a plan.
_CLI_MAY = _CLUSTER_MAY | {"cluster", "partition"}

# Room -> the rooms that it may import. A room may always import itself. Ground floor first.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "slices": {"errors"},
    "closes": set(),
    "keywords": {"errors"},
    "nouns": set(),
    "blocks": {"errors", "nouns", "slices"},
    "machines": {"errors"},
    "faults": {"errors"},
    "schedules": {"errors"},
    "observe": {"closes", "errors", "keywords", "nouns", "slices", "blocks"},
    "model": GROUND,
    "wire": GROUND,
    "partition": GROUND | {"model"},
    "rules": GROUND | {"model"},
    "data": GROUND | {"model"},
    "shard": _ROLES_MAY,
    # A worker computes one partition of a model.
    "replica": _ROLES_MAY | {"partition"},
    "coordinator": _ROLES_MAY,
    # A user's own training loop is a replica that somebody else drives.
    "loop": _ROLES_MAY | {"replica"},
    "training": _TRAINING_MAY,
    "cluster": _CLUSTER_MAY,
    "cli": _CLI_MAY,
}
# Above all rooms: they put the parts together for a user, or use Squall as one.
ROOF = {"__init__", "__main__", "api", "bench", "doctor", "recipes"}
# (file, room): an import that points upward, inside a function, with its reason.
LOOKED_UP = {
    # The roof fills in defaults; the command line shows what `fit` does.
    ("cli/training.py", "api"): "`squall train` calls what a user calls",
    ("cli/app.py", "__init__"): "`squall version`",
    ("cli/bench.py", "bench"): "`squall bench` measures Squall as a user would",
    ("cli/doctor.py", "doctor"): "`squall doctor` starts a process as a run does",
    ("cli/listing.py", "recipes"): "`squall recipes` lists them",
    ("training/recipe.py", "recipes"): "`available` lists them; recipes are found by name, at run time",
}

DECIDERS = {
    "blocks.py",
    "faults.py",
    "cluster/restarts.py",
    "coordinator/book.py",
    "coordinator/events.py",
    "coordinator/gate.py",
    "coordinator/granting.py",
    "coordinator/hold.py",
    "coordinator/line.py",
    "coordinator/lives.py",
    "coordinator/machine.py",
    "coordinator/members.py",
    "coordinator/membership.py",
    "coordinator/recovery.py",
    "coordinator/refusals.py",
    "coordinator/takeover.py",
    "coordinator/work.py",
    "machines.py",
    "partition/agenda.py",
    "partition/calls.py",
    "partition/compiler.py",
    "partition/cost.py",
    "partition/coupling.py",
    "partition/drawing.py",
    "partition/indices.py",
    "partition/model_plan.py",
    "partition/picture.py",
    "partition/plan.py",
    "partition/predict.py",
    "partition/program.py",
    "partition/regions.py",
    "partition/traffic.py",
    "partition/words.py",
    "replica/downpour.py",
    "replica/session.py",
    "shard/books.py",
    "shard/commits.py",
    "shard/events.py",
    "shard/machine.py",
    "slices.py",
    "wire/messages.py",
}
DOING = {
    "asyncio",
    "multiprocessing",
    "numpy",
    "os",
    "random",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
}

# The launcher hands code to its own child through a private pipe; nothing else may be unpickled.
MAY_PICKLE = "cluster/payload.py"
# It writes the source it compiles, from a graph captured in this process; see its first lines.
MAY_COMPILE = ("model/straight.py", "exec")
BANNED_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "__import__"}
BANNED_NAMES = {"torch": {"load"}, "numpy": {"load"}, "np": {"load"}}
# It takes no descriptor above 1,023: `squall.wire.waiting.wait` does.
BANNED_NAMES |= {"select": {"select"}}


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it: ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}: write the full path, not a relative one"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_of(file: Path) -> set[str]:
    """The rooms that a file imports; "__init__" for a name of the package itself."""
    known = MAY_IMPORT.keys() | ROOF
    parts = [name.split(".") for name in imports_of(file) if name.split(".")[0] == "squall"]
    names = {part[1] if len(part) > 1 else "__init__" for part in parts}
    return {name if name in known else "__init__" for name in names}


def test_every_room_is_in_the_plan() -> None:
    rooms = {room_of(name_of(file)) for file in files()}
    assert rooms <= MAY_IMPORT.keys() | ROOF, "a new room needs its line in MAY_IMPORT"


def test_no_room_imports_a_room_above_it_or_beside_it() -> None:
    wrong = []
    for file in files():
        name = name_of(file)
        room = room_of(name)
        if room in ROOF:
            continue
        for other in sorted(rooms_of(file) - MAY_IMPORT[room] - {room}):
            if (name, other) not in LOOKED_UP:
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(["Against the floor plan:", *wrong])


def test_every_exception_to_the_plan_is_still_needed() -> None:
    unused = [key for key in LOOKED_UP if key[1] not in rooms_of(ROOT / key[0])]
    assert not unused


def test_the_plan_has_no_circle() -> None:
    done: set[str] = set()
    for room, others in MAY_IMPORT.items():
        assert others <= done, f"{room} stands before {sorted(others - done)}"
        done.add(room)


def test_deciders_can_neither_wait_nor_talk_nor_draw_lots_nor_touch_a_tensor() -> None:
    wrong = [
        f"{name} imports {module}"
        for name in sorted(DECIDERS)
        for module in imports_of(ROOT / name)
        if module.split(".")[0] in DOING
    ]
    assert not wrong, "\n".join(["These must stay pure:", *wrong])


def test_nothing_is_unpickled_evaluated_or_waited_for_in_a_way_that_is_banned() -> None:
    wrong = [f"{name_of(file)}: {what}" for file in files() for what in banned_in(file)]
    assert not wrong, "\n".join(wrong)


def banned_in(file: Path) -> Iterator[str]:
    if name_of(file) == MAY_PICKLE:
        return
    for name in imports_of(file):
        top, *rest = name.split(".")
        if top in BANNED_MODULES or set(rest) & BANNED_NAMES.get(top, set()):
            yield f"imports {name}"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in BANNED_NAMES.get(node.value.id, set()):
                yield f"line {node.lineno}: {node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            if (name_of(file), node.func.id) == MAY_COMPILE:
                continue
            yield f"line {node.lineno}: {node.func.id}(...)"
