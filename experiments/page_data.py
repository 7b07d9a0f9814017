"""The records of a result page, and the form in which it prints their figures."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.experiments.example_values import example_values
from mini_ee.experiments.measures import READ_A_TASK
from mini_ee.experiments.recipe import Case, cases_of
from mini_ee.experiments.trainings import read_case, record_of

ROUNDING = 1e-4  # of a figure in the JSON, at most
# A chosen threshold is the confidence of an example. Another processor may round the last bit of a confidence
# differently, and then this example exits elsewhere. So many examples may differ from the run's own:
OTHER_EXITS = 2
TRAIN_SECONDS = "train seconds"  # a figure
NOT_RUN, NO_FIGURE = "not run", "none"  # cells of a case that was not run; of one that was run and lacks the figure
SHARE = re.compile(  # figures that are shares of 1, printed in percent
    r"((policy|default|decoded) )?(score|saved|agreement)( .+)?|full|hold-out( .+)?|majority|reference|overthought"
    r"|default lost|(leave|left|accuracy) after .+|head .+|end to end .+|best single layer|kNN votes.*|random layers"
    r"|oracle|estimate.*|measured|AdaInfer|SLEB|CALM|(HellaSwag|Winogrande|MMLU)( .+)?"
)

TEST_SHARE = re.compile(  # shares of the reported split of a task, which is the same for all seeds
    r"((policy|default) )?(score|saved)( .+)?|full|majority|best single layer|kNN votes.*|random layers|oracle"
    r"|AdaInfer|SLEB|CALM"
)


class PageData(NamedTuple):
    """The records of all cases of a recipe, and the names that its page prints."""

    cases: dict[str, Case]
    records: dict[str, dict]  # case -> its record
    figure_names: dict[str, str] = {}  # pattern of a figure's key in a record -> what the page calls it
    case_names: dict[str, str] = {}  # pattern in a case's name -> what the page prints for it, applied in this order
    folder: Path | None = None  # of the JSON files; None: there are no records of single examples

    @property
    def trained(self) -> dict[str, Case]:
        """The cases without those that are selected from others."""
        return {name: case for name, case in self.cases.items() if not case.of}

    def values(self, case: str, figure: str) -> dict[str, float]:
        """Seed -> figure, of the seeds that have it. Seconds of trainings on a GPU are left out: others are a CPU's."""
        seeds = self.records[case]["seeds"].items()
        if figure == TRAIN_SECONDS:
            seeds = [(seed, made) for seed, made in seeds if "gpu" not in made["how"]]
        return {seed: made["figures"][figure] for seed, made in seeds if figure in made["figures"]}

    def mean(self, case: str, figure: str) -> float | None:
        """Mean over the seeds that have the figure; None if none has it."""
        values = [*self.values(case, figure).values()]
        return float(np.mean(values)) if values else None

    def rows(self, case: str, figure: str) -> tuple[str, int]:
        """The task on whose test examples a share was measured, and their number; 0 for other figures."""
        task = str(self.cases[case].options.get("task"))
        if self.cases[case].measure not in READ_A_TASK or not TEST_SHARE.fullmatch(figure):
            return task, 0
        made = self.records[case]["seeds"].values()
        return task, min((record["test_rows"] for record in made), default=0)

    def examples(self, case: str, figure: str, seed: str) -> np.ndarray | None:
        """(N,): a figure of each reported example, of which the figure is the mean; None if it is not recorded.

        Raises ValueError if the record is not that of the run that gave the figure.
        """
        if self.folder is None:
            return None
        path = record_of(self.folder, self.records[case].get("selected", {}).get(seed, case))
        values = example_values(path, int(seed), figure)
        if values is None:
            return None
        if abs(values.mean() - self.values(case, figure)[seed]) > ROUNDING + OTHER_EXITS / len(values):
            raise ValueError(
                f"{path}: expected the examples of seed {seed} of {case}, found another mean of {figure!r}; remove the "
                f"record, so that the case is run again"
            )
        return values

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
    by_case = {name: read_case(folder, case) for name, case in cases.items() if not case.of}
    by_case |= {name: _selected(case, by_case) for name, case in cases.items() if case.of}
    return PageData(cases, by_case, recipe.get("figure_names", {}), recipe.get("case_names", {}), folder)


def _selected(case: Case, by_case: dict[str, dict]) -> dict:
    """The record of a case that is selected from others. A seed is left out if one of them lacks it, or the figure."""
    records = {name: by_case[name]["seeds"] for name in case.of}
    chosen, seeds = {}, set.intersection(*map(set, records.values()))
    for seed in sorted(seeds, key=int):
        figures = {name: made[seed]["figures"] for name, made in records.items()}
        if all(case.by in figure for figure in figures.values()):
            chosen[seed] = max(figures, key=lambda name: figures[name][case.by])
    return {"seeds": {seed: records[name][seed] for seed, name in chosen.items()}, "selected": chosen}


def is_share(figure: str) -> bool:
    """Whether the figure is a share of 1."""
    return SHARE.fullmatch(figure) is not None


def printed(value: float, figure: str, digits: int | None = None) -> str:
    """A share in percent with one decimal, any other figure with three significant digits or `digits` decimals."""
    if is_share(figure):
        return f"{100 * value:.{1 if digits is None else digits}f}"
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def with_unit(value: float, figure: str) -> str:
    """The figure as printed, followed by a percent sign if it is a share."""
    return printed(value, figure) + ("%" if is_share(figure) else "")


def cell(values: list[float], figure: str, seeds: int, digits: int | None = None) -> str:
    """Mean and standard deviation over seeds, and the number of seeds if some lack the figure."""
    mean = printed(float(np.mean(values)), figure, digits)
    decimals = len(mean.partition(".")[2])
    spread = (100 if is_share(figure) else 1) * float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    margin = f" ±{spread:,.{decimals}f}" if round(spread, decimals) else ""
    return mean + margin + (f" ({len(values)} of {seeds} seeds)" if len(values) < seeds else "")
