"""results/leaderboard.md and its details in results/leaderboard/: figures from records, for the templates of pages/."""

import csv
import io
from pathlib import Path

from mini_ee.experiments.leaderboard.exam import CORRELATIONS, EASY, SHORT, Exam, exam, sentences_by_kind
from mini_ee.experiments.leaderboard.figures import CONTROL, HEADLINE, REFERENCE
from mini_ee.experiments.leaderboard.made_tables import made_figures, record_rows
from mini_ee.experiments.leaderboard.methods_page import methods_figures
from mini_ee.experiments.leaderboard.pictures import draw_all, draw_decoders
from mini_ee.experiments.leaderboard.plan import EXAM, Plan, planned
from mini_ee.experiments.leaderboard.protocol import FEWER_SEEDS, LONG_SECONDS, SEARCH_SEEDS
from mini_ee.experiments.leaderboard.ranking import DRAWS, LEAST_SEEDS, compare, interval
from mini_ee.experiments.leaderboard.runs import HELD_OUT_ROWS
from mini_ee.experiments.leaderboard.tables import (
    Leaderboard,
    absent_rows,
    figure_rows,
    prediction_rows,
    read_leaderboard,
    task_rows,
    tiers,
    without_exam,
)
from mini_ee.experiments.leaderboard.token_figures import Decoders, decoder_figures, decoder_rows, read_decoders
from mini_ee.experiments.leaderboard.token_rules import LEVEL, SHARE
from mini_ee.experiments.pages import check_is_page, heading
from mini_ee.experiments.pages import write_page as fill_page
from mini_ee.lab.data.files import write_bytes
from mini_ee.lab.data.reviews import HARDNESS
from mini_ee.lab.evaluation.plots import can_draw

DETAILS = ("leaderboard/tasks", "leaderboard/decoders", "leaderboard/hardness", "leaderboard/protocol")


def write_page(out: Path, quick: bool) -> Path | None:
    """Write OUT/leaderboard.md, its details and OUT/METHODS.md from the records. Takes seconds; nothing is trained."""
    return write_pages(planned(out, quick), out, read_decoders(out, quick), quick)


def write_pages(plan: Plan, out: Path, decoders: Decoders, quick: bool) -> Path | None:
    """The same for a plan and these decoders. None if joint training has no record: all others are compared with it."""
    for name in ("leaderboard", "METHODS"):
        check_is_page(out / f"{name}.md", heading(name))
    board = read_leaderboard(plan)
    if REFERENCE not in board.headline:
        return None
    passed = exam(board.tasks[EXAM]) if EXAM in board.tasks and board.tasks[EXAM].runs else {}
    if can_draw():
        draw_all(board, passed, out)
        if decoders:
            draw_decoders(out / "leaderboard-decoders.png", decoders)
    figures = page_figures(board, passed, decoders, out, quick)
    tables = {"tasks": figure_rows(board), "decoders": decoder_rows(decoders), "records": record_rows(board)}
    (out / "leaderboard").mkdir(exist_ok=True)
    for name, rows in tables.items():
        write_bytes(out / "leaderboard" / f"{name}.csv", as_csv(rows))
    for name in ("METHODS", *DETAILS, "leaderboard"):
        path = fill_page(name, figures, out)
    return path


def page_figures(board: Leaderboard, passed: dict[str, Exam], decoders: Decoders, out: Path, quick: bool) -> dict:
    """What the templates name."""
    others = [name for name in board.ranks if name != REFERENCE]
    joint = {figure: board.mean(REFERENCE, figure) for figure in ("full", "saved", "saved own")}
    return {
        "command": board.plan.command,
        "results": "" if (out / "add-exits.md").exists() else "../results/",  # where the pages of other topics are
        "picture": {path.stem: path.exists() for path in (out / name for name in PICTURES)},
        "tasks": board.compared,
        "models": list(dict.fromkeys(board.plan.models.get(name, "a model") for name in board.compared)),
        "seeds": board.plan.seeds,
        "joint": {name.replace(" ", "_"): interval(joint_drawn) for name, joint_drawn in joint.items() if joint_drawn}
        | {"half": interval(board.headline[REFERENCE])},
        "joint_minus_fixed": compare(board.headline[REFERENCE], board.headline[CONTROL]),
        "others": len(others),
        "better": [name for name in others if (name, REFERENCE) in board.better],
        "worse": [name for name in others if (REFERENCE, name) in board.better],
        "tiers": tiers(board),
        "elsewhere": [
            _best_on(board, name)
            for name in board.plan.tasks
            if name not in board.compared and (REFERENCE, HEADLINE) in board.drawn[name]
        ],
        "each_task": [_task(board, name) for name in board.plan.tasks if board.tasks[name].runs],
        "exam": _exam(board, passed) if passed else None,
        "prediction": prediction_rows(board),
        "decoders": decoder_figures(decoders, quick),
        "level": LEVEL,
        "share": SHARE,
        "made": made_figures(board),
        "long": {"minutes": LONG_SECONDS // 60, "seeds": FEWER_SEEDS},
        "search_seeds": SEARCH_SEEDS,
        "held_out_rows": HELD_OUT_ROWS,
        "draws": DRAWS,
        "least_seeds": LEAST_SEEDS,
        "methods": methods_figures(board, decoders),
    }


PICTURES = ("leaderboard-front.png", "leaderboard-methods.png", "leaderboard-hardness.png", "leaderboard-decoders.png")


def _best_on(board: Leaderboard, name: str) -> dict:
    """The most accurate method on a task at half of the FLOPs, and joint training there."""
    headline = {method: drawn for (method, figure), drawn in board.drawn[name].items() if figure == HEADLINE}
    best = max(headline.keys() - {CONTROL}, key=lambda method: (headline[method].mean, method == REFERENCE))
    return {"task": name, "method": best, "half": interval(headline[best]), "joint": interval(headline[REFERENCE])}


def _task(board: Leaderboard, name: str) -> dict:
    task = board.tasks[name]
    rows = len(next(run.full for runs in task.runs.values() for run in runs.values()))
    return {
        "name": name,
        "model": board.plan.models.get(name, "a model"),
        "layers": task.layers,
        "examples": rows,
        "rows": task_rows(board, name),
        "absent": absent_rows(board, name),
    }


def _exam(board: Leaderboard, passed: dict[str, Exam]) -> dict:
    order = {name: passed[name] for name in (*board.order, CONTROL) if name in passed}
    accuracy = [
        [name, *(f"{100 * share:.1f}" for share in method_exam.accuracy)] for name, method_exam in order.items()
    ]
    if REFERENCE in order:
        accuracy.append([f"{REFERENCE}, full model", *(f"{100 * share:.1f}" for share in order[REFERENCE].full)])
    return {
        "methods": sum(bool(method_exam.verdict) for method_exam in order.values()),
        "easy": [name for name, method_exam in order.items() if method_exam.verdict == EASY],
        "short": [name for name, method_exam in order.items() if method_exam.verdict == SHORT],
        "order": order,
        "names": CORRELATIONS,
        "one_layer": [
            [name, method_exam.correlations]
            for name, method_exam in order.items()
            if isinstance(method_exam.correlations, str)
        ],
        "without": without_exam(board, EXAM),
        "kinds": HARDNESS,
        "sentences": sentences_by_kind(),
        "accuracy": accuracy,
        "layers": board.tasks[EXAM].layers,
    }


def as_csv(rows: list[dict[str, str]]) -> bytes:
    """Rows with these columns, in the order in which they first occur."""
    columns = dict.fromkeys(column for row in rows for column in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
