"""A ring may be deleted with those around it: what is left passes its tests in a copy, and the lab trains."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

ROOT = Path(__file__).parents[2]
FULL = "MINI_EE_FULL" in os.environ
RUN = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each).lower()]  # no package but the copy
sys.path.insert(0, sys.argv[1])
import pytest
sys.exit(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""
INNER = {"core": ("mini_ee", "weights", "tests/core", "tests/spec", "tests/golden")}
INNER["export"] = (*INNER["core"], "export", "tests/export")
TESTS = {"core": ["tests/spec", "tests/core"], "export": ["tests/export/test_ring_folders.py", "tests/export"]}


def copied(folder, paths):
    """These paths of the project in a folder, installed as pip does it: the rings below the package."""
    for path in paths:
        inside = f"mini_ee/{path}" if path in ("export", "lab", "weights") else path
        copytree(ROOT / path, folder / inside, dirs_exist_ok=True)
    (folder / "tests").mkdir(exist_ok=True)
    for name in ("tests/conftest.py", "tests/words.py", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


LAB = """
import importlib, sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each).lower()]
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from mini_ee.lab.cli.main import COMMANDS, main
for path in sorted(Path(sys.argv[1]).glob("mini_ee/lab/**/*.py")):
    if "clients" not in path.parts and path.stem.rpartition("_")[2] not in ("engine", "triton"):  # of an extra
        importlib.import_module(".".join(path.relative_to(sys.argv[1]).with_suffix("").parts))
assert not {"serve", "batch", "bench", "reproduce"} & set(COMMANDS), COMMANDS
sys.exit(main(["train", "joint", "--exits", "6,12", "--epochs", "1", "--max-train", "64", "--out", "run"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="imports the whole lab: set MINI_EE_FULL=1")
def test_the_lab_trains_without_the_server_and_the_experiments(tmp_path):
    """Every file of it is imported, and the commands that need another ring are not there."""
    folder = copied(tmp_path, ("mini_ee", "weights", "export", "lab"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-c", LAB, str(folder)]
    process = subprocess.run(code, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("ring", INNER)
def test_inner_rings_pass_their_tests_without_the_outer_ones(ring, tmp_path):
    """With MINI_EE_FULL all their tests; else the first, since each is run beside this one, and imports are fenced."""
    folder = copied(tmp_path, INNER[ring])
    tests = TESTS[ring] if FULL else TESTS[ring][:1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("MINI_EE_SLOW", None)
    process = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), *tests], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
