"""tutorial.md is made from the scripts in tutorial/, and each of them runs alone.

The scripts run with small trainings, in which numbers mean nothing; with MINI_EE_FULL=1 they run as readers run them,
and print what the page shows, up to differences between machines.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mini_ee.lab.registry import METHODS

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs"))
import make_tutorial  # noqa: E402

FULL = bool(os.environ.get("MINI_EE_FULL"))
SCRIPTS = [path for path in (*make_tutorial.chapters(), *make_tutorial.appendix()) if path.suffix == ".py"]
MADE_AGAIN = "make it again: python docs/make_tutorial.py"
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e-?\d+)?")
TIMED = re.compile(r"milliseconds|\bms\b|seconds|times as fast|speed-up|per second")  # lines with measured times
NEAR, NEAR_SHARE = 0.12, 0.25
"""How far the training of another machine may be: differently rounded ones differed by .07 and by a fifth."""


def near(printed, expected):
    """Equal words, and numbers that differ by no more than a training that was rounded differently."""
    lines = [text.strip().splitlines() for text in (printed, expected)]
    if len(lines[0]) != len(lines[1]):
        return False
    for line, wanted in zip(*lines):
        words = [[part.split() for part in NUMBER.split(text)] for text in (line, wanted)]
        numbers = zip(*(map(float, NUMBER.findall(text)) for text in (line, wanted)))
        close = all(abs(a - b) <= max(NEAR, NEAR_SHARE * abs(b)) for a, b in numbers)
        if words[0] != words[1] or not (close or TIMED.search(line)):
            return False
    return True


SHORT = ("01",)  # the chapter that CI has the time for; the others are long even with --quick


def pictures_of(text):
    return set(re.findall(r"\(docs/pictures/([\w-]+\.png)\)", text))


def exercises_of(script):
    names = [node.name for node in ast.parse(script).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name.removeprefix("check_") for name in names if name.startswith("check_")]


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_chapter_runs_alone_and_its_exercises_can_be_solved(path, tmp_path):
    if not FULL and path.stem[:2] not in SHORT:
        pytest.skip("too long for CI: set MINI_EE_FULL=1")
    script, last = path.read_text(), make_tutorial.last_run(path)
    ran = make_tutorial.execute(path, tmp_path, *([] if FULL else ["--quick"]))
    assert ran["solved"] == exercises_of(script)
    assert pictures_of(script) == {picture.name for picture in tmp_path.glob("*.png")}
    for printed, shown in zip(ran["printed"], last["printed"], strict=True):
        assert near(printed, shown) if FULL else bool(printed) == bool(shown), f"{printed}\nbut the page says\n{shown}"


@pytest.mark.slow
def test_a_chapter_is_a_script(tmp_path):
    environment = os.environ | {"MINI_EE_PICTURES": str(tmp_path)}
    command = [sys.executable, "tutorial/01_loop.py"]
    printed = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed == "".join(make_tutorial.last_run(SCRIPTS[0])["printed"])


def test_the_page_is_what_its_command_makes():
    assert make_tutorial.page() == make_tutorial.PAGE.read_text(), MADE_AGAIN


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_is_shown_was_printed_by_this_code(path):
    script, last = path.read_text(), make_tutorial.last_run(path)
    assert make_tutorial.digest_of(script) == last["code"], f"the code has changed: {MADE_AGAIN} --run {path.stem[:2]}"
    assert make_tutorial.with_times(script, last["seconds"]) == script, MADE_AGAIN


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_chapter_has_minutes_exercises_and_solutions(path):
    script, solutions = path.read_text(), ast.parse((path.parent / "solutions" / path.name).read_text())
    assert make_tutorial.head_of(path)[1] > 0
    exercises = exercises_of(script)
    assert 1 <= len(exercises) == script.count("FILL ME IN")
    assert set(exercises) <= {getattr(node, "name", None) for node in solutions.body}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_has_the_cells_of_its_script(path):
    jupytext = pytest.importorskip("jupytext", reason="notebooks are made with jupytext: pip install -e '.[docs]'")
    notebook = jupytext.reads(make_tutorial.notebook_of(path), fmt="ipynb")
    cells = make_tutorial.cells_of(path.read_text())
    assert [(cell.cell_type == "code") for cell in notebook.cells] == [cell.is_code for cell in cells]
    for cell, (is_code, text, _) in zip(notebook.cells, cells):
        assert cell.source == text if is_code else "{code}" not in cell.source
        prose = "" if is_code else re.sub(r"^```.*?^```", "", cell.source, flags=re.M | re.S)
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", prose):
            assert (path.parent / link).exists(), link


def test_every_picture_is_shown_and_every_shown_one_is_there():
    text = "".join(path.read_text() for path in (ROOT / "README.md", make_tutorial.PAGE))
    assert pictures_of(text) == {path.name for path in make_tutorial.PICTURES.glob("*.png")}


def test_the_map_of_the_field_has_every_method():
    files = set(re.findall(r"^\| \[[^]]*\]\(([^)]*)\)", (ROOT / "tutorial" / "d_field.md").read_text(), re.M))
    assert {f"{module.removeprefix('mini_ee.').replace('.', '/')}.py" for module in METHODS.values()} <= files


@pytest.mark.parametrize(
    ("printed", "expected"),
    [("1", "2"), ("layer 1", "exit 1"), ("1 2", "1"), ("1\n2", "1"), ("in 1 ms", "in 9 seconds"), ("", "1")],
)
def test_other_words_numbers_and_lines_are_not_near(printed, expected):
    assert not near(printed, expected)
    assert near(expected, expected) and near("0.70 in 3 ms", "0.75 in 9 ms")


@pytest.mark.parametrize("cell", ["1 / 0", "def f(): ...\n\n\ndef check_f():\n    f()\n"])
def test_an_error_and_a_check_that_accepts_anything_end_the_run(cell, tmp_path):
    (tmp_path / "chapter.py").write_text(f"# %%\n{cell}\n")
    with pytest.raises(subprocess.CalledProcessError):
        make_tutorial.execute(tmp_path / "chapter.py", tmp_path)


def test_code_that_is_shown_has_to_exist():
    assert make_tutorial.source_of("mini_ee/rules.py", "Rule.plan").startswith("def plan(self")
    with pytest.raises(ValueError, match="no Ruler"):
        make_tutorial.source_of("mini_ee/rules.py", "Ruler")
