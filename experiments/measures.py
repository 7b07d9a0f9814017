"""Measurements of a trained run for the page of a paper: named figures, one number each, and named lists of numbers.

Rules are chosen on training rows that no exit was trained on. Figures are of the reported split, unless their name
contains another one.
"""

from functools import partial
from math import inf
from pathlib import Path

import numpy as np

from mini_ee.experiments.bench.common import medians
from mini_ee.experiments.bench.streams import bare_streams, over_adapters
from mini_ee.experiments.example_values import FLOPS_SHARES, values_of
from mini_ee.experiments.records import SeedRecord, rounded
from mini_ee.experiments.retrieval_measures import of_compared, of_retrieval
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.calibration import observe
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.multiple_choice import load_benchmark
from mini_ee.lab.data.tasks import Split, Task, holdout, subset
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.evaluation.comparison import compare_tokens, rules_of
from mini_ee.lab.evaluation.probes import Costs, probe_rows, rows_to_read
from mini_ee.lab.evaluation.row_evaluation import (
    LOSSES,
    by_exit,
    curve,
    fewest_flops,
    is_full,
    measure_seconds,
    overthinking,
    replayed,
    rows_of,
    timed_batches,
)
from mini_ee.lab.evaluation.savings_estimate import savings_at, suitability, threshold_at
from mini_ee.lab.evaluation.token_evaluation import (
    EPSILONS,
    at_equal_agreement,
    held_text,
    score_benchmark,
    sweep,
    written_texts,
)
from mini_ee.lab.exits.generation import Sampling
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.methods.consistent_hardness import hardness_in_training
from mini_ee.lab.methods.lora_exits_streams import parallel, restart
from mini_ee.lab.methods.raee_collect import untrained_rows
from mini_ee.lab.recording import Record, exit_scores, record, summary
from mini_ee.lab.rules import Never, Policy, Threshold, rule_from_dict
from mini_ee.lab.training.default_rule import choose
from mini_ee.lab.training.holdout import split_rows
from mini_ee.lab.training.run_folder import Run

BATCH_SIZE = 32
HELD_OUT_ROWS, TRAIN_ROWS, PROBED_ROWS = 2500, 1000, 2000  # read at most, drawn with the seed
STORED_ROWS = 500  # held-out rows of a record
ROUNDING = 1e-5  # larger than the rounding error of a reference's score in the JSON, smaller than one row's share
CURVE_POINTS = 24  # at most, of a curve in the JSON
CONFIDENCE_MEASURE = "breaking_ties"
SAVING_MEASURES = (CONFIDENCE_MEASURE, "max_probability", "entropy")  # whose savings are compared
QUESTIONS = 250  # of a benchmark
SAVED_PERCENT = (10, 20, 30, 50, 60)  # of the layers, at which generated texts are compared
SAMPLING = Sampling(temperature=1.0, top_k=40, top_p=0.75)  # ConsistentEE, Section 4, generation
STREAM_BATCHES = (1, 2, 4, 8)  # batch sizes whose streams are timed
STREAM_SECONDS, STREAM_SECONDS_ON_A_GPU = 4.0, 1.0  # least time for each of them

Measured = tuple[dict[str, float], dict[str, list[float]]]


# ---- Rows ----


def of_rows(run: Run, task: Task, reference: dict | None) -> tuple[dict, dict, SeedRecord]:
    """A classifier: its exits, the savings of rules that are chosen on the held-out set, and its record.

    reference: figures of the model, with the same seed, from which a loss is counted; default: of this run. The figures
    of the reported rows are those that the record gives with the rules in its `about`. The run may be on a GPU; then it
    is moved to the CPU, where it is timed.
    """
    seed = run.config["seed"]
    _, rows = rows_of(task, None, None, seed)
    held_out = subset(untrained_rows(run, task), HELD_OUT_ROWS, seed)
    encoded, whole = run.encode(rows.texts), run.whole_model()
    reported = record(run.segments(), encoded, BATCH_SIZE, "reading", whole)
    chosen_on = record(run.segments(), run.encode(held_out.texts), BATCH_SIZE, "reading", whole)
    reported = rounded(reported._replace(labels=rows.labels))
    chosen_on = rounded(chosen_on._replace(labels=held_out.labels))
    figures = _exits(run, task, rows, reported) | _training(run)
    scores = exit_scores(chosen_on, task, held_out.labels)
    figures |= {f"hold-out score after {layer}": score for layer, score in zip(run.exits, scores)}
    figures["hold-out full"] = scores[-1]
    figures["majority"] = float(np.bincount(rows.labels.astype(int)).max() / len(rows))
    reference = reference or figures
    figures |= {"reference": reference["full"], "reference hold-out": reference["hold-out full"]}
    by_default = summary(reported.replay(run.rule), reported, task, rows.labels)
    figures |= {"default score": by_default["score"], "default saved": by_default["layers_saved"]}
    figures["default layers"] = by_default["mean_layers"]
    figures["default lost"] = figures["full"] - by_default["score"]
    has_policy = reported.segments.exit_logits is not None
    if has_policy:
        by_policy = summary(reported.replay(Policy()), reported, task, rows.labels)
        figures |= {"policy score": by_policy["score"], "policy saved": by_policy["layers_saved"]}
    picked, offered, chosen = _picked(run, task, rows, reported, (chosen_on, held_out), reference)
    keys = {"saved": "layers_saved", "score": "score", "operations": "flops_ratio"}
    lists = {f"curve {name}": [point[key] for point in offered] for name, key in keys.items()}
    figures |= {f"hold-out saved {name}": point["layers_saved"] for name, point in chosen.items()}
    figures |= _trained_rows(run, task, Policy() if has_policy else run.rule)
    run.model.to("cpu")
    whole = run.whole_model()
    order, timed = timed_batches(encoded, 1), [(whole, Never(), encoded)]
    for point in picked.values():
        timed.append((whole if is_full(point) else run.segments(), rule_from_dict(point["rule"]), encoded))
    full, *seconds = measure_seconds(timed, order, repeats=1)
    for (name, point), point_seconds in zip(picked.items(), seconds):
        figures |= {f"score {name}": point["score"], f"saved {name}": point["layers_saved"]}
        figures |= {f"operations {name}": point["flops_ratio"], f"speed-up {name}": float(full / point_seconds)}
    rules = {name: point["rule"] for name, point in picked.items()} | {"default": run.rule.to_dict()}
    rules |= {"policy": Policy().to_dict()} if has_policy else {}
    metadata = {"rules": rules, "curve": [point["rule"] for point in offered]}
    stored = chosen_on.take(np.arange(min(STORED_ROWS, len(held_out))))
    made = SeedRecord(reported, stored, metadata)
    return figures | at_costs(made), lists, made


def at_costs(made: SeedRecord) -> dict[str, float]:
    """The scores at most at shares of the full model's FLOPs; without those that no rule reaches."""
    scores = {name: values_of(made, name) for name in (f"score {share}" for share in FLOPS_SHARES)}
    return {name: float(values.mean()) for name, values in scores.items() if values is not None}


def _exits(run: Run, task: Task, rows: Split, reported: Record) -> dict[str, float]:
    scores = exit_scores(reported, task, rows.labels)
    figures = {f"score after {layer}": score for layer, score in zip(run.exits, scores)} | {"full": scores[-1]}
    return figures | {"overthought": overthinking(reported, task, rows)["share"]}


def _training(run: Run) -> dict[str, float]:
    metrics = read_json(run.folder / "metrics.json")
    epochs, steps = metrics["epochs"], -(-metrics["rows"] // run.config["training"]["batch_size"])
    named = run.model.named_parameters()
    return {
        "steps": float(len(epochs) * steps),
        "train seconds": sum(epoch["seconds"] for epoch in epochs),
        "megabytes": run.weight_bytes / 1e6,
        "trained parameters": float(sum(value.numel() for name, value in named if run.model.is_trainable(name))),
    }


def _picked(
    run: Run, task: Task, rows: Split, reported: Record, held_out: tuple, reference: dict
) -> tuple[dict, list, dict]:
    """Points of the reported split for the rules chosen on the held-out set, a curve of rules that it offers, and the
    points of the chosen rules on the held-out set itself, by which settings can be chosen, such as a price of layers.
    """
    chosen_on, split = held_out
    points = curve(chosen_on, rules_of(run, chosen_on._replace(labels=split.labels), task), task, split.labels)
    on_reported = partial(replayed, recorded=reported, task=task, labels=rows.labels)
    never = next(point for point in points if point["rule"]["name"] == "never")
    chosen = {}
    for name, loss in LOSSES.items():
        least = reference["hold-out full"] - loss - ROUNDING
        cheapest = choose(points, fewest_flops, lambda point, least=least: point["score"] >= least)
        if cheapest or not never["layers_saved"]:  # if tokens exit, every rule saves something: then none may be found
            chosen[f"at {name.replace('_', ' ')}"] = cheapest or never
    picked = {name: on_reported(point) for name, point in chosen.items()}
    offered = [on_reported(point) for point in points[:: max(1, len(points) // CURVE_POINTS)]]
    return picked, offered, chosen


def _trained_rows(run: Run, task: Task, rule) -> dict[str, float]:
    """ConsistentEE's Fig. 2 and Table 1."""
    parts = split_rows(task, run.config["seed"], run.config["training"].get("max_train"))
    train = subset(parts.train, TRAIN_ROWS, run.config["seed"])
    recorded = record(run.segments(), run.encode(train.texts), BATCH_SIZE, "reading")
    figures = {}
    for exit_figures in by_exit(recorded, recorded.replay(rule).exit_index, train.labels):
        layer = exit_figures["layer"]
        figures |= {
            f"loss after {layer}": exit_figures["loss"],
            f"left after {layer}": exit_figures["left"] / len(train),
        }
        if exit_figures["left"]:
            figures[f"loss after {layer} of those that left"] = exit_figures["left_loss"]
            figures[f"accuracy after {layer} of those that left"] = exit_figures["left_accuracy"]
    if hardness := hardness_in_training(run, task, BATCH_SIZE):
        figures["hardness and loss"] = hardness["spearman"]["loss"]
        figures["hardness and forgetting"] = hardness["spearman"]["forgetting events"]
    return figures


# ---- The estimate before training ----


def of_estimate(run: Run, task: Task, reference: dict | None) -> tuple[dict, dict, SeedRecord]:
    """The estimate of `mini-ee estimate` for the checkpoint, the savings of trained exits at the same agreement, and
    the record of the trained exits, from which these savings are computed.

    The threshold of the trained exits is chosen on the held-out set; their layers are of the reported split.
    """
    seed, folder = run.config["seed"], Path(run.config["backbone"]["folder"])
    backbone = load_backbone(folder).without_heads()
    rows, classes = rows_to_read(task, PROBED_ROWS, seed)
    probed = probe_rows(backbone, run.encode(rows.texts), rows.labels, classes, seed)
    answer = suitability(probed, seed)
    _, reported = rows_of(task, None, None, seed)
    held_out = subset(holdout(task.split("train"), seed)[1], HELD_OUT_ROWS, seed)
    chosen_on, measured_on = (
        record(run.segments(), run.encode(some.texts), BATCH_SIZE, "reading")._replace(labels=some.labels)
        for some in (held_out, reported)
    )
    chosen_on, measured_on = rounded(chosen_on), rounded(measured_on)
    rule = threshold_at(observe(chosen_on))
    measured = savings_at(observe(measured_on), rule, run.exits, Costs(0.0, 0.0))
    stored = chosen_on.take(np.arange(min(STORED_ROWS, len(held_out))))
    figures = {
        "estimate": answer["estimate"]["saved"],
        "estimate, low": answer["estimate"]["low"],
        "estimate, high": answer["estimate"]["high"],
        "oracle": answer["oracle_saved"],
        "measured": measured.saved,
        "agreement": measured.agreement,
        "full": exit_scores(measured_on, task, reported.labels)[-1],
    }
    return figures, {}, SeedRecord(measured_on, stored, {"rules": {"at 95 % agreement": rule.to_dict()}, "curve": []})


# ---- LoRAExit's streams ----


def of_streams(run: Run, task: Task, reference: dict | None, least: float = STREAM_SECONDS) -> Measured:
    """Milliseconds until all exits have predicted for a small batch: with parallel streams (SGMV, a loop over the
    adapters, no adapters), with one stream after the other, and for the model without exits.

    least: seconds of measurement for each batch size.
    """
    K, figures = len(run.exits), {}
    _, rows = rows_of(task, None, STREAM_BATCHES[-1], run.config["seed"])
    side_by_side, one_by_one = (run.model.segments(schedule(K)) for schedule in (parallel, restart))
    for count in STREAM_BATCHES:
        inputs = run.encode(rows.texts).batch(slice(count))
        together = partial(early_exit, side_by_side, Never(), inputs)
        ways = {
            "SGMV": together,
            "loop over adapters": partial(over_adapters, together),
            "one by one": partial(early_exit, one_by_one, Never(), inputs),
            "no adapters": partial(bare_streams, run.model, inputs),
            "full model": partial(early_exit, run.whole_model(), Never(), inputs),
        }
        for way, seconds in zip(ways, medians([*ways.values()], f"{count} rows", seconds_a_case=least)):
            figures[f"{way}, {count} rows"] = seconds * 1e3
    return figures, {}


# ---- Heads on a decoder ----


def of_tokens(run: Run, task: None, reference: dict | None) -> Measured:
    """Heads on a decoder: their training, and their savings on new text at equal agreement on calibration text."""
    figures, lists = _training_of_heads(run)
    _, calibration, new = written_texts(run, run.config["seed"])
    recorded = [record_texts(run.model, texts, progress="observing") for texts in (calibration, new)]
    return figures | _savings(at_equal_agreement(*recorded, SAVING_MEASURES)), lists


def _training_of_heads(run: Run) -> Measured:
    """Agreement and entropy of each head after the training, and their course."""
    metrics, exits = read_json(run.folder / "metrics.json"), run.exits
    figures = {f"agreement after {layer}": value for layer, value in zip(exits, metrics["agreement"])}
    figures |= {f"entropy after {layer}": value for layer, value in zip(exits, metrics["entropy"])}
    history = metrics["history"]
    figures |= {"steps": float(history[-1]["step"])}
    figures["train seconds"] = sum(epoch["seconds"] for epoch in metrics["epochs"])
    lists = {"step": [float(point["step"]) for point in history]}
    for k, layer in enumerate(exits[:-1]):
        lists |= {f"{key} after {layer}": [point[key][k] for point in history] for key in ("agreement", "entropy")}
    return figures, lists


def _savings(rows: list[dict]) -> dict[str, float]:
    """The figures of `at_equal_agreement`, by level and confidence measure."""
    figures = {}
    for row in rows:
        if row["measure"] in SAVING_MEASURES:
            measure = "" if row["measure"] == CONFIDENCE_MEASURE else f", {row['measure'].replace('_', ' ')}"
            figures[f"saved at {row['level']:g}{measure}".replace("0.", ".")] = row["layers_saved"]
    return figures


def of_tokens_over_epsilon(run: Run, read: Path | list[Path] | None, reference: dict | None) -> Measured:
    """The same, and the paper's Fig. 2 to 4: perplexity or benchmarks, speed-up and exit layers by epsilon.

    read: a text, or the folders of benchmarks, of which the seed draws QUESTIONS.
    """
    figures, lists = _training_of_heads(run)
    seed, reference_text, folders = run.config["seed"], None, read if isinstance(read, list) else []
    if isinstance(read, Path):
        reference_text = record_texts(run.model, held_text(read, run, seed), progress="reading", last=False)
    swept = sweep(run, CONFIDENCE_MEASURE, reference_text, None, seed)
    figures |= _savings(swept["measures"])
    if reference_text is not None:
        figures["full perplexity"] = swept["full_perplexity"]
    for epsilon, row in zip(EPSILONS, swept["rows"]):
        at = f"at epsilon {epsilon:g}".replace("0.", ".")
        figures |= {f"end to end {at}": row["end_to_end"], f"saved {at}": row["layers_saved"]}
        heads = zip(run.exits, row["agreement"])
        figures |= {f"head {layer} {at}": share for layer, share in heads if share is not None}
        figures |= {f"decoded agreement {at}": row["decoded_agreement"], f"speed-up {at}": row["speedup"]}
        figures[f"decoded saved {at}"] = 1 - row["decoded_layers"] / run.exits[-1]
        shares = np.array(row["exit_counts"]) / sum(row["exit_counts"])
        figures |= {f"leave after {layer} {at}": float(share) for layer, share in zip(run.exits, shares)}
        if reference_text is not None:
            figures[f"perplexity {at}"] = row["perplexity"]
    for folder in folders:
        figures |= _benchmark_over_epsilon(run, folder, swept["rows"])
    return figures, lists


def _benchmark_over_epsilon(run: Run, folder: Path, rows: list[dict]) -> dict[str, float]:
    """Accuracy on QUESTIONS of a benchmark: without exits, and with the thresholds of each row of a sweep."""
    seed = run.config["seed"]
    scores = score_benchmark(run, load_benchmark(folder).subset(QUESTIONS, seed))
    rules = {folder.name: Never()}
    for row in rows:
        thresholds = (*map(float, row["thresholds"]), -inf)
        name = f"{folder.name} at epsilon {row['epsilon']:g}".replace("0.", ".")
        rules[name] = Threshold(thresholds, CONFIDENCE_MEASURE)
    return {name: scores.accuracy(scores.recorded.replay(rule).exit_index)["accuracy"] for name, rule in rules.items()}


# ---- Generated text ----


def of_writing(run: Run, text: Path | None, reference: dict | None, sampling: Sampling = Sampling()) -> Measured:
    """Generated text with the method's own rules: Rouge-L against the full model's text, by share of layers saved."""
    compared = compare_tokens([run], None, None, sampling, True, run.config["seed"])
    full, *early_rows = compared["rows"]
    figures, lists = {"full against references": full["rouge_l_reference"]}, {}
    for row in early_rows:
        measure = "" if len(early_rows) == 1 else f" {row['measure']}"
        points = sorted((point["layers_saved"], point["rouge_l"]) for point in [row, *row["curve"]])
        saved, rouge = (list(column) for column in zip(*points))
        figures |= {f"Rouge-L{measure}": row["rouge_l"], f"saved{measure}": row["layers_saved"]}
        for share in SAVED_PERCENT:
            if saved[0] <= share / 100 <= saved[-1]:
                figures[f"Rouge-L{measure} at {share}% saved"] = float(np.interp(share / 100, saved, rouge))
        lists |= {f"curve saved{measure}": saved, f"curve Rouge-L{measure}": rouge}
    return figures, lists


ON_A_GPU = "streams on a GPU"
READ_ON_THE_DEVICE = ("rows", ON_A_GPU)  # measurements of a run on the device of its training
TIMES_ALONE = ("streams", ON_A_GPU)  # whose figures do not depend on what the examples are
READ_A_TASK = ("rows", *TIMES_ALONE, "prompts", "compared through prompts", "estimate")  # the others a text, or nothing
MEASUREMENTS = {
    "rows": of_rows,
    "streams": of_streams,
    ON_A_GPU: partial(of_streams, least=STREAM_SECONDS_ON_A_GPU),
    "prompts": of_retrieval,
    "compared through prompts": of_compared,
    "estimate": of_estimate,
    "tokens": of_tokens,
    "tokens over epsilon": of_tokens_over_epsilon,
    "writing": of_writing,
    "writing, sampled": partial(of_writing, sampling=SAMPLING),
}
WITHOUT_RECORD = {  # measurement -> what its figures are of, if it has no record of every example
    "streams": "times",
    ON_A_GPU: "times",
    "tokens": "generated tokens, too many to store",
    "tokens over epsilon": "generated tokens, too many to store",
    "writing": "generated texts",
    "writing, sampled": "generated texts",
}
