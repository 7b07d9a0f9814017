"""results/embeddings.md: embeddings of MiniLM at fixed and adaptive depth, with and without training of the encoder.

embeddings_runs.py trains and evaluates, embeddings_figures.py summarises. This module measures times and writes the
page.
"""

import textwrap
import time
from pathlib import Path

import numpy as np

from mini_ee.experiments.markdown import made_by_measuring, markdown_table, wrapped
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
        for at, each in enumerate(inputs):
            # The rules take turns, in a new order each time: how warm the caches are depends on what ran before.
            for number in random.permutation(len(every)):
                rule = rules_in_turn[number]
                early_exit(served.segments(), rule, each)
                begin = time.thread_time()  # not the clock, which counts other programs too
                early_exit(served.segments(), rule, each)
                seconds[number, at] = min(seconds[number, at], time.thread_time() - begin)
    return dict(zip(every, (seconds.mean(axis=1) * 1e3).tolist()))


PARTS = {"quality": measure_quality, "times": measure_times}


# ---- The page ----
NAMES = {
    "plain": "pooled hidden state, nothing trained",
    "maps": "map on a frozen encoder",
    "starbucks": "Starbucks",
    "2dmse": "2DMSE",
    **{f"one-depth-{depth}": "trained for this depth alone" for depth in ONE_DEPTHS},
}
FOUND_BEFORE = {"2dmse": " arXiv:2411.17299 finds the same."}
PICTURE = "embeddings.png"
MARGIN = 0.001  # smaller differences count for nothing
NEARLY = 0.02  # layers; of a rule that chooses the same exit for nearly every text

PAGE_TEXT = """# Embeddings at each depth

{answer}

Made by {made_by} Model: all-MiniLM-L6-v2, {layers} layers. All columns but *layers* are in percent. ± is the standard
deviation over seeds, of which there are {seeds}.

| embedding | layers | time | Spearman | recall of neighbours | cosine |
|---|---|---|---|---|---|
{main}

*Layers* is the mean number of layers that a text of a pair runs. *Time* is that of one text in ONNX Runtime, relative
to the full model. *Spearman* is the correlation of the cosines of pairs with their gold scores, on average over six
sets. *Recall of neighbours* is the share of the full model's ten nearest documents that are among the ten nearest
found, on average over three sets. *Cosine* is the mean cosine to the full model's embedding. A *map* is a linear map
from the pooled hidden state to the embedding. 2DMSE (2D Matryoshka sentence embeddings) and Starbucks train an encoder
for all depths at once. With a fixed depth, both texts of a pair stop at the same layer, and so do queries and
documents. With an adaptive rule, each text stops where the rule says; the table shows the setting whose mean number of
layers is nearest to {half}. The rule `similarity` stops if the cosine of the embedding and that of the exit before is
at least the number given, so never at layer 1. The rule `predictor` stops if a learned network predicts that the cosine
to the full embedding is above the number given; only maps have such networks.

![Mean Spearman correlation against the mean number of layers]({picture})

## Verdicts

{verdicts}

## Differences

Differences are in points, with a {level:g} % interval over seeds and pairs or queries. The verdicts count a difference
as better or worse if its whole interval, before it is rounded, is more than {margin:.1f} points from 0.

**Training for every depth, minus training for one depth**

| embedding | layer | difference | interval |
|---|---|---|---|
{one_depth}

**Adaptive depth, minus a fixed depth of the same encoder.** The figures of fixed depths are interpolated to the mean
number of layers of the adaptive rule.

{adaptive}

## Each set

Spearman correlation, the mean over seeds.

{sets}

Recall of the full model's ten nearest documents, the mean over seeds.

{recalls}

## How it was measured

- Training: {trained_on:,} texts of the train files of SICK-R and SST-2, without labels. The held-out texts and the
  order differ between seeds. The loss of every training is 1 - cosine to the embedding of the original encoder. Maps
  are trained on a frozen encoder, for {map_epochs} epochs with the learning rate {map_lr:g}. Encoders are trained for
  {epochs} epochs with the learning rate {lr:g}, which was chosen on held-out texts.
- 2DMSE and Starbucks have the losses of their methods, but not their training. All embeddings have the full size, the
  target is the original encoder's embedding instead of labelled pairs, and Starbucks has no pre-training. The paper of
  2DMSE itself was not compared (the heads of `lab/baselines/matryoshka_2d.py` and `starbucks.py` list the
  deviations). A model for one depth (`one_depth.py`) has the same settings and texts. In each step 2DMSE trains only
  one of the shallower layers, so each of them learns in fewer steps than a model for one depth. Longer training may
  change the verdicts.
- Sets: all pairs of STS 2012 to 2016 and of SICK-R's test file. Queries are drawn from dev or test, documents from
  train. Nothing was chosen on these sets. Some documents of SST-2 may also be training texts.
- Intervals: percentile bootstrap with {resamples} resamples of seeds and of pairs or queries, the same on both sides.
- Time: processor time of {timed} texts with batch size 1 and one thread. The texts are drawn from all pairs with seed
  0. In each of {rounds} rounds a text is run twice under each rule, in random order, and the second run is timed; the
  fastest counts.
  Models for one depth were not timed: the table shows the time of Starbucks at the same depth. The full model takes
  {full_ms:.1f} ms.
"""

ADAPTIVE_COLUMNS = ["embedding", "rule", "layers, pairs", "time", "Spearman", "difference", "interval"]
ADAPTIVE_COLUMNS += ["layers, retrieval", "recall, difference", "interval"]


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
        each = figures["quality"][name][label]
        recall = np.mean(list(each["recall"].values()), axis=0).tolist()
        table.append([title, f"{np.mean(each['layers']):.2f}", f"{100 * time_of(figures, name, label):.0f}"])
        table[-1] += [percent(each["spearman"]), percent(recall), percent(each["cosine"])]
    return table


def points(values: list[float]) -> list[str]:
    """A difference and its interval, in points."""
    value, low, high = (100 * each for each in values)
    return [f"{value:+.1f}", f"{low:+.1f} to {high:+.1f}"]


def counted(differences: list[list[float]]) -> tuple[int, int]:
    """How many intervals are above MARGIN, and how many below -MARGIN."""
    return sum(low > MARGIN for _, low, _ in differences), sum(high < -MARGIN for _, _, high in differences)


def verdicts(figures: dict) -> list[str]:
    """The verdicts, as list items."""
    found, differences = [], figures["differences"]
    for name in ("2dmse", "starbucks"):
        some = [differences[f"{name}/{depth}"] for depth in ONE_DEPTHS]
        better, worse = counted(some)
        holds = "holds" if not better else "does not hold" if better == len(some) else "holds at some depths"
        values = " and ".join(f"{points(each)[0]} points ({points(each)[1]})" for each in some)
        depths = " and ".join(map(str, ONE_DEPTHS))
        found.append(
            f'- **"{NAMES[name]} is no better than models trained for one depth" {holds}**, in our short training.'
            f"{FOUND_BEFORE.get(name, '')} After layers {depths}, the mean Spearman correlation differs by "
            f"{values}. {NAMES[name]} is better at {better} and worse at {worse} of {len(some)} depths."
            + (" It has one seed, so the interval is over pairs of texts alone." if figures["seeds"][name] == 1 else "")
        )
    similarity, recall = (adaptive_differences(figures, key) for key in ("", "recall "))
    (better, worse), (found_more, found_less) = counted(similarity.values()), counted(recall.values())
    word = "holds" if 2 * better > len(similarity) else "does not hold"
    found.append(
        f'- **"Adaptive depth beats fixed depth" {word}.** Each of {len(similarity)} settings is compared with a fixed '
        f"depth of the same encoder and the same mean number of layers. The Spearman correlation is better at {better} "
        f"and worse at {worse} of them, the recall of neighbours better at {found_more} and worse at {found_less}."
        f"{_same_layer(figures)}"
    )
    return [textwrap.fill(each, 118, subsequent_indent="  ", break_on_hyphens=False) for each in found]


def adaptive_differences(figures: dict, key: str) -> dict[str, list[float]]:
    """RUN/RULE -> difference from fixed depths and its interval. key: `` for Spearman correlations, or `recall `."""
    return {
        f"{name}/{label}": figures["differences"][f"{key}{name}/{label}"]
        for name in ADAPTIVE
        for label in rules_of(figures, name)
    }


def _same_layer(figures: dict) -> str:
    """How many adaptive settings choose nothing: their mean number of layers is that of an exit, within NEARLY."""
    layers = [layers_of(figures, name, label) for name in ADAPTIVE for label in rules_of(figures, name)]
    same = sum(min(abs(each - layer) for layer in figures["exits"]) < NEARLY for each in layers)
    return f" At {same} settings nearly every text of a pair stops at the same layer." if same else ""


def answer(figures: dict) -> str:
    """Which embedding after the first layer, whether it is the best elsewhere, and whether adaptive depth pays."""
    (first, later), full = ONE_DEPTHS, score_of(figures, "plain", f"fixed {figures['exits'][-1]}")
    label = f"fixed {first}"
    names = ("plain", "maps", f"one-depth-{first}", "2dmse", "starbucks")
    plain, maps, alone, twodmse, starbucks = (_share(score_of(figures, name, label) / full) for name in names)
    map_later, alone_later = (
        100 * score_of(figures, name, f"fixed {later}") for name in ("maps", f"one-depth-{later}")
    )
    recall = 100 * np.mean([*figures["quality"]["maps"][label]["recall"].values()])
    settings, recalls = (adaptive_differences(figures, key).values() for key in ("", "recall "))
    (better, worse), (found_more, found_less) = counted(settings), counted(recalls)
    return (
        f"A sentence encoder may stop after layer {first} of {figures['exits'][-1]}. With a linear map there, a frozen "
        f"encoder (`mini-ee train embedding-maps`) keeps {maps} of the full model's Spearman correlation in "
        f"{time_of(figures, 'maps', label):.0%} of its time. It finds {recall:.1f} % of the full model's nearest "
        f"neighbours. Without the map it keeps {plain} of the correlation. An encoder that is trained for this depth "
        f"alone keeps {alone}. Encoders that are trained for all depths at once keep {starbucks} (Starbucks) and "
        f"{twodmse} (2DMSE). After layer {later}, an encoder trained for it alone has a correlation of "
        f"{alone_later:.1f} %, the map {map_later:.1f} %. A rule can also choose the depth text by text. Compared with "
        f"a fixed depth with as many layers, the correlation is then higher at {better} of {len(settings)} settings "
        f"and lower at {worse}. The share of neighbours that are found is higher at {found_more} and lower at "
        f"{found_less}."
    ).replace("% of its", " % of its")


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def set_table(figures: dict, key: str, sizes: dict[str, str]) -> str:
    """A table with a column per set, a row per embedding and depth. sizes: the first row."""
    quality, names = figures["quality"], list(sizes)
    rows = [["*size*", "", *sizes.values()]]
    for name in NAMES:
        depths = [int(label.split()[1]) for label in quality[name] if label.startswith("fixed")]
        for depth in depths:
            each = quality[name][f"fixed {depth}"][key]
            rows.append([NAMES[name], depth, *(f"{100 * np.mean(each[set_name]):.1f}" for set_name in names)])
    return "\n".join(markdown_table(["embedding", "layer", *names], rows))


def page(figures: dict) -> str:
    """results/embeddings.md."""
    differences = figures["differences"]
    one_depth = [
        [NAMES[name], depth, *points(differences[f"{name}/{depth}"])]
        for name in ("2dmse", "starbucks")
        for depth in ONE_DEPTHS
    ]
    adaptive = []
    for name in ADAPTIVE:
        for label in rules_of(figures, name):
            score = percent(figures["quality"][name][label]["spearman"])
            numbers = [f"{layers_of(figures, name, label):.2f}", f"{100 * time_of(figures, name, label):.0f}", score]
            numbers += points(differences[f"{name}/{label}"])
            numbers.append(f"{np.mean(figures['quality'][name][label]['retrieval layers']):.2f}")
            adaptive.append([NAMES[name], label, *numbers, *points(differences[f"recall {name}/{label}"])])
    pairs = {name: f"{count:,} pairs" for name, count in figures["pairs"].items()}
    retrieval = {name: f"{q:,} queries in {d:,}" for name, (q, d) in figures["retrieval"].items()}
    rows = {"main": main_rows(figures), "one_depth": one_depth}
    fields = {key: "\n".join(markdown_table([""], each)[2:]) for key, each in rows.items()}
    fields["adaptive"] = "\n".join(markdown_table(ADAPTIVE_COLUMNS, adaptive))
    fields |= {"sets": set_table(figures, "sets", pairs), "recalls": set_table(figures, "recall", retrieval)}
    fields |= {"answer": answer(figures), "verdicts": "\n".join(verdicts(figures)), "picture": PICTURE}
    fields |= {"made_by": made_by_measuring("embeddings").removeprefix("Made by "), "layers": figures["exits"][-1]}
    fields |= {
        "seeds": seeds_line(figures),
        "half": f"{figures['exits'][-1] / 2:g}",
        "level": 100 * LEVEL,
        "margin": 100 * MARGIN,
    }
    fields["full_ms"] = figures["times"]["starbucks"][f"fixed {figures['exits'][-1]}"]
    fields |= {"trained_on": figures["trained_on"]} | ENCODERS
    of_maps = load_method(TRAININGS["maps"][0]).defaults["embeddings"]
    fields |= {"map_epochs": of_maps["epochs"], "map_lr": of_maps["head_lr"]}
    return wrapped(PAGE_TEXT.format(**fields, resamples=RESAMPLES, timed=TIMED, rounds=ROUNDS))


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
