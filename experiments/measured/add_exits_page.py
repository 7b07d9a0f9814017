"""results/add-exits.md: `mini-ee add-exits` on models that transformers fine-tuned.

The measurements are in add_exits_cases, add_exits_guarantee and one_file. All cases with seed 0 are measured first; the
page shows how many seeds each figure has.
"""

from collections.abc import Iterable

import numpy as np

from mini_ee.experiments.measured.add_exits_cases import (
    AGREEMENT,
    KEPT,
    REQUESTS,
    SHADOW,
    exit_0_cases,
    memory_cases,
    model_cases,
    same_labels,
    shifts,
)
from mini_ee.experiments.measured.add_exits_guarantee import OF, guarantee
from mini_ee.experiments.measured.add_exits_pictures import column, draw, grouped, largest
from mini_ee.experiments.measured.fine_tuning import MODELS, TASKS
from mini_ee.experiments.measured.one_file import EXITS, TOKENS, one_file

__all__ = ["PARTS", "draw", "page_figures"]
BAR = 0.03  # largest difference between the time at an exit and its share of the layers

PARTS = {
    "models": model_cases,
    "memory": memory_cases,
    "exit-0": exit_0_cases,
    "same-labels": same_labels,
    "guarantee": guarantee,
    "shift": shifts,
    "one-file": one_file,
}


# ---- Numbers ----
def percent(values: Iterable[float], digits: int = 1) -> str:
    """The mean in percent, and the standard deviation over seeds."""
    return number([100 * value for value in values], digits)


def number(values: Iterable[float], digits: int = 1) -> str:
    """The mean, and the standard deviation over seeds if there are several."""
    numbers = list(values)
    shown = f"{np.mean(numbers):.{digits}f}"
    return f"{shown} ± {np.std(numbers, ddof=1):.{digits}f}" if len(numbers) > 1 else shown


# ---- Tables ----
def models_rows(cases: list[dict]) -> list[list]:
    """One row per task, model and number of texts."""
    order = {name: at for at, name in enumerate((*TASKS, *MODELS))}
    rows = []
    groups = grouped(cases, "task", "model", "wanted")
    for task, model, wanted in sorted(groups, key=lambda key: (order[key[0]], order[key[1]], key[2])):
        some = groups[task, model, wanted]
        row = [task, model, f"{max(column(some, 'texts')):,}", len(some), percent(column(some, "agreement"))]
        row += [percent(column(some, key)) for key in ("score", "score_with_exits", "layers_saved")]
        row += [percent(column(some, "time"), 0), f"{sum(column(some, 'guaranteed'))} of {len(some)}"]
        rows.append([*row, number(column(some, "processor_minutes"))])
    return rows


def guarantee_rows(levels: list[dict]) -> list[list]:
    """One row per level of agreement, then those with the planted mistake."""
    rows = []
    for level in sorted(levels, key=lambda one: (one["planted"] is not None, -one["level"])):
        name = f"{level['level']:.0%}" + (f", {level['planted']}" if level["planted"] else "")
        low, high = level["interval"]
        row = [name, f"{level['guaranteed']} of {level['repetitions']}", level["broken"], f"{low:.1%} to {high:.1%}"]
        shown = (level["agreement"], level["least"], level["saved"])
        rows.append(row + ["" if value is None else f"{100 * value:.1f}" for value in shown])
    return rows


def shift_rows(cases: list[dict]) -> list[list]:
    """One row per set of texts, without and with --tighten."""
    rows = []
    for case in cases:
        metrics = case["metrics"]
        mean, low, high = (metrics.get(f"agreement end {end}") for end in ("mean", "low", "high"))
        reported = "none yet" if mean is None else f"{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"
        row = [case["task"], "yes" if case["tighten"] else "no", f"{100 * case['served_agreement']:.1f}", reported]
        row += [f"{100 * case['served_saved']:.1f}", f"{metrics['exit_drift']:.2f}"]
        rows.append([*row, f"{metrics['tightened_total']:.0f}"])
    return rows


def one_file_rows(figures: dict) -> list[list]:
    """One row per exit."""
    rows = [
        [exit_figures["layer"], *(f"{100 * value:.1f}" for value in (exit_figures["share"], exit_figures["time"]))]
        + [f"{100 * (exit_figures['time'] - exit_figures['share']):+.1f}", f"{exit_figures['ms']:.0f}"]
        for exit_figures in figures["exits"]
    ]
    return rows


def exit_0_rows(cases: list[dict]) -> list[list]:
    """One row per task, without and with exit 0."""
    rows = []
    for (task, model, first), some in grouped(with_first(cases), "task", "model", "first").items():
        shown = [percent(column(some, name)) for name in ("agreement", "layers_saved", "time")]
        rows.append([task, "yes" if first == 0 else "no", len(some), *shown])
    return sorted(rows)


def with_first(cases: list[dict]) -> list[dict]:
    """The cases, each with `first`: 0 if its first exit is 0, else 1."""
    return [case | {"first": min(1, case["exits"][0])} for case in cases]


# ---- The figures of the page ----
def page_figures(figures: dict) -> dict:
    """The rows of the tables, and what the first sentences compare: the largest number of texts of each task."""
    cases, best = figures["models"], largest(figures["models"])
    paid = {task: some for (task,), some in grouped(best, "task").items() if any(column(some, "pays"))}
    groups = grouped([case for some in paid.values() for case in some], "task", "model").values()
    saved, agrees = ([float(np.mean(column(some, key))) for some in groups] for key in ("layers_saved", "agreement"))
    late = [case for case in cases if "largest_difference" in case]
    fine_tuned = {(case["task"], case["model"], case["seed"]): case["fine_tuning_minutes"] for case in cases}
    one = figures["one-file"]
    return {
        **{"paid": [*paid], "never": [task for task in dict.fromkeys(column(best, "task")) if task not in paid]},
        **{"saved_least": min(saved), "saved_most": max(saved)},
        **{"agreement_least": min(agrees), "agreement_most": max(agrees), "agreement": AGREEMENT},
        "most_change": max(100 * abs(case["score_with_exits"] - case["score"]) for case in best),
        **{
            "not_exited": sum(column(late, "not_exited")),
            "largest_difference": max(column(late, "largest_difference")),
        },
        **{
            "memory_most": max(column(figures["memory"], "peak_mb")),
            "memory_texts": max(column(figures["memory"], "texts")),
        },
        **{
            "same": figures["same-labels"],
            "guarantee_model": OF["model"],
            "kept_texts": KEPT[2],
            "kept_model": KEPT[1],
        },
        **{"shadow": SHADOW, "requests": REQUESTS, "exits": ", ".join(map(str, EXITS)), "tokens": TOKENS},
        **{"full_ms": one["full_ms"], "plain_ms": one["plain_ms"], "bar": f"{100 * BAR:.0f}"},
        "exit_0_texts": max(column(figures["exit-0"], "texts")),
        "examples": list({case["task"]: case["examples"] for case in cases}.items()),
        "tuned": [(task, rows, epochs) for task, (rows, epochs) in TASKS.items()],
        "minutes": sum(column(cases, "processor_minutes")) + sum(fine_tuned.values()),
        "model_rows": models_rows(best),
        "rows_by_texts": models_rows(cases),
        "guarantee_rows": guarantee_rows(figures["guarantee"]["levels"]),
        "shift_rows": shift_rows(figures["shift"]),
        "depth_rows": one_file_rows(one),
        "exit_0_rows": exit_0_rows(figures["exit-0"]),
    }
