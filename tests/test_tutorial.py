"""tutorial.md runs from top to bottom: python blocks in one namespace, bash blocks in one folder, and the text block
after a python block is what it prints."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mini_ee.cli.main import main

TUTORIAL = Path(__file__).parent.parent / "tutorial.md"
FENCE = re.compile(r"^```(python|text|bash)\n(.*?)^```$", re.M | re.S)


def run_page(path: Path, folder: Path) -> None:
    """Run a page's blocks in `folder`, the working directory; AssertionError where page and code differ.

    A line that is `mini-ee` and no more runs in this process, which has torch loaded already; bash takes the others.
    """
    text, names, said = path.read_text(), {"__name__": "tutorial"}, ""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start()) + 2
        if block[1] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * (line - 1) + block[2], str(path), "exec"), names)
            said = out.getvalue()
        elif block[1] == "bash":
            for command in block[2].splitlines():
                if command.startswith("mini-ee ") and not set(command) & set("|<>$;&"):
                    with contextlib.redirect_stdout(io.StringIO()):
                        assert main(shlex.split(command)[1:]) == 0, f"{path}:{line}: {command}"
                    continue
                done = subprocess.run(
                    ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{path}:{line}: {done.stderr[-500:]}"
        elif said.strip() != block[2].strip():
            raise AssertionError(f"{path}:{line}: the page says\n{block[2]}\nbut the code printed\n{said}")


def test_the_tutorial_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(TUTORIAL, tmp_path)


@pytest.mark.parametrize(
    "page", ["```python\nprint(1)\n```\n```text\n2\n```", "```python\n1 / 0\n```", "```bash\nfalse\n```"]
)
def test_the_tutorial_test_can_fail(tmp_path, page):
    (tmp_path / "page.md").write_text(page + "\n")
    with pytest.raises((AssertionError, ZeroDivisionError)):
        run_page(tmp_path / "page.md", tmp_path)
