"""The built wheel, installed into an environment of its own, outside the repository."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import mini_ee
from mini_ee import __version__
from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.rules import Fixed, Threshold

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
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
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # two threads would wait for the cores of the tests beside it
    done = subprocess.run([python, "-c", source], cwd=folder, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_every_module_and_every_other_file(installed):
    """As in the repository: a folder or a kind of file that pyproject.toml forgets is found here."""
    source = "from importlib.util import find_spec; print(find_spec('mini_ee').origin)"
    package = Path(run(installed, source).strip()).parent
    assert package.is_relative_to(installed[0].parent)
    folders = {
        "mini_ee/": "",
        "export/": "export/",
        "lab/": "lab/",
        "serve/": "serve/",
        "experiments/": "experiments/",
        "weights/": "weights/",
    }
    expected = {
        inside + name.removeprefix(folder)
        for name in TRACKED
        for folder, inside in folders.items()
        if name.startswith(folder) and (ROOT / name).exists()
    }
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert sorted(expected - files) == []


README = (ROOT / "README.md").read_text()
(PYTHON,) = re.findall(r"```python\n(import .*?)```", README, re.DOTALL)
(CLIENT,) = re.findall(r"```python\n(import numpy .*?)```", (ROOT / "export" / "README.md").read_text(), re.DOTALL)
QUICK = """
from mini_ee.lab.training import default_rule, holdout
holdout.TEST_ROWS, default_rule.CANDIDATES = 200, 10
import mini_ee
mini_ee.train("joint", out="mini-ee-demo/run", exits=(2, 7, 12), max_train=1200, epochs=1, batch_size=8)
"""


def exits_in(printed):
    """The layers that README's block prints: of the demo's rule, of its threshold; and those of the page's client."""
    by_rule = [int(layers) for layers in re.findall(r" after (\d+) layers: ", printed)]
    by_threshold = re.search(r"^\[([ \d]+)\] layers with a threshold", printed, re.M)
    by_client = re.findall(r"^\[array\(.*array\(\[(\d+)\]", printed, re.M)
    return by_rule, by_threshold and [int(layers) for layers in by_threshold[1].split()], [*map(int, by_client)]


@pytest.mark.skipif("MINI_EE_FULL" not in os.environ, reason="trains a BERT of 12 layers: set MINI_EE_FULL=1")
def test_readmes_python_exits_early(installed):
    """As it stands, on a run that takes a tenth of the time of the demo's."""
    printed = run(installed, QUICK + PYTHON + CLIENT)
    by_rule, by_threshold, by_client = exits_in(printed)
    assert len(by_rule) == len(by_threshold) == len(by_client) == 2, printed
    assert all(len(set(layers)) > 1 for layers in (by_rule, by_threshold, by_client)), printed
    for name in ("mini-ee-demo", "exported"):
        shutil.rmtree(installed[0] / name)


@pytest.mark.skipif("MINI_EE_FULL" not in os.environ, reason="the demo takes two minutes: set MINI_EE_FULL=1")
def test_readmes_python_prints_what_it_shows_on_the_demos_run(installed, tmp_path):
    demo = "from mini_ee.lab.cli.main import main\nmain(['demo'])\n"
    printed = run((tmp_path, installed[1]), demo + PYTHON + CLIENT)
    shown = re.search(r"```text\n(positive .*?)```", README, re.DOTALL)[1]
    assert exits_in(printed)[:2] == exits_in(shown)[:2] and shown in printed
    plain, doubly = (re.search(rf"^{kind} .* (\S+)$", printed, re.M)[1] for kind in ("plain", "doubly negated"))
    assert f"after {float(plain):.1f} layers" in README and f"after {float(doubly):.1f} layers" in README


def test_the_pages_client_runs_a_distilbert_which_has_no_token_types(
    installed, checkpoint_folder, task_folder, tmp_path
):
    """Its threshold is between the confidences of the two texts at the first exit, so that one of them exits there."""
    save_backbone(load_backbone(ROOT / "tests" / "golden" / "distilbert").without_heads(), tmp_path / "checkpoint")
    Tokenizer.from_folder(checkpoint_folder, None).save_beside_model(tmp_path / "checkpoint")
    with torch.enable_grad():
        trained = mini_ee.train("joint", tmp_path / "checkpoint", task_folder, tmp_path / "run", epochs=1)
    texts = re.findall(r'"([^"]+\.)"', CLIENT)
    first = trained._replace(rule=Fixed(0)).classify(texts)
    between = np.mean([answer.confidence for answer in first])
    mini_ee.export(trained._replace(rule=Threshold(between)), tmp_path / "exported")
    by_client = exits_in(run((tmp_path, installed[1]), CLIENT))[2]
    assert len(by_client) == len(set(by_client)) == len(texts) == 2 and min(by_client) == 1


def test_the_demo_runs_and_then_readmes_python(installed, checkpoint_folder, task_folder):
    argv = ["demo", "--model", str(checkpoint_folder), "--task", str(task_folder), "--epochs", "1"]
    printed = run(installed, f"from mini_ee.lab.cli.main import main\nmain({argv!r})\n" + PYTHON + CLIENT)
    assert all(len(layers) == 2 for layers in exits_in(printed)), printed
    assert "Report: mini-ee-demo/report.md\n" in printed and (installed[0] / "mini-ee-demo" / "report.md").is_file()
