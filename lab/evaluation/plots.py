"""Pictures, and plots in text. The functions write a file or return text; the command line prints it."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mini_ee.lab.data.files import write_bytes
from mini_ee.lab.errors import WrongArguments

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOT_WIDTH, PLOT_HEIGHT = 60, 12  # characters

DPI = 150  # of a picture


def text_plot(points: list[tuple[float, float]], x_name: str, y_name: str) -> str:
    """A scatter plot in characters; the axes span the points."""
    (x_low, x_high), (y_low, y_high) = (_span([point[axis] for point in points]) for axis in (0, 1))
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    for x, y in points:
        column = round((x - x_low) / (x_high - x_low) * (PLOT_WIDTH - 1))
        line = round((y_high - y) / (y_high - y_low) * (PLOT_HEIGHT - 1))
        grid[line][column] = "o"
    labels = [f"{y_high:.3f}"] + [""] * (PLOT_HEIGHT - 2) + [f"{y_low:.3f}"]
    body = [f"{label:>7} |{''.join(line)}".rstrip() for label, line in zip(labels, grid)]
    axis = f"{'':8}+{'-' * PLOT_WIDTH}"
    return "\n".join([y_name, *body, axis, f"{'':9}{x_low:<.3g}{x_name:^{PLOT_WIDTH - 12}}{x_high:>.3g}"])


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def can_draw() -> bool:
    """Whether matplotlib is installed (the extra `plots`)."""
    return find_spec("matplotlib") is not None


def check_picture(path: Path | None) -> None:
    """Raise WrongArguments if matplotlib is missing or a picture cannot be written to the path."""
    if path is None:
        return
    if not can_draw():
        raise WrongArguments("--picture needs matplotlib: pip install mini-ee[plots]")
    if path.suffix != ".png" or path.is_dir() or not path.absolute().parent.is_dir():
        raise WrongArguments(f"--picture: expected a file NAME.png in a folder that exists, found {path}")


def draw_compared(path: Path, answer: dict, swept: bool) -> None:
    """The picture of `compare`: all curves if `swept`; else the score over alpha if all runs are of ConsistentEE, or
    loss and accuracy by layer."""
    rewards = all("reward" in row for row in answer["rows"])
    draw = draw_curves if swept else draw_rewards if rewards else draw_layers
    draw(path, answer)


def draw_speed_accuracy(path: Path, answer: dict) -> None:
    """Score against measured speed-up: each exit for all rows, the curve of thresholds, and the run's own rule."""
    figure, axes = new_figure()
    exits, curve = answer["rows"], sorted(answer["curve"], key=lambda row: row["speedup"])
    axes.plot([row["speedup"] for row in curve], [row["score"] for row in curve], "o-", label="thresholds")
    fixed = [(row["speedup"], row["score"]) for row in exits]
    axes.plot(*zip(*fixed), "s", color="0.6", label="same exit for all")
    for row, point in zip(exits, fixed):
        text = str(row["layer"])
        axes.annotate(text, point, textcoords="offset points", xytext=(4, -11), fontsize=8, color="0.4")
    axes.plot(answer["speedup"], answer["score"], "*", markersize=14, color="tab:red", label="default rule")
    axes.axhline(answer["full_score"], color="0.8", linewidth=1, zorder=0)
    axes.set(xlabel="measured speed-up over the full model", ylabel=f"score on {answer['task']} {answer['split']}")
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_agreement(path: Path, summary: dict) -> None:
    """Agreement with the original model against layers saved, a point per threshold; the star is the chosen one."""
    figure, axes = new_figure()
    points = [(point["layers_saved"], point["agreement"]) for point in summary["curve"]]
    if points:
        axes.plot(*zip(*points), "o-", label="thresholds")
    axes.plot(summary["layers_saved"], summary["agreement"], "*", markersize=14, color="tab:red", label="chosen")
    if summary["required_agreement"] is not None:
        axes.axhline(summary["required_agreement"], color="0.8", linewidth=1, zorder=0)
    axes.set(xlabel="share of the layers saved", ylabel="agreement with the original model")
    axes.legend(frameon=False)
    save_figure(figure, path)


def draw_curves(path: Path, answer: dict) -> None:
    """Score against FLOPs, one curve per run (LoRAExit, Fig. 3; ConsistentEE, Fig. 3); a star is the run's own rule.

    Runs that differ by their seed alone have the same colour and name.
    """
    from matplotlib import colormaps

    figure, axes = new_figure()
    groups = [[(run, group["how"]) for run in group["runs"]] for group in answer["over_seeds"]]
    runs = [(row["run"], row["how"]) for row in answer["rows"]]
    groups += [[run] for run in runs if not any(run in group for group in groups)]
    colours = colormaps["tab10" if len(groups) <= 10 else "tab20"]
    for row, run in zip(answer["rows"], runs):
        number = next(number for number, group in enumerate(groups) if run in group)
        colour, group = colours(number % colours.N), groups[number]
        name, method = run
        label = method if len(group) > 1 else f"{Path(name).name} ({method})"
        default_point = row["flops_ratio"], row["score"]
        points = sorted((point["flops_ratio"], point["score"]) for point in row["curve"]) or [default_point]
        axes.plot(*zip(*points), ".-", linewidth=1, color=colour, label=label if run == group[0] else None)
        axes.plot(*default_point, "*", markersize=12, color=colour)
    axes.set(xlabel="FLOPs, as a share of the full model's", ylabel=f"score on {answer['task']} {answer['split']}")
    axes.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    save_figure(figure, path)


def draw_exits_by_hardness(path: Path, answer: dict) -> None:
    """Exit layers of the sentences of each hardness: a stacked bar per kind, from early (dark) to late (light)."""
    figure, axes = new_figure()
    kinds = answer["hardness"]
    ends = [0.0] * len(kinds)  # of the bars so far
    from matplotlib import colormaps

    shades = colormaps["viridis"].resampled(len(answer["exits"]))
    for k, layer in enumerate(answer["exits"]):
        shares = [kind["exit_counts"][k] / sum(kind["exit_counts"]) for kind in kinds]
        axes.barh([kind["hardness"] for kind in kinds], shares, left=ends, color=shades(k), label=str(layer))
        ends = [end + share for end, share in zip(ends, shares)]
    axes.invert_yaxis()
    axes.set(xlabel="share of sentences that exit at each layer", xlim=(0, 1))
    axes.legend(title="layer", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=8)
    save_figure(figure, path)


def draw_decoder(path: Path, answer: dict, history: list[dict]) -> None:
    """Valade 2024's figures in one picture: training (Fig. 1), score, speed-up and exits over epsilon (Fig. 2 to 4).

    answer: of token_evaluation.sweep; history: for Fig. 1, from metrics.json, or empty. Fig. 2 shows the accuracy of a
    benchmark, else perplexity, else it is omitted. One more panel shows agreement on fresh text against epsilon.
    """
    layers = [f"layer {layer}" for layer in answer["exits"]]
    score = next((key for key in ("accuracy", "perplexity") if key in answer["rows"][0]), None)
    panels = [_draw_guarantee, _draw_speedup, _draw_distribution]
    if score:
        panels.insert(1, lambda axes, *_: _draw_score(axes, answer, score))
    if history:
        panels[:0] = [lambda axes, *_, key=key: _draw_history(axes, history, key, layers) for key in HISTORY]
    figure, grid = new_panels(len(panels), columns=3 if len(panels) > 4 else 2)
    for axes, draw in zip(grid, panels):
        draw(axes, answer, layers)
    save_figure(figure, path)


def draw_training(path: Path, rows: list[dict]) -> None:
    """Fig. 1 of Valade 2024: agreement and entropy of every head during training, a row of panels per run."""
    figure, grid = new_panels(2 * len(rows), height=2.6)
    for place, row in enumerate(rows):
        layers = [f"layer {layer}" for layer in row["exits"]]
        for axes, key in zip(grid[2 * place :], HISTORY):
            _draw_history(axes, row["history"], key, layers)
            axes.set_title(f"{Path(row['run']).name}: {key}")
    for axes in grid[::2]:
        if legend := axes.get_legend():
            legend.remove()  # the panel to the right has the same
    for panels in (grid[::2], grid[1::2]):
        top = max(axes.get_ylim()[1] for axes in panels)  # the same scale for all runs
        for axes in panels:
            axes.set_ylim(0, top)
    save_figure(figure, path)


HISTORY = {"agreement": "agreement with the full model", "entropy": "entropy, in nats"}


def _draw_history(axes: "Axes", history: list[dict], key: str, layers: list[str]) -> None:
    for k, layer in enumerate(layers[:-1]):
        steps = [(point["step"], point[key][k]) for point in history]
        axes.plot(*zip(*steps), color=_shade(k, len(layers)), label=layer)
    axes.set(title=f"Fig. 1: {key} of each head", xlabel="training step", ylabel=HISTORY[key], ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)


def _draw_guarantee(axes: "Axes", answer: dict, layers: list[str]) -> None:
    epsilons = [row["epsilon"] for row in answer["rows"]]
    axes.plot(epsilons, epsilons, ":", color="0.6", label="guaranteed")
    for k, layer in enumerate(layers[:-1]):
        shares = [float("nan") if row["agreement"][k] is None else row["agreement"][k] for row in answer["rows"]]
        axes.plot(epsilons, shares, ".-", linewidth=1, color=_shade(k, len(layers)), label=layer)
    axes.plot(epsilons, [row["end_to_end"] for row in answer["rows"]], "s-", color="tab:red", label="end to end")
    axes.set(title="The guarantee on fresh text", xlabel="epsilon", ylabel="agreement with the full model")
    axes.legend(frameon=False, fontsize=8)


def _draw_score(axes: "Axes", answer: dict, score: str) -> None:
    epsilons, values = [row["epsilon"] for row in answer["rows"]], [row[score] for row in answer["rows"]]
    task = f" on {answer['task']}" if score == "accuracy" else ""
    errors = [row["standard_error"] for row in answer["rows"]] if score == "accuracy" else None
    axes.errorbar(epsilons, values, yerr=errors, fmt="o-", capsize=2)
    axes.axhline(answer[f"full_{score}"], color="0.6", linestyle=":", label="full model")
    axes.set(title=f"Fig. 2: {score}{task}", xlabel="epsilon", ylabel=score)
    axes.legend(frameon=False, fontsize=8)


def _draw_speedup(axes: "Axes", answer: dict, layers: list[str]) -> None:
    epsilons = [row["epsilon"] for row in answer["rows"]]
    for missing_kv, rows in (
        ("copy_state", answer["rows"]),
        ("recompute", [row["recompute"] for row in answer["rows"]]),
    ):
        axes.plot(epsilons, [row["speedup"] for row in rows], "o-", label=missing_kv)
    axes.axhline(1, color="0.6", linestyle=":", label="full model")
    axes.set(title="Fig. 3: speed-up", xlabel="epsilon", ylabel="tokens per second, over the full model's")
    axes.legend(frameon=False, fontsize=8)


def _draw_distribution(axes: "Axes", answer: dict, layers: list[str]) -> None:
    names = [str(row["epsilon"]) for row in answer["rows"]]
    below = [0.0] * len(names)
    for k, layer in enumerate(layers):
        shares = [row["exit_counts"][k] / sum(row["exit_counts"]) for row in answer["rows"]]
        axes.bar(names, shares, bottom=below, color=_shade(k, len(layers)), label=layer)
        below = [a + b for a, b in zip(below, shares)]
    axes.set(title="Fig. 4: exits of tokens", xlabel="epsilon", ylabel="share of tokens", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")


def _shade(k: int, count: int) -> tuple[float, float, float, float]:
    """The colour of exit k: from early (dark) to late (light)."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.95 * k / max(count - 1, 1))


def new_panels(count: int, columns: int = 2, width: float = 4.6, height: float = 3.6) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` panels, each of `width` by `height` inches."""
    from matplotlib.figure import Figure

    lines = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    grid = [figure.add_subplot(lines, columns, place + 1) for place in range(count)]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def draw_layers(path: Path, answer: dict) -> None:
    """Loss and accuracy at every layer (ConsistentEE, Fig. 2): of all rows, and of the rows that exit there."""
    figure, (losses, accuracies) = new_panels(2)
    for row in answer["rows"]:
        name, exits = f"{Path(row['run']).name} ({row['method']})", row["by_exit"]
        for axes, key in ((losses, "loss"), (accuracies, "accuracy")):
            (line,) = axes.plot(
                [figures["layer"] for figures in exits], [figures[key] for figures in exits], ".-", label=name
            )
            exited = [(figures["layer"], figures[f"left_{key}"]) for figures in exits if figures["left"]]
            axes.plot(*zip(*exited), "o--", markersize=4, color=line.get_color(), label=f"{name}, rows that exit there")
    losses.set(xlabel="layer", ylabel=f"cross-entropy on {answer['task']} {answer['split']}, in nats")
    accuracies.set(xlabel="layer", ylabel="accuracy")
    handles = losses.get_legend_handles_labels()
    figure.legend(*handles, frameon=False, fontsize=7, ncols=2, loc="outside upper center")
    save_figure(figure, path)


def draw_rewards(path: Path, answer: dict) -> None:
    """Score against layers saved for each alpha, a line per reward (ConsistentEE, Fig. 4). All runs are of it."""
    figure, axes = new_figure()
    for reward in sorted({row["reward"] for row in answer["rows"]}):
        points = sorted((row for row in answer["rows"] if row["reward"] == reward), key=lambda row: row["alpha"])
        x, y = ([row[key] for row in points] for key in ("layers_saved", "score"))
        axes.plot(x, y, "o-", label=f"{reward} reward")
        for row in points:
            point, text = (row["layers_saved"], row["score"]), f"{row['alpha']:g}"
            axes.annotate(text, point, textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set(xlabel="share of the layers saved", ylabel=f"score on {answer['task']} {answer['split']}")
    axes.legend(title="points: alpha", frameon=False)
    save_figure(figure, path)


def draw_writing(path: Path, answer: dict) -> None:
    """Rouge-L against layers saved, a curve per measure (ConsistentEE, Fig. 5); a star is the run's own rule."""
    figure, axes = new_figure()
    for row in answer["rows"]:
        if not row["curve"]:
            continue
        points = sorted((point["layers_saved"], point["rouge_l"]) for point in row["curve"])
        label = f"{Path(row['run']).name}: {row['measure']}"
        (line,) = axes.plot(*zip(*points), ".-", linewidth=1, label=label)
        axes.plot(row["layers_saved"], row["rouge_l"], "*", markersize=12, color=line.get_color())
    axes.set(xlabel="share of the layers saved", ylabel="Rouge-L against the full model's text")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def new_figure() -> "tuple[Figure, Axes]":
    """A figure as wide as README, and its axes."""
    figure, (axes,) = new_panels(1, columns=1, width=7, height=4.2)
    return figure, axes


def save_figure(figure: "Figure", path: Path) -> None:
    """Write the figure as PNG. Names of runs, tasks and models may contain $, which must not begin a formula."""
    for axes in figure.axes:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_parse_math(False)
    for legend in (*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))):
        for text in legend.get_texts():
            text.set_parse_math(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    write_bytes(path, buffer.getvalue())


def draw_ablation(path: Path, answer: dict) -> None:
    """RAEE's score and mean layers over k, a line per size of the datastore (its Tables 3 and 4)."""
    figure, panels = new_panels(2)
    sizes = dict.fromkeys(point["database"] for point in answer["rows"])
    for axes, key, name in zip(panels, ("score", "mean_layers"), ("score", "mean layers")):
        for size in sizes:
            points = [point for point in answer["rows"] if point["database"] == size]
            axes.plot([point["k"] for point in points], [point[key] for point in points], ".-", label=size)
        full = answer["full_score"] if key == "score" else answer["exits"][-1]
        axes.axhline(full, color="0.8", linewidth=1, zorder=0, label="full model")
        axes.set(xlabel="k, neighbours that vote", ylabel=f"{name} on {answer['task']} {answer['split']}")
        axes.set_xticks(sorted({point["k"] for point in answer["rows"]}))
    panels[0].legend(title="share of the datastore", frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_estimate(path: Path, answer: dict) -> None:
    """Left: agreement and accuracy of every layer. Right: the layers from which on predictions do not change."""
    figure, (by_layer, settled) = new_panels(2)
    layers, unit = range(1, answer["layers"] + 1), answer["unit"]
    by_layer.plot(layers, answer["agreement"], "o-", label="agree with the last layer")
    if "accuracy" in answer:
        by_layer.plot(layers, answer["accuracy"], "s--", color="tab:orange", label="are correct")
    level = answer["estimate"]["agreement"]
    by_layer.axhline(level, color="0.6", linestyle=":", label=f"{level:g}")
    by_layer.set(
        title=f"{answer['model']}: {answer['how']}", xlabel="layer", ylabel=f"share of {unit} that", ylim=(0, 1.03)
    )
    by_layer.legend(frameon=False)
    shares = [count / sum(answer["oracle_counts"]) for count in answer["oracle_counts"]]
    settled.bar(layers, shares, color=[_shade(k, len(layers)) for k in range(len(layers))])
    saved = f"an oracle would save {answer['oracle_saved']:.0%} of the layers"
    settled.set(title=saved, xlabel="layer from which on the prediction stays", ylabel=f"share of {unit}")
    for axes in (by_layer, settled):
        axes.set_xticks(layers[:: -(-len(layers) // 16)])
    save_figure(figure, path)
