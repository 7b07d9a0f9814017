"""The plan of the house: what stands where, and imports that go down the floors."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    ("__init__", "shapes", "metrics", "confidence", "files", "flops"),
    ("bert", "decoder"),
    ("checkpoint", "reviews", "tasks", "prompts", "multiple_choice"),
    ("rules", "early_exit", "exits", "evaluation", "fitting", "policies", "decoding", "generation"),
    (
        "baselines",
        "calibration",
        "encoders",
        "multi_model",
        "prompting",
        "lora_exits",
        "reinforce",
        "retrieval",
        "self_supervised",
        "sgmv",
        "sgmv_triton",
        "segd",
        "decoder_exits",
        "decoder_policies",
        "calm",
        "writing",
    ),
    ("methods", "runs", "training"),
    (
        "export.__init__",
        "export.graphs",
        "export.decoder_graphs",
        "export.causal_graphs",
        "export.runtime",
        "export.segments",
        "export.decoder_runtime",
        "export.decoder_segments",
    ),
    (
        "report",
        "decoder_evaluation",
        "decoder_commands",
        "writing_commands",
        "demo",
        "bench",
        "arguments",
        "comparing",
        "commands",
        "serve",
        "__main__",
    ),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WITHOUT_TORCH = (
    "__init__",
    "metrics",
    "confidence",
    "files",
    "flops",
    "rules",
    "early_exit",
    "decoding",
    "tasks",
    "prompts",
    "reviews",
    "retrieval",
    "calibration",
    "export.runtime",
    "export.decoder_runtime",
    "serve",
)
MODULES = [*sorted((ROOT / "mini_ee").glob("*.py")), *sorted((ROOT / "export").glob("*.py"))]


def name_of(path):
    """As it stands in FLOORS and after `mini_ee.`."""
    return f"export.{path.stem}" if path.parent.name == "export" else path.stem


def imported(path, inside=True):
    """Names of the modules that a file imports; `inside` its functions too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            if node.module == "mini_ee":
                yield from (f"mini_ee.{alias.name}" for alias in node.names if alias.name in FLOOR)
            if node.module == "mini_ee.export":
                yield from (f"mini_ee.export.{alias.name}" for alias in node.names)


def test_every_module_has_its_floor():
    assert set(map(name_of, MODULES)) == set(FLOOR)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_the_floors(path):
    for name in imported(path):
        if name.startswith("mini_ee."):
            below = name.removeprefix("mini_ee.")
            if below != "export":
                assert FLOOR[below] <= FLOOR[name_of(path)], f"{path.name} imports {name}, which is above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_loop_its_rules_and_the_tasks_import_no_torch(path):
    if name_of(path) in WITHOUT_TORCH:
        assert not [name for name in imported(path, inside=False) if name.split(".")[0] in ("torch", "safetensors")]


def test_there_are_no_circles():
    graph = {name_of(path): {name.removeprefix("mini_ee.") for name in imported(path)} & set(FLOOR) for path in MODULES}
    done = set()
    while len(done) < len(graph):
        ready = {name for name in graph if name not in done and graph[name] <= done}
        assert ready, f"these import each other: {sorted(set(graph) - done)}"
        done |= ready


def test_the_top_level_is_the_one_in_the_design():
    planned = {
        "pyproject.toml",
        "README.md",
        "tutorial.md",
        "LICENSE",
        "mini_ee",
        "export",
        "weights",
        "tests",
    }
    import subprocess

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    found = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert found - planned <= {".ci", ".gitignore"}


@pytest.mark.parametrize("page", ["README.md", "tutorial.md", "weights/README.md"])
def test_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:mini_ee|tests|weights|export)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page} names {name}"


def test_the_package_ships_nothing_above_20_megabytes():
    assert all(path.stat().st_size < 20e6 for path in (ROOT / "weights").rglob("*") if path.is_file())


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "weights").glob("*.py"))], ids=name_of)
def test_nothing_is_unpickled_and_public_things_are_explained(path):
    source = path.read_text()
    assert not re.search(r"\bpickle|torch\.load\(|strict=False|TODO|FIXME", source)
    tree = ast.parse(source)
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
