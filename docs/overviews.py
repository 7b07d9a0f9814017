"""Pages made of the registry and of the heads of files, and what a result page says at the top of a paper's code."""

from itertools import groupby, takewhile
from pathlib import Path

from code_page import ROOT, Code

from mini_ee.lab.registry import METHODS

PAPERS = {  # result page -> the file that implements the paper
    "loraexit": "mini_ee/lora_exits.py",
    "self-supervised": "mini_ee/self_supervised.py",
    "raee": "mini_ee/raee.py",
    "consistentee": "mini_ee/consistent.py",
}


def paper_notes(paper: str) -> tuple[str, str]:
    """The name of a paper, and from its result page the answer, in Markdown."""
    title, *paragraphs = (ROOT / f"results/{paper}.md").read_text().removeprefix("# ").split("\n\n")
    lines = list(takewhile(lambda paragraph: not paragraph.startswith("!"), paragraphs))  # up to the first picture
    title = title.partition(":")[0]
    lines += [f"[All results of {title}]({paper}.md)"]
    return title, "\n\n".join(lines)


def methods_table(files: dict[str, Code]) -> str:
    """Markdown: every method of the registry with the first line of its file."""
    lead = "`mini-ee train NAME` trains each of them; `mini-ee train NAME --help-all` lists its options."
    lines = ["# All methods", "", lead, ""]
    for folder, title in (("methods", "Papers"), ("baselines", "Baselines")):
        lines += [f"## {title}", "", "| method | idea |", "|---|---|"]
        paths = {
            name: f"{module.removeprefix('mini_ee.').replace('.', '/')}.py"
            for name, module in METHODS.items()
            if folder in module
        }
        lines += [f"| [`{name}`]({path}) | {_cell(files[path].title)} |" for name, path in paths.items()]
        lines.append("")
    return "\n".join(lines)


def all_files(files: dict[str, Code]) -> str:
    """Markdown: every file that has a page, by folder, with the first line of it."""
    lines = ["# All files", ""]
    for folder, group in groupby(files.values(), key=lambda code: code.source.rpartition("/")[0]):
        lines += [f"## {folder}/", "", "| file | what it contains |", "|---|---|"]
        lines += [f"| [{Path(code.source).name}]({code.source}) | {_cell(code.title)} |" for code in group]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
