"""The result page of a paper: made from its recipe and the JSON of its cases, which contain all of its figures."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mini_ee.data.metrics import spearman
from mini_ee.experiments.markdown import made_by, markdown_row, markdown_table
from mini_ee.experiments.recipe import Case, cases_of, is_choice, sides
from mini_ee.experiments.trainings import MADE_WITH, read_case
from mini_ee.experiments.verdicts import (
    CONFIDENCE_LEVEL,
    FAILS,
    FEW,
    HOLDS,
    LEAST_SEEDS,
    MISSING,
    RULES,
    UNDECIDED,
    UNTRIED,
    Compared,
    compared,
    verdict_of,
)

DIFFERS = "What differs from the paper"
NOT_RUN, NO_FIGURE = "·", "none"  # cells of a case that was not run; of one that was run and lacks the figure
NO_SEED_HAS_IT = Compared(0.0, 0.0, 0.0, 0.0, 0.0, 0, UNDECIDED)  # all cases were run, and no seed has the figure


class PageData(NamedTuple):
    """The JSON of all cases of a recipe."""

    cases: dict[str, Case]
    found: dict[str, dict]  # case -> its JSON
    figure_names: dict[str, str] = {}  # pattern of a figure's key in the JSON -> what the page calls it

    def values(self, case: str, figure: str) -> dict[str, float]:
        """Seed -> figure, of the seeds that have it."""
        seeds = self.found[case]["seeds"].items()
        return {seed: made["figures"][figure] for seed, made in seeds if figure in made["figures"]}

    def name_of(self, figure: str) -> str:
        """The name of a figure on the page, if the recipe gives one; otherwise its key."""
        for pattern, name in self.figure_names.items():
            if match := re.fullmatch(pattern, figure):
                return match.expand(name)
        return figure


class Judged(NamedTuple):
    """A claim with its comparisons and its verdict."""

    claim: dict
    comparisons: list[Compared | None]  # in the claim's order; None: its cases have not been run
    verdict: str


def read_data(folder: Path, recipe: dict) -> PageData:
    """The JSON of a recipe's cases under a folder."""
    cases = cases_of(recipe)
    found = {name: read_case(folder, case) for name, case in cases.items()}
    return PageData(cases, found, recipe.get("figure_names", {}))


# ---- Claims ----


def judge_claim(claim: dict, data: PageData) -> Judged:
    """Compare on the seeds that all cases of a comparison have, and decide the claim.

    If the cases were run with enough seeds and too few of these have the figure, the comparison is undecided. For
    example, there is no loss of the rows that exit at a layer if no row exits there.
    """
    comparisons = []
    for each in claim.get("compare", []):
        both = [_side(data, each, side) for side in ("more", "than")]
        seeds = sorted(set.intersection(*(set(values) for values in both if values is not None)))
        names = {name for side in ("more", "than") for name, _ in sides(each, side)}
        run = len(set.intersection(*(set(data.found[name]["seeds"]) for name in names)))
        if not seeds:
            comparisons.append(NO_SEED_HAS_IT if run >= LEAST_SEEDS else None)
            continue
        more, than = ([values[seed] if values is not None else each["than"] for seed in seeds] for values in both)
        comparison = compared(more, than, each.get("by", 0.0), each.get("exact", False))
        if comparison.seeds < LEAST_SEEDS <= run:
            comparison = comparison._replace(verdict=UNDECIDED)
        comparisons.append(comparison)
    if "unseen" in claim:
        return Judged(claim, [], UNDECIDED)
    verdict, tried = verdict_of(comparisons, claim.get("need", "all")), claim.get("tried", {"cases": []})
    if verdict == FAILS and not all(data.found[name]["seeds"] for name in tried["cases"]):
        verdict = UNTRIED
    return Judged(claim, comparisons, verdict)


def _side(data: PageData, compare: dict, side: str) -> dict[str, float] | None:
    """Seed -> the mean over the side's cases; None if the side is a number."""
    pairs = sides(compare, side)
    if not pairs:
        return None
    found = [data.values(*pair) for pair in pairs]
    shared = set.intersection(*(set(values) for values in found))
    return {seed: float(np.mean([values[seed] for values in found])) for seed in shared}


def _claim_lines(number: int, judged: Judged, data: PageData) -> list[str]:
    claim, comparisons, verdict = judged
    whose = "A control of ours; the paper" if claim.get("control") else "The paper"
    lines = [f"{number}. {claim['text']}: **{verdict}**. {whose}: {claim['paper']}."]
    if "unseen" in claim:
        return [f"{lines[0]} {claim['unseen']}"]
    for each, comparison in zip(claim["compare"], comparisons):
        if comparison not in (None, NO_SEED_HAS_IT):
            lines.append(_comparison_line(each, comparison, data))
    if verdict not in (HOLDS, FEW, MISSING) and (tried := claim.get("tried")):
        found = {name: list(data.values(name, tried["figure"]).values()) for name in tried["cases"]}
        means = {name: float(np.mean(values)) for name, values in found.items() if values}
        if len(means) > 1:
            best = (min if tried.get("least") else max)(means, key=means.get)
            about = f"{data.name_of(tried['figure'])} {_digits(means[best])}"
            lines.append(f"   - best of {len(means)} settings tried: *{best}*, {about}")
    return lines


def _comparison_line(compare: dict, comparison: Compared, data: PageData) -> str:
    """Both means, their difference with its interval, the difference that is required, and the verdict."""
    interval = f" ({comparison.low:+.3f} to {comparison.high:+.3f})" if comparison.high > comparison.low else ""
    more, than = _names(compare, data)
    line = f"   - {more}{_digits(comparison.more)}{than}{_digits(comparison.than)}; difference "
    line += f"{comparison.difference:+.3f}{interval}"
    if compare.get("by"):
        line += f", required: above {compare['by']:+g}"
    line += f"; {comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
    return line if comparison.verdict == FEW else f"{line}: {comparison.verdict}"


def _names(compare: dict, data: PageData) -> tuple[str, str]:
    """The words before the figure of each side: the name of the case, of the figure, or both."""
    more, than = (sides(compare, side) for side in ("more", "than"))
    if not than:
        return f"{_case_name(more)}: {data.name_of(more[0][1])} ", " against " if compare.get("by") else ", required: "
    names = [data.name_of(side[0][1]) for side in (more, than)]
    if [case for case, _ in more] == [case for case, _ in than]:
        return f"{_case_name(more)}: {names[0]} ", f" against {names[1]} "
    if names[0] == names[1]:
        return f"{names[0]}: {_case_name(more)} ", f" against {_case_name(than)} "
    return f"{names[0]}, {_case_name(more)} ", f" against {names[1]}, {_case_name(than)} "


def _case_name(pairs: list[tuple[str, str]]) -> str:
    cases = [f"*{case}*" for case in dict.fromkeys(case for case, _ in pairs)]
    if len(cases) > 2:
        return f"mean of {len(cases)} cases ({cases[0]}, ...)"
    return f"mean of {cases[0]} and {cases[1]}" if len(cases) == 2 else cases[0]


def _digits(value: float, digits: int = 3) -> str:
    """A figure as papers print it, a share without the leading zero: .931."""
    if abs(value) >= 10:
        return f"{value:,.{0 if abs(value) >= 100 else 1}f}"
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) and digits else text


# ---- Tables ----


def _table_lines(table: dict, data: PageData) -> list[str]:
    columns = table["columns"]
    rows = []
    for name, row in table["rows"].items():
        cells = []
        for column in columns.values():
            case, figure = (table[key].format(**column | row) for key in ("case", "figure"))
            values, seeds = list(data.values(case, figure).values()), len(data.found[case]["seeds"])
            cells.append(_cell(values, table.get("digits", 3), seeds) if values else NO_FIGURE if seeds else NOT_RUN)
        rows.append([name, *cells])
    lines = [f"**{table['id']}: {table['title']}**", ""]
    if all(cell == NOT_RUN for _, *cells in rows for cell in cells):
        lines += ["Not run yet."]
    else:
        lines += markdown_table(["our results", *columns], rows)
    if note := table.get("note"):
        lines += ["", note]
    if theirs := table.get("theirs"):
        paper_rows = ([name, *cells] for name, cells in theirs["rows"].items())
        lines += ["", *markdown_table(["the paper's results", *theirs["columns"]], paper_rows)]
    return [*lines, ""]


def _cell(values: list[float], digits: int, seeds: int) -> str:
    """Mean over seeds, their range if it is not one printed value, and the number of seeds if some lack the figure."""
    mean, least, most = (_digits(float(value), digits) for value in (np.mean(values), min(values), max(values)))
    about = [f"{least} to {most}"] if least != most else []
    about += [f"{len(values)} of {seeds} seeds"] if len(values) < seeds else []
    return f"{mean} ({'; '.join(about)})" if about else mean


# ---- The page ----


CLAIMS_INTRO = (
    "Each line below a claim is one comparison: two means over seeds, their difference, in brackets its "
    f"{CONFIDENCE_LEVEL:.0%} interval, and the number of seeds. The first figure should be larger, by more than the "
    "required difference if one is given. [README.md](README.md#how-a-verdict-is-computed) explains the verdicts."
)
TABLES_INTRO = (
    "Our results are means over seeds. Brackets contain the smallest and the largest value if the seeds differ, and "
    f"the number of seeds if some have no value. *{NO_FIGURE}*: no seed has a value. Accuracies and shares are "
    "fractions of 1; the papers print percent."
)


def page(paper: str, recipe: dict, data: PageData, folder: Path, command: str) -> str:
    """The page as Markdown. folder: of its pictures; one that was not drawn is left out."""
    total = len(data.cases)
    run = sum(bool(each["seeds"]) for each in data.found.values())
    lines = [f"# {recipe['title']}", "", f"*{recipe['source']}.* {recipe['about']}", ""]
    for each in in_short(recipe, data):
        lines += [each, ""]
    lines += [made_by(command, f"the JSON files in {paper}/"), ""]
    if run < total:
        lines += [
            f"{run} of {total} cases have been run; `{NOT_RUN}` stands for the others. The command runs them.",
            "",
        ]
    if recipe["claims"]:
        lines += ["## Claims", "", CLAIMS_INTRO, "", *([recipe["names"], ""] if "names" in recipe else [])]
        for number, claim in enumerate(recipe["claims"], 1):
            lines += _claim_lines(number, judge_claim(claim, data), data)
        lines += [""]
    lines += ["## Tables and figures", "", " ".join([TABLES_INTRO, *_dropped(data)]), ""]
    for table in recipe["tables"]:
        lines += _table_lines(table, data)
    if ranks := recipe.get("ranks"):
        lines += [*_rank_lines(ranks, data), ""]
    for picture in recipe["pictures"]:
        if (folder / picture["file"]).exists():
            lines += [f"**{picture['title']}**", "", f"![{picture['title']}]({paper}/{picture['file']})", ""]
    if recipe.get("changed"):
        lines += ["## What changed since an earlier version", "", *_changed_lines(recipe["changed"], data), ""]
    lines += ["## How it was trained", "", *_training_lines(data), ""]
    for key, title in (("differs", recipe.get("differs_title", DIFFERS)), ("next", "What to try next")):
        lines += [f"## {title}", "", *(f"- {each}" for each in recipe[key]), ""]
    return "\n".join([*lines, *_machine_lines(data)]).rstrip() + "\n"


def _machine_lines(data: PageData) -> list[str]:
    made = [one["how"] for each in data.found.values() for one in each["seeds"].values()]
    about = {key: ", ".join(sorted({str(each[key]) for each in made})) for key in MADE_WITH}
    if not made:
        return []
    threads = f"{about['threads']} thread{'' if about['threads'] == '1' else 's'}"
    return [f"Machine: {about['machine']}, {threads}, torch {about['torch']}. Commits: {about['commit']}."]


def in_short(recipe: dict, data: PageData) -> list[str]:
    """The recipe's summary: {case | figure} is replaced by the mean over seeds, {case | figure | %} in percent."""

    def mean(match: re.Match) -> str:
        case, figure, percent = match.groups()
        values = [*data.values(case, figure).values()]
        if not values:
            return NOT_RUN
        value = float(np.mean(values))
        return f"{100 * value:.1f} %" if percent else f"{value:.{2 if value < 10 else int(value < 100)}f}"

    return [re.sub(r"\{([^|}]+) \| ([^|}]+?)( \| %)?\}", mean, each) for each in recipe.get("short", [])]


def _rank_lines(ranks: dict, data: PageData) -> list[str]:
    """Spearman's correlation between the means of two figures over the cases."""
    pairs = [[data.values(case, ranks[key]) for key in ("x", "y")] for case in data.cases]
    means = [[float(np.mean([*each.values()])) for each in pair] for pair in pairs if all(pair)]
    if len(means) < 3:
        return [f"{ranks['text']}: {MISSING}."]
    return [f"{ranks['text']}, over {len(means)} pairs of model and task: **{_digits(spearman(*zip(*means)))}**."]


def _changed_lines(changed: list[dict], data: PageData) -> list[str]:
    """Figures of an earlier version of the page, those of today, and the reason."""
    lines = markdown_table(["figure", "before", "now", "reason"])
    for each in changed:
        values, seeds = list(data.values(each["case"], each["figure"]).values()), len(data.found[each["case"]]["seeds"])
        now = _cell(values, each.get("digits", 3), seeds) if values else NOT_RUN
        lines.append(markdown_row([each["text"], each["then"], now, each["why"]]))
    return lines


def _dropped(data: PageData) -> list[str]:
    """A sentence on the number of dropped test rows of each task, if there are any."""
    counts = {}
    for name, case in data.cases.items():
        for one in data.found[name]["seeds"].values():
            if count := one.get("test_rows_dropped", 0):
                counts[case.options["task"]] = count
    listed = ", ".join(f"{count} of {task}" for task, count in sorted(counts.items()))
    return (
        [f"Test examples that also occur in the train split, word for word, are dropped: {listed}."] if counts else []
    )


def _training_lines(data: PageData) -> list[str]:
    """The settings that most cases share, then a row for each case: its other settings, and the value it chose."""
    run = {name: case for name, case in data.cases.items() if data.found[name]["seeds"]}
    given = {name: {k: _setting(v) for k, v in case.options.items() if not is_choice(v)} for name, case in run.items()}
    often = Counter(setting for each in given.values() for setting in each.items())
    shared = {key: value for (key, value), cases in often.items() if len(run) > 2 and 2 * cases > len(run)}
    lines = []
    if shared:
        lines += [f"Settings of all cases, unless the table gives others: {_listed(shared)}.", ""]
    columns = ["case", "seeds", "other settings"]
    chose = any("chosen" in data.found[name] for name in run)
    lines += markdown_table([*columns, "chosen on the held-out set (values tried: score)"] if chose else columns)
    for name, case in run.items():
        found = data.found[name]
        settings = {key: "not given" for key in shared if key not in case.options} | given[name]
        own = _listed({key: value for key, value in settings.items() if shared.get(key) != value})
        tried = "; ".join(f"{_given(each)}: {_digits(each['hold-out'])}" for each in found.get("tried", []))
        chosen = f"{_given(found['chosen'])} ({tried})" if "chosen" in found else ""
        lines.append(markdown_row([name, len(found["seeds"]), own, *([chosen] if chose else [])]))
    return lines


def _listed(settings: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _given(options: dict) -> str:
    return " ".join(f"{name} {value:g}" for name, value in options.items() if name != "hold-out")


def _setting(value) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_setting(each)}' for key, each in value.items())})"
    return "built-in" if value is None else str(value)


CLAIMS_HEADING = "# Results"  # of results/README.md

OTHER_PAGES = """## Other pages

`mini-ee reproduce NAME` makes each of them; NAME is the name of the file.

| page | what it shows |
|---|---|
| [shortest.md](shortest.md) | the results of the default settings |
| [estimate.md](estimate.md) | how well `mini-ee estimate` predicts the share of the layers saved |
| [onnx.md](onnx.md) | the exported ONNX graph: speed, equality with torch, size, memory |
| [guarantees.md](guarantees.md) | how often each guarantee is violated on new examples |
| [shards.md](shards.md) | RAEE's datastore in shards, and a projection to a billion examples |
| [serving.md](serving.md) | latency and goodput of the server under load |
| [embeddings.md](embeddings.md) | embeddings of a sentence encoder at each depth |

`mini-ee bench all` runs the benchmarks on your machine and prints ratios of times, each with its target. For the
comparisons with transformers, install `pip install -e '.[bench]'`.
"""


def claims_page(
    judged: dict[str, list[Judged]], titles: dict[str, str], shorts: dict[str, list[str]], others: str
) -> str:
    """results/README.md: the summaries, and the claims of all papers in one table. others: the text after the rules."""
    about = (
        "The table lists the claims of the papers and our own controls, each with its verdict. *Our figures* are "
        "the first three comparisons of a claim: in each pair the first number should be larger. Some claims require "
        "a margin; the page of the paper gives it, with all comparisons and their intervals."
    )
    every = [one for each in judged.values() for one in each]
    lines = [CLAIMS_HEADING, ""]
    for paper, short in shorts.items():
        lines += [f"**[{titles[paper]}]({paper}.md).** {' '.join(short)}", ""] if short else []
    lines += ["## Claims", "", f"{about} {_counted('claims of the papers', every, False)}", ""]
    if controls := _counted("controls of ours", every, True):
        lines += [controls, ""]
    lines += markdown_table(["page", "no.", "claim", "verdict", "our figures", "the paper's figures"])
    for paper, each in judged.items():
        for number, one in enumerate(each, 1):
            pairs = [
                f"{_digits(comparison.more)} against {_digits(comparison.than)}"
                for comparison in one.comparisons
                if comparison not in (None, NO_SEED_HAS_IT)
            ]
            ours = "; ".join([*pairs[:3], *(["..."] if len(pairs) > 3 else [])])
            link = f"[{titles[paper]}]({paper}.md)"
            text = f"{'*control:* ' if one.claim.get('control') else ''}{one.claim['text']}"
            lines.append(markdown_row([link, number, text, one.verdict, ours, one.claim["paper"]]))
    return "\n".join([*lines, "", RULES, "", others]).rstrip() + "\n"


def _counted(what: str, judged: list[Judged], control: bool) -> str:
    """A sentence with the number of claims, or of controls, by verdict; empty if there are none."""
    verdicts = Counter(one.verdict for one in judged if bool(one.claim.get("control")) == control)
    counts = ", ".join(f"{count} *{verdict}*" for verdict, count in verdicts.most_common())
    return f"Verdicts of the {verdicts.total()} {what}: {counts}." if verdicts else ""
