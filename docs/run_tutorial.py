"""Runs the blocks of tutorial.md as a reader would, and keeps the pictures that they draw.

    python docs/run_tutorial.py               run all blocks, compare their output with the page, print the minutes
    python docs/run_tutorial.py --pictures    the same, then copy the pictures to docs/pictures/

A section begins with `## ` and starts by itself: its python blocks share names with no other. All sections share one
working folder. A text block shows the output of the block above it:

    text            equal, except for white space at the ends of lines
    text about      equal words, and numbers that are near: they come from a training
    text part       lines of the output, in order, whatever their numbers; others are left out

An exercise is a block with FILL ME IN. Its check() must refuse it as it stands, and accept the solution that follows.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TUTORIAL, PICTURES = ROOT / "tutorial.md", ROOT / "docs" / "pictures"
FENCE = re.compile(r"^```(python|text about|text part|text|bash)\n(.*?)^```$", re.M | re.S)
SECTION = re.compile(r"^## (.+)$", re.M)
UNLESS = re.compile(r"\[ -d (\S+) \] \|\| ")  # a command for the case that a folder is not there
NUMBER = re.compile(r"-?\d+(?:\.\d*)?")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
NEAR, NEAR_SHARE = 0.12, 0.25
"""How far the training of another machine may be: differently rounded ones differed by .07 and by a fifth."""


class Block(NamedTuple):
    """One fenced block. section: the heading above it; line: of its first line in the page."""

    kind: str
    source: str
    line: int
    section: str


def blocks_of(text: str) -> list[Block]:
    """All blocks of a page, in order."""
    headings = [(match.start(), match[1]) for match in SECTION.finditer(text)]
    found = []
    for match in FENCE.finditer(text):
        section = next((name for start, name in reversed(headings) if start < match.start()), "")
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start()) + 2, section))
    return found


def page_of(notebook: dict) -> str:
    """The Markdown of a notebook that `docs/make_notebook.py` has made: tutorial.md, except for blank lines."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            kind = "bash" if source.startswith("%%bash\n") else "python"
            source = f"```{kind}\n{source.removeprefix('%%bash')}\n```".replace("bash\n\n", "bash\n")
        parts.append(source)
    return "\n".join(parts)


# ---- Comparison ----
def same(printed: str, expected: str) -> bool:
    """Equal, except for white space at the ends of lines."""
    return [line.rstrip() for line in printed.strip().splitlines()] == expected.strip().splitlines()


def near(printed: str, expected: str) -> bool:
    """Equal words, and numbers that differ by no more than a training that was rounded differently."""
    words, wanted = ([part.split() for part in NUMBER.split(text)] for text in (printed, expected))
    numbers = zip(*(map(float, NUMBER.findall(text)) for text in (printed, expected)))
    return words == wanted and all(abs(a - b) <= max(NEAR, NEAR_SHARE * abs(b)) for a, b in numbers)


def contains(printed: str, expected: str) -> bool:
    """Whether the expected lines are among the printed ones, in this order, whatever their numbers (or inf, or -)."""

    def words(line: str) -> list[str]:
        return ["#" if word in ("inf", "-") else word for word in NUMBER.sub("#", line).split()]

    lines = iter([words(line) for line in printed.splitlines()])
    return all(words(line) in lines for line in expected.splitlines() if line.strip() not in ("", "..."))


COMPARED = {"text": same, "text about": near, "text part": contains}


# ---- Running ----
Shell = Callable[[str, Path], str]


def bash(command: str, folder: Path) -> str:
    """The output of a command in a process of its own. Raises AssertionError if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr[-500:]}"
    return COLOUR.sub("", done.stdout)


def in_process(command: str, folder: Path) -> str:
    """The same, but a command that is `mini-ee` and nothing else runs here, where torch is loaded already."""
    from mini_ee.lab.cli.main import main

    if unless := UNLESS.match(command):
        if (folder / unless[1]).exists():
            return ""
        command = command[unless.end() :]
    if not command.startswith("mini-ee ") or set(command) & set("|<>$;&"):
        return bash(command, folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(shlex.split(command)[1:]) == 0, command
    return COLOUR.sub("", out.getvalue())


def run_python(block: Block, module: types.ModuleType, path: Path) -> str:
    """The output of a python block. An exercise that is not filled in must not pass its own check."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\n" * (block.line - 1) + block.source, str(path), "exec"), vars(module))
        if "FILL ME IN" in block.source:
            try:
                module.check()
            except Exception:
                return ""
            raise AssertionError(f"{path}:{block.line}: check() accepts the exercise as it stands")
    return out.getvalue()


def run_page(blocks: list[Block], path: Path, folder: Path, shell: Shell = in_process) -> dict[str, float]:
    """Run blocks in `folder`, the working directory. Returns the seconds of each section.

    Raises AssertionError if the output differs from the page.
    """
    seconds: dict[str, float] = {}
    module, printed = types.ModuleType("tutorial"), ""
    for block in blocks:
        begin = time.perf_counter()
        if block.section not in seconds:
            module = sys.modules["tutorial"] = types.ModuleType("tutorial")
        if block.kind == "python":
            printed = run_python(block, module, path)
        elif block.kind == "bash":
            printed = "".join(shell(line, folder) for line in block.source.replace("\\\n", "").splitlines())
        elif not COMPARED[block.kind](printed, block.source):
            raise AssertionError(f"{path}:{block.line}: the page says\n{block.source}\nbut the code printed\n{printed}")
        seconds[block.section] = seconds.get(block.section, 0) + time.perf_counter() - begin
    return seconds


def main() -> None:
    """Run the tutorial in an empty folder and print the time of each section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", action="store_true", help="copy the pictures to docs/pictures/")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        seconds = run_page(blocks_of(TUTORIAL.read_text()), TUTORIAL, Path(name), bash)
        for picture in sorted(Path(name).glob("*.png")) if args.pictures else ():
            shutil.copy(picture, PICTURES)
    for section, taken in seconds.items():
        print(f"{taken:6.1f} s  {section}")
    computed = os.times()
    processor = sum(computed[:4])  # of this process and of the commands
    print(f"{sum(seconds.values()) / 60:.1f} minutes in all, {processor / 60:.1f} minutes of processor time")


if __name__ == "__main__":
    main()
