"""Mutants of the deciders against the simulated suite: which small faults would nobody notice?

`python -m tests.simulated.mutants [--jobs 2] [--file NAME] [--json]` makes each change of a fixed set of
operators in each decider, one at a time, and runs `tests.simulated.suite` against it in a process of its own.
A mutant is killed if a check fails or takes too long. Those that survive are printed; `survivors.txt` holds
them with the reason why each is no fault. `check_invariants` is left alone: it decides nothing.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "squall"
SURVIVORS = Path(__file__).with_name("survivors.txt")
FILES = (
    "shard/machine.py",
    "shard/books.py",
    "coordinator/machine.py",
    "coordinator/book.py",
    "coordinator/gate.py",
    "coordinator/granting.py",
    "coordinator/hold.py",
    "coordinator/line.py",
    "coordinator/lives.py",
    "coordinator/members.py",
    "coordinator/membership.py",
    "coordinator/recovery.py",
    "coordinator/refusals.py",
    "coordinator/takeover.py",
    "coordinator/work.py",
    "replica/session.py",
    "replica/downpour.py",
    "blocks.py",
    "slices.py",
)
LEFT_ALONE = {"check_invariants"}
CONTROL = -1
"""Number of the mutant that changes nothing, and must survive."""
CHECK_S = 2.0
"""Processor time of one check, after which a mutant counts as one without an end [seconds]."""
MEMORY = 2 << 30

_SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: below ``src/squall``.
        number: of the change within the file.
        line: where, from 1.
        scope: the class and function around it.
        what: the change in words.
        text: the source line.
    """

    file: str
    number: int
    line: int
    scope: str
    what: str
    text: str

    @property
    def key(self) -> str:
        """What names it as long as its function stays as it is, wherever that moves to."""
        return f"{self.file} | {self.scope} | {self.what} | {self.text}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.scope}: {self.what}: {self.text}"


# Changes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    node: ast.AST
    scope: str
    what: str
    make: Callable[[], None]


def _changes(node: ast.AST, scope: str = "") -> Iterator[_Change]:
    """All changes below a node, in a fixed order; each changes the tree in place when made."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        if node.name in LEFT_ALONE:
            return
        scope = f"{scope}.{node.name}".lstrip(".")
    yield from (_Change(at, scope, what, make) for at, what, make in _changes_of(node))
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or (
            name == "keywords" and isinstance(node, ast.ClassDef)
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _changes(child, scope)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    match node:
        case ast.Compare(ops=operators):
            for at, operator in enumerate(operators):
                new = _SWAPS[type(operator)]
                yield (
                    node,
                    f"{type(operator).__name__} to {new.__name__}",
                    partial(_put, operators, at, new()),
                )
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            words = f"{type(operator).__name__} to {type(other).__name__}"
            yield node, words, partial(setattr, node, "op", other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            # "not not x": the truth of x.
            yield node, "not removed", partial(setattr, node, "operand", ast.UnaryOp(ast.Not(), operand))
        case ast.Constant(value=bool() as value):
            yield node, f"{value} to {not value}", partial(setattr, node, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield node, f"{value} to {value + 1}", partial(setattr, node, "value", value + 1)
        case ast.Return(value=ast.Tuple(elts=elements)):
            for at in range(len(elements)):
                yield node, f"element {at} not returned", partial(_take_out, elements, at)
        case ast.Return(value=ast.BinOp(op=ast.Add(), left=left, right=right)):
            yield node, "right side not returned", partial(setattr, node, "value", left)
            yield node, "left side not returned", partial(setattr, node, "value", right)
    yield from _dropped(node)


def _dropped(node: ast.AST) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    """Statements that change state, or gather effects, each left out."""
    for field in ("body", "orelse"):
        body = getattr(node, field, None)
        if not isinstance(body, list):
            continue
        for at, statement in enumerate(body):
            if _changes_state(statement):
                yield statement, "statement dropped", partial(_put, body, at, ast.Pass())


def _put(nodes: list[Any], at: int, new: ast.AST) -> None:
    nodes[at] = new


def _take_out(nodes: list[Any], at: int) -> None:
    del nodes[at]


def _changes_state(statement: ast.AST) -> bool:
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.AugAssign():
            return True
        case ast.Assign(targets=targets):
            return any(
                isinstance(part, ast.Attribute | ast.Subscript)
                for target in targets
                for part in ast.walk(target)
            )
    return False


@cache
def _text(file: str) -> str:
    """A file as it was when it was first asked for, so that one grid speaks of one state of it."""
    return (SOURCE / file).read_text()


def mutants_of(file: str) -> list[Mutant]:
    text = _text(file)
    lines = text.splitlines()
    mutants = [Mutant(file=file, number=CONTROL, line=0, scope="", what="nothing", text="")]
    for number, change in enumerate(_changes(ast.parse(text))):
        line: int = change.node.lineno  # type: ignore[attr-defined]
        source = " ".join(lines[line - 1].split())
        mutants.append(
            Mutant(file=file, number=number, line=line, scope=change.scope, what=change.what, text=source)
        )
    return mutants


def mutated(file: str, number: int) -> ast.Module:
    tree = ast.parse(_text(file))
    if number != CONTROL:
        next(change for at, change in enumerate(_changes(tree)) if at == number).make()
    return ast.fix_missing_locations(tree)


# Running one --------------------------------------------------------------------------------------------


class _Planter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives code that is compiled already to whoever imports these modules; one of them is mutated."""

    def __init__(self, codes: dict[str, CodeType]) -> None:
        self._codes = codes

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name in self._codes else None

    def exec_module(self, module: ModuleType) -> None:
        code = self._codes[module.__name__]
        module.__file__ = code.co_filename
        exec(code, module.__dict__)


_OURS = ("squall.", "tests.simulated.", "tests.coordinator.", "tests.replica.")


def _codes() -> dict[str, CodeType]:
    """The code of every module that the suite imports, packages left out."""
    importlib.import_module("tests.simulated.suite")
    codes = {}
    for name, module in sys.modules.items():
        if name.startswith(_OURS) and not hasattr(module, "__path__"):
            assert module.__file__ is not None
            codes[name] = compile(Path(module.__file__).read_text(), module.__file__, "exec")
    return codes


def try_out(mutant: Mutant, codes: dict[str, CodeType], most: int | None = None) -> str:
    """Run the suite in a process of its own; return what killed the mutant, or "" if nothing did."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        verdict = "could not be imported"
        try:
            verdict = _verdict(mutant, codes, writer, most)
        finally:
            os.write(writer, f"\n={verdict}".encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"{lines[-1] if lines else 'import'}: no end"
    return next(line[1:] for line in reversed(lines) if line.startswith("="))


def _verdict(mutant: Mutant, codes: dict[str, CodeType], writer: int, most: int | None) -> str:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    name = "squall." + mutant.file.removesuffix(".py").replace("/", ".")
    for module in [module for module in sys.modules if f"{module}.".startswith(_OURS)]:
        del sys.modules[module]
    tree = mutated(mutant.file, mutant.number)
    sys.meta_path.insert(0, _Planter(codes | {name: compile(tree, str(SOURCE / mutant.file), "exec")}))
    suite = importlib.import_module("tests.simulated.suite")
    for check, run in islice(suite.checks(), most):
        os.write(writer, f"{check}\n".encode())
        signal.setitimer(signal.ITIMER_PROF, CHECK_S)
        try:
            run()
        except Exception as error:
            return f"{check}: {type(error.__cause__ or error).__name__}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    return ""


def try_all(mutants: Sequence[Mutant], jobs: int, most: int | None = None) -> dict[Mutant, str]:
    """What killed each mutant, tried out `jobs` at a time on at most so many of the first checks."""
    readers = []
    codes = _codes()
    for job in range(jobs):
        reader, writer = os.pipe()
        if os.fork() == 0:
            with os.fdopen(writer, "w") as pipe:
                for at in range(job, len(mutants), jobs):
                    pipe.write(json.dumps([at, try_out(mutants[at], codes, most)]) + "\n")
                    pipe.flush()
            os._exit(0)
        os.close(writer)
        readers.append(os.fdopen(reader))
    verdicts: dict[Mutant, str] = {}
    for pipe in readers:
        with pipe:
            for line in pipe:
                at, verdict = json.loads(line)
                verdicts[mutants[at]] = verdict
        os.wait()
    return {mutant: verdicts[mutant] for mutant in mutants}


# Reporting ----------------------------------------------------------------------------------------------


def reasons() -> dict[str, str]:
    """Why each listed survivor is no fault, by its key."""
    found = {}
    for line in SURVIVORS.read_text().splitlines():
        if line and not line.startswith("#"):
            key, _, reason = line.rpartition(" | ")
            found[key] = reason
    return found


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All verdicts, and which survivors nobody has given a reason for.

    Raises:
        AssertionError: the suite complains of code that was not changed.
    """

    verdicts: dict[Mutant, str]

    def __post_init__(self) -> None:
        for control in [mutant for mutant in self.verdicts if mutant.number == CONTROL]:
            verdict = self.verdicts.pop(control)
            assert not verdict, f"the suite fails without a mutation: {verdict}"

    @property
    def survivors(self) -> list[Mutant]:
        return [mutant for mutant, verdict in self.verdicts.items() if not verdict]

    @property
    def share(self) -> float:
        return 1 - len(self.survivors) / len(self.verdicts)

    @property
    def unexplained(self) -> list[Mutant]:
        known = reasons()
        return [mutant for mutant in self.survivors if mutant.key not in known]


def grid(files: Sequence[str] = FILES, jobs: int = 2) -> Grid:
    return Grid(verdicts=try_all([mutant for file in files for mutant in mutants_of(file)], jobs))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.mutants")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--file", action="append", choices=FILES)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    done = grid(chosen.file or FILES, chosen.jobs)
    if chosen.json:
        print(
            json.dumps(
                {
                    "mutants": len(done.verdicts),
                    "share": done.share,
                    "survivors": list(map(str, done.survivors)),
                }
            )
        )
        return
    for file in chosen.file or FILES:
        verdicts = [verdict for mutant, verdict in done.verdicts.items() if mutant.file == file]
        print(f"{file}: {sum(map(bool, verdicts))} of {len(verdicts)} killed")
    for mutant in done.survivors:
        print("survived" if mutant in done.unexplained else "survived, as listed", mutant)
    print(f"{len(done.verdicts)} mutants, {done.share:.1%} killed")


if __name__ == "__main__":
    main()
