"""Makes tutorial.md from the scripts in tutorial/, with what they printed.

    python docs/make_tutorial.py                  write tutorial.md
    python docs/make_tutorial.py --run 03 07      first run these chapters (or: all), and keep what they print
    python docs/make_tutorial.py --notebooks      write a notebook beside each script (pip install -e '.[docs]')

A script is in the percent format of jupytext: cells of text begin with `# %% [markdown]`, cells of code with `# %%`.
Its pictures go to docs/pictures/. tutorial/outputs/ keeps what the cells printed, how long the script took, and a
digest of its code: when the code has changed since, a test asks for `--run`. Special lines in the text:

    # 20 minutes to read, 10 seconds to run       the second line of a chapter, written by this program
    # {code} mini_ee/raee.py exit_values          shows this function or class; without a name, the whole file
"""

import argparse
import ast
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE, PICTURES = ROOT / "tutorial", ROOT / "tutorial.md", ROOT / "docs" / "pictures"
CODE = re.compile(r"^\{code\} (\S+)(?: (\S+))?$", re.M)
TIMES = re.compile(r"^# (?:READ|\d+) minutes to read, (?:RUN|\d+ \w+) to run", re.M)
WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_OF_AN_EXERCISE = 200, 15, 4
"""By which the minutes of reading are estimated; the minutes of running are measured."""


class Cell(NamedTuple):
    """text: Markdown, or Python; line: its first line in the script."""

    is_code: bool
    text: str
    line: int


def cells_of(script: str) -> list[Cell]:
    """All cells of a script, in order."""
    cells, parts = [], re.split(r"^# %%( \[markdown\])?\n", script, flags=re.M)
    line = parts[0].count("\n") + 2
    for kind, text in zip(parts[1::2], parts[2::2]):
        plain = re.sub(r"^# ?", "", text, flags=re.M) if kind else text
        cells.append(Cell(kind is None, plain.strip("\n"), line + len(text) - len(text.lstrip("\n"))))
        line += text.count("\n") + 1
    return cells


def digest_of(script: str) -> str:
    """Of the code of a script. Its text may change without a new run."""
    return hashlib.sha256("\n".join(cell.text for cell in cells_of(script) if cell.is_code).encode()).hexdigest()[:16]


# ---- What a script includes ----
def source_of(file: str, name: str | None) -> str:
    """A file, or one function or class in it, NAME or CLASS.METHOD. Raises ValueError if there is none."""
    text = (ROOT / file).read_text()
    if name is None:
        return text.rstrip()
    body = ast.parse(text).body
    for part in name.split("."):
        node = next((node for node in body if getattr(node, "name", None) == part), None)
        if node is None:
            raise ValueError(f"{file} has no {name}, which the tutorial shows")
        body = node.body
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def with_sources(text: str) -> str:
    """Markdown in which {code} lines have become blocks of code."""
    return CODE.sub(lambda match: f"```python\n# {match[1]}\n{source_of(match[1], match[2])}\n```", text)


# ---- Minutes ----
def minutes_to_read(script: str) -> int:
    """An estimate, exercises included."""
    words = lines = 0
    for is_code, text, _ in cells_of(script):
        shown = with_sources(text)
        blocks = re.findall(r"^```python\n(.*?)^```", shown, re.M | re.S)
        lines += sum(bool(line.strip()) for part in ([text] if is_code else blocks) for line in part.splitlines())
        words += 0 if is_code else len(re.sub(r"^```.*?^```", "", shown, flags=re.M | re.S).split())
    exercises = len(re.findall(r"^\*\*\d\.\*\*|^# \*\*\d\.\*\*", script, re.M))
    return round(words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + exercises * MINUTES_OF_AN_EXERCISE)


def time_to_run(seconds: float) -> str:
    """Rounded up: `20 seconds` or `2 minutes`."""
    return f"{math.ceil(seconds / 5) * 5} seconds" if seconds <= 90 else f"{math.ceil(seconds / 60)} minutes"


def with_times(script: str, seconds: float) -> str:
    """The script with the minutes in its second line."""
    return TIMES.sub(f"# {minutes_to_read(script)} minutes to read, {time_to_run(seconds)} to run", script, count=1)


# ---- Running ----
def execute(path: Path, pictures: Path, *options: str) -> dict:
    """Run a script with one thread: what docs/run_chapter.py prints about it."""
    environment = os.environ | {"MINI_EE_PICTURES": str(pictures), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "docs" / "run_chapter.py", path, *options]
    return json.loads(subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def output_of(path: Path) -> Path:
    return FOLDER / "outputs" / f"{path.stem}.json"


def last_run(path: Path) -> dict:
    """What a script printed when it was run: code, its digest; seconds; printed, by cell."""
    return json.loads(output_of(path).read_text())


def run(path: Path) -> None:
    """Run a chapter; keep what it printed, its pictures and its time."""
    code, ran = digest_of(path.read_text()), execute(path, PICTURES)
    facts = {"code": code, "seconds": round(ran["seconds"], 1), "printed": ran["printed"]}
    output_of(path).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    print(f"{ran['seconds']:6.1f} s  {path.relative_to(ROOT)}; exercises solved: {', '.join(ran['solved']) or 'none'}")


# ---- The page ----
def chapters() -> list[Path]:
    """The scripts, in the order in which they are read."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def appendix() -> list[Path]:
    """Scripts and pages of Markdown, a_NAME to e_NAME."""
    return sorted(path for path in FOLDER.glob("[a-z]_*") if path.suffix in (".py", ".md"))


def section(path: Path) -> str:
    """A chapter as Markdown, with headings one level below the page's title."""
    if path.suffix == ".md":
        return re.sub(r"^#", "##", path.read_text(), flags=re.M).strip()
    printed, parts = iter(last_run(path)["printed"]), []
    for is_code, text, _ in cells_of(path.read_text()):
        if not is_code:
            parts.append(with_sources(re.sub(r"^(#+ )", r"#\1", text, flags=re.M)))
            continue
        parts.append(f"```python\n{text}\n```")
        if output := next(printed).rstrip():
            parts.append(f"```text\n{output}\n```")
    place = path.relative_to(ROOT)
    solutions = place.parent / "solutions" / place.name
    links = [f"This chapter as a script: [{place}]({place})"]
    links += [f"solutions: [{solutions}]({solutions})"] if (ROOT / solutions).is_file() else []
    return "\n\n".join([*parts, f"{'; '.join(links)}."])


def head_of(path: Path) -> tuple[str, int, str, str]:
    """Of a script: its title, minutes to read, time to run, and the papers, or ""."""
    title, line = re.match(r"# (.*)\n\n(.*)", cells_of(path.read_text())[0].text).groups()
    read, ran = re.match(r"(\d+) minutes to read, (.+?) to run", line).groups()
    papers = re.search(r"Papers?: (.*?\))(?: ·|$)", line)
    return title, int(read), ran, papers[1] if papers else ""


def entrance() -> str:
    """The beginning of tutorial.md: what is in braces in entrance.md is filled in."""
    heads = {path: head_of(path) for path in (*chapters(), *appendix()) if path.suffix == ".py"}
    lines = ["| chapter | script | paper | to read | to run |", "|---|---|---|---|---|"]
    for path, (title, read, ran, papers) in heads.items():
        link = f"[{title}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})"
        lines.append(f"| {link} | [{path.name}]({path.relative_to(ROOT)}) | {papers} | {read} min | {ran} |")
    minutes = {path.stem[:2]: read for path, (_, read, _, _) in heads.items()}
    return (
        (FOLDER / "entrance.md")
        .read_text()
        .strip()
        .format(
            chapters="\n".join(lines),
            understand=sum(minutes[chapter] for chapter in ("01", "02", "03", "10")),
            paper=minutes["01"]
            + minutes["02"]
            - 4 * MINUTES_OF_AN_EXERCISE
            + max(minutes[c] for c in ("04", "05", "06", "07")),
            hours=round(sum(minutes.values()) / 60),
        )
    )


def page() -> str:
    """tutorial.md."""
    return "\n\n".join([entrance(), *map(section, [*chapters(), *appendix()])]) + "\n"


def notebook_of(path: Path) -> str:
    """A script as a notebook for the same folder, without outputs."""
    import jupytext

    notebook = jupytext.reads(path.read_text(), fmt="py:percent")
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    up = "../" * len(path.relative_to(ROOT).parent.parts)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # jupytext draws them at random
        if cell.cell_type == "markdown":
            cell.source = with_sources(re.sub(r"\]\((?![a-z]+:|#)", f"]({up}", cell.source))
    return jupytext.writes(notebook, fmt="ipynb") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="+", default=[], metavar="NAME", help="chapters to run first, or all")
    parser.add_argument("--notebooks", action="store_true", help="write notebooks too")
    args = parser.parse_args()
    scripts = [path for path in (*chapters(), *appendix()) if path.suffix == ".py"]
    for name in args.run:
        if not (named := [path for path in scripts if name == "all" or path.stem.startswith(name)]):
            parser.error(f"--run {name}: expected the beginning of one of {', '.join(path.stem for path in scripts)}")
        for path in named:
            run(path)
    for path in scripts:
        path.write_text(with_times(path.read_text(), last_run(path)["seconds"]))
    PAGE.write_text(page())
    for path in scripts if args.notebooks else ():
        path.with_suffix(".ipynb").write_text(notebook_of(path))


if __name__ == "__main__":
    main()
