"""The records of a result page, and the form in which it prints their figures."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.recipe import Case, cases_of
from mini_ee.experiments.trainings import read_case

NOT_RUN, NO_FIGURE = "·", "none"  # cells of a case that was not run; of one that was run and lacks the figure
SHARE = re.compile(  # figures that are shares of 1, printed in percent
    r"((policy|default|decoded) )?(score|saved|agreement)( .+)?|full|hold-out|majority|reference|overthought"
    r"|default lost|(leave|left|accuracy) after .+|head .+|end to end .+|best single layer|kNN votes.*|random layers"
    r"|oracle|estimate.*|measured|AdaInfer|SLEB|CALM"
)


class PageData(NamedTuple):
    """The records of all cases of a recipe, and the names that its page prints."""

    cases: dict[str, Case]
    found: dict[str, dict]  # case -> its record
    figure_names: dict[str, str] = {}  # pattern of a figure's key in a record -> what the page calls it
    case_names: dict[str, str] = {}  # pattern in a case's name -> what the page prints for it, applied in this order

    def values(self, case: str, figure: str) -> dict[str, float]:
        """Seed -> figure, of the seeds that have it."""
        seeds = self.found[case]["seeds"].items()
        return {seed: made["figures"][figure] for seed, made in seeds if figure in made["figures"]}

    def mean(self, case: str, figure: str) -> float | None:
        """Mean over the seeds that have the figure; None if none has it."""
        values = [*self.values(case, figure).values()]
        return float(np.mean(values)) if values else None

    def name_of(self, figure: str) -> str:
        """The name of a figure on the page, if the recipe gives one; otherwise its key."""
        for pattern, name in self.figure_names.items():
            if match := re.fullmatch(pattern, figure):
                return match.expand(name)
        return figure

    def name_of_case(self, case: str) -> str:
        for pattern, name in self.case_names.items():
            case = re.sub(pattern, name, case)
        return case


def read_data(folder: Path, recipe: dict) -> PageData:
    """The records of a recipe's cases under a folder."""
    cases = cases_of(recipe)
    found = {name: read_case(folder, case) for name, case in cases.items()}
    return PageData(cases, found, recipe.get("figure_names", {}), recipe.get("case_names", {}))


def is_share(figure: str) -> bool:
    """Whether the figure is a share of 1."""
    return SHARE.fullmatch(figure) is not None


def printed(value: float, figure: str, digits: int | None = None) -> str:
    """A share in percent with one decimal, any other figure with three significant digits or `digits` decimals."""
    if is_share(figure):
        return f"{100 * value:.1f}"
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def with_unit(value: float, figure: str) -> str:
    """The figure as printed, followed by a percent sign if it is a share."""
    return printed(value, figure) + (" %" if is_share(figure) else "")


def cell(values: list[float], figure: str, seeds: int, digits: int | None = None) -> str:
    """Mean and standard deviation over seeds, and the number of seeds if some lack the figure."""
    mean = printed(float(np.mean(values)), figure, digits)
    decimals = len(mean.partition(".")[2])
    spread = (100 if is_share(figure) else 1) * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    about = f" ±{spread:,.{decimals}f}" if round(spread, decimals) else ""
    return mean + about + (f" ({len(values)} of {seeds} seeds)" if len(values) < seeds else "")


def filled_in(text: str, data: PageData) -> str:
    """The text with {case | figure} replaced by the mean over seeds."""

    def mean(match: re.Match) -> str:
        case, figure = match.groups()
        value = data.mean(case, figure)
        return NOT_RUN if value is None else with_unit(value, figure)

    return re.sub(r"\{([^|}]+) \| ([^|}]+?)\}", mean, text)
