"""Recipes: the experiments, claims, tables and pictures of a result page, as data (recipes/*.json).

An experiment is a pattern for names and some axes. Each combination of values on the axes gives a case. A case is one
training, repeated with several seeds, and its measurement. If the experiment has "select", a case is one of several
others that differ in a setting: for each seed the one that is selected on held-out examples.
"""

from itertools import product
from pathlib import Path
from typing import NamedTuple

from mini_ee.lab.data.files import read_json
from mini_ee.lab.errors import WrongArguments

RECIPES = Path(__file__).parent / "recipes"
PAPERS = ("loraexit", "self-supervised", "raee", "consistentee")
PAGES = (*PAPERS, "larger-models", "shortest", "estimate")
METHOD_OF = {"loraexit": "lora-exits", "consistentee": "consistent"}  # page -> method, if they have different names


class Case(NamedTuple):
    """One training and its measurement."""

    name: str
    measure: str
    options: dict  # of `mini_ee.train`; {"choose": [...]}: the value is chosen on the held-out set, among numbers and
    # beyond them (see trainings.next_to_try), or among settings of one or several options
    reference: str | None = None  # the case whose last exit a loss of accuracy is measured against
    reads: str | list[str] | None = None  # a text whose perplexity is measured, or benchmarks
    seeds: int | None = None  # number of seeds on the page; None: 3, or 1 with --quick
    of: tuple[str, ...] = ()  # if it is selected: the cases of which each seed has the one with the largest figure
    by: str = ""  # that figure, of held-out examples

    def sources(self) -> list[str]:
        """The names of the task, the texts and the benchmarks that the case reads."""
        read = self.reads if isinstance(self.reads, list) else [self.reads]
        named = (self.options.get("task"), self.options.get("text"), *read)
        return [name for name in dict.fromkeys(named) if isinstance(name, str)]


def command_of(page: str) -> str:
    """The command that makes a page. That of a paper takes the name of its method, as `mini-ee train` does."""
    return f"mini-ee reproduce {METHOD_OF.get(page, page)}"


def load_recipe(paper: str, quick: bool = False) -> dict:
    """The recipe of a page. quick: its small version, which needs only built-in models and texts."""
    recipe = read_json(RECIPES / f"{paper}.json")
    small = recipe.pop("quick", None)
    if quick and small is None:
        papers = ", ".join(METHOD_OF.get(page, page) for page in PAPERS)
        raise WrongArguments(f"--quick is for {papers}; leave it out for {paper}")
    for claim in recipe["claims"]:
        if (tried := claim.get("tried")) and isinstance(tried["cases"], str):
            tried["cases"] = recipe["settings"][tried["cases"]]
    return recipe | small | {"template": "quick"} if quick else recipe


def cases_of(recipe: dict) -> dict[str, Case]:
    """Name -> case, in the order of the recipe."""
    cases = {}
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
            select = experiment.get("select", {"of": [], "by": ""})
            of = tuple(pattern.format(**chosen) for pattern in select["of"])
            case = Case(
                name, experiment["measure"], options, reference, experiment.get("reads"), seeds, of, select["by"]
            )
            if cases.setdefault(name, case) != case:
                raise ValueError(f"two experiments make the case {name!r} with different settings")
    return cases


def is_choice(value) -> bool:
    """Whether the value of an option is chosen on the held-out set."""
    return isinstance(value, dict) and "choose" in value


def select(recipe: dict, only: str) -> dict:
    """The recipe with only one table, picture or claim. Raises WrongArguments if it has none of that name.

    A claim is reduced to its comparisons, without the other settings that are tried before it fails.
    """
    claims = {f"claim {number}": claim for number, claim in enumerate(recipe["claims"], 1)}
    tables = [table for table in recipe["tables"] if table["id"] == only]
    pictures = [picture for picture in recipe["pictures"] if picture["title"].startswith(f"{only}:")]
    if not tables and not pictures and only not in claims:
        known = [table["id"] for table in recipe["tables"]]
        known += [picture["title"].partition(":")[0] for picture in recipe["pictures"]] + [*claims]
        raise WrongArguments(f"--only: expected one of {'; '.join(dict.fromkeys(known))}; found {only}")
    compared = [claims[only] | {"tried": {}}] if only in claims else []
    return recipe | {"claims": compared, "tables": tables, "pictures": pictures}


def cases_named(recipe: dict, cases: dict[str, Case]) -> dict[str, Case]:
    """The cases that claims, tables and pictures of the recipe read, those from which one is selected, and their
    references, in the order of the recipe.

    Raises ValueError if one is named that no experiment makes.
    """
    named = set()
    for claim in recipe["claims"]:
        for comparison in comparisons_of(claim):
            for side in ("more", "than"):
                named |= {case for case, _ in sides(comparison, side)}
        named |= set(claim.get("tried", {}).get("cases", []))
    for table in recipe["tables"]:
        for row in table["rows"].values():
            named |= {table["case"].format(**column | row) for column in table["columns"].values()}
    for picture in recipe["pictures"]:
        for panel in panels_of(picture):
            for series in panel["series"].values():
                if "rows" in panel:
                    named |= {series["case"].format(**series | row) for row in panel["rows"].values()}
                else:
                    named |= {series["case"].format(value, **series) for value in series.get("over", [None])}
    named |= {other for name in named if name in cases for other in cases[name].of}
    if unknown := sorted(named - cases.keys()):
        raise ValueError(f"no experiment makes {', '.join(unknown)}")
    named |= {cases[name].reference for name in named if cases[name].reference}
    return {name: case for name, case in cases.items() if name in named}


def comparisons_of(claim: dict) -> list[dict]:
    """The comparisons of a claim, each with the settings over which it is a mean: those of the claim and its own.

    `over` has axes, such as {"task": ["TREC", "SST-2"]}; the names of cases and figures contain {task}.
    """
    shared = claim.get("over", {})
    return [compare | {"over": shared | compare.get("over", {})} for compare in claim.get("compare", [])]


def parts_of(compare: dict) -> list[dict]:
    """The comparison in each of the settings over which it is a mean."""
    axes = compare["over"]
    parts = [dict(zip(axes, values)) for values in product(*axes.values())]
    return [compare | {"over": {axis: [value] for axis, value in part.items()}} for part in parts]


def sides(compare: dict, side: str) -> list[tuple[str, str]]:
    """The (case, figure) pairs of one side of a comparison, without repetitions; an empty list if it is a number."""
    given, figure = compare[side], compare.get("figure")
    if isinstance(given, (int, float)):
        return []
    if isinstance(given, dict):
        given, figure = given["case"], given["figure"]
    axes = compare.get("over", {})
    settings = (dict(zip(axes, values)) for values in product(*axes.values()))
    return list(dict.fromkeys((given.format(**setting), figure.format(**setting)) for setting in settings))


def panels_of(picture: dict) -> list[dict]:
    """The panels of a picture, each with its own series: those of its `panels`, whose `with` is added to every series;
    or one for each series, next to the series that the picture names as `against`; or the picture itself.
    """
    if one := picture.get("against"):
        series = picture["series"]
        pairs = {name: {one: series[one], name: line} for name, line in series.items() if name != one}
        return [picture | {"panel": name, "series": pair} for name, pair in pairs.items()]
    panels = [picture | panel for panel in picture.get("panels", [{}])]
    return [
        panel | {"series": {name: line | panel.get("with", {}) for name, line in panel["series"].items()}}
        for panel in panels
    ]
