"""The result page of a paper: made from its recipe and the records of its cases, which contain all of its figures.

The answer stands first, then two pictures and the main table: the first ones of the recipe. Everything else is folded.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mini_ee.experiments.claims import claim_lines, counted, judge_claim
from mini_ee.experiments.markdown import folded, made_by, markdown_row, markdown_table
from mini_ee.experiments.measures import TIMES_ALONE, WITHOUT_RECORD
from mini_ee.experiments.page_data import NO_FIGURE, NOT_RUN, PageData, cell, filled_in, printed
from mini_ee.experiments.recipe import is_choice
from mini_ee.experiments.trainings import MADE_WITH, record_of
from mini_ee.experiments.verdicts import MISSING
from mini_ee.lab.data.metrics import spearman

DIFFERS = "What differs from the paper"
JUDGING = "judging.md"
SMALL = "The models are small: a verdict says whether an effect shows at this size, not whether a paper is wrong."
TOP_PICTURES = 2
TABLES_NOTE = "Mean over seeds ± standard deviation. Accuracies and shares are in percent."
NONE_NOTE = f"*{NO_FIGURE}*: no rule of the method qualifies, no example exits there, or the method has no such figure."


def page(paper: str, recipe: dict, data: PageData, folder: Path, command: str) -> str:
    """The page as Markdown. folder: of its pictures; one that was not drawn is left out."""
    judged = [judge_claim(claim, data) for claim in recipe["claims"]]
    pictures = [_picture_lines(each, paper) for each in recipe["pictures"] if (folder / each["file"]).exists()]
    tables = [_table_lines(table, data, main=not number) for number, table in enumerate(recipe["tables"])]
    run, total = sum(bool(data.found[name]["seeds"]) for name in data.trained), len(data.trained)
    lines = [f"# {recipe['title']}", "", *_paragraphs(answer(recipe, data))]
    if run < total:
        lines += [
            f"{run} of {total} cases have been run; `{NOT_RUN}` stands for the others. The command runs them.",
            "",
        ]
    if judged:
        whose = f"Claims: {counted(judged)}. " if counted(judged) else ""
        controls = f"Our own controls: {counted(judged, True)}. " if counted(judged, True) else ""
        lines += [f"{whose}{controls}[How a claim is judged]({JUDGING})", ""]
    lines += sum(pictures[:TOP_PICTURES], [])
    lines += [*sum(tables[:1], []), TABLES_NOTE + (f" {NONE_NOTE}" if f"| {NO_FIGURE} " in str(tables[:1]) else ""), ""]
    lines += _paragraphs([filled_in(each, data) for each in recipe.get("bridges", [])])
    if ranks := recipe.get("ranks"):
        lines += [*_rank_lines(ranks, data), ""]
    if judged:
        lines += ["## Claims", "", f"{SMALL} Open a claim to see our figures.", ""]
        for number, one in enumerate(judged, 1):
            lines += claim_lines(number, one, data)
        if "names" in recipe:
            lines += folded("Words used in the comparisons", [recipe["names"]])
    lines += ["## Appendix", ""]
    lines += folded("The method and its source", [f"{recipe['about']} *{recipe['source']}.*"])
    dropped = [f"- {sentence}" for sentence in _dropped(data)]
    lines += folded("How it was trained", [*_training_lines(data), "", *_machine_lines(data), *dropped])
    for key, title in (("differs", recipe.get("differs_title", DIFFERS)), ("next", "What to try next")):
        lines += folded(title, [f"- {each}" for each in recipe[key]])
    if tables[1:]:
        lines += folded(f"More tables ({len(tables[1:])})", [NONE_NOTE, "", *sum(tables[1:], [])])
    if more := pictures[TOP_PICTURES:]:
        lines += folded(f"More pictures ({len(more)})", sum(more, []))
    made = made_by(command, f"the records in {paper}/")
    return "\n".join([*lines, f"{made} Cases without a record are trained first, which can take hours."]) + "\n"


def answer(recipe: dict, data: PageData) -> list[str]:
    """The idea of the method, and the recipe's answer with its figures filled in: a paragraph each."""
    idea = [f"*{recipe['idea']}*"] if "idea" in recipe else []
    return [*idea, *(filled_in(each, data) for each in recipe.get("answer", []))]


def _paragraphs(texts: list[str]) -> list[str]:
    return [line for text in texts for line in (text, "")]


def _picture_lines(picture: dict, paper: str) -> list[str]:
    return [f"![{picture['title']}]({paper}/{picture['file']})", "", f"*{picture['title']}.*", ""]


def _table_lines(table: dict, data: PageData, main: bool = False) -> list[str]:
    """main: with a column of the number of seeds, because the pages have different ones for the same quantity."""
    columns, theirs = table["columns"], table.get("theirs")
    joined = theirs if theirs and table.get("join") else None  # the paper's columns stand to the right of ours
    rows = []
    for name, row in table["rows"].items():
        cells, counts = [], set()
        for column in columns.values():
            case, figure = (table[key].format(**column | row) for key in ("case", "figure"))
            values, seeds = list(data.values(case, figure).values()), len(data.found[case]["seeds"])
            counts.add(seeds)
            digits = column.get("digits", row.get("digits", table.get("digits")))
            cells.append(cell(values, figure, seeds, digits) if values else NO_FIGURE if seeds else NOT_RUN)
        cells += [" to ".join(map(str, sorted({min(counts), max(counts)})))] if main else []
        rows.append([name, *cells, *(joined["rows"].get(name, [""] * len(joined["columns"])) if joined else [])])
    lines = [f"**{table['id']}: {table['title']}**", ""]
    if all(each == NOT_RUN for _, *cells in rows for each in cells[: len(columns)]):
        lines += ["Not run yet."]
    else:
        names = [f"the paper: {name}" for name in joined["columns"]] if joined else []
        seeds = ["seeds"] if main else []
        lines += markdown_table(["" if joined else "our results", *columns, *seeds, *names], rows)
    if theirs and not joined:
        paper_rows = ([name, *cells] for name, cells in theirs["rows"].items())
        lines += ["", *markdown_table(["the paper's results", *theirs["columns"]], paper_rows)]
    return [*lines, "", *_paragraphs([filled_in(table["note"], data)] if table.get("note") else [])]


def _machine_lines(data: PageData) -> list[str]:
    """A list: machine, commits, core hours, the data with their checksums, and the cases that have records of single
    examples.
    """
    runs = [(name, one) for name in data.trained for one in data.found[name]["seeds"].values()]
    if not runs:
        return []
    about = {key: _several(str(one["how"][key]) for _, one in runs) for key in MADE_WITH}
    threads = f"{about['threads']} thread{'' if about['threads'] == '1' else 's'}"
    lines = [f"- Machine: {about['machine']}, {threads}; processor: {about['processor']}; torch {about['torch']}."]
    gpus = {gpu: len({name for name, one in runs if one["how"].get("gpu") == gpu}) for gpu in _gpus(runs)}
    lines += [f"- Run on a GPU ({gpu}): {count} of {len(data.trained)} cases." for gpu, count in gpus.items()]
    hours = sum(one["core_seconds"] for _, one in runs) / 3600
    lines += [
        f"- Commits: {about['commit']}.",
        f"- Time: {hours:.2g} core hours for {len(runs)} runs, with everything.",
    ]
    sums = {}
    for name, one in runs:
        for source in data.cases[name].sources():
            sums.setdefault(source, []).append(one["data"][source])
    listed = "; ".join(f"{source}: {_several(found)}" for source, found in sorted(sums.items()))
    lines += [f"- Data, with their sha256: {listed}."] if listed else []
    run = {name: data.cases[name].measure for name, _ in runs}
    stored = [name for name in run if data.folder and record_of(data.folder, name).exists()]
    counts = Counter(WITHOUT_RECORD[measure] for measure in run.values() if measure in WITHOUT_RECORD)
    line = f"- Records (what every exit says of each test example): {len(stored)} of {len(run)} cases"
    line += ", in results/records/" if stored else ""
    for what, count in sorted(counts.items()):
        line += f"; none where figures are of {what} ({count} case{'s' if count > 1 else ''})"
    return [*lines, f"{line}."]


def _gpus(runs: list[tuple[str, dict]]) -> list[str]:
    return sorted({one["how"]["gpu"] for _, one in runs if "gpu" in one["how"]})


def _several(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _rank_lines(ranks: dict, data: PageData) -> list[str]:
    """Spearman's correlation between the means of two figures over the cases."""
    pairs = [[data.mean(case, ranks[key]) for key in ("x", "y")] for case in data.trained]
    means = [pair for pair in pairs if None not in pair]
    if len(means) < 3:
        return [f"{ranks['text']}: {MISSING}."]
    return [f"{ranks['text']}, over {len(means)} pairs of model and task: **{spearman(*zip(*means)):.2f}**."]


def _dropped(data: PageData) -> list[str]:
    """A sentence on the number of dropped test rows of each task, if there are any."""
    counts = {}
    for name, case in data.cases.items():
        for one in data.found[name]["seeds"].values():
            if (count := one["test_rows_dropped"]) and case.measure not in TIMES_ALONE:
                counts[case.options["task"]] = count
    listed = ", ".join(f"{count} of {task}" for task, count in sorted(counts.items()))
    return (
        [f"Test examples that also occur in the train split, word for word, are dropped: {listed}."] if counts else []
    )


def _training_lines(data: PageData) -> list[str]:
    """The settings that most cases share, then a row for each case: its other settings, and the value it chose."""
    run = {name: case for name, case in data.trained.items() if data.found[name]["seeds"]}
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
        tried = "; ".join(f"{_given(each)}: {printed(each['hold-out'], 'hold-out')}" for each in found.get("tried", []))
        chosen = f"{_given(found['chosen'])} ({tried})" if "chosen" in found else ""
        lines.append(markdown_row([name, len(found["seeds"]), own, *([chosen] if chose else [])]))
    return [*lines, *_selection_lines(data)]


def _selection_lines(data: PageData) -> list[str]:
    """For each selected case, how often each of its candidates was selected, and by which figure."""
    lines = []
    for name, case in data.cases.items():
        if chosen := data.found[name].get("selected"):
            listed = ", ".join(
                f"{data.name_of_case(each)} ({count} of {len(chosen)} seeds)"
                for each, count in Counter(chosen.values()).items()
            )
            lines += ["", f"*{data.name_of_case(name)}*, selected for each seed by {data.name_of(case.by)}: {listed}."]
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
