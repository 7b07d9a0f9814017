"""The core and its export need nothing else of the project: their tests pass in a copy without the other rings."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[2]
RUN = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each).lower()]  # no package but the copy
sys.path.insert(0, sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "tests/core", "tests/spec", *sys.argv[2:]]))
"""
INNER = {"core": ("mini_ee", "weights", "tests/core", "tests/spec", "tests/golden")}
INNER["export"] = (*INNER["core"], "export", "tests/export")


def copied(folder, paths):
    """These paths of the project in a folder, installed as pip does it: the rings below the package."""
    for path in paths:
        inside = f"mini_ee/{path}" if path in ("export", "weights") else path
        copytree(ROOT / path, folder / inside, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for name in ("tests/conftest.py", "tests/words.py", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ring", INNER)
def test_inner_rings_pass_their_tests_without_the_outer_ones(ring, tmp_path):
    folder = copied(tmp_path, INNER[ring])
    tests = ["tests/export"] if ring == "export" else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("MINI_EE_SLOW", None)
    found = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), *tests], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
