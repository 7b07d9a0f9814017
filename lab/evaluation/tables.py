"""JSON answers as text tables. The functions return text; the command line prints it."""

from mini_ee.lab.data.text_table import table
from mini_ee.lab.evaluation.row_evaluation import LOSSES, RANGES
from mini_ee.lab.rules import RULES
from mini_ee.lab.sweep import KNOBS

LOSS_HEADINGS = {"no_loss": "layers saved at no loss", "one_point": "at one point of loss"}


def stages_table(epochs: list[dict]) -> str:
    """Epochs, last loss, best score and seconds of each stage of a training."""
    stages: dict[str, list[dict]] = {}
    for epoch in epochs:
        stages.setdefault(epoch["stage"], []).append(epoch)
    rows = [
        {
            "stage": name,
            "epochs": len(members),
            "loss": members[-1]["loss"],
            "score": max(epoch["score"] for epoch in members),
            "seconds": sum(epoch["seconds"] for epoch in members),
        }
        for name, members in stages.items()
    ]
    headings = {"loss": "last loss:.3f", "score": "best held-out score:.3f", "seconds": "seconds:.1f"}
    return table(rows, {"stage": "stage", "epochs": "epochs"} | headings)


def heads_trained_table(metrics: dict, exits: tuple[int, ...]) -> str:
    """Fig. 1 of self-supervised exits: agreement before and after the training, and entropy after it, of each head."""
    columns = zip(exits, metrics["history"][0]["agreement"], metrics["agreement"], metrics["entropy"])
    rows = [dict(zip(("layer", "before", "agreement", "entropy"), column)) for column in columns]
    headings = {"before": "agreement before:.3f", "agreement": "after:.3f", "entropy": "entropy in nats:.3f"}
    return table(rows, {"layer": "exit"} | headings)


# ---- evaluate ----


def score_name(metrics: tuple[str, ...]) -> str:
    """The name of a task's score, which is the mean of its metrics.

    >>> score_name(("matthews",)), score_name(("f1", "accuracy"))
    ('matthews', 'mean of f1, accuracy')
    """
    return metrics[0] if len(metrics) == 1 else f"mean of {', '.join(metrics)}"


def exits_table(answer: dict, score: str) -> str:
    """The score of each exit for all rows, and the number of rows that exit there. score: its name."""
    columns = zip(answer["exits"], answer["per_exit_score"], answer["exit_counts"])
    rows = [{"layer": layer, "score": score, "left": count} for layer, score, count in columns]
    return table(rows, {"layer": "layer", "score": f"{score}:.3f", "left": "exited here"})


def sweep_table(rows: list[dict], score: str) -> str:
    """A curve, one rule per line. score: its name."""
    if not rows:
        return "There is nothing to sweep: the model has one exit."
    knob = KNOBS[RULES[rows[0]["rule"]["name"]]].setting
    lines = [row | {"setting": float(row["rule"][knob])} for row in rows]
    headings = {
        "setting": "patience:.0f" if knob == "patience" else f"{knob}:.3f",
        "score": f"{score}:.3f",
        "mean_layers": "mean layers:.2f",
        "layers_saved": "layers saved:.1%",
        "flops_ratio": "FLOPs:.3f",
        "speedup": "speed-up:.2f",
    }
    return table(lines, headings)


def controls_table(answer: dict, controls: dict[str, dict]) -> str:
    """The score of RAEE's plan and of its controls (methods/raee_controls.py). controls: by name."""
    names = {
        "knn_labels": "kNN label vote",
        "knn_weighted": "kNN label vote, weighted",
        "best_single_layer": f"best single layer, {controls['best_single_layer']['layer']}",
        "random_layers": f"random layers, +- {controls['random_layers']['spread']:.3f}",
        "oracle": "oracle: earliest correct layer",
        "full_model": "full model",
    }
    rows = [answer | {"name": answer["method"]}, *(controls[key] | {"name": name} for key, name in names.items())]
    headings = {"name": "exit chosen by", "score": "score:.3f", "mean_layers": "mean layers:.2f"}
    note = "The layers of a kNN vote are those that compute its queries. Search in the index counts only as time."
    return f"\n{table(rows, headings)}\n{note}\n"


def ablation_table(points: list[dict]) -> str:
    """RAEE's Tables 3 and 4 in one: score and mean layers by k (lines) and size of the datastore (columns)."""
    lines: dict[int, dict] = {}
    for point in points:
        heading = f"{point['database']} ({point['rows']})"
        lines.setdefault(point["k"], {"k": point["k"]})[heading] = f"{point['score']:.3f} {point['mean_layers']:6.2f}"
    rows = list(lines.values())
    return (
        table(rows, {key: key for key in rows[0]})
        + "\n(score and mean layers; in brackets the rows of the datastore)\n"
    )


def epsilon_table(answer: dict) -> str:
    """The rows of `sweep`, one epsilon per line, and the measures at equal agreement."""
    lines = []
    for row in answer["rows"]:
        tokens = sum(row["exit_counts"])
        agreement_by_head = " ".join("   -" if share is None else f"{share:.3f}" for share in row["agreement"])
        shares = " ".join(f"{count / tokens:4.0%}" for count in row["exit_counts"])
        recomputed = {f"recompute_{key}": value for key, value in row["recompute"].items()}
        lines.append(row | recomputed | {"heads": agreement_by_head, "shares": shares})
    columns = {
        "epsilon": "epsilon",
        "heads": "agreement by head",
        "end_to_end": "end to end:.3f",
        "shares": f"share of tokens that exit after {', '.join(map(str, answer['exits']))}",
        "mean_layers": "layers:.2f",
        "decoded_agreement": "decoded:.3f",
        "tokens_per_second": "tokens/s:.0f",
        "speedup": "speed-up:.2f",
        "recompute_decoded_agreement": "recomputed:.3f",
        "recompute_speedup": "speed-up:.2f",
    }
    full = [f"{answer['full_tokens_per_second']:.0f} tokens/s"]
    if "full_perplexity" in answer:
        columns["perplexity"] = "perplexity:.2f"
        full.append(f"perplexity {answer['full_perplexity']:.2f}")
    if "full_accuracy" in answer:
        columns["accuracy"] = f"{answer['task']}:.3f"
        full.append(f"{answer['task']} {answer['full_accuracy']:.3f}")
    note = (
        f"Full model: {', '.join(full)}. Thresholds on {answer['measure']} are chosen on "
        f"{answer['tokens_calibration']} tokens that it generated; agreement is measured on {answer['tokens_fresh']} "
        f"others. Decoded: agreement in greedy text with missing_kv copy_state; recomputed: with recompute."
    )
    measures = {
        "measure": "measure",
        "level": "end-to-end agreement, target",
        "epsilon": "epsilon:.3f",
        "end_to_end": "on fresh text:.3f",
        "mean_layers": "layers:.2f",
    }
    return "\n".join([table(lines, columns), note, "", table(answer["measures"], measures)])


# ---- compare ----


def compare_table(rows: list[dict], score: str) -> str:
    """Each run under its own rule, one per line. score: its name."""
    columns = {
        "run": "run",
        "how": "method",
        "engine": "engine",
        "score": f"{score}:.3f",
        "full_score": "full:.3f",
        "mean_layers": "layers:.2f",
        "layer_passes": "passes:.2f",
        "layers_saved": "saved:.1%",
        "seconds": "seconds:.3f",
        "speedup": "speed-up:.2f",
        "megabytes": "MB:.1f",
    }
    return table(rows, columns)


def losses_table(rows: list[dict]) -> str:
    """Layers saved, speed-up and score of each run at each of LOSSES."""
    lines = []
    for row in rows:
        line = {"run": row["run"], "how": row["how"], "full": f"{row['full_score']:.3f}"}
        for name in LOSSES:
            point = row[name]
            line[name] = "{layers_saved:.1%}, {speedup:.2f} x, score {score:.3f}".format(**point) if point else "-"
        lines.append(line | {"chosen_on": row["chosen_on"]})
    headings = {"run": "run", "how": "method", "full": "full"} | LOSS_HEADINGS | {"chosen_on": "rules chosen on"}
    note = "The loss is against the best full model among the runs whose rules were chosen on the same rows."
    return f"\n{table(lines, headings)}\n{note}"


def ranges_table(rows: list[dict], timed_rows: int) -> str:
    """The best score of each run in each of RANGES, with its cost. Empty text if there is none."""
    headings = {
        "range": "FLOPs allowed",
        "run": "run",
        "how": "method",
        "score": "score:.3f",
        "mean_layers": "layers:.2f",
        "layer_passes": "passes:.2f",
        "flops_ratio": "FLOPs:.3f",
        "milliseconds": "ms per row:.2f",
        "speedup": "speed-up:.2f",
    }
    lines = [
        row[name]
        | {"range": f"at most {share:.0%}", "run": row["run"], "how": row["how"]}
        | {"milliseconds": row[name]["seconds"] * 1e3 / timed_rows}
        for name, share in RANGES.items()
        for row in rows
        if row[name]
    ]
    return "\n" + table(lines, headings) if lines else ""


def seeds_table(groups: list[dict], swept: bool) -> str:
    """Score and savings of each group of seeds: mean, and in brackets least and most."""

    def mean_and_range(spread: dict, spec: str) -> str:
        return f"{spread['mean']:{spec}} ({spread['least']:{spec}} to {spread['most']:{spec}})"

    lines = []
    for group in groups:
        line = {"how": group["how"], "seeds": len(group["seeds"])}
        line["exits"] = " ".join(f"{spread['mean']:.3f}" for spread in group["per_exit_score"])
        line |= {"full": mean_and_range(group["full_score"], ".3f"), "score": mean_and_range(group["score"], ".3f")}
        for name, point in {"saved": group, **{name: group.get(name) for name in LOSSES}}.items():
            figures = point and (mean_and_range(point["layers_saved"], ".1%"), f"{point['speedup']['mean']:.2f} x")
            line[name] = ", ".join(figures) if figures else "-"
        lines.append(line)
    headings = {"how": "method", "seeds": "seeds", "exits": "score of each exit", "full": "full model"}
    return "\n" + table(lines, headings | (LOSS_HEADINGS if swept else {"score": "own rule", "saved": "saved"}))


def writing_table(rows: list[dict], swept: bool) -> str:
    """Quality and speed of generated text under each run's own rules; with `swept` also under the others."""
    headings = {
        "run": "run",
        "measure": "rule",
        "rouge_l": "Rouge-L, full model:.3f",
        "rouge_l_reference": "reference:.3f",
        "mean_layers": "layers:.2f",
        "layers_saved": "saved:.1%",
        "tokens_per_second": "tokens/s:.0f",
    }
    summary = table(rows, headings)
    others = [row | point for row in rows for point in row["curve"]]
    return f"{summary}\n\n{table(others, headings)}" if swept and others else summary


def heads_table(answer: dict) -> str:
    """Agreement and entropy of each head after training, and the mean layers at equal end-to-end agreement."""
    lines = [
        row
        | {key: " ".join(f"{value:.3f}" for value in row.get(key, ())) or "-" for key in ("agreement", "entropy")}
        | {"init": str(row["init"]), "penalty": str(row["penalty"])}
        | {"end_to_end": row["equal"]["end_to_end"], "layers": row["equal"]["mean_layers"]}
        for row in answer["heads"]
    ]
    columns = {
        "run": "run",
        "init": "init",
        "penalty": "lambda",
        "agreement": "agreement by head",
        "entropy": "entropy by head, nats",
        "end_to_end": "end to end:.3f",
        "layers": "layers:.2f",
    }
    return (
        f"\n{table(lines, columns)}\nAgreement by head and entropy: after training. End-to-end agreement and layers: "
        f"on fresh texts, at the epsilon with which agreement on the calibration texts is {answer['level']:.0%}."
    )
