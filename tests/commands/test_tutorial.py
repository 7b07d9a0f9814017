"""tutorial.md runs from top to bottom: python blocks in one namespace, bash blocks in one folder, and the text block
after a python block is what it prints. A block marked `text about` comes from a training: equal words, numbers near.
No compared figure depends on the default rules of the shell's trainings: they are tested on 100 examples, not 2,000.
An exercise is a block with FILL ME IN: check() must refuse it as it stands, and pass with the solution that follows.
"""

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
from mini_ee.training import holdout

TUTORIAL = Path(__file__).parents[2] / "tutorial.md"
FENCE = re.compile(r"^```(python|text about|text|bash)\n(.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"-?\d+(?:\.\d*)?")
NEAR, NEAR_SHARE = 0.12, 0.25
"""How far another machine's training may be: differently rounded ones differed by .07 and by a fifth."""


def near(printed: str, expected: str) -> bool:
    """Equal words, and numbers that differ by no more than a training rounded differently."""
    words, wanted = ([part.split() for part in NUMBER.split(text)] for text in (printed, expected))
    numbers = zip(*(map(float, NUMBER.findall(text)) for text in (printed, expected)))
    return words == wanted and all(abs(a - b) <= max(NEAR, NEAR_SHARE * abs(b)) for a, b in numbers)


def same(printed: str, expected: str) -> bool:
    """Equal but for white space at the ends of lines."""
    return [line.rstrip() for line in printed.strip().splitlines()] == expected.strip().splitlines()


def run_python(source: str, names: dict, path: Path, line: int) -> str:
    """What a block prints. An exercise that is not filled in must not pass its own check."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\n" * (line - 1) + source, str(path), "exec"), names)
        if "FILL ME IN" in source:
            with pytest.raises(Exception):
                names["check"]()
                pytest.fail(f"{path}:{line}: check() takes the exercise as it stands", pytrace=False)
    return out.getvalue()


def run_page(path: Path, folder: Path) -> None:
    """Run a page's blocks in `folder`, the working directory; AssertionError if page and code differ.

    A line that is `mini-ee` and no more runs in this process, which has torch loaded already; bash takes the others.
    """
    text, names, printed = path.read_text(), {"__name__": "tutorial"}, ""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in FENCE.finditer(text):
        line = text.count("\n", 0, block.start()) + 2
        if block[1] == "python":
            printed = run_python(block[2], names, path, line)
        elif block[1] == "bash":
            for command in block[2].splitlines():
                if command.startswith("mini-ee ") and not set(command) & set("|<>$;&"):
                    with contextlib.redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
                        patch.setattr(holdout, "TEST_ROWS", 100)
                        assert main(shlex.split(command)[1:]) == 0, f"{path}:{line}: {command}"
                    continue
                done = subprocess.run(
                    ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{path}:{line}: {done.stderr[-500:]}"
        elif not (near if block[1] == "text about" else same)(printed, block[2]):
            raise AssertionError(f"{path}:{line}: the page says\n{block[2]}\nbut the code printed\n{printed}")


def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(TUTORIAL, tmp_path)


def test_every_section_has_an_exercise_with_a_solution_that_runs():
    first, *sections, glossary = re.split(r"^## ", TUTORIAL.read_text(), flags=re.M)
    assert len(sections) == 8 and glossary.startswith("Glossary\n")
    for section in sections:
        blocks = [block[2] for block in FENCE.finditer(section) if block[1] == "python"]
        assert sum("FILL ME IN" in block for block in blocks) == 1, section[:40]
        assert sum(block.endswith("\ncheck()\n") for block in blocks) == 1, section[:40]


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1)\n```\n```text\n2\n```",
        "```python\nprint(1)\n```\n```text about\n2\n```",
        "```python\nprint('layer 1')\n```\n```text about\nexit 1\n```",
        "```python\nprint('1 2')\n```\n```text about\n1\n```",
        "```python\n1 / 0\n```",
        "```bash\nfalse\n```",
        "```python\ndef check():  # FILL ME IN\n    pass\n```",
    ],
)
def test_the_tutorial_test_can_fail(tmp_path, page):
    (tmp_path / "page.md").write_text(page + "\n")
    with pytest.raises((AssertionError, ZeroDivisionError, pytest.fail.Exception)):
        run_page(tmp_path / "page.md", tmp_path)


def test_numbers_of_a_training_may_be_near(tmp_path):
    page = "```python\nprint('accuracy 0.82 , 8.8 of 12')\n```\n```text about\naccuracy 0.80, 9.1 of 12\n```\n"
    (tmp_path / "page.md").write_text(page.replace(" ,", ","))
    run_page(tmp_path / "page.md", tmp_path)
