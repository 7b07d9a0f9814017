"""What CITATION.cff, pyproject.toml and the pages say: numbers of methods and lines, the version, how to cite."""

import re
import tomllib
from pathlib import Path

import pytest

from mini_ee import __version__
from mini_ee.lab.registry import METHODS

ROOT = Path(__file__).parents[2]
CITATION = (ROOT / "CITATION.cff").read_text()
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_PAPERS = 4  # methods whose papers' claims are tested; the first table of the README has a line for each


def field(name: str) -> str:
    """The value of a key of CITATION.cff that is no list."""
    (text,) = re.findall(rf"^{name}: (.+)$", CITATION, re.M)
    return text.strip('"')


@pytest.mark.parametrize(
    "text, number",
    [
        (README, r"implements (\d+) early-exit methods"),
        (PROJECT["description"], r"^(\d+) early-exit methods"),
        (field("abstract"), r"^(\d+) early-exit methods"),
        ((ROOT / "results" / "METHODS.md").read_text(), r"All (\d+) methods of the registry"),
    ],
    ids=["README", "pyproject", "CITATION", "METHODS"],
)
def test_the_number_of_methods_is_that_of_the_registry(text, number):
    assert re.findall(number, text) == [str(len(METHODS))]


@pytest.mark.parametrize("text", [README, field("abstract")], ids=["README", "CITATION"])
def test_the_other_methods_are_those_without_a_page_of_claims(text):
    lines = re.findall(r"^\| \[[^]]+\]\(mini_ee/(\w+)\.py\),", README, re.M)
    assert len(set(lines)) == OF_PAPERS and all((ROOT / "mini_ee" / f"{name}.py").exists() for name in lines)
    assert re.findall(r"(\d+) others", text) == [str(len(METHODS) - OF_PAPERS)]


def test_the_readme_has_the_size_of_the_core():
    (size,) = re.findall(r"^mini_ee/ .*, about ([\d,]+) lines$", README, re.M)
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "mini_ee").glob("*.py"))
    assert abs(int(size.replace(",", "")) - lines) <= 100


def test_the_readmes_bibtex_is_made_from_the_citation():
    (entry,) = re.findall(r"```bibtex\n@software\{mini_ee, (.*?)\}\n```", README, re.S)
    fields = dict(re.findall(r"(\w+) = \{(.*?)\}(?=,|$)", entry))
    (author,) = re.findall(r'^authors:\n  - name: "(.+)"\n(?!  -)', CITATION, re.M)
    released = field("date-released")
    assert {name: text.replace("\\", "") for name, text in fields.items()} == {
        "title": field("title"),
        "author": f"{{{author}}}",
        "version": field("version"),
        "date": released,
        "year": released[:4],
        "license": field("license"),
    }
    assert field("version") == __version__ and field("license") == PROJECT["license"]
    assert author == PROJECT["authors"][0]["name"] and re.fullmatch(r"\d{4}-\d\d-\d\d", released)


def test_every_author_of_a_cited_paper_has_both_names():
    cited = CITATION.partition("references:")[2]
    assert cited.count("  - type:") == OF_PAPERS
    assert cited.count("given-names:") == cited.count("family-names:") >= OF_PAPERS
