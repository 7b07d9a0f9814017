"""Answers as text tables. Functions return text; the command line prints."""

from mini_ee.evaluation.row_evaluation import LOSSES, RANGES
from mini_ee.rules import RULES

LOSS_HEADINGS = {"no_loss": "saved at no loss", "one_point": "at one point of loss"}


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


def stages_table(epochs: list[dict]) -> str:
    """What each stage of a training took, and came to."""
    stages: dict[str, list[dict]] = {}
    for epoch in epochs:
        stages.setdefault(epoch["stage"], []).append(epoch)
    rows = [
        {
            "stage": name,
            "epochs": len(some),
            "loss": some[-1]["loss"],
            "score": max(epoch["score"] for epoch in some),
            "seconds": sum(epoch["seconds"] for epoch in some),
        }
        for name, some in stages.items()
    ]
    headings = {"loss": "last loss:.3f", "score": "best, held out:.3f", "seconds": "seconds:.1f"}
    return table(rows, {"stage": "stage", "epochs": "epochs"} | headings)


def heads_trained_table(metrics: dict, exits: tuple[int, ...]) -> str:
    """Fig. 1 of self-supervised exits: where the heads stand before and after the training."""
    columns = zip(exits, metrics["history"][0]["agreement"], metrics["agreement"], metrics["entropy"])
    rows = [dict(zip(("layer", "before", "agreement", "entropy"), column)) for column in columns]
    headings = {"before": "agreement before:.3f", "agreement": "after:.3f", "entropy": "entropy in nats:.3f"}
    return table(rows, {"layer": "exit"} | headings)


# ---- evaluate ----


def score_name(metrics: tuple[str, ...]) -> str:
    """What a task's score is called, the mean of its metrics.

    >>> score_name(("matthews",)), score_name(("f1", "accuracy"))
    ('matthews', 'mean of f1, accuracy')
    """
    return metrics[0] if len(metrics) == 1 else f"mean of {', '.join(metrics)}"


def exits_table(answer: dict, score: str) -> str:
    """Every exit on its own, and how many rows left there. score: its name."""
    columns = zip(answer["exits"], answer["per_exit_score"], answer["exit_counts"])
    rows = [{"layer": layer, "score": score, "left": count} for layer, score, count in columns]
    return table(rows, {"layer": "layer", "score": f"{score}:.3f", "left": "left here"})


def sweep_table(rows: list[dict], score: str) -> str:
    """A curve, a rule a line. score: its name."""
    if not rows:
        return "No rule has anything to choose: the model has one exit."
    knob = RULES[rows[0]["rule"]["name"]].knob
    lines = [row | {"setting": float(row["rule"][knob])} for row in rows]
    headings = {
        "setting": "patience:.0f" if knob == "patience" else f"{knob}:.3f",
        "score": f"{score}:.3f",
        "mean_layers": "mean layers:.2f",
        "layers_saved": "layers saved:.1%",
        "flops_ratio": "flops:.3f",
        "speedup": "speed-up:.2f",
    }
    return table(lines, headings)


def controls_table(answer: dict, found: dict[str, dict]) -> str:
    """A plan's figure and those without which it says nothing."""
    names = {
        "knn_labels": "kNN label vote",
        "knn_weighted": "kNN label vote, weighted",
        "best_single_layer": f"best single layer, {found['best_single_layer']['layer']}",
        "random_layers": f"random layers, +- {found['random_layers']['spread']:.3f}",
        "oracle": "oracle: earliest right layer",
        "full_model": "full model",
    }
    rows = [answer | {"name": answer["method"]}, *(found[key] | {"name": name} for key, name in names.items())]
    headings = {"name": "what chooses", "score": "score:.3f", "mean_layers": "mean layers:.2f"}
    about = "A vote's layers are those of its queries; the search in the index is in measured time alone."
    return f"\n{table(rows, headings)}\n{about}\n"


def ablation_table(points: list[dict]) -> str:
    """Tables 3 and 4 of RAEE in one: a line for each k, score and mean layers for each size of the datastore."""
    lines: dict[int, dict] = {}
    for point in points:
        heading = f"{point['database']} ({point['rows']})"
        lines.setdefault(point["k"], {"k": point["k"]})[heading] = f"{point['score']:.3f} {point['mean_layers']:6.2f}"
    rows = list(lines.values())
    return table(rows, {key: key for key in rows[0]}) + "\n(score and mean layers; in brackets the datastore)\n"


def epsilon_table(answer: dict) -> str:
    """Everything over epsilon, and the measures at equal agreement."""
    lines = []
    for row in answer["rows"]:
        tokens = sum(row["exit_counts"])
        kept_by_head = " ".join("   -" if share is None else f"{share:.3f}" for share in row["agreement"])
        shares = " ".join(f"{count / tokens:4.0%}" for count in row["exit_counts"])
        recomputed = {f"recompute_{key}": value for key, value in row["recompute"].items()}
        lines.append(row | recomputed | {"heads": kept_by_head, "shares": shares})
    columns = {
        "epsilon": "epsilon",
        "heads": "agreement by head",
        "end_to_end": "end to end:.3f",
        "shares": f"tokens that leave after {', '.join(map(str, answer['exits']))}",
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
    said = (
        f"Full model: {', '.join(full)}. Thresholds on {answer['measure']} from {answer['tokens_calibration']} tokens "
        f"it wrote, agreement on {answer['tokens_fresh']} others. Decoded: the same in greedy text that fills gaps by "
        f"copy_state, and recomputed by recompute."
    )
    measures = {
        "measure": "measure",
        "level": "end to end at least",
        "epsilon": "epsilon:.3f",
        "end_to_end": "on fresh text:.3f",
        "mean_layers": "layers:.2f",
    }
    return "\n".join([table(lines, columns), said, "", table(answer["measures"], measures)])


# ---- compare ----


def compare_table(rows: list[dict], score: str) -> str:
    """Each run under its own rule. score: its name."""
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
    """What each run saves, and scores, under rules that lose nothing or one point where they were chosen."""
    lines = []
    for row in rows:
        line = {"run": row["run"], "how": row["how"], "full": f"{row['full_score']:.3f}"}
        for name in LOSSES:
            point = row[name]
            said = "{layers_saved:.1%}, {speedup:.2f} x, score {score:.3f}"
            line[name] = said.format(**point) if point else "-"
        lines.append(line | {"chosen_on": row["chosen_on"]})
    headings = {"run": "run", "how": "method", "full": "full"} | LOSS_HEADINGS | {"chosen_on": "rules chosen on"}
    about = "A loss is counted from the best full model of all whose rules are chosen on the same rows."
    return f"\n{table(lines, headings)}\n{about}"


def ranges_table(rows: list[dict], timed_rows: int) -> str:
    """The best score that each run has for a share of the full model's operations, and what that takes."""
    headings = {
        "range": "operations",
        "run": "run",
        "how": "method",
        "score": "score:.3f",
        "mean_layers": "layers:.2f",
        "layer_passes": "passes:.2f",
        "flops_ratio": "flops:.3f",
        "milliseconds": "ms a row:.2f",
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
    """The mean over seeds and, in brackets, the least and the most: of the full model, and of what is saved."""

    def said(spread: dict, form: str) -> str:
        return f"{spread['mean']:{form}} ({spread['least']:{form}} to {spread['most']:{form}})"

    lines = []
    for group in groups:
        line = {"how": group["how"], "seeds": len(group["seeds"])}
        line["exits"] = " ".join(f"{spread['mean']:.3f}" for spread in group["per_exit_score"])
        line |= {"full": said(group["full_score"], ".3f"), "score": said(group["score"], ".3f")}
        for name, point in {"saved": group, **{name: group.get(name) for name in LOSSES}}.items():
            both = point and (said(point["layers_saved"], ".1%"), f"{point['speedup']['mean']:.2f} x")
            line[name] = ", ".join(both) if both else "-"
        lines.append(line)
    headings = {"how": "method", "seeds": "seeds", "exits": "after each exit", "full": "full model"}
    return "\n" + table(lines, headings | (LOSS_HEADINGS if swept else {"score": "own rule", "saved": "saved"}))


def writing_table(rows: list[dict], swept: bool) -> str:
    """How well and how fast decoders write; with `swept` also under their other rules."""
    headings = {
        "run": "run",
        "measure": "what decides",
        "rouge_l": "Rouge-L, full model:.3f",
        "rouge_l_reference": "reference:.3f",
        "mean_layers": "layers:.2f",
        "layers_saved": "saved:.1%",
        "tokens_per_second": "tokens/s:.0f",
    }
    told = table(rows, headings)
    others = [row | point for row in rows for point in row["curve"]]
    return f"{told}\n\n{table(others, headings)}" if swept and others else told


def heads_table(answer: dict) -> str:
    """Fig. 1 of self-supervised exits where training ended, and the layers at one end-to-end agreement."""
    lines = [
        row
        | {key: " ".join(f"{value:.3f}" for value in row.get(key, ())) or "-" for key in ("agreement", "entropy")}
        | {"init": str(row["init"]), "penalty": str(row["penalty"])}
        | {"kept": row["equal"]["end_to_end"], "layers": row["equal"]["mean_layers"]}
        for row in answer["heads"]
    ]
    columns = {
        "run": "run",
        "init": "init",
        "penalty": "lambda",
        "agreement": "agreement by head",
        "entropy": "entropy by head, nats",
        "kept": "end to end:.3f",
        "layers": "layers:.2f",
    }
    return (
        f"\n{table(lines, columns)}\nAgreement and entropy when training ended; end to end and layers on fresh texts, "
        f"at the epsilon with which {answer['level']:.0%} of the calibration texts' tokens are the full model's."
    )
