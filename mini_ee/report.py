"""Tables, text plots and pictures. Functions return text or write a file; the command line prints."""

from importlib.util import find_spec
from pathlib import Path

from mini_ee.files import write_bytes

PLOT_WIDTH, PLOT_HEIGHT = 60, 12  # characters


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """A text table, numbers to the right. columns: key -> heading; a heading may end in a format, `accuracy:.3f`.

    >>> print(table([{"layer": 2, "accuracy": 0.5}], {"layer": "layer", "accuracy": "accuracy:.2f"}))
    layer  accuracy
        2      0.50
    """
    headings = {key: heading.partition(":")[::2] for key, heading in columns.items()}
    cells = [[name for name, _ in headings.values()]]
    for row in rows:
        cells.append([format(row[key], spec) if spec else str(row[key]) for key, (_, spec) in headings.items()])
    widths = [max(map(len, column)) for column in zip(*cells)]
    numeric = [all(not isinstance(row[key], str) for row in rows) for key in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric)
        ).rstrip()
        for line in cells
    )


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


def draw_speed_accuracy(path: Path, answer: dict) -> None:
    """Accuracy against measured speed-up: every single exit, the curve of thresholds, and the run's own rule."""
    figure, axes = _figure()
    exits, curve = answer["rows"], sorted(answer["curve"], key=lambda row: row["speedup"])
    axes.plot([row["speedup"] for row in curve], [row["score"] for row in curve], "o-", label="threshold, swept")
    axes.plot(
        [row["speedup"] for row in exits],
        [row["score"] for row in exits],
        "s",
        color="0.6",
        label="one exit for all",
    )
    for row in exits:
        axes.annotate(
            str(row["layer"]),
            (row["speedup"], row["score"]),
            textcoords="offset points",
            xytext=(4, -11),
            fontsize=8,
            color="0.4",
        )
    axes.plot(answer["speedup"], answer["score"], "*", markersize=14, color="tab:red", label="default rule")
    axes.axhline(answer["full_score"], color="0.8", linewidth=1, zorder=0)
    axes.set(xlabel="measured speed-up over the full model", ylabel=f"score on {answer['task']} {answer['split']}")
    axes.yaxis.label.set_parse_math(False)  # a task may have any name
    axes.legend(frameon=False)
    _save(figure, path)


def draw_curves(path: Path, answer: dict) -> None:
    """Score against operations, one curve a run (LoRAExit, Fig. 3; ConsistentEE, Fig. 3); a star is its own rule."""
    figure, axes = _figure()
    for row in answer["rows"]:
        points = [(point["flops_ratio"], point["score"]) for point in row["curve"]]
        own = row["flops_ratio"], row["score"]
        (line,) = axes.plot(
            *zip(*(points or [own])), ".-", linewidth=1, label=f"{Path(row['run']).name} ({row['method']})"
        )
        axes.plot(*own, "*", markersize=12, color=line.get_color())
    axes.set(xlabel="operations, as a share of the full model's", ylabel=f"score on {answer['task']} {answer['split']}")
    axes.yaxis.label.set_parse_math(False)
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)  # a run may have any name
    _save(figure, path)


def draw_exits_by_hardness(path: Path, answer: dict) -> None:
    """Where the sentences of each hardness leave: one stacked bar a kind, from early (dark) to late (light)."""
    figure, axes = _figure()
    kinds = answer["hardness"]
    left = [0.0] * len(kinds)
    from matplotlib import colormaps

    shades = colormaps["viridis"].resampled(len(answer["exits"]))
    for k, layer in enumerate(answer["exits"]):
        shares = [kind["exit_counts"][k] / sum(kind["exit_counts"]) for kind in kinds]
        axes.barh([kind["hardness"] for kind in kinds], shares, left=left, color=shades(k), label=str(layer))
        left = [a + b for a, b in zip(left, shares)]
    axes.invert_yaxis()
    axes.set(xlabel="share of sentences that left at each layer", xlim=(0, 1))
    axes.legend(title="layer", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=8)
    _save(figure, path)


def _figure():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure, path: Path) -> None:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_bytes(path, buffer.getvalue())
