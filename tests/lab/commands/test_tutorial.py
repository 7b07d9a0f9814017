"""tutorial.ipynb, which is made from tutorial.md, runs from top to bottom and prints what it shows.

docs/run_tutorial.py says how output is compared. Here commands run in this process, and the trainings of the shell are
small: so their output is compared in words (`text part`). No compared number depends on them.
"""

import ast
import builtins
import json
import re
import sys
from pathlib import Path

import pytest

from mini_ee.lab.export import writer
from mini_ee.lab.registry import METHODS
from mini_ee.lab.training import holdout, train_embeddings, train_rows, train_run, training_text

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs"))
import run_tutorial  # noqa: E402

TEXT, NOTEBOOK = (ROOT / "tutorial.md").read_text(), json.loads((ROOT / "tutorial.ipynb").read_text())
BLOCKS = run_tutorial.blocks_of(TEXT)
NUMBERED = [section for section in dict.fromkeys(block.section for block in BLOCKS) if section[0].isdigit()]
SMALL = {  # beginning of a command -> options that make it small; the last of equal options counts
    "mini-ee train two-stage --exits 12": "--max-train 40 --epochs 3",  # its predictions must differ
    "mini-ee train two-stage": "--max-train 20 --epochs 1",
    "mini-ee train lora-exits": "--max-train 16 --epochs 1",
    "mini-ee train self-supervised": "--texts 6 --new-tokens 12 --epochs 1",
    "mini-ee train consistent": "--max-train 16 --epochs 1 --policy-epochs 1",
    "mini-ee train embedding-maps": "--max-train 60 --epochs 1",
    "mini-ee calibrate": "--texts 8 --new-tokens 12",
    "mini-ee evaluate": "--max-rows 4",
    "mini-ee compare": "--max-rows 4",
}
SMALL_METHODS = {"doubt": {"max_train": 16, "epochs": 1}}  # trained in Python: settings that are replaced
FEWER = (  # section, what its blocks contain, what is run instead; no compared number depends on it
    ("5", "slice(400)", "slice(64)"),
    ("6", "prompts, 32, 16,", "prompts, 8, 12,"),
    ("7", "length, confident = 40,", "length, confident = 12,"),
    ("8", "slice(400)", "slice(40)"),
    ("9", "recorded = record(consistent", "dev = dev.take(slice(40)); recorded = record(consistent"),
    ("14", "slice(400)", "slice(40)"),
)
TEST_ROWS, ADDED_TEXTS, HELD_PIECES, ROUNDED_TEXTS = 60, 200, 4, 16
DRAWN = {"add-exits.png"}  # not drawn if exits do not pay


def small(command, folder):
    """Run a command of the shell, with less training than the page shows."""
    if command.startswith("mini-ee add-exits"):
        texts = folder / "inputs.txt"
        texts.write_text("\n".join(texts.read_text().split("\n")[:ADDED_TEXTS]))
    more = next((options for begin, options in SMALL.items() if begin in command), "")
    return run_tutorial.in_process(f"{command} {more}".strip(), folder)


@pytest.fixture(autouse=True)
def less_training(monkeypatch):
    """Few examples test the default rules. The module that a section is, which run_page sets, is removed at the end."""
    as_shown = train_run.train

    def train(method, *args, **settings):
        return as_shown(method, *args, **settings | SMALL_METHODS.get(method, {}))

    def parts(*args):
        found = holdout.split_rows(*args)
        return found._replace(test=found.test.take(slice(TEST_ROWS)))

    monkeypatch.setattr(train_run, "train", train)
    monkeypatch.setattr(training_text, "HELD_PIECES", HELD_PIECES)
    monkeypatch.setattr(writer, "ROUNDED_TEXTS", ROUNDED_TEXTS)
    for unit in (train_rows, train_embeddings):
        monkeypatch.setattr(unit, "split_rows", parts)
    monkeypatch.setitem(sys.modules, "tutorial", None)


def fewer(page):
    """The page with less to compute in sections whose trainings are small."""
    for section, shown, instead in FEWER:
        before, begin, text = re.split(rf"^(## {section}\. )", page, maxsplit=1, flags=re.M)
        text, end, after = re.split(r"^(## )", text, maxsplit=1, flags=re.M)
        assert shown in text, (section, shown)
        page = "".join((before, begin, text.replace(shown, instead), end, after))
    return page


def run(page, folder):
    return run_tutorial.run_page(run_tutorial.blocks_of(page), folder / "page.md", folder, small)


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(METHODS, "doubt", "tutorial")  # section 14 adds it; no later test may find it
    run(fewer(run_tutorial.page_of(NOTEBOOK)), tmp_path)
    shown = set(re.findall(r"\(docs/pictures/([\w-]+\.png)\)", TEXT))
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert shown - drawn <= DRAWN and drawn <= shown, shown ^ drawn
    assert all((run_tutorial.PICTURES / name).is_file() for name in shown)


def test_the_notebook_has_the_lines_of_the_tutorial():
    lines = [[line for line in text.splitlines() if line.strip()] for text in (run_tutorial.page_of(NOTEBOOK), TEXT)]
    assert lines[0] == lines[1], "make it again: python docs/make_notebook.py"


def test_the_notebook_is_what_its_command_makes():
    pytest.importorskip("jupytext", reason="the notebook is made with jupytext: pip install -e '.[docs]'")
    from make_notebook import notebook_of

    assert notebook_of(TEXT) == (ROOT / "tutorial.ipynb").read_text(), "make it again: python docs/make_notebook.py"


def test_every_section_has_a_box_exercises_and_a_conclusion():
    sections = {text.split("\n")[0]: text for text in re.split(r"^## ", TEXT, flags=re.M)[1:]}
    assert len(NUMBERED) == 14 and list(sections)[-1] == "Glossary"
    for name in NUMBERED:
        text = sections[name]
        assert text.split("\n\n")[1].startswith("> **You will learn**"), name
        assert "![" in text and "### Exercises" in text and "**Easy.**" in text, name
        assert text.strip().split("\n\n")[-1].startswith("**What we found.**") and "**When to use" in " ".join(
            text.split()
        ), name
        assert (
            text.count("<details>")
            == text.count("</details>")
            == len(re.findall(r"^\*\*(?:Easy|Medium|Hard)\.\*\*", text, re.M))
        ), name


def test_every_task_to_fill_in_has_a_solution_that_runs():
    for name in NUMBERED:
        sources = [block.source for block in BLOCKS if block.section == name and block.kind == "python"]
        tasks = sum("FILL ME IN" in source for source in sources)
        assert tasks == sum(source.endswith("\ncheck()\n") for source in sources) <= 1, name
    assert sum("FILL ME IN" in block.source for block in BLOCKS) >= 8


def names_of(source):
    """(names that a block binds, names that it reads), at any depth."""
    bound, read = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return bound, read


@pytest.mark.parametrize("section", NUMBERED)
def test_a_section_starts_by_itself(section):
    known = {*dir(builtins), "__name__"}
    for block in BLOCKS:
        if block.section == section and block.kind == "python":
            bound, read = names_of(block.source)
            known |= bound
            assert read <= known, f"line {block.line}: {sorted(read - known)}"


def test_the_table_of_section_10_has_every_method():
    section = TEXT.split("\n## 10. ")[1].split("\n## 11. ")[0]
    files = set(re.findall(r"^\| \[[^]]*\]\(([^)]*)\)", section, re.M))
    assert {f"{module.removeprefix('mini_ee.').replace('.', '/')}.py" for module in METHODS.values()} <= files


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1)\n```\n```text\n2\n```",
        "```python\nprint(1)\n```\n```text about\n2\n```",
        "```python\nprint('layer 1')\n```\n```text about\nexit 1\n```",
        "```python\nprint('1 2')\n```\n```text about\n1\n```",
        "```python\nprint('layer 1')\n```\n```text part\nexit 1\n```",
        "```bash\necho one; echo two\n```\n```text part\ntwo\none\n```",
        "```python\n1 / 0\n```",
        "```python\nx = 1\n```\n## Next\n```python\nx\n```",
        "```bash\nfalse\n```",
        "```bash\n[ -d missing ] || false\n```",
        "```python\ndef check():  # FILL ME IN\n    pass\n```",
    ],
)
def test_a_page_that_does_not_run_as_it_shows_is_refused(tmp_path, page):
    with pytest.raises((AssertionError, ZeroDivisionError, NameError)):
        run(page + "\n", tmp_path)


def test_numbers_of_a_training_may_be_near_and_lines_left_out(tmp_path):
    run("```python\nprint('accuracy 0.82, 8.8 of 12')\n```\n```text about\naccuracy 0.80, 9.1 of 12\n```\n", tmp_path)
    run("```bash\necho layer 3; echo; echo run 1\n```\n```text part\nlayer 9\n...\nrun 2\n```\n", tmp_path)
