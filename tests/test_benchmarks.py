"""Tests of benchmarks/simulated: the page of staleness holds what the results say.

Faults planted by hand, each seen to fail a test: a figure changed in the page · a result replaced and the page not filled.
"""

import re

import pytest

from benchmarks.simulated import page


def test_the_tables_of_the_page_are_those_of_the_newest_results() -> None:
    text = page.PAGE.read_text()
    assert page.filled(text) == text, "run `python -m benchmarks.simulated page`"


@pytest.mark.parametrize("name", page.TABLES)
def test_each_experiment_is_told_with_its_figures(name: str) -> None:
    told = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", page.PAGE.read_text(), re.DOTALL)
    assert told is not None
    assert len(re.findall(r"^\|", told[1], re.MULTILINE)) > 3


def test_each_figure_of_the_page_is_there() -> None:
    figures = re.findall(r"\]\((figures/\S+)\)", page.PAGE.read_text())
    assert len(figures) == 4
    assert all((page.PAGE.parent / figure).stat().st_size < 300_000 for figure in figures)
