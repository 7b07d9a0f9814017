"""results/embeddings.md: embeddings of MiniLM at fixed and adaptive depth, with and without training of the encoder.

embeddings_runs.py trains and evaluates, embeddings_figures.py summarises. This module measures times and makes
the figures of the page.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mini_ee.experiments.measured.embeddings_figures import ADAPTIVE, LEVEL, RESAMPLES, quality_of
from mini_ee.experiments.measured.embeddings_runs import (
    CUTS,
    ENCODERS,
    LEAST_COSINES,
    ONE_DEPTHS,
    SEEDS,
    TRAININGS,
    Evaluated,
    every_run,
    trained,
)
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.plots import can_draw, new_figure, save_figure
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.methods.embedding_maps_rule import Similarity
from mini_ee.lab.rules import Fixed, Never, Policy, Rule
from mini_ee.lab.training.method import load_method

TIMED, ROUNDS = 60, 3  # texts, and times that each is run


# ---- Measuring ----
def measure_quality(sources: Sources, work: Path) -> dict:
    """Train and evaluate what is missing; Spearman, recall, cosines and the differences with their intervals."""
    paths = every_run(sources, work)
    return quality_of(Evaluated(sources), paths, trained(sources, work, "maps", SEEDS[0]).metrics["rows"])


def measure_times(sources: Sources, work: Path) -> dict:
    """Processor milliseconds of one text under each rule, in ONNX Runtime with one thread: the mean over texts."""
    every = Evaluated(sources)
    drawn = np.random.default_rng(0).permutation(every.paired)[:TIMED]
    texts = [text for text, at in every.number.items() if at in set(drawn.tolist())]
    times: dict[str, dict[str, float]] = {}
    for name in ADAPTIVE:
        rules: dict[str, Rule] = {f"similarity {least}": Similarity(least) for least in LEAST_COSINES}
        times[name] = timed(sources, work, name, rules, texts)
    times["maps"] |= timed(sources, work, "maps", {f"predictor {cut}": Policy(cut) for cut in CUTS}, texts)
    return {"times": times}


def timed(sources: Sources, work: Path, name: str, rules: dict[str, Rule], texts: list[str]) -> dict[str, float]:
    """Label of each fixed depth and of each rule -> milliseconds. Of several rounds the fastest counts for a text."""
    run, some = trained(sources, work, name, SEEDS[0]), next(iter(rules.values()))
    folder = work / f"{name}-{some.name}"
    if not folder.is_dir():
        export(run._replace(rule=some), folder)
    served = Runtime(folder, threads=1)
    inputs = [served.encode([text]).batch(slice(None)) for text in texts]
    fixed = {f"fixed {layer}": Fixed(k) for k, layer in enumerate(run.exits[:-1])}
    every = fixed | {f"fixed {run.exits[-1]}": Never()} | rules
    rules_in_turn, random = [*every.values()], np.random.default_rng(0)
    seconds = np.full((len(every), len(inputs)), np.inf)
    for _ in range(ROUNDS):
        for at, batch in enumerate(inputs):
            # The rules take turns, in a new order each time: how warm the caches are depends on what ran before.
            for number in random.permutation(len(every)):
                rule = rules_in_turn[number]
                early_exit(served.segments(), rule, batch)
                begin = time.thread_time()  # not the clock, which counts other programs too
                early_exit(served.segments(), rule, batch)
                seconds[number, at] = min(seconds[number, at], time.thread_time() - begin)
    return dict(zip(every, (seconds.mean(axis=1) * 1e3).tolist()))


PARTS = {"quality": measure_quality, "times": measure_times}


# ---- The figures of the page ----
NAMES = {
    "plain": "pooled hidden state, nothing trained",
    "maps": "map on a frozen encoder",
    "starbucks": "Starbucks",
    "2dmse": "2DMSE",
    **{f"one-depth-{depth}": "trained for this depth alone" for depth in ONE_DEPTHS},
}
PICTURE = "embeddings.png"
MARGIN = 0.001  # smaller differences count for nothing
NEARLY = 0.02  # layers; of a rule that chooses the same exit for nearly every text


def percent(values: list[float]) -> str:
    """The mean, and the standard deviation over seeds if there are several."""
    mean = f"{100 * np.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * np.std(values, ddof=1):.1f}"


def time_of(figures: dict, name: str, label: str) -> float:
    """Relative to the full model in the same graph. Encoders without maps take the time of Starbucks."""
    times = figures["times"][name if name in figures["times"] else "starbucks"]
    return times[label] / times[f"fixed {figures['exits'][-1]}"]


def layers_of(figures: dict, name: str, label: str) -> float:
    """Mean layers of the texts of all pairs, over seeds."""
    return float(np.mean(figures["quality"][name][label]["layers"]))


def score_of(figures: dict, name: str, label: str) -> float:
    """Mean Spearman correlation over sets and seeds."""
    return float(np.mean(figures["quality"][name][label]["spearman"]))


def rules_of(figures: dict, name: str) -> list[str]:
    """Labels of the adaptive rules of a run."""
    return [label for label in figures["quality"][name] if not label.startswith("fixed")]


def seeds_line(figures: dict) -> str:
    """The number of seeds, and that of each training that has fewer."""
    counts = {NAMES[name]: count for name, count in figures["seeds"].items() if name != "plain"}
    most = max(counts.values())
    fewer = [f"{name} {count}" for name, count in counts.items() if count < most]
    return f"{most} ({', '.join(fewer)})" if fewer else f"{most}"


def main_rows(figures: dict) -> list[list[str]]:
    """The main table: the full model, fixed depths, then adaptive rules."""
    last, half = figures["exits"][-1], figures["exits"][-1] / 2
    rows = [("full model", "plain", f"fixed {last}")]
    for name in ("plain", "maps"):
        rows += [(NAMES[name], name, f"fixed {depth}") for depth in ONE_DEPTHS]
    rows += [(NAMES[f"one-depth-{depth}"], f"one-depth-{depth}", f"fixed {depth}") for depth in ONE_DEPTHS]
    for name in ("2dmse", "starbucks"):
        rows += [(NAMES[name], name, f"fixed {depth}") for depth in (*ONE_DEPTHS, last)]
    for name in ADAPTIVE:
        for kind in dict.fromkeys(label.split()[0] for label in rules_of(figures, name)):
            labels = [label for label in rules_of(figures, name) if label.startswith(kind)]
            label = min(labels, key=lambda label: abs(layers_of(figures, name, label) - half))
            rows.append((f"{NAMES[name]}, {label}", name, label))
    table = []
    for title, name, label in rows:
        quality = figures["quality"][name][label]
        recall = np.mean(list(quality["recall"].values()), axis=0).tolist()
        table.append([title, f"{np.mean(quality['layers']):.2f}", f"{100 * time_of(figures, name, label):.0f}"])
        table[-1] += [percent(quality["spearman"]), percent(recall), percent(quality["cosine"])]
    return table


def difference(values: list[float]) -> list[str]:
    """A difference and its interval, in points."""
    value, low, high = (100 * share for share in values)
    return [f"{value:+.1f}", f"{low:+.1f} to {high:+.1f}"]


def counted(differences: Iterable[list[float]]) -> tuple[int, int]:
    """How many intervals are above MARGIN, and how many below -MARGIN."""
    return sum(low > MARGIN for _, low, _ in differences), sum(high < -MARGIN for _, _, high in differences)


def adaptive_differences(figures: dict, key: str) -> dict[str, list[float]]:
    """RUN/RULE -> difference from fixed depths and its interval. key: `` for Spearman correlations, or `recall `."""
    return {
        f"{name}/{label}": figures["differences"][f"{key}{name}/{label}"]
        for name in ADAPTIVE
        for label in rules_of(figures, name)
    }


def same_layer(figures: dict) -> int:
    """How many adaptive settings choose nothing: their mean number of layers is that of an exit, within NEARLY."""
    layers = [layers_of(figures, name, label) for name in ADAPTIVE for label in rules_of(figures, name)]
    return sum(min(abs(depth - layer) for layer in figures["exits"]) < NEARLY for depth in layers)


def set_rows(figures: dict, key: str, sizes: dict[str, str]) -> list[list]:
    """A column per set, a row per embedding and depth. sizes: the first row."""
    quality, names = figures["quality"], list(sizes)
    rows = [["*size*", "", *sizes.values()]]
    for name in NAMES:
        depths = [int(label.split()[1]) for label in quality[name] if label.startswith("fixed")]
        for depth in depths:
            scores = quality[name][f"fixed {depth}"][key]
            rows.append([NAMES[name], depth, *(f"{100 * np.mean(scores[set_name]):.1f}" for set_name in names)])
    return rows


def page_figures(figures: dict) -> dict:
    """The rows of the tables, and what the first sentences compare."""
    (first, _), last, differences = ONE_DEPTHS, figures["exits"][-1], figures["differences"]
    full = score_of(figures, "plain", f"fixed {last}")
    runs = {
        "plain": "plain",
        "maps": "maps",
        "alone": f"one-depth-{first}",
        "twodmse": "2dmse",
        "starbucks": "starbucks",
    }
    pairs = {name: f"{count:,} pairs" for name, count in figures["pairs"].items()}
    retrieval = {name: f"{q:,} queries in {d:,}" for name, (q, d) in figures["retrieval"].items()}
    of_maps = load_method(TRAININGS["maps"][0]).defaults["embeddings"]
    return ENCODERS | {
        **{"first": first, "last": last, "half": last / 2, "level": LEVEL, "margin": 100 * MARGIN},
        "kept": {key: score_of(figures, name, f"fixed {first}") / full for key, name in runs.items()},
        "map_time": time_of(figures, "maps", f"fixed {first}"),
        **{key: counts(figures, at) for key, at in (("spearman", ""), ("recall", "recall "))},
        **{"same_layer": same_layer(figures), "seeds": seeds_line(figures)},
        "full_ms": figures["times"]["starbucks"][f"fixed {last}"],
        **{"map_epochs": of_maps["epochs"], "map_lr": of_maps["head_lr"]},
        **{"resamples": RESAMPLES, "timed": TIMED, "rounds": ROUNDS},
        "main_rows": main_rows(figures),
        "one_depth_rows": [
            [NAMES[name], depth, *difference(differences[f"{name}/{depth}"])]
            for name in ("2dmse", "starbucks")
            for depth in ONE_DEPTHS
        ],
        "adaptive_rows": [adaptive_row(figures, name, rule) for name in ADAPTIVE for rule in rules_of(figures, name)],
        **{"set_names": list(pairs), "set_rows": set_rows(figures, "sets", pairs)},
        **{"recall_names": list(retrieval), "recall_rows": set_rows(figures, "recall", retrieval)},
    }


def counts(figures: dict, key: str) -> dict:
    """How many settings of adaptive depth there are, how many are better and worse than a fixed depth, and the best."""
    settings = adaptive_differences(figures, key).values()
    better, worse = counted(settings)
    return {
        "settings": len(settings),
        "better": better,
        "worse": worse,
        "most": max(setting[0] for setting in settings),
    }


def adaptive_row(figures: dict, name: str, rule: str) -> list:
    """The row of a run and a rule."""
    quality, differences = figures["quality"][name][rule], figures["differences"]
    row = [NAMES[name], rule, f"{layers_of(figures, name, rule):.2f}", f"{100 * time_of(figures, name, rule):.0f}"]
    row += [percent(quality["spearman"]), *difference(differences[f"{name}/{rule}"])]
    return [*row, f"{np.mean(quality['retrieval layers']):.2f}", *difference(differences[f"recall {name}/{rule}"])]


def draw(figures: dict, folder: Path) -> None:
    """The picture, if matplotlib is installed. Fixed depths are lines, adaptive rules crosses of the same colour."""
    if not can_draw():
        return
    figure, axes = new_figure()
    colours = {"plain": "0.6", "maps": "tab:green", "starbucks": "tab:orange", "2dmse": "tab:blue"}
    for name, colour in colours.items():
        fixed = [(depth, 100 * score_of(figures, name, f"fixed {depth}")) for depth in figures["exits"]]
        axes.plot(*zip(*fixed), "o-", markersize=4, color=colour, label=NAMES[name])
        for label in rules_of(figures, name) if name in ADAPTIVE else ():
            mark = "x" if label.startswith("similarity") else "+"
            axes.plot(layers_of(figures, name, label), 100 * score_of(figures, name, label), mark, color=colour, ms=8)
    alone = [(depth, 100 * score_of(figures, f"one-depth-{depth}", f"fixed {depth}")) for depth in ONE_DEPTHS]
    axes.plot(*zip(*alone), "D", markersize=7, color="tab:red", label="trained for this depth alone")
    for mark, kind in (("x", "similarity"), ("+", "predictor")):
        axes.plot([], [], mark, color="0.2", ms=8, label=f"adaptive depth, rule {kind}")
    axes.set(xlabel="mean number of layers", ylabel="mean Spearman correlation, %")
    figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside lower center")
    save_figure(figure, folder / PICTURE)
