"""What the templates of the papers' pages name: means over seeds, claims with their comparisons, tables.

pages/PAPER.md is the first page of a paper. All papers share pages/claims.md and pages/tables.md, the details.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from mini_ee.experiments.claims import NO_SEED_HAS_IT, Judged, compare_cases, judge_claim
from mini_ee.experiments.leaderboard.figures import task_figures
from mini_ee.experiments.page_data import NO_FIGURE, NOT_RUN, PageData, cell, is_share, printed, read_data, with_unit
from mini_ee.experiments.pages import TEMPLATES, markdown_row, markdown_table, page_of
from mini_ee.experiments.recipe import PAPERS, command_of, comparisons_of, is_choice, load_recipe, parts_of, sides
from mini_ee.experiments.records import read_records
from mini_ee.experiments.trainings import MADE_WITH
from mini_ee.experiments.verdicts import ABOVE, BELOW, FAILS, HOLDS, MISSING, VERDICTS, Compared
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.errors import WrongArguments

WORDS = {ABOVE: HOLDS, BELOW: FAILS}  # of a comparison that stands alone
NONE = "–"
ON_BOTH = ("joint", "two-stage", "lora-exits", "consistent", "pabee")  # methods of the leaderboard and of other pages


class Claim(NamedTuple):
    """A claim as pages show it."""

    number: int
    name: str
    entry: dict  # of the recipe: text, paper, control, caveat, unseen
    verdict: str
    compared: list[list]  # rows of a table: names, both means, the difference, the paper's, seeds, result
    tried: list[list]  # rows of a table of other settings: case, mean of `tried_by`, seeds
    tried_by: str
    sizes: list[
        tuple[str, Compared]
    ] = []  # comparisons of shares for which the paper reports a size, with what it says


def figures_of(recipe: dict, data: PageData) -> dict:
    """What the templates of a paper name. A claim is judged once, when it is first read from here."""
    judged = {claim["name"]: judge_claim(claim, data) for claim in recipe["claims"]}
    claims = [_claim(number, one, data) for number, one in enumerate(judged.values(), 1)]
    return {
        "title": recipe["title"],
        "source": recipe["source"],
        "names": recipe.get("names", ""),
        "claims": claims,
        "work": work_of(data),
        "count": Counter(claim.verdict for claim in claims if not claim.entry.get("control")),
        "verdict": {claim.name: claim.verdict for claim in claims},
        "tables": [{**table, "text": table_text(table, data)} for table in recipe["tables"]],
        "pictures": [
            picture for picture in recipe["pictures"] if data.folder and (data.folder / picture["file"]).exists()
        ],
        "figure": partial(mean_of, data),
        "row": partial(_row, judged, data, cache(partial(_other_page, data))),
        "ranks": partial(rank_correlation, data),
        "table": {table["id"]: table_text(table, data) for table in reversed(recipe["tables"])},
    }


# ---- Figures ----


def work_of(data: PageData) -> dict:
    """The runs of the page's cases: their number, core hours and processors, and of those on a GPU the hours."""
    seeds = [made for name in data.trained for made in data.records[name]["seeds"].values()]
    seconds = [(made["core_seconds"], "gpu" in made["how"]) for made in seeds]
    return {
        "runs": len(seeds),
        "hours": sum(core for core, _ in seconds) / 3600,
        "gpu_hours": sum(core for core, on_gpu in seconds if on_gpu) / 3600,
        **{
            f"{key}s": sorted({made["how"][key] for made in seeds if key in made["how"]})
            for key in ("processor", "gpu")
        },
    }


def mean_of(data: PageData, case: str, figure: str) -> str:
    """The mean over seeds with its unit; NOT_RUN if the case has no record. Raises WrongArguments if there is no such
    case, or if its records lack the figure.
    """
    if case not in data.records:
        raise WrongArguments(f"no experiment of the recipe makes the case {case!r}")
    if not data.records[case]["seeds"]:
        return NOT_RUN
    if (mean := data.mean(case, figure)) is None:
        raise WrongArguments(f"the records of {case!r} have no figure {figure!r}")
    return with_unit(mean, figure)


def rank_correlation(data: PageData, x: str, y: str) -> str:
    """Spearman's correlation between the means of two figures over the cases."""
    means = [pair for case in data.trained if None not in (pair := (data.mean(case, x), data.mean(case, y)))]
    return f"{spearman(*zip(*means)):.2f}" if len(means) == len(data.trained) else NOT_RUN


# ---- Claims ----


def _claim(number: int, judged: Judged, data: PageData) -> Claim:
    claim, rows, tried, sizes = judged.claim, [], [], []
    for compare, comparison in zip(comparisons_of(claim), judged.comparisons):
        if comparison and comparison.size is not None and is_share(sides(compare, "more")[0][1]):
            sizes.append((f"{claim['name']}: {compare['reported']}", comparison))
        rows.append(_compared_row(compare, comparison, data))
        parts = parts_of(compare)
        rows += [_compared_row(part, compare_cases(part, data), data, part=True) for part in parts if len(parts) > 1]
    other = claim.get("tried", {"cases": []})
    for case in other["cases"] if judged.verdict not in (HOLDS, MISSING) else []:
        if values := [*data.values(case, other["figure"]).values()]:
            tried.append([data.name_of_case(case), cell(values, other["figure"], len(values)), len(values)])
    tried_by = data.name_of(other.get("figure", ""))
    return Claim(number, claim["name"], claim, judged.verdict, rows, tried, tried_by, sizes)


def _compared_row(compare: dict, comparison: Compared | None, data: PageData, part: bool = False) -> list:
    """What is compared, both means, the difference with its interval, what is required, the paper's, seeds, result."""
    more, than = (sides(compare, side) for side in ("more", "than"))
    (figure, case), against = _names(more, data), "a number"
    figure = f"{compare['times']:g} times {figure}" if "times" in compare else figure
    if than:
        other_figure, other_case = _names(than, data)
        against = other_case if other_figure == figure else f"{other_figure}, {other_case}"
    name = f"{'*part:* ' if part else ''}{figure}: {case}, against {against}"
    required, reported = compare.get("by", 0.0), compare.get("reported", NONE)
    if comparison in (None, NO_SEED_HAS_IT):
        missing = NOT_RUN if comparison is None else NO_FIGURE
        return [name, missing, missing, missing, reported, 0, missing]
    key = more[0][1]
    means = (with_unit(value, key) for value in (comparison.more, comparison.than))
    difference = _signed(comparison.difference, key) if part else _interval(comparison, key)
    difference += f", required: {_signed(required, key)}" if required and not part else ""
    return [name, *means, difference, "" if part else reported, comparison.seeds, "" if part else comparison.verdict]


def _other_page(data: PageData, page: str) -> tuple[dict[str, dict], PageData]:
    """The claims of another page, by name, and its records, which stand beside these."""
    recipe = load_recipe(page)
    return {claim["name"]: claim for claim in recipe["claims"]}, read_data(data.folder.parent / page, recipe)


def _verdict(one: Judged, at: int | None = None) -> str:
    """That of the claim, or of one of its comparisons."""
    if at is None:
        return one.verdict
    result = compared.verdict if (compared := one.comparisons[at]) else MISSING
    return WORDS.get(result, result) or MISSING


def _row(
    judged: dict[str, Judged],
    data: PageData,
    other_page: Callable[[str], tuple[dict[str, dict], PageData]],
    label: str,
    name: str,
    at: int | None = None,
    other: tuple | None = None,
) -> str:
    """A row of a first page: the label, what the paper reports, ours, and the verdict.

    at: the comparison of the claim; None: the one that is farthest from what the claim requires. other: page, claim and
    perhaps comparison; their verdict is a last cell.
    """
    one = judged[name]
    compares, verdict = comparisons_of(one.claim), _verdict(one, at)
    last = []
    if other:
        page, other_name, *part = other
        claims, records = other_page(page)
        last = [_verdict(judge_claim(claims[other_name], records), *part)]
    if at is None:
        margins = [_margin(compared) for compared in one.comparisons] or [0.0]
        at = margins.index(min(margins))
    if not compares:
        return markdown_row([label, NONE, NONE, f"**{verdict}**", *last])
    compare, comparison = compares[at], one.comparisons[at]
    ours = NOT_RUN if comparison is None else NO_FIGURE
    if comparison not in (None, NO_SEED_HAS_IT):
        (_, figure), *_ = sides(compare, "more")
        ours = _interval(comparison, figure) if sides(compare, "than") else _value(comparison, figure)
    return markdown_row([label, compare.get("reported", NONE), ours, f"**{verdict}**", *last])


def _margin(comparison: Compared | None) -> float:
    """How far the difference is above what is required, in half widths of its interval."""
    if comparison in (None, NO_SEED_HAS_IT):
        return float("-inf")
    distance, half = comparison.difference - comparison.required, comparison.half_width()
    return distance / half if half else float("inf") * (1 if distance > 0 else -1)


def _interval(comparison: Compared, figure: str) -> str:
    """The difference and its interval: +2.5 (+0.8 to +4.3)."""
    low, high = (_signed(value, figure) for value in (comparison.low, comparison.high))
    return _signed(comparison.difference, figure) + (f" ({low} to {high})" if comparison.high > comparison.low else "")


def _value(comparison: Compared, figure: str) -> str:
    """The first side and its interval, if the second is a number: 28.1% (26.0% to 30.2%)."""
    half = comparison.half_width()
    mean, low, high = (with_unit(comparison.more + off, figure) for off in (0.0, -half, half))
    return f"{mean} ({low} to {high})" if half else mean


def _signed(value: float, figure: str) -> str:
    text = printed(abs(value), figure, None if is_share(figure) or abs(value) >= 10 else 3)
    if value and not float(text.replace(",", "")):  # its sign can decide a verdict
        text = printed(abs(value), figure, 2 if is_share(figure) else 4)
    return f"{'-' if value < 0 else '+'}{text}" if float(text.replace(",", "")) else text


def _names(pairs: list[tuple[str, str]], data: PageData) -> tuple[str, str]:
    """What the page calls the figures and the cases of a side: the first one, and how many there are."""
    columns = (map(data.name_of, [figure for _, figure in pairs]), map(data.name_of_case, [case for case, _ in pairs]))
    several = [list(dict.fromkeys(names)) for names in columns]
    figure, case = (f"mean of {len(names)} ({names[0]}, ...)" if names[1:] else names[0] for names in several)
    return figure, case


# ---- Tables ----


def table_text(table: dict, data: PageData) -> str:
    """Markdown: our table, and next to it or below it the paper's."""
    columns, theirs, rows = table["columns"], table.get("theirs"), []
    joined = theirs if theirs and table.get("join") else {"columns": [], "rows": {}}
    for name, row in table["rows"].items():
        cells = []
        for column in columns.values():
            case, figure = (table[key].format(**column | row) for key in ("case", "figure"))
            values, seeds = [*data.values(case, figure).values()], len(data.records[case]["seeds"])
            digits = column.get("digits", row.get("digits", table.get("digits")))
            cells.append(cell(values, figure, seeds, digits) if values else NO_FIGURE if seeds else NOT_RUN)
        rows.append([name, *cells, *joined["rows"].get(name, [""] * len(joined["columns"]))])
    lines = markdown_table(["ours", *columns, *(f"the paper: {name}" for name in joined["columns"])], rows)
    if theirs and joined is not theirs:
        paper_rows = ([name, *cells] for name, cells in theirs["rows"].items())
        lines += ["", *markdown_table(["the paper", *theirs["columns"]], paper_rows)]
    return "\n".join(lines)


def runs_table(data: PageData) -> str:
    """CSV: of each case its settings, what was chosen and tried, test rows, core hours, where it ran, and its data."""
    where = (*sorted(MADE_WITH), "gpu")
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(
        ["case", "seeds", "settings", "chosen", "tried", "test_rows", "dropped", "core_hours", *where, "sha256"]
    )
    for name, case in data.trained.items():
        seeds = [*data.records[name]["seeds"].values()]
        settings = {key: value for key, value in case.options.items() if not is_choice(value)}
        chosen, tried = (json.dumps(data.records[name].get(key)) for key in ("chosen", "tried"))
        rows, dropped = (
            max((one.get(key, 0) for one in seeds), default=0) for key in ("test_rows", "test_rows_dropped")
        )
        hours = sum(one["core_seconds"] for one in seeds) / 3600
        places = [" / ".join(sorted({str(one["how"][key]) for one in seeds if key in one["how"]})) for key in where]
        sums = json.dumps({source: value for one in seeds for source, value in one["data"].items()})
        made = [chosen, tried, rows, dropped, f"{hours:.3g}", *places, sums]
        writer.writerow([name, len(seeds), json.dumps(settings), *made])
    return content.getvalue()


# ---- Pages ----


def pages_of(paper: str, recipe: dict, out: Path) -> dict[str, str]:
    """Path below OUT -> text: PAPER.md, the first page, and PAPER/claims.md, tables.md and runs.csv, its details."""
    data = read_data(out / paper, recipe)
    first, differs = recipe.get("template", paper), f"differs/{paper}.md"
    known = first == paper and (TEMPLATES / differs).exists()
    figures = figures_of(recipe, data) | {
        "paper": paper,
        "differs": differs if known else "",
        "command": command_of(paper),
    }
    names = ("claims", "tables") if recipe["claims"] else ("tables",)
    details = {f"{paper}/{name}.md": page_of(name, figures) for name in names}
    return {f"{paper}.md": page_of(first, figures), **details, f"{paper}/runs.csv": runs_table(data)}


def overview_figures(out: Path, quick: bool) -> dict:
    """What results/README.md names: the figures of each paper that has a page in OUT; and if all have theirs, those of
    the other pages in its table of one quantity.
    """
    recipes = {name: load_recipe(name, quick) for name in PAPERS if (out / f"{name}.md").exists()}
    papers = {name: figures_of(recipe, read_data(out / name, recipe)) for name, recipe in recipes.items()}
    counts = {name: paper["count"] for name, paper in papers.items()}
    count = sum(counts.values(), Counter())
    verdicts = [verdict for verdict in VERDICTS if count[verdict]]
    whole = [*papers] == [*PAPERS] and not any("template" in recipe for recipe in recipes.values())
    defaults = partial(mean_of, read_data(out / "shortest", load_recipe("shortest"))) if whole else None
    return {
        "papers": papers,
        "count": count,
        "verdicts": verdicts,
        "rows": [
            [
                f"[{papers[name]['title']}]({name}.md)",
                verdict_counts.total(),
                *(verdict_counts[verdict] or "" for verdict in verdicts),
            ]
            for name, verdict_counts in counts.items()
        ],
        "whole": whole,
        "defaults": defaults,
        "leaderboard": leaderboard_saved(out / "records" / "TREC") if whole else {},
    }


def leaderboard_saved(folder: Path) -> dict[str, str]:
    """Method -> the share of the layers saved at one point on the leaderboard, by the records in a folder."""
    records = {method: read_records(folder / f"{method}.npz") for method in ON_BOTH}
    figures = task_figures(folder.name, {method: seeds for method, seeds in records.items() if seeds}, {}).figures
    values = {method: figures.get((method, "saved"), NOT_RUN) for method in ON_BOTH}
    return {
        method: NOT_RUN if isinstance(saved, str) else with_unit(saved.by_seed.mean(), "saved")
        for method, saved in values.items()
    }
