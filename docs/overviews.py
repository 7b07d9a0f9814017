"""Pages and notes that are made of the registry, of the heads of files, and of the records of results/."""

from collections import Counter
from itertools import groupby

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


def paper_notes(paper: str) -> tuple[str, str]:
    """The name of a paper, and Markdown: the verdicts on its claims, from the records in results/."""
    recipe = load_recipe(paper)
    data = read_data(ROOT / "results" / paper, recipe)
    judged = [judge_claim(claim, data) for claim in recipe["claims"]]
    counts = Counter(each.verdict for each in judged if not each.claim.get("control"))
    summary = ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common())
    lines = [
        *in_short(recipe, data)[:1],
        f"<details><summary>Verdicts of its {counts.total()} claims: {summary}</summary>",
    ]
    for number, (claim, _, verdict) in enumerate(judged, 1):
        control = "*control:* " if claim.get("control") else ""
        lines.append(f'{number}. <span class="{verdict.replace(" ", "-")}">{verdict}</span> {control}{claim["text"]}')
    lines += ["</details>", f"[All results of {recipe['title']}](results/{paper}.md)"]
    return recipe["title"], "\n\n".join(lines)


def methods_table(files: dict[str, Code]) -> str:
    """Markdown: every method of the registry with its file and the first line of it."""
    about = "`mini-ee train NAME` trains each of them; `mini-ee train NAME --help` lists its options."
    lines = ["# All methods", "", about, ""]
    for folder, title in (("methods", "Papers, and a method of ours"), ("baselines", "Baselines")):
        lines += [f"## {title}", "", "| name | idea | file |", "|---|---|---|"]
        paths = {name: f"{module.replace('.', '/')}.py" for name, module in METHODS.items() if folder in module}
        lines += [f"| `{name}` | {_cell(files[path].title)} | {_link(path)} |" for name, path in paths.items()]
        lines.append("")
    return "\n".join(lines)


def all_files(files: dict[str, Code]) -> str:
    """Markdown: every file that has a page, by folder, with the first line of it."""
    lines = ["# All files", ""]
    for folder, each in groupby(files.values(), key=lambda code: code.source.rpartition("/")[0]):
        lines += [f"## {folder}/", "", "| file | what it contains |", "|---|---|"]
        lines += [f"| {_link(code.source)} | {_cell(code.title)} |" for code in each]
        lines.append("")
    return "\n".join(lines)


def _link(path: str) -> str:
    return f"[{path.rpartition('/')[2]}]({path})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
