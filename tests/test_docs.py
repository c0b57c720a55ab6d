"""Tests of docs/: generated pages are up to date, and names that pages speak of are there.

Faults planted here by hand, each seen to fail a test: a row taken out of a state table · a message's description changed ·
a misspelt name in the table of the paper · a misspelt test, and a misspelt name, in the semantics · a `Job` argument missing from the contract · a refused one said to be built.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import squall

DOCS = Path(__file__).parents[1] / "docs"
CONTRACT = (DOCS / "contract.md").read_text()
TABLE = (DOCS / "paper-to-code.md").read_text()
SEMANTICS = (DOCS / "semantics.md").read_text()
NAME = r"`(squall[\w.]*:[\w.]+)`"


def make_protocol() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_protocol", DOCS / "make_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_protocol_page_is_what_the_code_says() -> None:
    assert (DOCS / "protocol.md").read_text() == make_protocol().page(), "run `make docs`"


@pytest.mark.parametrize("name", sorted(set(re.findall(NAME, TABLE + SEMANTICS))))
def test_a_name_in_the_table_of_the_paper_or_in_the_semantics_is_there(name: str) -> None:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    assert found is not None


def test_each_test_that_the_semantics_name_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SEMANTICS)
    assert len(named) >= SEMANTICS.count("\nTest: ") >= 20
    files = {path: (DOCS.parent / path).read_text() for path, _ in named}
    assert [test for path, test in named if f"\ndef {test}(" not in files[path]] == []


def test_every_row_of_the_table_of_the_paper_names_code() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 15
    assert all(re.search(r"`squall[\w.]*:[\w.]+` \|$", row) for row in rows)


def test_the_contract_names_every_argument_and_its_default() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", CONTRACT, re.DOTALL | re.MULTILINE)
    told = dict(re.findall(r"(\w+)=([\w.\"{}]+|\(\))", code.split("run = squall.fit")[0]))
    for kind in (squall.Job, squall.Downpour):
        for field in dataclasses.fields(kind):
            if field.name in ("recipe", "model", "train", "strategy", "rule"):
                continue
            assert field.name in told, f"{kind.__name__}.{field.name}"
            if field.default is not dataclasses.MISSING:
                assert told[field.name] == repr(field.default).replace("'", '"'), field.name


@pytest.mark.parametrize("other", [{"durability": "ack"}, {"device": "meta"}, {"precision": "bfloat16"}])
def test_what_the_contract_says_is_refused_of_a_cut_model_is_refused(other: dict[str, Any]) -> None:
    data = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))
    with pytest.raises(squall.SquallError, match=next(iter(other))):
        squall.fit(
            torch.nn.Linear(4, 2), data, partitions=2, cluster=squall.InProcess(), progress=False, **other
        )


def test_what_the_contract_says_is_missing_is_missing() -> None:
    missing = CONTRACT.split("Not there by name:")[1].split("## ")[0]
    names = re.findall(r"`(\w+)`", missing.split("the commands")[0])
    assert names
    assert [name for name in names if hasattr(squall, name)] == []


def test_the_contract_names_every_public_name() -> None:
    unnamed = [name for name in squall._PUBLIC if not re.search(rf"\b{name}\b", CONTRACT) and name != "Rule"]
    assert unnamed == []


def test_the_contract_names_the_ledgers_columns_in_their_order() -> None:
    from squall.observe.ledger import LEDGER_DTYPE

    assert ", ".join(LEDGER_DTYPE.names or ()) in CONTRACT


def test_the_examples_run_and_one_replica_is_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    path = DOCS.parent / "examples" / "plain_loop.py"
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(path.read_text(), path, "exec"), namespace)  # as a user would run it

    namespace["main"]()

    assert float(capsys.readouterr().out.split()[-1]) < 1e-6


def test_the_example_recipe_is_a_job() -> None:
    from squall.training.recipe import find

    job = find(f"{DOCS.parent / 'examples' / 'my_recipe.py'}:rings", [("cluster", "None"), ("epochs", "2")])
    run = squall.fit(dataclasses.replace(job, cluster=squall.InProcess(), progress=False))
    assert run.metrics["test_accuracy"] > 0.9
    assert inspect.getdoc(job.model)
