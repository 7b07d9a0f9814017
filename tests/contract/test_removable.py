"""Every baseline, method, engine and backbone family but joint training and BERT can be deleted: its files, and its
lines in the registry. Nothing else knows its name, but experiments/, which measures what it names."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest

from mini_ee.lab.registry import BACKBONES, ENGINES, METHODS

ROOT = Path(__file__).parents[2]
KEPT = ("mini_ee.lab.baselines.joint", "mini_ee.lab.backbones.bert")
REMOVABLE = sorted({*METHODS.values(), *BACKBONES.values(), *ENGINES.values()} - set(KEPT))
GROUPS = {  # what is removed at once: methods and baselines do not import each other, see test_house.py
    "methods": [module for module in REMOVABLE if ".methods." in module],
    "baselines": [module for module in REMOVABLE if ".baselines." in module],
}
ALONE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each).lower()]
def forget():  # the next folder's modules are imported anew; torch and its like stay
    for name in [name for name in sys.modules if name.startswith("mini_ee")]:
        del sys.modules[name]
"""  # no package is found but the one in sys.path[0]
LIFE = """
import importlib, json, os, torch
torch.set_num_threads(1)
def errors(names):
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if not isinstance(error, ModuleNotFoundError) or error.name.startswith("mini_ee"):  # not Ray, ...
                yield name, f"{type(error).__name__}: {error}"
for folder, names, commands in json.load(sys.stdin):
    sys.path[0] = folder
    os.chdir(folder)
    from mini_ee.lab.cli.main import main
    for line in commands:
        if status := main(line.split()):
            sys.exit(f"{folder}: {line}: status {status}")
    with open("errors.json", "w") as file:
        json.dump(dict(errors(names)), file)
    forget()
"""
COMMANDS = (
    "train joint --model model --out run --task words --epochs 1 --exits 1,3",
    "evaluate run --max-rows 8 --batch-size 8",
    "export run --out exported",
    "run exported rows.txt --out answers.jsonl",
)


def files_of(module, package):
    """The files that go with a module, in a package's folder."""
    stem = module.removeprefix("mini_ee.").replace(".", "/")
    patterns = (stem, f"{stem}_*")
    return [path for pattern in patterns for path in package.glob(f"{pattern}.py")]


def without(modules, folder):
    """The package in a folder, as it is installed, without the files of these modules and their lines."""
    package = folder / "mini_ee"
    copytree(ROOT / "mini_ee", package)
    for room in ("export", "lab", "serve", "experiments"):
        copytree(ROOT / room, package / room)
    (package / "weights").symlink_to(ROOT / "weights")
    registry = package / "lab" / "registry.py"
    for module in modules:
        gone, lines = files_of(module, package), registry.read_text().splitlines(keepends=True)
        names = [f'"{dotted(path, folder)}"' for path in gone]
        remaining = [line for line in lines if not any(name in line for name in names)]
        assert gone and len(remaining) < len(lines), module
        registry.write_text("".join(remaining))
        for path in gone:
            path.unlink()
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()
    return folder


def modules_in(folder):
    """The modules of the package in a folder, but those of experiments/."""
    for path in sorted((folder / "mini_ee").rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if path.stem != "__main__" and "experiments" not in parts:
            yield ".".join(parts[:-1] if path.stem == "__init__" else parts)


def names_in(path):
    """What a file imports, inside its functions too, and its texts but for docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def dotted(path, root=ROOT):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] == "mini_ee" else ("mini_ee", *parts))


def test_no_other_file_names_one_of_them():
    paths = [path for room in ("lab", "serve") for path in (ROOT / room).rglob("*.py")]
    names = {dotted(path): set(names_in(path)) for path in paths}
    for module in REMOVABLE:
        removed = set(map(dotted, files_of(module, ROOT)))
        gone = removed | {name for name, where in (METHODS | BACKBONES | ENGINES).items() if where == module}
        for path, words in names.items():
            named = words & gone if path not in removed | {"mini_ee.lab.registry"} else ()
            assert not named, f"{path} names {sorted(named)}"


def check(groups, tmp_path, checkpoint_folder, task_folder):
    """Without each of these groups joint training of a small BERT is trained, evaluated, exported and run, and every
    other module is imported, except those of experiments/. One process does it all."""
    folders = [without(group, tmp_path / str(number)) for number, group in enumerate(groups)]
    for folder in folders:
        (folder / "rows.txt").write_text("the film was good\na dull meal\n")
        copytree(task_folder, folder / "words")
        copytree(checkpoint_folder, folder / "model")
    given = json.dumps([(str(folder), list(modules_in(folder)), COMMANDS) for folder in folders])
    done = subprocess.run(
        [sys.executable, "-c", ALONE + LIFE], input=given, text=True, capture_output=True, cwd=folders[0]
    )
    assert done.returncode == 0, done.stderr
    for group, folder in zip(groups, folders):
        answers = [json.loads(line)["label"] for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert len(answers) == 2 and set(answers) <= {"bad", "good"}, f"without {group}"
        assert not json.loads((folder / "errors.json").read_text()), f"without {group}"


@pytest.mark.slow
def test_without_all_of_them_joint_training_lives_and_every_other_module_is_imported(
    tmp_path, checkpoint_folder, task_folder
):
    check([REMOVABLE], tmp_path, checkpoint_folder, task_folder)


@pytest.mark.skipif("MINI_EE_FULL" not in os.environ, reason="removes each method alone: set MINI_EE_FULL=1")
def test_without_each_of_them_joint_training_lives_and_every_other_module_is_imported(
    tmp_path, checkpoint_folder, task_folder
):
    groups = [*GROUPS.values(), *([module] for module in REMOVABLE)]
    check(groups, tmp_path, checkpoint_folder, task_folder)
