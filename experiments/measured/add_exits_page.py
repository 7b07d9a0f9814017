"""results/add-exits.md: `mini-ee add-exits` on models that transformers fine-tuned.

The measurements are in add_exits_cases, add_exits_guarantee and one_file. All cases with seed 0 are measured first; the
page shows how many seeds each figure has.
"""

from pathlib import Path

import numpy as np

from mini_ee.experiments.measured import one_file
from mini_ee.experiments.measured.add_exits_cases import (
    AGREEMENT,
    COUNTS,
    KEPT,
    REQUESTS,
    SHADOW,
    exit_0_cases,
    larger_cases,
    memory_cases,
    model_cases,
    same_labels,
    shifts,
    stored,
)
from mini_ee.experiments.measured.add_exits_guarantee import OF, guarantee
from mini_ee.experiments.measured.fine_tuning import MODELS, OTHERS, TASKS
from mini_ee.experiments.pages import spread
from mini_ee.lab.evaluation.plots import can_draw, new_figure, new_panels, save_figure


def column(cases: list[dict], name: str) -> list:
    """One figure of all cases."""
    return [case[name] for case in cases]


def grouped(cases: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Cases that have these figures in common."""
    groups: dict[tuple, list[dict]] = {}
    for case in cases:
        groups.setdefault(tuple(case[name] for name in names), []).append(case)
    return groups


def largest(cases: list[dict]) -> list[dict]:
    """Of each task, model and seed the case with most texts."""
    groups = grouped(cases, "task", "model", "seed").values()
    return [max(group, key=lambda case: case["texts"]) for group in groups]


# ---- Pictures ----
def draw(figures: dict, folder: Path) -> None:
    """Both pictures, if matplotlib is installed."""
    if not can_draw():
        return
    cases = [case for case in largest(figures["models"]) if case.get("curve")]
    tasks = [task for task in TASKS if task in column(cases, "task")]
    figure, panels = new_panels(len(tasks), columns=len(tasks), width=4.2)
    for axes, task in zip(panels, tasks):
        _lines(axes, [case for case in cases if case["task"] == task], "model", list(MODELS))
        axes.set_title(task)
    panels[-1].legend(frameon=False, loc="lower left")
    save_figure(figure, folder / "add-exits.png")
    figure, axes = new_figure()
    some = [case for case in figures["models"] if case.get("curve") and case["task"] == KEPT[0]]
    _lines(axes, [case for case in some if case["model"] == KEPT[1]], "wanted", list(COUNTS[KEPT[0]]))
    axes.set_title(f"{KEPT[0]}, {KEPT[1]}")
    axes.legend(frameon=False, title="texts without labels")
    save_figure(figure, folder / "add-exits-texts.png")


def _lines(axes, cases: list[dict], name: str, values: list) -> None:
    """A line per case, in the colour of its value of `name`; the chosen point is a star."""
    named = set()
    for case in cases:
        colour = f"C{values.index(case[name])}"
        label = None if case[name] in named else f"{case[name]:,}" if isinstance(case[name], int) else case[name]
        named.add(case[name])
        axes.plot(*zip(*[point[:2] for point in case["curve"]]), "-", linewidth=1.2, color=colour, label=label)
        axes.plot(case["layers_saved"], case["agreement"], "*", markersize=11, color=colour)
    axes.axhline(AGREEMENT, color="0.8", linewidth=1, zorder=0)
    axes.set(xlabel="share of the layers saved", ylabel="agreement with the model", ylim=(0.9, 1.002))


BAR = 0.03  # largest difference between the time at an exit and its share of the layers

PARTS = {
    "models": model_cases,
    "larger": larger_cases,
    "memory": memory_cases,
    "exit-0": exit_0_cases,
    "same-labels": same_labels,
    "guarantee": guarantee,
    "shift": shifts,
    "one-file": lambda sources, work: {"one-file": stored(work, "one file", one_file.measure)},
}


# ---- Tables ----
def models_rows(cases: list[dict]) -> list[list]:
    """One row per task, model and number of texts."""
    order = {name: at for at, name in enumerate((*TASKS, *MODELS, *OTHERS))}
    rows = []
    groups = grouped(cases, "task", "model", "wanted")
    for task, model, wanted in sorted(groups, key=lambda key: (order[key[0]], order[key[1]], key[2])):
        some = groups[task, model, wanted]
        row = [task, model, f"{max(column(some, 'texts')):,}", len(some), spread(column(some, "agreement"))]
        row += [spread(column(some, key)) for key in ("score", "score_with_exits", "layers_saved")]
        row += [spread(column(some, "time"), 0), f"{sum(column(some, 'guaranteed'))} of {len(some)}"]
        rows.append([*row, spread(column(some, "processor_minutes"), scale=1)])
    return rows


def exit_0_rows(cases: list[dict]) -> list[list]:
    """One row per task, without and with exit 0."""
    rows = []
    marked = [case | {"first": min(1, case["exits"][0])} for case in cases]
    for (task, _, first), some in grouped(marked, "task", "model", "first").items():
        shown = [spread(column(some, name)) for name in ("agreement", "layers_saved", "time")]
        rows.append([task, "yes" if first == 0 else "no", len(some), *shown])
    return sorted(rows)


# ---- The figures of the page ----
def page_figures(figures: dict) -> dict:
    """The rows of the tables, and what the first sentences compare: the largest number of texts of each task."""
    cases, best = figures["models"], largest(figures["models"])
    paid = {task: some for (task,), some in grouped(best, "task").items() if any(column(some, "pays"))}
    groups = grouped([case for some in paid.values() for case in some], "task", "model").values()
    saved, agrees = ([float(np.mean(column(some, key))) for some in groups] for key in ("layers_saved", "agreement"))
    late = [case for case in cases if "largest_difference" in case]
    fine_tuned = {(case["task"], case["model"], case["seed"]): case["fine_tuning_minutes"] for case in cases}
    one, larger = figures["one-file"], [*grouped(figures["larger"], "task").values()]
    return {
        **{"paid": [*paid], "never": [task for task in dict.fromkeys(column(best, "task")) if task not in paid]},
        **{"saved_least": min(saved), "saved_most": max(saved)},
        **{"agreement_least": min(agrees), "agreement_most": max(agrees), "agreement": AGREEMENT},
        "most_change": max(100 * abs(case["score_with_exits"] - case["score"]) for case in best),
        "not_exited": sum(column(late, "not_exited")),
        "largest_difference": max(column(late, "largest_difference")),
        "memory_most": max(column(figures["memory"], "peak_mb")),
        "memory_texts": max(column(figures["memory"], "texts")),
        **{"same": figures["same-labels"], "guarantee_model": OF["model"]},
        **{"kept_texts": KEPT[2], "kept_model": KEPT[1]},
        **{
            "shadow": SHADOW,
            "requests": REQUESTS,
            "exits": ", ".join(map(str, one_file.EXITS)),
            "tokens": one_file.TOKENS,
        },
        **{"full_ms": one["full_ms"], "plain_ms": one["plain_ms"], "bar": f"{100 * BAR:.0f}"},
        "exit_0_texts": max(column(figures["exit-0"], "texts")),
        "examples": list({case["task"]: case["examples"] for case in cases}.items()),
        "tuned": [(task, rows, epochs) for task, (rows, epochs) in TASKS.items()],
        "minutes": sum(column(cases, "processor_minutes")) + sum(fine_tuned.values()),
        "model_rows": models_rows(best),
        "rows_by_texts": models_rows(cases),
        "larger_rows": models_rows(figures["larger"]),
        "larger": {key: [float(np.mean(column(some, key))) for some in larger] for key in ("layers_saved", "time")},
        "larger_lowest": min(figures["larger"], key=lambda case: case["agreement"]),
        "larger_calls": len(figures["larger"]),
        "depths": one["exits"],
        "exit_0_rows": exit_0_rows(figures["exit-0"]),
    }
