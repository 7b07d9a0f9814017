"""The built wheel, installed into an environment of its own, outside the repository."""

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from mini_ee import __version__

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An empty folder, and the Python of an environment that holds the wheel.

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
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("mini_ee-*.whl")
    assert __version__ in wheel.name
    venv.create(folder / "venv")
    site = Path(sysconfig.get_path("purelib", "venv", {"base": folder / "venv", "platbase": folder / "venv"}))
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "empty").mkdir()
    return folder / "empty", folder / "venv" / "bin" / "python"


def run(installed, *command):
    folder, python = installed
    done = subprocess.run([python, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_the_wheel_that_is_imported(installed):
    where = Path(run(installed, "-c", "import mini_ee; print(mini_ee.__file__)").strip())
    assert where.is_relative_to(installed[0].parent)
    assert (where.parent / "py.typed").exists()


def test_it_has_every_module_and_every_other_file(installed):
    """As they stand in the repository: a folder or a kind of file that pyproject.toml forgets is found here."""
    package = Path(run(installed, "-c", "import mini_ee; print(mini_ee.__file__)").strip()).parent
    rooms = {"mini_ee/": "", "export/": "export/", "experiments/": "experiments/", "weights/": "weights/"}
    expected = {
        inside + name.removeprefix(room)
        for name in TRACKED
        for room, inside in rooms.items()
        if name.startswith(room) and (ROOT / name).exists()
    }
    found = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert sorted(expected - found) == []


def test_a_short_demo_runs(installed):
    run(installed, "-m", "mini_ee", "demo", "--max-train", "80", "--epochs", "1", "--exits", "4,12")
    assert (installed[0] / "mini-ee-demo" / "report.md").is_file()


def test_readmes_python_runs(installed):
    train, session = re.findall(r"```python\n(import .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "layers: A charming film." in run(installed, "-c", train)
    assert re.match(r"\[array\(\[.*?\]", run(installed, "-c", session))
