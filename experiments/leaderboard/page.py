"""results/leaderboard.md: which method for a classifier at half the FLOPs, and how sure is that? Made from records."""

import math
from pathlib import Path

import numpy as np

from mini_ee.experiments.leaderboard.answer import answer, counted
from mini_ee.experiments.leaderboard.decoder_section import decoder_section
from mini_ee.experiments.leaderboard.exam import CORRELATIONS, EASY, SHORT, Exam, exam, sentences_by_kind
from mini_ee.experiments.leaderboard.figures import CONTROL, REFERENCE, TaskFigures, Values, confidence_figures
from mini_ee.experiments.leaderboard.legend import EXAM_NOTE, FEWER_EPOCHS, LEGEND, PREDICTION_NOTE, TASK_LEGEND, TERMS
from mini_ee.experiments.leaderboard.methods_page import write_methods
from mini_ee.experiments.leaderboard.pictures import draw_all
from mini_ee.experiments.leaderboard.plan import EXAM, Plan, planned
from mini_ee.experiments.leaderboard.provenance import bullets, measured_lines, minutes_to_add
from mini_ee.experiments.leaderboard.ranking import LEAST_SEEDS
from mini_ee.experiments.leaderboard.tables import (
    NO_INTERVAL,
    NOTHING,
    Leaderboard,
    main_table,
    percent,
    read_leaderboard,
    task_table,
)
from mini_ee.experiments.leaderboard.token_figures import Decoders, flops_saved, read_decoders
from mini_ee.experiments.markdown import check_is_page, link, listed, made_by, markdown_table, wrapped
from mini_ee.lab.data.files import write_bytes
from mini_ee.lab.data.metrics import spearman
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.lab.evaluation.plots import can_draw

HEADING = "# Leaderboard: early-exit methods for classifiers"
PICTURES = {
    "leaderboard-front.png": "Accuracy on the reported examples against the share of the full model's FLOPs, mean over "
    "seeds. At each share, a method has the rule with the best held-out accuracy that needs no more. A panel colours "
    "every method that is the best at one of the shares 20, 25, ..., 65 %; its lead is often smaller than the "
    "interval. Joint training and fixed depth are in every panel. The bar at 50 % shows how long a 95 % interval "
    "is, the median over methods; only its length counts",
    "leaderboard-methods.png": "Each method alone, and all others in grey: accuracy against the share of the full "
    "model's FLOPs, mean over seeds and over the tasks of the ranks. Dashed: joint training. A method that lacks one "
    "of the tasks has no panel; one that reaches only 100 % is a dot",
    "leaderboard-hardness.png": "Mean exit layer of each kind of sentence at half of the FLOPs, from plain to doubly "
    "negated: reviews, mean over seeds",
}


def write_page(out: Path, quick: bool) -> Path:
    """Write OUT/leaderboard.md with its pictures, and OUT/METHODS.md. Takes seconds; nothing is trained."""
    return write_pages(planned(out, quick), out, read_decoders(out, quick), quick)


def write_pages(plan: Plan, out: Path, decoders: Decoders, quick: bool) -> Path:
    """The same for a plan and these decoders."""
    path = out / "leaderboard.md"
    check_is_page(path, HEADING)
    board = read_leaderboard(plan)
    passed = exam(board.tasks[EXAM]) if EXAM in board.tasks and board.tasks[EXAM].runs else {}
    if can_draw():
        draw_all(board, passed, out, list(PICTURES))
    write_bytes(path, page(board, passed, out, decoder_section(out, decoders, quick)).encode())
    write_methods(board, out, *flops_saved(decoders))
    return path


def page(board: Leaderboard, passed: dict[str, Exam], out: Path, decoders: list[str]) -> str:
    """The page as Markdown. out: the folder of its pictures; one that was not drawn is left out."""
    pictures = {name: [f"![{text}]({name})", "", f"*{text}.*", ""] for name, text in PICTURES.items()}
    front, panels, hardness = (lines if (out / name).exists() else [] for name, lines in pictures.items())
    lines = [HEADING, "", *_wrapped([FEWER_EPOCHS, *answer(board), _is_a_decoder(decoders), _fine_tuned_already(out)])]
    if board.compared:
        lines += [*_wrapped([TERMS]), *main_table(board), *_legend(LEGEND), *front, *panels]
    lines += ["## Each task", "", *_legend(TASK_LEGEND)]
    for name in board.plan.ranked_tasks:
        if board.tasks[name].runs:
            lines += [f"### {name}", "", *_task_lines(board, name)]
    if waiting := [name for name in board.plan.ranked_tasks if not board.tasks[name].runs]:
        lines += [f"Not run yet: {listed(waiting)}.", ""]
    if EXAM in board.plan.tasks:
        lines += ["## Sentences of known hardness", "", *_exam_lines(board, passed), *hardness]
    lines += _prediction_lines(board)
    lines += ["## Decoders", "", *decoders]
    lines += ["## Methods without a rank", "", *_other_lines(board.plan, out)]
    lines += ["## How it was measured", "", *measured_lines(board), *_wrapped([other_figures(out)])]
    lines += ["## How to add a method", "", *_wrapped(adding(out, minutes_to_add(board)))]
    made = made_by(board.plan.command, "the records in records/")
    return "\n".join([*lines, *_wrapped([f"{made} It trains what has no record, and then computes this page."])])


def _wrapped(paragraphs: list[str]) -> list[str]:
    return [line for text in paragraphs for line in (*wrapped(text).splitlines(), "")]


# ---- Sections ----
def _task_lines(board: Leaderboard, name: str) -> list[str]:
    task = board.tasks[name]
    if not task.runs:
        return ["Not run yet.", ""]
    rows = len(next(run.full for runs in task.runs.values() for run in runs.values()))
    model = f" The model is {board.plan.models[name]}." if name in board.plan.models else ""
    return [f"{rows:,} reported examples, {task.layers} layers.{model}", "", *task_table(board, name)]


def _prediction_lines(board: Leaderboard) -> list[str]:
    """Does EEFP predict what early exit saves better than the calibration error does, over the methods of a task?"""
    rows = []
    for name, task in board.tasks.items():
        found = {method: confidence_figures(task, method) for method in task.runs if method != CONTROL}
        saved = {method: _mean_saved(task, method) for method in found}
        points = [(*both, saved[method]) for method, both in found.items() if both and saved[method] is not None]
        if len({point[:2] for point in points}) < LEAST_CORRELATED:  # methods that share a training have equal ones
            continue
        failure, calibration, layers = np.round(list(zip(*points)), 9)
        rho = [f"{spearman(each, layers):.2f}" for each in (failure, calibration)]
        rows.append([name, *rho, str(len(points))])
    if not rows:
        return []
    return [
        "## Does a property of the exits predict how many layers are saved?",
        "",
        *_wrapped([PREDICTION_NOTE]),
        *markdown_table(["task", "correlation with EEFP", "with ECE", "methods"], rows),
        "",
    ]


def _mean_saved(task: TaskFigures, method: str) -> float | None:
    found = task.found.get((method, "saved"))
    return float(found.by_seed.mean()) if isinstance(found, Values) else None


LEAST_CORRELATED = 6  # trainings


def _exam_lines(board: Leaderboard, passed: dict[str, Exam]) -> list[str]:
    """The verdicts in words, the correlations, depth and accuracy by kind, and the usual table."""
    runs = board.tasks[EXAM].runs
    if not runs:
        return ["Not run yet.", ""]
    order = [name for name in [*board.order, CONTROL] if name in passed]
    absent = [name for name in board.order if name in runs and name not in passed]
    without = [f"Not here, because some seed has no rule with so few FLOPs: {listed(absent)}."] if absent else []
    verdicts = {name: each.verdict for name, each in passed.items() if not isinstance(each.correlations, str)}
    easy, short = ([name for name, verdict in verdicts.items() if verdict == which] for which in (EASY, SHORT))
    few = sum(len(runs[name]) < LEAST_SEEDS for name in verdicts)
    summary = (
        f"**Does a method exit early on what is easy, or on what is short?** Of {len(verdicts)} methods whose examples "
        f"exit at several layers in every seed, {counted(easy)} exit early on what is easy, "
        f"{counted(short)} on what is short; for {len(verdicts) - len(easy) - len(short)} it is not decided"
        f"{f' ({few} of them have fewer than {LEAST_SEEDS} seeds)' if few else ''}."
    )
    rows = []
    for name in order:
        found = passed[name].correlations
        alone = isinstance(found, str)
        cells = [found, *[NOTHING] * 3] if alone else [_correlation(found[each]) for each in CORRELATIONS]
        rows.append([name, *cells, passed[name].verdict or NOTHING])
    lines = [*_wrapped([summary, EXAM_NOTE]), *markdown_table(["method", *CORRELATIONS, "exits early on"], rows), ""]
    lines += _wrapped(without)
    depth = [[name, *(f"{each:.1f}" for each in passed[name].depth)] for name in order]
    depth.append(["*number of sentences*", *map(str, sentences_by_kind())])
    right = [[name, *(percent(each) for each in passed[name].accuracy)] for name in order]
    lines += [
        f"**Mean exit layer of each kind at half of the FLOPs, of {board.tasks[EXAM].layers} layers**",
        "",
        *markdown_table(["method", *HARDNESS], depth),
        "",
    ]
    if REFERENCE in passed:
        right.append([f"*{REFERENCE}, full model*", *(percent(each) for each in passed[REFERENCE].full)])
    lines += [
        "**Accuracy of each kind at these exits, in percent** (guessing: 50, since half of each kind is positive)",
        "",
        *markdown_table(["method", *HARDNESS], right),
        "",
    ]
    if EXAM in board.plan.ranked_tasks:  # its other figures have a section
        return lines
    return [
        *lines,
        "**All figures on the built-in reviews** (columns as in [Each task](#each-task))",
        "",
        *_task_lines(board, EXAM),
    ]


def _correlation(found) -> str:
    half = NO_INTERVAL if math.isnan(found.high) else f"±{found.high - found.mean:.2f}"
    return f"{found.mean:.2f} {half}".replace("-0.00", "0.00")


def _fine_tuned_already(out: Path) -> str:
    return (
        f"**Is your model fine-tuned already?** Every method in the table trains the model itself. `mini-ee add-exits` "
        f"leaves your model as it is; {link(out, 'the results of add-exits', 'add-exits.md')} are on another page."
    )


def _is_a_decoder(decoders: list[str]) -> str:
    run = "has its own tables" if any(line.startswith("|") for line in decoders) else "has no runs yet"
    return f"**Is your model a decoder?** The section [Decoders](#decoders) {run}."


def _other_lines(plan: Plan, out: Path) -> list[str]:
    """The methods that are in no table of classifiers, by the reason."""
    lines = []
    for reason in dict.fromkeys(plan.not_rows.values()):
        names = [name for name, each in plan.not_rows.items() if each == reason]
        lines.append(f"- {', '.join(names)}: {reason}.")
    embeddings, raee, add_exits = (link(out, name, name) for name in ("embeddings.md", "raee.md", "add-exits.md"))
    elsewhere = (
        f"Their figures are elsewhere: tokens in [Decoders](#decoders), embeddings in {embeddings}, RAEE in {raee}, "
        f"and exits that are added to a fine-tuned model in {add_exits}. [METHODS.md](METHODS.md) lists all methods."
    )
    return [*bullets(lines), "", *_wrapped([elsewhere])]


def _legend(columns: dict[str, str]) -> list[str]:
    """A point for each column."""
    return [*bullets([f"- *{name}*: {' '.join(text.split())}" for name, text in columns.items()]), ""]


def other_figures(out: Path) -> str:
    """Why other pages have other figures for the same methods."""
    names = {"LoRAExit": "loraexit.md", "ConsistentEE": "consistentee.md", "RAEE": "raee.md"}
    names |= {"self-supervised exits": "self-supervised.md", "the shortest commands": "shortest.md"}
    names |= {"the estimate": "estimate.md", "added exits": "add-exits.md"}
    papers = listed([link(out, *each) for each in names.items()])
    return (
        f"The pages of {papers} have other figures for the same methods. There, models learn from other numbers of "
        f"examples. Most have other learning rates, and some have other exit layers. On the pages of LoRAExit and "
        f"ConsistentEE, *at one point* means a loss of one point of accuracy compared with the last exit of two-stage "
        f"training; on this page, with the full model of joint training."
    )


def adding(out: Path, minutes: str) -> list[str]:
    """How to add a method. minutes: a sentence on what that takes."""
    guide = link(out, "CONTRIBUTING.md", "../CONTRIBUTING.md#how-to-add-something")
    return [
        f"Write one file as {guide} says, add its line to the registry, and run `mini-ee reproduce leaderboard --only "
        f"my-method`. It trains the method on every task with every seed, writes records/TASK/my-method.npz, and draws "
        f"this page with it.{minutes}",
        "A contribution contains the file with its paper, symbols and numbered deviations, a test of its equations, "
        "the records of all tasks and seeds (in `records` and, with the learning rates that were tried, in "
        "`leaderboard`), and this page as the command writes it. Nobody needs to train the other methods again: they "
        "are computed from their records.",
    ]
