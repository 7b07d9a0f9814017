"""The pictures of results/add-exits.md, and how its cases are grouped."""

from pathlib import Path

from mini_ee.experiments.measured.add_exits_cases import AGREEMENT, COUNTS, KEPT
from mini_ee.experiments.measured.fine_tuning import MODELS, TASKS
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
