"""The pictures of the tutorial, one call each. They go to docs/pictures/, or to the folder in MINI_EE_PICTURES."""

import json
import os
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

COMMITTED = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FOLDER = Path(os.environ.get("MINI_EE_PICTURES") or COMMITTED)
COLOURS = ("tab:blue", "tab:orange", "tab:green")


def axes_of(width=7.0, height=3.6, columns=1):
    """A figure and its axes, or an array of them."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for panel in np.atleast_1d(axes):
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, name):
    """Write a picture into the folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / name, dpi=150)


def curve(name, points, picture):
    """The picture that grows: accuracy against layers. `picture` is curve-N.png of chapter N.

    points: (mean layers, accuracy) of one method. Earlier chapters' curves are grey. A file curve-N.json beside the
    picture keeps the points; those of chapters that you have not run come from docs/pictures/.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    curve_file = FOLDER / picture.replace(".png", ".json")
    curves = json.loads(curve_file.read_text()) if curve_file.exists() else {}
    curves[name] = sorted([round(float(layers), 4), round(float(accuracy), 4)] for layers, accuracy in points)
    curve_file.write_text(json.dumps(curves).replace("]], ", "]],\n ") + "\n")
    earlier = {path.name: path for folder in (COMMITTED, FOLDER) for path in folder.glob("curve-*.json")}
    figure, axes = axes_of(height=4)
    for file, marker in zip(sorted(earlier), "osDv^P"):
        if file < curve_file.name:
            for style, (label, known) in zip(("-", "--", ":"), json.loads(earlier[file].read_text()).items()):
                axes.plot(*zip(*known), marker + style, color="0.7", markersize=3, linewidth=1, label=label)
    for colour, (label, known) in zip(COLOURS, curves.items()):
        axes.plot(*zip(*known), "o-", color=colour, markersize=5, linewidth=2, label=label)
        if (most := max(layers for layers, _ in known)) > 12.5:
            style = {"textcoords": "offset points", "ha": "right", "va": "top", "color": colour, "fontsize": 8}
            axes.annotate(f"to {most:.0f} →", (12.4, known[-1][1]), (0, -5), **style)
    axes.set(xlabel="layers run, mean over the sentences", ylabel="accuracy on the built-in reviews", xlim=(3.5, 12.5))
    axes.grid(color="0.92", linewidth=0.5)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    save(figure, picture)


def adder(numbers, layers, threshold):
    """Chapter 1: the largest probability of each number after every layer, up to its exit."""
    figure, axes = axes_of()
    for number, last in zip(numbers, layers):
        depths = np.arange(1, last + 1)
        axes.plot(depths, 1 / (1 + np.exp(-2 * abs(number) * depths)), "o-", label=f"{number:g}")
    axes.axhline(threshold, color="0.6", linestyle=":", label="threshold")
    axes.set(xlabel="layer", ylabel="largest probability", xticks=range(1, 5))
    axes.legend(title="example", frameon=False)
    save(figure, "adder.png")


def reliability(diagrams):
    """Chapter 3: a panel for each layer, {layer: {name: (confidence, accuracy, share) of the bins}}."""
    figure, panels = axes_of(width=9, height=3.2, columns=len(diagrams))
    for axes, (layer, curves) in zip(panels, diagrams.items()):
        axes.plot((0.5, 1), (0.5, 1), ":", color="0.6", label="calibrated")
        for (name, (confidence, accuracy, _)), marker in zip(curves.items(), "os"):
            axes.plot(confidence, accuracy, marker + "-", label=name)
        axes.set(title=f"after layer {layer}", xlabel="confidence", ylabel="accuracy", ylim=(0.4, 1.03))
        axes.legend(frameon=False, loc="upper left", fontsize=8)
    save(figure, "reliability.png")


def losses(values, accepted):
    """Chapter 3: histograms of the losses of chosen rules, {name: (draws,)}."""
    figure, axes = axes_of()
    for (name, shares), colour in zip(values.items(), ("tab:orange", "tab:blue")):
        axes.hist(shares, bins=np.arange(0, 0.025, 0.001), alpha=0.6, color=colour, label=name)
    axes.axvline(accepted, color="0.4", linestyle=":", label="what we accept")
    axes.set(xlabel="share of the 2,000 other sentences that are lost", ylabel="number of draws")
    axes.legend(frameon=False)
    save(figure, "guarantee.png")


def guesses(beginnings, words, probabilities):
    """Appendix A: the word after each layer, in blue when it is the final one; below, the final word's probability."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    for row, (beginning, line) in enumerate(zip(beginnings, words)):
        for layer, word in enumerate(line, 1):
            colour = "#9ecae1" if word == line[-1] else "#eeeeee"
            above.barh(row, 0.96, left=layer - 0.48, height=0.9, color=colour)
            above.text(layer, row, word[:9], ha="center", va="center", fontsize=8, color="black")
        below.plot(range(1, len(line) + 1), probabilities[row], "o-", markersize=4, label=f"... {line[-1]}")
    names = [f"... {' '.join(beginning.split()[-3:])}" for beginning in beginnings]
    above.set(yticks=range(len(names)), yticklabels=names, title="blue: the word that the full model writes")
    above.invert_yaxis()
    below.set(xlabel="layers that were run", ylabel="its probability", xticks=range(1, 13), xlim=(0.5, 12.5))
    below.legend(frameon=False, fontsize=8)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, "guesses.png")


def embeddings(layers, before, after):
    """Appendix B: cosines (N, K - 1) to the full embedding; the band goes from the lowest to the highest tenth."""
    figure, axes = axes_of()
    for name, values, colour in (("before", before, "0.6"), ("trained", after, "tab:blue")):
        axes.plot(layers, values.mean(0), "o-", color=colour, label=name)
        axes.fill_between(layers, *np.quantile(values, (0.1, 0.9), axis=0), color=colour, alpha=0.2)
    axes.set(xlabel="layers that were run", ylabel="cosine to the full embedding", xticks=layers)
    axes.legend(frameon=False)
    save(figure, "cosines.png")


def epsilon(points, exits):
    """Chapter 5: agreement against layers; points {epsilon: (layers, agreement)}, exits [(layer, agreement)]."""
    figure, axes = axes_of()
    axes.plot(*zip(*exits), "o--", color="0.6", label="one layer for all tokens")
    axes.plot(*zip(*points.values()), "o-", label="each token at its own exit")
    for value, point in points.items():
        axes.annotate(f"{value}", point, textcoords="offset points", xytext=(-8, 6), ha="right", fontsize=8)
    axes.set(xlabel="layers, mean over the tokens", ylabel="agreement with the full model", title="points: epsilon")
    axes.legend(frameon=False, loc="lower right")
    save(figure, "epsilon.png")


def guarantee(realised, epsilon):
    """Chapter 5: histograms of the agreement on new texts, {rule: (draws,)}."""
    figure, axes = axes_of()
    values = np.concatenate(list(realised.values()))
    bins = np.linspace(values.min(), values.max(), 40)
    for name, shares in realised.items():
        axes.hist(shares, bins, alpha=0.6, label=name)
    axes.axvline(epsilon, color="0.3", linestyle=":", label="epsilon")
    axes.set(xlabel="share of the exiting tokens that agree, on new texts", ylabel="draws")
    axes.legend(frameon=False)
    save(figure, "tau.png")


def controls(points, spread):
    """Chapter 6: {name: (layers, accuracy)}; spread: standard deviation of the accuracy with layers at random."""
    figure, axes = axes_of(height=4)
    for (name, (layers, accuracy)), marker in zip(points.items(), "*osD^vP"):
        if "random" in name:
            axes.errorbar(layers, accuracy, spread, color="0.3", capsize=4, zorder=1)
        axes.plot(layers, accuracy, marker, markersize=15 if marker == "*" else 7, linestyle="", label=name)
    axes.set(xlabel="layers, mean over the sentences", ylabel="accuracy")
    axes.grid(color="0.92", linewidth=0.5)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "controls.png")


def gradients(estimates):
    """Chapter 7: histograms of {name: estimates of the gradient}; the exact one is a line."""
    figure, axes = axes_of()
    for name, values in estimates.items():
        if name == "exact":
            axes.axvline(values[0], color="0.3", linestyle=":", label=name)
        else:
            axes.hist(values, np.linspace(-0.4, 0.6, 60), alpha=0.6, label=name)
    axes.set(xlabel="gradient of the first policy's logit, 8 draws each", ylabel="number of estimates")
    axes.legend(frameon=False)
    save(figure, "variance.png")


def memorized(means):
    """Chapter 7: {kind of sentence: (memorized layer, exit of the policy)}."""
    figure, axes = axes_of()
    kinds, values = list(means)[::-1], list(means.values())[::-1]
    for shift, name, column in ((0.2, "memorized layer", 0), (-0.2, "exit of the policy", 1)):
        axes.barh([row + shift for row in range(len(kinds))], [pair[column] for pair in values], 0.38, label=name)
    axes.set(yticks=range(len(kinds)), yticklabels=kinds, xlabel="layers, mean over the sentences")
    axes.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    save(figure, "memorized.png")


def tokens(stories):
    """Chapter 8: {title: (words, layers)}, a bar for each token."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    for axes, (title, (words, layers)) in zip(figure.subplots(len(stories), 1), stories.items()):
        axes.bar(range(len(words)), layers, color=["tab:orange" if n < max(layers) else "tab:blue" for n in layers])
        axes.set_xticks(range(len(words)), [word.strip() or "·" for word in words], rotation=90, fontsize=8)
        axes.set(title=title, ylabel="layers", yticks=(0, 4, 8, 12), xlim=(-0.6, len(words) - 0.4))
    save(figure, "tokens.png")


def agreement(summary):
    """Chapter 9: agreement with the original against layers saved; the star is the chosen threshold."""
    figure, axes = axes_of()
    axes.plot([p["layers_saved"] for p in summary["curve"]], [p["agreement"] for p in summary["curve"]], "o-")
    axes.plot(summary["layers_saved"], summary["agreement"], "*", markersize=15, color="tab:red", label="chosen")
    axes.axhline(summary["required_agreement"], color="0.6", linestyle=":", label="required")
    axes.set(xlabel="share of the layers saved", ylabel="agreement with the original model")
    axes.legend(frameon=False)
    save(figure, "add-exits.png")


def compared(curves):
    """Chapter 11: {method: [(layers, accuracy)]}."""
    figure, axes = axes_of()
    for (name, points), style in zip(curves.items(), ("o-", "s--")):
        axes.plot(*zip(*sorted(points)), style, label=name)
    axes.set(xlabel="layers, mean over the sentences", ylabel="accuracy")
    axes.grid(color="0.9", linewidth=0.5)
    axes.legend(frameon=False)
    save(figure, "own-method.png")
