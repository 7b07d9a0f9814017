"""Pages of results are filled in from records: a figure without a record is an error."""

import math
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
