"""`squall plan`: a recipe's model told, drawn and kept."""

import json
from pathlib import Path

import pytest

import squall
from tests.cli.test_app import squall_


def test_a_recipes_plan_is_told_drawn_and_kept(tmp_path: Path) -> None:
    svg, kept = tmp_path / "plan.svg", tmp_path / "plan.json"
    told = squall_("plan", "digits", "--partitions", 2, "--how", "vertical", "--svg", svg, "--out", kept)
    assert told.code == 0
    assert told.out.startswith("a plan over 2 partitions (vertical)")
    assert "0 to 1" in told.out
    assert svg.read_text().startswith("<svg")
    assert squall.Plan.load(kept).partitions == 2


def test_with_json_the_last_line_is_one_object(tmp_path: Path) -> None:
    told = squall_("plan", "digits", "--partitions", 3, "--how", "1,2", "--json")
    assert told.code == 0
    figures = json.loads(told.out.strip().split("\n")[-1])
    assert figures["how"] == "mixed 1+2"
    assert len(figures["predicted"]["memory_bytes"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [("nothing", "--partitions", 2), ("digits", "--how", "diagonal"), ("digits", "--partitions", 0)],
)
def test_a_wrong_request_is_exit_code_2(arguments: tuple[object, ...]) -> None:
    assert squall_("plan", *arguments).code == 2
