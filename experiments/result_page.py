"""A paper's page, made from its recipe and the JSON of its cases: no figure comes from anywhere else."""

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
    FAILS,
    FEW,
    HOLDS,
    LEAST_SEEDS,
    MISSING,
    RULE,
    UNSEEN,
    UNTRIED,
    Compared,
    compared,
    verdict_of,
)

NOT_RUN, NONE = "·", "none"  # of a case that was run, and has no such figure
NOTHING = Compared(0.0, 0.0, 0.0, 0.0, 0.0, 0, UNSEEN)  # of a figure that no seed has, though all cases were run


class PageData(NamedTuple):
    """The JSON of all cases of a recipe."""

    cases: dict[str, Case]
    found: dict[str, dict]  # case -> its JSON

    def values(self, case: str, figure: str) -> dict[str, float]:
        """Seed -> figure, of the seeds that have it."""
        seeds = self.found[case]["seeds"].items()
        return {seed: made["figures"][figure] for seed, made in seeds if figure in made["figures"]}


class Judged(NamedTuple):
    """A claim with what its comparisons say."""

    claim: dict
    comparisons: list[Compared | None]  # in the claim's order; None of one whose cases have not been run
    verdict: str


def read_data(folder: Path, recipe: dict) -> PageData:
    """The JSON of a recipe's cases under a folder."""
    cases = cases_of(recipe)
    return PageData(cases, {name: read_case(folder, case) for name, case in cases.items()})


# ---- Claims ----


def judge(claim: dict, data: PageData) -> Judged:
    """What the claim's comparisons say, on the seeds that all of their cases have.

    Where the cases were run with enough seeds and too few have the figure, as where no rows left at a layer, the
    comparison cannot be seen.
    """
    comparisons = []
    for each in claim.get("compare", []):
        both = [_side(data, each, side) for side in ("more", "than")]
        seeds = sorted(set.intersection(*(set(values) for values in both if values is not None)))
        names = {name for side in ("more", "than") for name, _ in sides(each, side)}
        run = len(set.intersection(*(set(data.found[name]["seeds"]) for name in names)))
        if not seeds:
            comparisons.append(NOTHING if run >= LEAST_SEEDS else None)
            continue
        more, than = ([values[seed] if values is not None else each["than"] for seed in seeds] for values in both)
        comparison = compared(more, than, each.get("by", 0.0), each.get("exact", False))
        comparisons.append(comparison._replace(verdict=UNSEEN) if comparison.seeds < LEAST_SEEDS <= run else comparison)
    if "unseen" in claim:
        return Judged(claim, [], UNSEEN)
    verdict, tried = verdict_of(comparisons, claim.get("need", "all")), claim.get("tried", {"cases": []})
    if verdict == FAILS and not all(data.found[name]["seeds"] for name in tried["cases"]):
        verdict = UNTRIED
    return Judged(claim, comparisons, verdict)


def _side(data: PageData, compare: dict, side: str) -> dict[str, float] | None:
    """Seed -> the mean of the side's cases; None for a number."""
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
        if comparison in (None, NOTHING):
            continue
        interval = f"{comparison.low:+.3f} to {comparison.high:+.3f}; " if comparison.high > comparison.low else ""
        wanted = f", wanted above {each['by']:+g}" if each.get("by") else ""
        seeds = f"{comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
        more, than = _names(each)
        lines.append(
            f"   - {more}{_digits(comparison.more)}, {than}{_digits(comparison.than)}: {comparison.difference:+.3f} "
            f"({interval}{seeds}{wanted}){'' if comparison.verdict == FEW else f', {comparison.verdict}'}"
        )
    if verdict not in (HOLDS, FEW, MISSING) and (tried := claim.get("tried")):
        found = {name: list(data.values(name, tried["figure"]).values()) for name in tried["cases"]}
        means = {name: float(np.mean(values)) for name, values in found.items() if values}
        if len(means) > 1:
            best = (min if tried.get("least") else max)(means, key=means.get)
            lines.append(f"   - of {len(means)} settings the best is {best}: {tried['figure']} {_digits(means[best])}")
    return lines


def _names(compare: dict) -> tuple[str, str]:
    """How both sides are called: the case, the figure, or both; a number has no name."""
    more, than = (sides(compare, side) for side in ("more", "than"))
    if not than:
        return f"{_case_name(more)}, {more[0][1]}: ours ", "wanted "
    if [case for case, _ in more] == [case for case, _ in than]:
        return f"{_case_name(more)}: {more[0][1]} ", f"{than[0][1]} "
    figures = [more[0][1], than[0][1]]
    if figures[0] == figures[1]:
        return f"{figures[0]}: {_case_name(more)} ", f"{_case_name(than)} "
    return f"{_case_name(more)}, {figures[0]} ", f"{_case_name(than)}, {figures[1]} "


def _case_name(pairs: list[tuple[str, str]]) -> str:
    cases = list(dict.fromkeys(case for case, _ in pairs))
    return " and ".join(cases) if len(cases) < 3 else f"mean of {len(cases)} cases ({cases[0]}, ...)"


def _digits(value: float, digits: int = 3) -> str:
    """A figure as papers print it: .931 for a share."""
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
            cells.append(_cell(values, table.get("digits", 3), seeds) if values else NONE if seeds else NOT_RUN)
        rows.append([name, *cells])
    lines = [f"**{table['id']}: {table['title']}**", ""]
    if all(cell == NOT_RUN for _, *cells in rows for cell in cells):
        lines += ["Ours: not run yet."]
    else:
        lines += markdown_table(["ours", *columns], rows)
    if note := table.get("note"):
        lines += ["", note]
    if theirs := table.get("theirs"):
        paper_rows = ([name, *cells] for name, cells in theirs["rows"].items())
        lines += ["", *markdown_table(["the paper's", *theirs["columns"]], paper_rows)]
    return [*lines, ""]


def _cell(values: list[float], digits: int, seeds: int) -> str:
    """Mean and range over seeds; the mean alone where they print the same; and how many have it, where not all do."""
    mean, least, most = (_digits(float(value), digits) for value in (np.mean(values), min(values), max(values)))
    about = [f"{least} to {most}"] if least != most else []
    about += [f"{len(values)} of {seeds} seeds"] if len(values) < seeds else []
    return f"{mean} ({'; '.join(about)})" if about else mean


# ---- The page ----


def page(paper: str, recipe: dict, data: PageData, folder: Path, command: str) -> str:
    """The page as Markdown. folder: where its pictures are, those that were drawn."""
    made = [one["how"] for each in data.found.values() for one in each["seeds"].values()]
    judged = [judge(claim, data) for claim in recipe["claims"]]
    total = len(data.cases)
    done = sum(bool(each["seeds"]) for each in data.found.values())
    lines = [f"# {recipe['title']}", "", f"*{recipe['source']}.* {recipe['about']}", ""]
    for each in in_short(recipe, data):
        lines += [each, ""]
    lines += [made_by(command, f"the JSON files in {paper}/"), ""]
    if done < total:
        lines += [f"Of {total} cases {done} have been run; `{NOT_RUN}` stands for the others. The command goes on.", ""]
    if judged:
        lines += ["## Claims", "", *([recipe["names"], ""] if "names" in recipe else [])]
        for number, each in enumerate(judged, 1):
            lines += _claim_lines(number, each, data)
        lines += ["", RULE, ""]
    about = "Ours: the mean over seeds and, in brackets, the range where they differ, and how many have it, if not all."
    lines += ["## Tables and figures", "", " ".join([about, *_dropped(data)]), ""]
    for table in recipe["tables"]:
        lines += _table_lines(table, data)
    if ranks := recipe.get("ranks"):
        lines += [*_rank_lines(ranks, data), ""]
    for picture in recipe["pictures"]:
        if (folder / picture["file"]).exists():
            lines += [f"**{picture['title']}**", "", f"![{picture['title']}]({paper}/{picture['file']})", ""]
    if recipe.get("changed"):
        lines += ["## What changed against the figures before", "", *_changed_lines(recipe["changed"], data), ""]
    lines += ["## How it was trained", "", *_training_lines(data), ""]
    for key, title in (("differs", "What differs from the paper"), ("next", "What would tell more")):
        lines += [f"## {title}", "", *(f"- {each}" for each in recipe[key]), ""]
    about = {key: ", ".join(sorted({str(each[key]) for each in made})) for key in MADE_WITH if made}
    if about:
        lines += [
            f"Machine: {about['machine']}, {about['threads']} thread(s), torch {about['torch']}; "
            f"commits {about['commit']}."
        ]
    return "\n".join(lines).rstrip() + "\n"


def in_short(recipe: dict, data: PageData) -> list[str]:
    """What came out, in a few sentences: a figure's mean over seeds stands where they have {case | figure}."""

    def mean(named: re.Match) -> str:
        values = [*data.values(*named.groups()).values()]
        return _digits(float(np.mean(values))) if values else NOT_RUN

    return [re.sub(r"\{(.+?) \| (.+?)\}", mean, each) for each in recipe.get("short", [])]


def _rank_lines(ranks: dict, data: PageData) -> list[str]:
    """How the means of two figures rank the same cases: Spearman's correlation."""
    pairs = [[data.values(case, ranks[key]) for key in ("x", "y")] for case in data.cases]
    means = [[float(np.mean([*each.values()])) for each in pair] for pair in pairs if all(pair)]
    if len(means) < 3:
        return [f"{ranks['text']}: {MISSING}."]
    return [f"{ranks['text']}, over {len(means)} pairs of model and task: **{_digits(spearman(*zip(*means)))}**."]


def _changed_lines(changed: list[dict], data: PageData) -> list[str]:
    """Figures that an earlier page had, what stands in their place, and why."""
    lines = markdown_table(["figure", "then", "now", "why"])
    for each in changed:
        values, seeds = list(data.values(each["case"], each["figure"]).values()), len(data.found[each["case"]]["seeds"])
        now = _cell(values, each.get("digits", 3), seeds) if values else NOT_RUN
        lines.append(markdown_row([each["text"], each["then"], now, each["why"]]))
    return lines


def _dropped(data: PageData) -> list[str]:
    """A sentence on the test rows that were dropped, by task, if there are any."""
    counts = {}
    for name, case in data.cases.items():
        for one in data.found[name]["seeds"].values():
            if count := one.get("test_rows_dropped", 0):
                counts[case.options["task"]] = count
    listed = ", ".join(f"{count} of {task}" for task, count in sorted(counts.items()))
    return [f"Test rows that the train split has word for word are dropped: {listed}."] if counts else []


def _training_lines(data: PageData) -> list[str]:
    """The settings that most cases share, then every case's others; of a choice what the hold-out preferred."""
    run = {name: case for name, case in data.cases.items() if data.found[name]["seeds"]}
    given = {name: {k: _setting(v) for k, v in case.options.items() if not is_choice(v)} for name, case in run.items()}
    often = Counter(setting for each in given.values() for setting in each.items())
    shared = {key: value for (key, value), cases in often.items() if len(run) > 2 and 2 * cases > len(run)}
    lines = []
    if shared:
        lines += [f"Where a case does not say otherwise: {_listed(shared)}.", ""]
    lines += markdown_table(["case", "seeds", "settings", "chosen on the hold-out, of"])
    for name, case in run.items():
        found = data.found[name]
        settings = {key: "not given" for key in shared if key not in case.options} | given[name]
        own = _listed({key: value for key, value in settings.items() if shared.get(key) != value})
        tried = "; ".join(f"{_given(each)}: {_digits(each['hold-out'])}" for each in found.get("tried", []))
        chosen = f"{_given(found['chosen'])} of ({tried})" if "chosen" in found else ""
        lines.append(markdown_row([name, len(found["seeds"]), own, chosen]))
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


CLAIMS = "# What came out"  # the head of results/README.md

OTHERS = """## Other pages

| | what it shows |
|---|---|
| [shortest.md](shortest.md) | what the shortest commands give, `mini-ee reproduce shortest` |
| [estimate.md](estimate.md) | whether `mini-ee estimate` predicts what training finds, `mini-ee reproduce estimate` |
| [onnx.md](onnx.md) | the graph that stops by itself: speed, parity, size, memory; `mini-ee reproduce onnx` |
| [guarantees.md](guarantees.md) | how often each guarantee is broken on new examples; `mini-ee reproduce guarantees` |
| [shards.md](shards.md) | RAEE's datastore in shards, and a billion rows on paper; `mini-ee reproduce shards` |
| [serving.md](serving.md) | a server that takes rows together again after each exit; `mini-ee reproduce serving` |

`mini-ee bench all` prints benchmarks with their bars, as ratios on the machine at hand; it compares with transformers:
`pip install -e '.[bench]'`.
"""


def claims_page(
    judged: dict[str, list[Judged]], titles: dict[str, str], shorts: dict[str, list[str]], others: str
) -> str:
    """What came out in short, and all papers' claims in one table: results/README.md. others: what stands behind."""
    about = (
        "Claims of the four papers, each with its verdict, and controls of ours. The column *ours* shows the first "
        "three comparisons; of each the first number should be the larger, by a margin where the paper's page, which "
        "names them all, says so."
    )
    every = [one for each in judged.values() for one in each]
    lines = [CLAIMS, ""]
    for paper, short in shorts.items():
        lines += [f"**[{titles[paper]}]({paper}.md).** {' '.join(short)}", ""] if short else []
    lines += [f"{about} {_counted('claims of the papers', every, False)}", ""]
    if controls := _counted("controls of ours", every, True):
        lines += [controls, ""]
    lines += markdown_table(["paper", "", "claim", "verdict", "ours", "the paper"])
    for paper, each in judged.items():
        for number, one in enumerate(each, 1):
            pairs = [
                f"{_digits(comparison.more)} beside {_digits(comparison.than)}"
                for comparison in one.comparisons
                if comparison not in (None, NOTHING)
            ]
            ours = "; ".join([*pairs[:3], *(["..."] if len(pairs) > 3 else [])])
            link = f"[{titles[paper]}]({paper}.md)"
            text = f"{'*control:* ' if one.claim.get('control') else ''}{one.claim['text']}"
            lines.append(markdown_row([link, number, text, one.verdict, ours, one.claim["paper"]]))
    return "\n".join([*lines, "", RULE, "", others]).rstrip() + "\n"


def _counted(what: str, judged: list[Judged], control: bool) -> str:
    """How many there are of each verdict; nothing where there are none."""
    verdicts = Counter(one.verdict for one in judged if bool(one.claim.get("control")) == control)
    counts = ", ".join(f"*{verdict}* {count}" for verdict, count in verdicts.most_common())
    return f"Of {verdicts.total()} {what}: {counts}." if verdicts else ""
