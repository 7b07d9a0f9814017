"""Figures that README and the first pages print are those of the records; documents cite what the cited page has."""

import functools
import re
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from mini_ee.experiments.leaderboard.figures import CONTROL, HEADLINE, REFERENCE, task_figures
from mini_ee.experiments.page_data import printed, read_data
from mini_ee.experiments.pages import TEMPLATES
from mini_ee.experiments.recipe import PAPERS, load_recipe
from mini_ee.experiments.records import read_records
from mini_ee.lab.data.files import read_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?%|(?<![\w.])(?<![a-z]-)\d+\.\d+(?!\w|\.\d)"  # a share or decimal, no version


@functools.cache
def data_of(paper):
    return read_data(RESULTS / paper, load_recipe(paper))


def recorded(paper, case, figure):
    """The mean over seeds of a figure of a paper's page."""
    return lambda: printed(data_of(paper).mean(case, figure), figure)


def of_add_exits(texts, figure, digits, scale=1.0):
    """The mean over three MiniLMs fine-tuned on SST-2, with exits from so many texts."""
    models = read_json(RESULTS / "add-exits.json", signed="models")["models"]
    some = [row for row in models if (row["task"], row["model"], row["wanted"]) == ("SST-2", "MiniLM", texts)]
    return f"{scale * mean(measured[figure] for measured in some):.{digits}f}"


def exits_gain():
    """Points by which joint training with its rule is better than its fixed depth, the mean over three tasks."""
    gains = []
    for task in ("TREC", "SST-2", "SICK"):
        values = task_figures(task, {REFERENCE: read_records(RESULTS / "records" / task / "joint.npz")}, {}).figures
        gains += [values[REFERENCE, HEADLINE].by_seed.mean() - values[CONTROL, HEADLINE].by_seed.mean()]
    return f"{100 * np.mean(gains):.1f}"


BUILT_IN = ("self-supervised", "built-in copy 0 soft")
README = {  # as printed, without its unit -> the figure of the records
    "90.4": recorded("loraexit", "TREC mean segd", "score after 2"),
    "91.1": recorded("loraexit", "TREC mean joint", "score after 2"),
    "15.4": recorded("self-supervised", "stories260K scratch .95 soft", "saved at .9"),
    "19.0": recorded("self-supervised", "stories260K copy 0 soft", "saved at .9"),
    "86.7": recorded(*BUILT_IN, "decoded agreement at epsilon .8"),
    "1.19": recorded(*BUILT_IN, "speed-up at epsilon .8"),
    "8.13": recorded(*BUILT_IN, "full perplexity"),
    "12.2": recorded(*BUILT_IN, "perplexity at epsilon .8"),
    "0.86": recorded("self-supervised", "stories260K copy 0 soft", "speed-up at epsilon .8"),
    "64.8": recorded("raee", "TREC encoder fallback 3", "score"),
    "60.7": recorded("raee", "TREC encoder fallback 3", "full"),
    "76.6": recorded("raee", "TREC encoder fallback 3", "kNN votes"),
    "46.1": recorded("consistentee", "TREC consistent", "saved at one point"),
    "55.1": recorded("consistentee", "TREC joint", "saved at one point"),
    "30": lambda: of_add_exits(1000, "layers_saved", 0, 100),
    "47": lambda: of_add_exits(10000, "layers_saved", 0, 100),
    "53": lambda: of_add_exits(10000, "time", 0, 100),
    "99.5": lambda: of_add_exits(10000, "agreement", 1, 100),
    "1.6": exits_gain,
}
SETTINGS = {"99", "95", "90", "50", "100", "0.9", "0.8", "0.5", "0.6", "10"}  # levels, chance, thresholds
DEMO = {"2.3", "11.8", "62", "0.98", "0.97", "0.87"}  # outputs of README's commands, which test_demo.py and others run
SIZES = {"0.2", "0.3", "0.5", "1.2", "3.11"}  # gigabytes of the installation, versions


def numbers(text):
    """Percentages and decimals of the prose, without their unit: no code, no comments of Jinja, no targets of links."""
    text = re.sub(r"```.*?```|`[^`]*`|\{\{.*?\}\}|\{%.*?%\}|\]\([^)]*\)|arXiv:[\d.]+", "", text, flags=re.S)
    return {number.rstrip("%") for number in re.findall(NUMBER, re.sub(r"(\d) %", r"\1%", text))}


@pytest.mark.parametrize("printed", README)
def test_a_figure_of_readme_is_that_of_its_record(printed):
    assert printed in numbers((ROOT / "README.md").read_text()), "README prints it no more: delete its line"
    assert printed == README[printed]()


def test_readme_prints_no_figure_without_a_record():
    text = (ROOT / "README.md").read_text()
    cited = {number for sentence, _ in citations(text) for number in numbers(sentence)}
    assert numbers(text) <= README.keys() | SETTINGS | DEMO | SIZES | cited


def test_readme_counts_the_verdicts_of_the_records():
    """Its sentence on claims that hold has no integer but those of the first sentence of results/README.md, which
    test_reproduce.py compares with the records."""
    known = set(re.findall(r"\d+", (RESULTS / "README.md").read_text().split("**")[1]))
    sentences = re.findall(r"[^.\n]*\b\d+ (?:of \d+ )?hold\b[^.\n]*", (ROOT / "README.md").read_text())
    assert sentences and all(
        set(re.findall(r"\d+", re.sub(r"\(.*?\)", "", sentence))) <= known for sentence in sentences
    ), known


@pytest.mark.parametrize("name", [*PAPERS, "README", "judging", "shortest", "estimate", "claims", "tables"])
def test_a_template_has_no_figure_of_its_own(name):
    """What it prints comes from the records, and what the paper reports from the recipe."""
    allowed = SETTINGS | ({"2.5", "1.96"} if name == "judging" else set())  # levels of its tests
    assert numbers((TEMPLATES / f"{name}.md").read_text()) <= allowed


@pytest.mark.parametrize(
    "document", ["README.md", "tutorial.md", "CONTRIBUTING.md", "export/README.md", "docs/your-classifier.md"]
)
def test_a_figure_that_a_document_cites_from_a_page_is_on_that_page(document):
    """Decimals and percentages of a sentence with a link to a page of results, or on its page of tables. README's own
    are those of a record, which may be rounded differently."""
    path = ROOT / document
    for sentence, link in citations(path.read_text()):
        page = (path.parent / link).resolve()
        texts = [file.read_text() for file in (page, page.with_suffix("") / "tables.md") if file.exists()]
        known = set(re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(texts)))
        cited = re.findall(r"(?<![\w.])\d[\d,]*\.\d+|\d+(?= ?%)", sentence)
        known |= README.keys() if document == "README.md" else set()
        assert set(cited) <= known, f"not on {link}: {set(cited) - known}, in: {sentence}"


def citations(text: str) -> list[tuple[str, str]]:
    """(sentence, page) of each link to a page of results; a sentence ends where its link or its row does."""
    cited = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        for link in re.finditer(r"\]\(((?:\.\./)?results/[\w-]+\.md)", paragraph):
            before = paragraph[: link.end()]
            ends = [end.end() for end in re.finditer(r"(?<=[\w%)`*])[.:!?] (?=[A-Z*`\[-])|\| \|", before)]
            cited.append((before[max(ends, default=0) :], link[1]))
    return cited


def test_a_citation_is_the_sentence_before_its_link():
    text = "It had 9.9 %. It saves 1.5 % ([results](results/raee.md)). Then 7.7.\n\nNo [link](../results/onnx.md) here."
    assert citations(text) == [
        ("It saves 1.5 % ([results](results/raee.md", "results/raee.md"),
        ("No [link](../results/onnx.md", "../results/onnx.md"),
    ]
