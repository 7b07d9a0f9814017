"""The size of the core, and what it imports. Its equations: tests/spec; its models: test_core_models.py."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "mini_ee"
PACKAGE = "mini_ee"
PAPERS = ("lora_exits", "self_supervised", "raee", "consistent")
FILES = {"__init__", "__main__", "loop", "rules", "bert", "llama", "load", "data", "train", "calibrate", *PAPERS}
LIBRARIES = {"torch", "numpy", "tokenizers", "safetensors", "tqdm"}  # besides the standard library
OF_FUNCTIONS = {"raee": {"hnswlib"}, "train": {"matplotlib.figure", "mini_ee.export.writer"}}
MOST_LINES, MOST_LINES_OF_A_PAPER = 2600, 1300


def imported(name, inside=False):
    """The modules that a file imports: at its head, or with `inside` in its functions too."""
    tree = ast.parse((CORE / f"{name}.py").read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def lines(name):
    return len((CORE / f"{name}.py").read_text().splitlines())


def with_all_it_imports(name):
    """The files of the core that a file loads, in its functions too."""
    loaded, new = {"__init__"}, [name]
    while new:
        loaded.add(name := new.pop())
        inner = (
            module.removeprefix(f"{PACKAGE}.")
            for module in imported(name, inside=True)
            if module.removeprefix(f"{PACKAGE}.") in FILES
        )
        new += [other for other in inner if other not in loaded]
    return loaded


def test_the_core_is_fourteen_files_of_at_most_2600_lines():
    assert {path.stem for path in CORE.glob("*.py")} == FILES
    assert sum(map(lines, FILES)) <= MOST_LINES


@pytest.mark.parametrize("name", sorted(FILES - {"__main__"}))
def test_a_file_imports_the_core_and_its_libraries_alone(name):
    """But __main__.py, with which `python -m mini_ee` is the command of the lab."""
    allowed = LIBRARIES | sys.stdlib_module_names
    for inside, more in ((False, set()), (True, OF_FUNCTIONS.get(name, set()))):
        for module in imported(name, inside):
            inner = module.removeprefix(f"{PACKAGE}.") in FILES
            assert inner or module in more or module.split(".")[0] in allowed, f"{name} imports {module}"


@pytest.mark.parametrize("name", ["loop", "rules", "calibrate"])
def test_the_loop_the_rules_and_the_guarantees_need_no_torch(name):
    for other in with_all_it_imports(name):
        assert not {"torch", "safetensors", "tokenizers"} & set(imported(other))


def test_raee_chooses_exits_without_torch():
    """As a served model does: its equations and its rule are imported."""
    code = "import sys; from mini_ee.raee import Retrieval, chosen_exit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_with_all_that_it_imports_has_at_most_1300_lines(paper):
    """Papers do not import each other. The export of --out is not a part of it."""
    files = with_all_it_imports(paper)
    assert not files & set(PAPERS) - {paper}
    assert sum(map(lines, files)) <= MOST_LINES_OF_A_PAPER


def test_a_papers_head_names_tests_that_are_there():
    folders = (CORE.parent / "tests" / name for name in ("spec", "core"))
    tests = " ".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    for paper in PAPERS:
        head = ast.get_docstring(ast.parse((CORE / f"{paper}.py").read_text()))
        named = {word.strip("().,:;") for word in head.split() if word.strip("(").startswith("test_")}
        named = {name.removesuffix("_...").rstrip(".") for name in named if not name.endswith("py")}
        assert named and all(f"def {name}" in tests for name in named), (paper, named)
