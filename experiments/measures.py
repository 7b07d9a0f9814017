"""What is measured of a trained run for a paper's page: figures by name, one number each, and lists of numbers.

Rules are chosen on rows of train that no exit was trained on; figures are of the reported split, unless their name says
otherwise.
"""

import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.backbones.hub import load_backbone
from mini_ee.baselines import sleb
from mini_ee.baselines.adainfer import right_of, svm
from mini_ee.calibration import observe
from mini_ee.data.files import read_json
from mini_ee.data.tasks import Split, Task, holdout, subset
from mini_ee.data.tokenizer import Encoded, Inputs
from mini_ee.early_exit import early_exit
from mini_ee.evaluation.comparison import compare_tokens, rules_of
from mini_ee.evaluation.probes import Costs, probe_rows, rows_to_read
from mini_ee.evaluation.row_evaluation import (
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
from mini_ee.evaluation.savings_estimate import savings_at, suitability, threshold_at
from mini_ee.evaluation.token_evaluation import EPSILONS, at_equal_agreement, held_text, sweep, written_texts
from mini_ee.exits.generation import Sampling
from mini_ee.exits.prompt_exits import PromptModel
from mini_ee.exits.token_exits import record_texts
from mini_ee.experiments.bench.common import medians
from mini_ee.experiments.bench.streams import bare_streams, over_adapters
from mini_ee.methods.consistent_hardness import hardness_in_training
from mini_ee.methods.lora_exits_streams import parallel, restart
from mini_ee.methods.raee import exit_values
from mini_ee.methods.raee_collect import untrained_rows
from mini_ee.methods.raee_controls import ablation, controls, embed_all
from mini_ee.recording import Record, exit_scores, plan_rows, record, summary
from mini_ee.rules import NeverExit, Policy, Threshold, rule_from_dict
from mini_ee.training.default_rule import choose
from mini_ee.training.holdout import split_rows
from mini_ee.training.run_folder import Run
from mini_ee.training.stages import task_loss

BATCH = 32
HELD_ROWS, TRAIN_ROWS, PROBED_ROWS = 2500, 1000, 2000  # read at most, drawn with the seed
ROUNDED = 1e-5  # more than what is lost of a reference's score where it is kept, and less than a row
LISTED = 24  # points of a curve that are kept
MEASURE = "breaking_ties"
PRUNED, PRUNED_ROWS = 1 / 3, 256  # layers that SLEB removes, so that it runs as many as RAEE; and rows of its search
SHARES = {"at a third": 1 / 3, "at two thirds": 2 / 3}  # of the full model's operations, at which scores are compared
SAVED = (10, 20, 30, 50, 60)  # percent of the layers, at which writing is compared
SAMPLING = Sampling(temperature=1.0, top_k=40, top_p=0.75)  # ConsistentEE, Section 4, generation
STREAMED, STREAMED_SECONDS = (1, 2, 4, 8), 4.0  # rows whose streams are timed; at least, for each count
PROFILED = 8  # neighbours in RAEE's Fig. 2

Measured = tuple[dict[str, float], dict[str, list[float]]]


# ---- Rows ----


def of_rows(run: Run, task: Task, reference: dict | None) -> Measured:
    """A classifier: its exits, and what rules save that the hold-out chose.

    reference: the figures of the model from which points of loss are counted, of the same seed; by default its own.
    """
    seed = run.config["seed"]
    _, rows = rows_of(task, None, None, seed)
    held = subset(untrained_rows(run, task), HELD_ROWS, seed)
    encoded, whole = run.encode(rows.texts), run.whole_model()
    reported = record(run.segments(), encoded, BATCH, "reading", whole)
    chosen_on = record(run.segments(), run.encode(held.texts), BATCH, "reading", whole)
    figures = _exits(run, task, rows, reported) | _training(run)
    figures["hold-out full"] = exit_scores(chosen_on, task, held.labels)[-1]
    figures["majority"] = float(np.bincount(rows.labels.astype(int)).max() / len(rows))
    reference = reference or figures
    figures |= {"reference": reference["full"], "reference hold-out": reference["hold-out full"]}
    own = summary(reported.replay(run.rule), reported, task, rows.labels)
    figures |= {"default score": own["score"], "default saved": own["layers_saved"]}
    figures["default layers"] = own["mean_layers"]
    figures["default lost"] = figures["full"] - own["score"]
    decides = reported.segments.exit_logits is not None
    if decides:
        at = summary(reported.replay(Policy()), reported, task, rows.labels)
        figures |= {"policy score": at["score"], "policy saved": at["layers_saved"]}
    picked, lists = _picked(run, task, rows, reported, (chosen_on, held), reference)
    figures |= _trained_rows(run, task, Policy() if decides else run.rule)
    order, timed = timed_batches(encoded, 1), [(whole, NeverExit(), encoded)]
    for point in picked.values():
        timed.append((whole if is_full(point) else run.segments(), rule_from_dict(point["rule"]), encoded))
    full, *seconds = measure_seconds(timed, order, repeats=1)
    for (name, point), each in zip(picked.items(), seconds):
        figures |= {f"score {name}": point["score"], f"saved {name}": point["layers_saved"]}
        figures |= {f"operations {name}": point["flops_ratio"], f"speed-up {name}": float(full / each)}
    return figures | _at_equal_operations(lists), lists


def _at_equal_operations(lists: dict[str, list[float]]) -> dict[str, float]:
    """The curve's score at a share of the full model's operations, between the points beside it; none outside it."""
    operations, scores = (np.array(lists[f"curve {name}"]) for name in ("operations", "score"))
    order = np.argsort(operations, kind="stable")
    within = {name: share for name, share in SHARES.items() if operations.min() <= share <= operations.max()}
    return {
        f"score {name}": float(np.interp(share, operations[order], scores[order])) for name, share in within.items()
    }


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
        "trained parameters": float(sum(value.numel() for name, value in named if run.model.trainable(name))),
    }


def _picked(run: Run, task: Task, rows: Split, reported: Record, held: tuple, reference: dict) -> tuple[dict, dict]:
    """The points of the reported split whose rules the hold-out chose, and the curve of some that it offers."""
    chosen_on, split = held
    points = curve(chosen_on, rules_of(run, chosen_on._replace(labels=split.labels), task), task, split.labels)
    there = partial(replayed, recorded=reported, task=task, labels=rows.labels)
    never = next(point for point in points if point["rule"]["name"] == "never")
    picked = {}
    for name, loss in LOSSES.items():
        least = reference["hold-out full"] - loss - ROUNDED
        found = choose(points, fewest_flops, lambda point, least=least: point["score"] >= least)
        if found or not never["layers_saved"]:  # where tokens leave, there is no rule under which nothing is saved
            picked[f"at {name.replace('_', ' ')}"] = there(found or never)
    offered = [there(point) for point in points[:: max(1, len(points) // LISTED)]]
    lists = {
        "curve saved": [point["layers_saved"] for point in offered],
        "curve score": [point["score"] for point in offered],
        "curve operations": [point["flops_ratio"] for point in offered],
    }
    return picked, lists


def _trained_rows(run: Run, task: Task, rule) -> dict[str, float]:
    """ConsistentEE's Fig. 2 and Table 1."""
    if task.regression:
        return {}
    parts = split_rows(task, run.config["seed"], run.config["training"].get("max_train"))
    train = subset(parts.train, TRAIN_ROWS, run.config["seed"])
    recorded = record(run.segments(), run.encode(train.texts), BATCH, "reading")
    figures = {}
    for each in by_exit(recorded, recorded.replay(rule).exit_index, train.labels):
        layer = each["layer"]
        figures |= {f"loss after {layer}": each["loss"], f"left after {layer}": each["left"] / len(train)}
        if each["left"]:
            figures[f"loss after {layer} of those that left"] = each["left_loss"]
            figures[f"accuracy after {layer} of those that left"] = each["left_accuracy"]
    if found := hardness_in_training(run, task, BATCH):
        figures["hardness and loss"] = found["spearman"]["loss"]
        figures["hardness and forgetting"] = found["spearman"]["forgetting events"]
    return figures


# ---- Suitability ----


def of_estimate(run: Run, task: Task, reference: dict | None) -> Measured:
    """What `mini-ee estimate` says of the checkpoint, and what exits trained on it save at the same agreement.

    The threshold of the trained exits is that of the hold-out; layers are of the reported split.
    """
    seed, folder = run.config["seed"], Path(run.config["backbone"]["folder"])
    backbone = load_backbone(folder).without_heads()
    rows, classes = rows_to_read(task, PROBED_ROWS, seed)
    probed = probe_rows(backbone, run.encode(rows.texts), rows.labels, classes, seed)
    said = suitability(probed, seed)
    _, reported = rows_of(task, None, None, seed)
    held = subset(holdout(task.split("train"), seed)[1], HELD_ROWS, seed)
    chosen_on, there = (record(run.segments(), run.encode(some.texts), BATCH, "reading") for some in (held, reported))
    observed = observe(there)
    rule = threshold_at(observe(chosen_on))
    measured = savings_at(observed, rule, run.exits, Costs(0.0, 0.0))
    return {
        "estimate": said["estimate"]["saved"],
        "estimate, low": said["estimate"]["low"],
        "estimate, high": said["estimate"]["high"],
        "oracle": said["oracle_saved"],
        "measured": measured.saved,
        "agreement": measured.agreement,
        "full": exit_scores(there, task, reported.labels)[-1],
    }, {}


# ---- LoRAExit's streams ----


def of_streams(run: Run, task: Task, reference: dict | None) -> Measured:
    """Milliseconds until all exits of a few rows have answered: side by side, with SGMV and with a loop over the
    adapters, one after the other, and without adapters; and of the model without exits.
    """
    K, figures = len(run.exits), {}
    _, rows = rows_of(task, None, STREAMED[-1], run.config["seed"])
    side_by_side, one_by_one = (run.model.segments(schedule(K)) for schedule in (parallel, restart))
    for count in STREAMED:
        inputs = run.encode(rows.texts).batch(slice(count))
        together = partial(early_exit, side_by_side, NeverExit(), inputs)
        ways = {
            "SGMV": together,
            "loop over adapters": partial(over_adapters, together),
            "one by one": partial(early_exit, one_by_one, NeverExit(), inputs),
            "no adapters": partial(bare_streams, run.model, inputs),
            "full model": partial(early_exit, run.whole_model(), NeverExit(), inputs),
        }
        for way, seconds in zip(ways, medians([*ways.values()], f"{count} rows", seconds_a_case=STREAMED_SECONDS)):
            figures[f"{way}, {count} rows"] = seconds * 1e3
    return figures, {}


# ---- RAEE ----


def of_retrieval(run: Run, task: Task, reference: dict | None) -> Measured:
    """RAEE and what must stand beside it; its score over k and over the size of the datastore."""
    seed = run.config["seed"]
    _, rows = rows_of(task, None, None, seed)
    encoded = run.encode(rows.texts)
    recorded = record(run.segments(), encoded, BATCH, "reading", run.whole_model())
    found = summary(recorded.replay(plan_rows(run.rule, encoded, BATCH)), recorded, task, rows.labels)
    given = run.rule, recorded, encoded, task, rows.labels, BATCH, seed
    beside = controls(*given)
    figures = {
        "score": found["score"],
        "layers": found["mean_layers"],
        "saved": found["layers_saved"],
        "full": beside["full_model"]["score"],
        "majority": float(np.bincount(rows.labels.astype(int)).max() / len(rows)),
        "best single layer": beside["best_single_layer"]["score"],
        "kNN votes": beside["knn_labels"]["score"],
        "kNN votes weighted": beside["knn_weighted"]["score"],
        "random layers": beside["random_layers"]["score"],
        "oracle": beside["oracle"]["score"],
        "oracle layers": beside["oracle"]["mean_layers"],
        "rows": float(len(run.rule.datastore)),
    }
    for point in ablation(*given):
        names = []
        if point["database"] == "100%":
            names.append(f"k {point['k']}")
        if point["k"] == run.rule.k:
            names.append(f"store {point['database']}")
        for name in names:
            figures |= {f"score {name}": point["score"], f"layers {name}": point["mean_layers"]}
    for name, distance in profile_distances(run, recorded, encoded, rows.labels).items():
        figures[f"profile distance, {name}"] = distance
    order = timed_batches(encoded, 1)
    full, early = measure_seconds(
        [(run.whole_model(), NeverExit(), encoded), (run.segments(), run.rule, encoded)], order, repeats=1
    )
    return figures | {"speed-up": float(full / early)}, {}


def profile_distances(run: Run, recorded: Record, encoded: Encoded, labels: np.ndarray) -> dict[str, float]:
    """RAEE's Fig. 2 as numbers: the distance between a row's own values and the mean values of its neighbours, and the
    same for as many collected rows drawn at random; means of |v - p| over rows and exits.
    """
    own, store = exit_values(recorded.logits, labels), run.rule.datastore
    near = store.search(embed_all(run.rule, encoded, BATCH)[0], PROFILED).rows
    drawn = np.random.default_rng(run.config["seed"]).integers(len(store), size=near.shape)
    distances = (np.abs(store.values[rows].mean(axis=1) - own).mean() for rows in (near, drawn))
    return dict(zip(("neighbours", "by lot"), map(float, distances)))


def of_compared(run: Run, task: Task, reference: dict | None) -> Measured:
    """What RAEE is compared with on its own model, through the same prompt: AdaInfer, CALM and SLEB; and the seconds
    that building takes, where anything is built. Labelled rows come from where RAEE's store has its own.
    """
    seed, model = run.config["seed"], run.model
    _, rows = rows_of(task, None, None, seed)
    known = subset(untrained_rows(run, task), HELD_ROWS, seed)
    encoded, seen = run.encode(rows.texts), run.encode(known.texts)
    recorded = record(run.segments(), encoded, BATCH, "reading", run.whole_model())
    begin = time.perf_counter()
    fitted = record(run.segments(), seen, BATCH, "reading")._replace(labels=known.labels)
    rule = svm(fitted, right_of(fitted)["gold"])
    fitting = time.perf_counter() - begin
    left_early = summary(recorded.replay(rule), recorded, task, rows.labels)
    begin = time.perf_counter()
    few = np.random.default_rng(seed).permutation(len(known))[:PRUNED_ROWS]
    kept = _kept_through_prompt(run, seen.batch(few), torch.from_numpy(known.labels[few]))
    pruning = time.perf_counter() - begin
    pruned = PromptModel(sleb.with_layers(model.backbone, kept), run.tokenizer, (len(kept),)).eval()
    short = record(pruned.segments(), encoded, BATCH, "reading")
    gaps = summary(recorded.replay(_gap_for(fitted, len(kept))), recorded, task, rows.labels)
    sizes = {path.name: path.stat().st_size / 1e6 for path in (run.folder / "datastore").iterdir()}
    return {
        "full": exit_scores(recorded, task, rows.labels)[-1],
        "AdaInfer": left_early["score"],
        "AdaInfer layers": left_early["mean_layers"],
        "AdaInfer seconds": fitting,
        "CALM": gaps["score"],
        "CALM layers": gaps["mean_layers"],
        "SLEB": exit_scores(short, task, rows.labels)[-1],
        "SLEB layers": float(len(kept)),
        "SLEB seconds": pruning,
        "RAEE seconds": read_json(run.folder / "metrics.json")["seconds"],
        "RAEE index megabytes": sizes.pop("index.hnsw"),
        "RAEE values megabytes": sum(sizes.values()),
    }, {}


def _gap_for(seen: Record, layers: int) -> Threshold:
    """CALM for an answer of one token: the gap between the two likeliest label words at which these rows run so many
    layers in the mean, or the nearest to it; tried are percentiles of what they have.
    """
    rules = [Threshold(float(gap), MEASURE) for gap in np.quantile(seen.confidence(MEASURE), np.linspace(0, 1, 101))]
    return min(rules, key=lambda rule: abs(seen.replay(rule).layers_run.mean() - layers))


@torch.inference_mode()
def _kept_through_prompt(run: Run, inputs: Inputs, labels: torch.Tensor) -> list[int]:
    """SLEB's search with the loss of the label words in place of that of the next token: the layers that stay."""
    backbone = run.model.backbone
    kept = list(range(backbone.config.num_hidden_layers))

    def loss(layers: list[int]) -> float:
        short = PromptModel(sleb.with_layers(backbone, layers), run.tokenizer, (len(layers),)).eval()
        said = short(*(torch.from_numpy(x) for x in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)))
        return task_loss(said, labels).item()

    for _ in range(sleb.Config(share=PRUNED).count(len(kept))):
        kept.remove(min(kept[1:-1], key=lambda gone: loss([layer for layer in kept if layer != gone])))
    return kept


# ---- Heads on a decoder ----


def of_tokens(run: Run, task: None, reference: dict | None) -> Measured:
    """Heads on a decoder: how they learned, and what they save on fresh text at equal agreement on calibration text."""
    metrics, exits = read_json(run.folder / "metrics.json"), run.exits
    figures = {f"agreement after {layer}": value for layer, value in zip(exits, metrics["agreement"])}
    figures |= {f"entropy after {layer}": value for layer, value in zip(exits, metrics["entropy"])}
    history = metrics["history"]
    figures |= {"steps": float(history[-1]["step"])}
    figures["train seconds"] = sum(epoch["seconds"] for epoch in metrics["epochs"])
    lists = {"step": [float(point["step"]) for point in history]}
    for k, layer in enumerate(exits[:-1]):
        lists |= {f"{key} after {layer}": [point[key][k] for point in history] for key in ("agreement", "entropy")}
    _, calibration, fresh = written_texts(run, run.config["seed"])
    recorded = [record_texts(run.model, texts, progress="observing") for texts in (calibration, fresh)]
    for found in at_equal_agreement(*recorded, (MEASURE, "max_probability", "entropy")):
        by = "" if found["measure"] == MEASURE else f", {found['measure'].replace('_', ' ')}"
        figures[f"saved at {found['level']:g}{by}".replace("0.", ".")] = found["layers_saved"]
    return figures, lists


def of_tokens_over_epsilon(run: Run, text: Path | None, reference: dict | None) -> Measured:
    """The same, and the paper's Fig. 2 to 4: what thresholds for each epsilon keep, cost and save, also in writing."""
    figures, lists = of_tokens(run, None, reference)
    seed, held = run.config["seed"], None
    if text is not None:
        held = record_texts(run.model, held_text(text, run, seed), progress="reading", last=False)
    found = sweep(run, MEASURE, held, None, seed)
    if held is not None:
        figures["full perplexity"] = found["full_perplexity"]
    for epsilon, row in zip(EPSILONS, found["rows"]):
        at = f"at epsilon {epsilon:g}".replace("0.", ".")
        figures |= {f"end to end {at}": row["end_to_end"], f"saved {at}": row["layers_saved"]}
        heads = zip(run.exits, row["agreement"])
        figures |= {f"head {layer} {at}": share for layer, share in heads if share is not None}
        figures |= {f"decoded agreement {at}": row["decoded_agreement"], f"speed-up {at}": row["speedup"]}
        figures[f"decoded saved {at}"] = 1 - row["decoded_layers"] / run.exits[-1]
        shares = np.array(row["exit_counts"]) / sum(row["exit_counts"])
        figures |= {f"leave after {layer} {at}": float(share) for layer, share in zip(run.exits, shares)}
        if held is not None:
            figures[f"perplexity {at}"] = row["perplexity"]
    return figures, lists


# ---- Writing ----


def of_writing(run: Run, text: Path | None, reference: dict | None, sampling: Sampling = Sampling()) -> Measured:
    """A decoder's tokens under the method's own rules: Rouge-L against the full model's text, over layers saved."""
    found = compare_tokens([run], None, None, sampling, True, run.config["seed"])
    full, *own = found["rows"]
    figures, lists = {"full against references": full["rouge_l_reference"]}, {}
    for row in own:
        measure = "" if len(own) == 1 else f" {row['measure']}"
        points = sorted((point["layers_saved"], point["rouge_l"]) for point in [row, *row["curve"]])
        saved, rouge = (list(each) for each in zip(*points))
        figures |= {f"Rouge-L{measure}": row["rouge_l"], f"saved{measure}": row["layers_saved"]}
        for share in SAVED:
            if saved[0] <= share / 100 <= saved[-1]:
                figures[f"Rouge-L{measure} at {share}% saved"] = float(np.interp(share / 100, saved, rouge))
        lists |= {f"curve saved{measure}": saved, f"curve Rouge-L{measure}": rouge}
    return figures, lists


# these read a task; the others read a text, or nothing
OF_ROWS = ("rows", "streams", "prompts", "compared through prompts", "estimate")
MEASURES = {
    "rows": of_rows,
    "streams": of_streams,
    "prompts": of_retrieval,
    "compared through prompts": of_compared,
    "estimate": of_estimate,
    "tokens": of_tokens,
    "tokens over epsilon": of_tokens_over_epsilon,
    "writing": of_writing,
    "writing, sampled": partial(of_writing, sampling=SAMPLING),
}
