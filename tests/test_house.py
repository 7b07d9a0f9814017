"""The plan of the house: what stands where, and imports that go down the floors."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (  # folders and the files at the top; what stands in one line may import each other
    ("__init__",),
    ("early_exit", "rules", "confidence", "calibration", "registry", "data"),
    ("backbones",),
    ("units", "training", "methods", "baselines"),
    ("export",),
    ("measure",),
    ("cli", "__main__"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
WITHOUT_TORCH = (
    "__init__",
    "early_exit",
    "rules",
    "confidence",
    "calibration",
    "registry",
    "data.files",
    "data.glue",
    "data.metrics",
    "data.multiple_choice",
    "data.prompts",
    "data.reviews",
    "data.tasks",
    "data.texts",
    "data.tokens",
    "backbones.flops",
    "units.decoding",
    "units.recording",
    "methods.datastore",
    "methods.index_file",
    "methods.raee",
    "export.manifest",
    "export.sessions",
    "export.row_segments",
    "export.token_segments",
    "export.runtime",
    "cli.main",
    "cli.run",
)
MODULES = [*sorted((ROOT / "mini_ee").rglob("*.py")), *sorted((ROOT / "export").glob("*.py"))]


def name_of(path):
    """As it is imported, after `mini_ee.`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "export" else parts[1:])


def room_of(name):
    return name.split(".")[0]


def imported(path, inside=True):
    """Names of the modules that a file imports; `inside` its functions too."""
    tree = ast.parse(path.read_text())
    names = set(map(name_of, MODULES))
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            package = node.module.removeprefix("mini_ee").lstrip(".")
            for alias in node.names:
                if f"{package}.{alias.name}".lstrip(".") in names:
                    yield f"{node.module}.{alias.name}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_the_floors(path):
    for name in imported(path):
        if name.startswith("mini_ee."):
            room, own = room_of(name.removeprefix("mini_ee.")), room_of(name_of(path))
            assert FLOOR[room] <= FLOOR[own], f"{name_of(path)} imports {name}, which is above it"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_torch_free_floor_imports_no_torch(name):
    (path,) = [path for path in MODULES if name_of(path) == name]
    assert not [name for name in imported(path, inside=False) if name.split(".")[0] in ("torch", "safetensors")]


def test_there_are_no_circles():
    names = set(map(name_of, MODULES))
    graph = {name_of(path): {name.removeprefix("mini_ee.") for name in imported(path)} & names for path in MODULES}
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
    assert ast.get_docstring(tree) or not source
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"
