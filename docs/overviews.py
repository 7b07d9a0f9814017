"""Pages and notes that are made of the registry, of the heads of files, and of the records of results/."""

import html
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from code_page import Code
from prose import ROOT

from mini_ee.experiments.recipe import load_recipe
from mini_ee.experiments.result_page import in_short, judge_claim, read_data
from mini_ee.registry import METHODS

PAPERS = {  # result page -> the file that implements the paper
    "loraexit": "mini_ee/methods/lora_exits.py",
    "self-supervised": "mini_ee/methods/self_supervised.py",
    "raee": "mini_ee/methods/raee.py",
    "consistentee": "mini_ee/methods/consistent.py",
}


class Notes(NamedTuple):
    """What stands at the top of the page of a paper."""

    title: str
    html: str


def paper_notes(paper: str) -> Notes:
    """The verdicts on the claims of a paper, from the records in results/."""
    recipe = load_recipe(paper)
    data = read_data(ROOT / "results" / paper, recipe)
    judged = [judge_claim(claim, data) for claim in recipe["claims"]]
    counts = Counter(each.verdict for each in judged if not each.claim.get("control"))
    summary = ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common())
    items = [
        f'<li><span class="verdict {each.verdict.replace(" ", "-")}">{each.verdict}</span> '
        f"{'<em>control:</em> ' if each.claim.get('control') else ''}{html.escape(each.claim['text'])}</li>"
        for each in judged
    ]
    about = f"Verdicts of its {counts.total()} claims: {summary}"
    short = "".join(f"<p>{html.escape(each).replace('*', '')}</p>" for each in in_short(recipe, data)[:1])
    address = f"{'../' * PAPERS[paper].count('/')}results/{paper}.html"
    return Notes(
        recipe["title"],
        f'<div class="notes">{short}<details><summary>{about}</summary><ol>{"".join(items)}</ol></details>'
        f'<p><a href="{address}">All results of {html.escape(recipe["title"])}</a></p></div>',
    )


def methods_table(files: dict[str, Code]) -> str:
    """Markdown: every method of the registry with its file and the first line of it."""
    about = "`mini-ee train NAME` trains each of them; `mini-ee train NAME --help` lists its options."
    lines = ["# All methods", "", about, ""]
    for folder, title in (("methods", "Papers, and a method of ours"), ("baselines", "Baselines")):
        lines += [f"## {title}", "", "| name | idea | file |", "|---|---|---|"]
        for name, module in METHODS.items():
            if f".{folder}." in module:
                path = f"{module.replace('.', '/')}.py"
                lines.append(f"| `{name}` | {_cell(files[path].title)} | [{path.rpartition('/')[2]}]({path}) |")
        lines.append("")
    return "\n".join(lines)


def all_files(files: Iterable[Code]) -> str:
    """Markdown: every file that has a page, by folder, with the first line of it."""
    lines = ["# All files", ""]
    for folder, each in groupby(files, key=lambda code: code.source.rpartition("/")[0]):
        lines += [f"## {folder}/", "", "| file | what it contains |", "|---|---|"]
        lines += [f"| [{code.source.rpartition('/')[2]}]({code.source}) | {_cell(code.title)} |" for code in each]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
