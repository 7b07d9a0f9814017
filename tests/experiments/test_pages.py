"""Pages of results are filled in from records: a figure without a record is an error."""

import math
import re
from pathlib import Path

import pytest

from mini_ee.experiments.measured import MEASURED, page_figures
from mini_ee.experiments.pages import fill_in, page_of
from mini_ee.lab.data.files import read_json
from mini_ee.lab.errors import WrongArguments

RESULTS = Path(__file__).parents[2] / "results"


def test_a_template_is_filled_in():
    text = "{{ saved | percent }} saved, {{ more | points }} points\n\n{{ rows | table('method', 'saved') }}\n"
    figures = {"saved": 0.551, "more": 0.0192, "rows": [("joint", "55.1%")]}
    expected = "55.1% saved, +1.9 points\n\n| method | saved |\n|---|---|\n| joint | 55.1% |\n"
    assert fill_in(text, figures, "page.md") == expected


@pytest.mark.parametrize("template", ["{{ x }}", "{{ x | percent }}", "{{ known.x }}", "{{ [[x]] | table('x') }}"])
@pytest.mark.parametrize("figures", [{}, {"x": None}, {"x": math.nan}], ids=["missing", "none", "nan"])
def test_a_figure_without_a_record_is_an_error(template, figures):
    with pytest.raises(WrongArguments, match="page.md: a figure has no record"):
        fill_in(template, {"known": {}} | figures, "page.md")


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_page_is_made_of_its_json(name):
    made = page_of(name, page_figures(name, read_json(RESULTS / f"{name}.json")))
    assert made == (RESULTS / f"{name}.md").read_text(), f"write the page anew: mini-ee reproduce {name}"


def test_the_program_of_a_power_calculation_prints_what_the_page_says(capsys):
    page = (RESULTS / "guarantees.md").read_text().partition("## How many texts?")[2]
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in line.split("|")] for line in re.findall(r"^\| (\d.*) \|$", page, re.M)]
    of_page = {row[0].replace(",", ""): [row[1], row[4]] for row in rows}
    assert printed[0] == ["298", "-1", "0%"] and len(printed) == 6  # one text fewer than the page's 299 is too few
    assert [of_page[texts] for texts, *_ in printed[1:]] == [values for _, *values in printed[1:]]
