"""Tests of README.md: its code runs, its commands work, and what it names is there.

Faults planted here by hand, each seen to fail a test: a misspelt argument in the quick start · an option that does not
exist in a command · a room missing from the tree · a make target that does not exist · a link to a page that is not there.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import squall
from squall.cli import training
from squall.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = {
    "train",
    "resume",
    "recipes",
    "evaluate",
    "export",
    "ledger",
    "plan",
    "doctor",
    "bench",
    "version",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.processes
def test_the_python_in_it_runs_as_a_script_without_a_main_guard(tmp_path: Path) -> None:
    found = blocks("python")
    assert found
    for number, code in enumerate(found):
        file = tmp_path / f"block{number}.py"
        file.write_text(code)
        ran = subprocess.run(
            [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        assert float(ran.stdout.split()[0]) > 0.8, "the first word printed is the test accuracy"


def test_the_quick_start_is_short() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_commands_in_it_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def calling_thread() -> Iterator[squall.InProcess]:
        yield squall.InProcess()

    monkeypatch.setattr(training, "Local", calling_thread)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    lines = [line for block in blocks("console") for line in block.splitlines()]

    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "squall"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, f"{line}: {result.stderr}"
    assert {shlex.split(line)[1] for line in lines} >= COMMANDS - {"resume", "doctor", "bench", "version"}
    assert (tmp_path / "model.safetensors").exists()


def test_every_command_and_make_target_that_it_names_is_there() -> None:
    named = set(re.findall(r"`?squall (\w+)", README)) & set(re.findall(r"squall (\w+) [A-Z`d-]", README))
    assert named <= COMMANDS, named - COMMANDS
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake (\w+)`", README)) | {"demo", "test"} <= targets


def test_the_two_commands_stand_alone_in_one_block() -> None:
    assert "make demo\nmake test\n" in blocks("sh")


def test_the_tree_of_files_has_every_room() -> None:
    (tree,) = [block for block in blocks("text") if block.startswith("src/squall/")]
    rooms = {name.removesuffix("/") for name in re.findall(r"^  (\w+)/", tree, re.MULTILINE)}
    there = {
        path.name
        for path in (ROOT / "src" / "squall").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert rooms == there


def test_its_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_ci_runs_what_it_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make check" in script.read_text()
    assert "`make check` adds what CI checks" in README
