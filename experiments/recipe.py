"""A recipe is what a paper's page is made from: its experiments, claims, tables and pictures, as data (recipes/*.json).

An experiment is a pattern for names and some axes; each choice of values along the axes makes a case. A case is one
training, repeated with several seeds, and what is measured of it.
"""

from itertools import product
from pathlib import Path
from string import Formatter
from typing import NamedTuple

from mini_ee.data.files import read_json
from mini_ee.errors import WrongArguments

RECIPES = Path(__file__).parent / "recipes"
PAPERS = ("loraexit", "self-supervised", "raee", "consistentee")
PAGES = (*PAPERS, "shortest", "estimate")


class Case(NamedTuple):
    """One training and what is measured of it."""

    name: str
    measure: str
    options: dict  # of `mini_ee.train`; {"choose": [...]} where the hold-out decides
    reference: str | None = None  # the case from whose last exit points of loss are counted
    reads: str | None = None  # a text, for perplexity
    seeds: int | None = None  # how many its page has; None: 3, of --quick 1


def load_recipe(paper: str, quick: bool = False) -> dict:
    """A page's recipe. quick: the small part of it that the built-in models and reviews show anywhere."""
    recipe = read_json(RECIPES / f"{paper}.json")
    small = recipe.pop("quick", None)
    if quick and small is None:
        raise WrongArguments(f"--quick is for {', '.join(PAPERS)}; leave it out for {paper}")
    return recipe | small | {"changed": [], "short": []} if quick else recipe


def cases_of(recipe: dict) -> dict[str, Case]:
    """All cases by name, in the order of the file."""
    found = {}
    for experiment in recipe["experiments"]:
        axes = experiment["axes"]
        for values in product(*axes.values()):
            chosen = dict(zip(axes, values))
            options = dict(experiment["options"])
            for axis, value in chosen.items():
                options |= axes[axis][value]
            name = experiment["name"].format(**chosen)
            reference = experiment.get("reference")
            reference = reference and reference.format(**chosen)
            seeds = options.pop("seeds", experiment.get("seeds"))
            case = Case(name, experiment["measure"], options, reference, experiment.get("reads"), seeds)
            if found.setdefault(name, case) != case:
                raise ValueError(f"two experiments make the case {name!r}, with other settings")
    return found


def is_choice(value) -> bool:
    """Whether an option is one of several, of which the hold-out chooses."""
    return isinstance(value, dict) and "choose" in value


def select(recipe: dict, only: str) -> dict:
    """The recipe with one table, picture or claim alone. Raises WrongArguments for one that it does not have.

    Of a claim what it compares; the other settings that are tried before it fails are no part of it.
    """
    claims = {f"claim {number}": claim for number, claim in enumerate(recipe["claims"], 1)}
    tables = [table for table in recipe["tables"] if table["id"] == only]
    pictures = [picture for picture in recipe["pictures"] if picture["title"].startswith(f"{only}:")]
    if not tables and not pictures and only not in claims:
        there = [table["id"] for table in recipe["tables"]]
        there += [picture["title"].partition(":")[0] for picture in recipe["pictures"]] + [*claims]
        raise WrongArguments(f"--only: expected one of {'; '.join(dict.fromkeys(there))}; found {only}")
    compared = [claims[only] | {"tried": {}}] if only in claims else []
    return recipe | {"claims": compared, "tables": tables, "pictures": pictures, "changed": []}


def cases_named(recipe: dict, cases: dict[str, Case]) -> dict[str, Case]:
    """The cases that the recipe's claims, tables and pictures read, with their references, in the order of the file.

    Raises ValueError where they name one that no experiment makes.
    """
    named = set()
    for claim in recipe["claims"]:
        for each in claim.get("compare", []):
            for side in ("more", "than"):
                named |= {case for case, _ in sides(each, side)}
        named |= set(claim.get("tried", {}).get("cases", []))
    for table in recipe["tables"]:
        for row in table["rows"].values():
            named |= {table["case"].format(**column | row) for column in table["columns"].values()}
    named |= {each["case"] for each in recipe.get("changed", [])}
    for picture in recipe["pictures"]:
        for series in picture["series"].values():
            named |= {filled(series["case"], value) for value in series.get("over", [None])}
    if unknown := sorted(named - cases.keys()):
        raise ValueError(f"no experiment makes {', '.join(unknown)}")
    named |= {cases[name].reference for name in named if cases[name].reference}
    return {name: case for name, case in cases.items() if name in named}


def sides(compare: dict, side: str) -> list[tuple[str, str]]:
    """The (case, figure) pairs of one side of a comparison; none where it is a number."""
    found, figure = compare[side], compare.get("figure")
    if isinstance(found, (int, float)):
        return []
    if isinstance(found, dict):
        found, figure = found["case"], found["figure"]
    return [(name, figure) for name in ([found] if isinstance(found, str) else found)]


def filled(pattern: str, value) -> str:
    """The pattern with the value where {} stands."""
    takes_one = any(field is not None for _, field, _, _ in Formatter().parse(pattern))
    return pattern.format(value) if takes_one else pattern
