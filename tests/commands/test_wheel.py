"""The built wheel, installed into an environment of its own, outside the repository."""

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from mini_ee import __version__

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An empty folder, and the Python of an environment that contains the wheel.

    The wheel is built from a copy of the tracked files. Its dependencies are those of the present environment: their
    folder is on the path, but .pth files in it are not followed, so the editable installation is not seen.
    """
    if not TRACKED:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("wheel")
    for name in TRACKED:
        if not name.startswith(("results/", "tests/")) and (ROOT / name).exists():
            (copy := folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "source", check=True, capture_output=True)
    (wheel,) = folder.glob("mini_ee-*.whl")
    assert __version__ in wheel.name
    venv.create(folder / "venv")
    site = Path(sysconfig.get_path("purelib", "venv", {"base": folder / "venv", "platbase": folder / "venv"}))
    zipfile.ZipFile(wheel).extractall(site)
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    (folder / "empty").mkdir()
    return folder / "empty", folder / "venv" / "bin" / "python"


def run(installed, source):
    folder, python = installed
    done = subprocess.run([python, "-c", source], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_every_module_and_every_other_file(installed):
    """As in the repository: a folder or a kind of file that pyproject.toml forgets is found here."""
    source = "from importlib.util import find_spec; print(find_spec('mini_ee').origin)"
    package = Path(run(installed, source).strip()).parent
    assert package.is_relative_to(installed[0].parent)
    folders = {
        "mini_ee/": "",
        "core/": "core/",
        "export/": "export/",
        "experiments/": "experiments/",
        "weights/": "weights/",
    }
    expected = {
        inside + name.removeprefix(folder)
        for name in TRACKED
        for folder, inside in folders.items()
        if name.startswith(folder) and (ROOT / name).exists()
    }
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert sorted(expected - found) == []


def test_readmes_python_and_the_demo_run(installed, checkpoint_folder, task_folder):
    """In one process, with fewer examples to train on and to test the default rule, which is one of fewer; the demo on
    a small model."""
    train, session = re.findall(r"```python\n(import .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    fewer = "from mini_ee.training import default_rule, holdout\nholdout.TEST_ROWS, default_rule.CANDIDATES = 20, 5\n"
    argv = ["demo", "--model", str(checkpoint_folder), "--task", str(task_folder), "--epochs", "1"]
    demo = f"from mini_ee.cli.main import main\nmain({argv!r})\n"
    printed = run(installed, fewer + train.replace("max_train=600", "max_train=20") + session + demo)
    assert "layers: A charming film." in printed and re.search(r"^\[array\(\[.*?\]", printed, re.M)
    assert "Report: mini-ee-demo/report.md\n" in printed and (installed[0] / "mini-ee-demo" / "report.md").is_file()
