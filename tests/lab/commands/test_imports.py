"""How many files of the project a command imports, in a process of its own."""

import ast
import subprocess
import sys
from pathlib import Path

import mini_ee

MOST = 40
COUNT = """
import sys
from mini_ee.lab.cli.main import main
status = main(sys.argv[1:])
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "mini_ee"]
files = {getattr(module, "__file__", None) for module in ours}
print(*sorted(filter(None, files)), sep="\\n", file=sys.stderr)
sys.exit(status)
"""


def imported(*words):
    """The files with code, which an empty `__init__.py` has not."""
    done = subprocess.run([sys.executable, "-c", COUNT, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stderr.splitlines() if line.endswith(".py")]
    code = [ast.parse(file.read_text()).body for file in files]
    return [file for file, body in zip(files, code) if any(not isinstance(node, ast.Expr) for node in body)]


def test_classifying_one_sentence_imports_at_most_40_files(checkpoint_folder, task_folder, tmp_path):
    run = mini_ee.train("joint", checkpoint_folder, task_folder, tmp_path / "run", epochs=1).folder
    files = imported("classify", run, "--text", "a good film")
    assert len(files) <= MOST, "\n".join(map(str, files))
    assert any(file.name == "run_folder.py" for file in files)
