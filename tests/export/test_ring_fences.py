"""The size of the ring export/, and what it imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "export").rglob("*.py"))
CORE = {path.stem for path in (ROOT / "mini_ee").glob("*.py")}
LIBRARIES = {"numpy", "onnx", "onnxruntime", "torch", "tokenizers", "safetensors"} | sys.stdlib_module_names
MOST_LINES = 900


def imported(path):
    """The modules that a file imports, in its functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_the_ring_has_at_most_900_lines():
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= MOST_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_the_core_the_ring_and_its_libraries_alone(path):
    for module in imported(path):
        package, _, rest = module.partition(".")
        inner = package == "mini_ee" and (rest in CORE | {""} or rest.startswith("export."))
        assert inner or package in LIBRARIES, f"{path.name} imports {module}"


def test_only_out_of_a_script_imports_the_ring_into_the_core():
    """In a function; test_core_fences.py allows no such import at a head."""
    imports = {path.stem: list(imported(path)) for path in (ROOT / "mini_ee").glob("*.py")}
    inside = {
        name: [module for module in modules if module.startswith("mini_ee.export")] for name, modules in imports.items()
    }
    assert {name: modules for name, modules in inside.items() if modules} == {"train": ["mini_ee.export.writer"]}


def test_the_runtime_needs_no_torch(tmp_path):
    """A process in which torch, safetensors and the lab cannot be imported classifies texts."""
    from small_models import median_threshold, model_of, rows_of

    from mini_ee.export.writer import export

    export(tmp_path / "out", model_of("joint"), median_threshold("joint", "entropy"), rows_of("joint"), "bert")
    code = """
import sys
for name in ("torch", "safetensors", "onnx", "mini_ee.lab", "hnswlib"):
    sys.modules[name] = None
from mini_ee.export.runtime import Runtime
answers = Runtime(sys.argv[1], threads=1).run(["A warm and funny film.", "Dull."])
print(*[(each.label, each.exit) for each in answers])
"""
    line = [sys.executable, "-c", code, str(tmp_path / "out")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(") == 2
