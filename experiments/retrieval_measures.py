"""Measurements of RAEE's runs for its page, and of the methods that it is compared with on its model."""

import time
from dataclasses import replace

import numpy as np
import torch

from mini_ee.experiments.records import SeedRecord
from mini_ee.lab.baselines import sleb
from mini_ee.lab.baselines.adainfer import right_of, svm
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.tasks import Task, subset
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.evaluation.row_evaluation import measure_seconds, rows_of, timed_batches
from mini_ee.lab.exits.prompt_exits import PromptModel
from mini_ee.lab.methods.raee_collect import untrained_rows
from mini_ee.lab.methods.raee_controls import (
    KS,
    SHUFFLES,
    best_single_exit,
    earliest_right_exit,
    embed_all,
    knn_labels,
    parts_of,
    shuffled_plan,
)
from mini_ee.lab.methods.raee_datastore import Neighbours
from mini_ee.lab.recording import Record, exit_scores, record, summary
from mini_ee.lab.rules import Never, Threshold
from mini_ee.lab.training.run_folder import Run
from mini_ee.raee import exit_values
from mini_ee.train import task_loss

BATCH_SIZE = 32
HELD_OUT_ROWS = 2500  # read at most, drawn with the seed
PRUNED, PRUNED_ROWS = 1 / 3, 256  # share of the layers that SLEB removes, about as RAEE skips; rows of its search
PROFILE_NEIGHBOURS = 8  # RAEE, Fig. 2
GAP = "breaking_ties"


def of_retrieval(run: Run, task: Task, reference: dict | None) -> tuple[dict, dict, SeedRecord]:
    """RAEE and its controls; its score for several k and sizes of the datastore; and the record of all exits."""
    _, rows = rows_of(task, None, None, run.config["seed"])
    encoded = run.encode(rows.texts)
    recorded = record(run.segments(), encoded, BATCH_SIZE, "reading", run.whole_model())
    queries, _ = embed_all(run.rule, encoded, BATCH_SIZE)
    values = retrieval_values(run, recorded, queries, rows.labels)
    figures = {name: float(np.mean(row_values)) for name, row_values in values.items()}
    figures["majority"] = float(np.bincount(rows.labels.astype(int)).max() / len(rows))
    figures["rows"] = float(len(run.rule.datastore))
    for name, distance in profile_distances(run, recorded, queries, rows.labels).items():
        figures[f"profile distance, {name}"] = distance
    order = timed_batches(encoded, 1)
    full, early = measure_seconds(
        [(run.whole_model(), Never(), encoded), (run.segments(), run.rule, encoded)], order, repeats=1
    )
    return figures | {"speed-up": float(full / early)}, {}, _with_values(recorded, rows.labels, values)


def retrieval_values(run: Run, recorded: Record, queries: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Figure -> its values (N,), of which it is the mean: whether RAEE or a control is right, or layers.

    queries (N, D): the embeddings of the examples. Controls and tables: raee_controls.py.
    """
    rule, store, seed, every = run.rule, run.rule.datastore, run.config["seed"], np.arange(len(labels))
    near = store.search(queries, rule.k)
    right, depth, plan = recorded.predictions == labels[:, None], np.array(run.exits), rule.chosen(near)
    votes, weights = store.labels[near.rows], rule.weights_and_votes(near)[0]
    shuffled = [right[every, shuffled_plan(plan, seed + number)] for number in range(SHUFFLES)]
    values = {
        "score": right[every, plan],
        "layers": depth[plan],
        "saved": 1 - depth[plan] / depth[-1],
        "full": right[:, -1],
        "best single layer": right[:, best_single_exit(store.values)],
        "kNN votes": knn_labels(votes) == labels,
        "kNN votes weighted": knn_labels(votes, weights) == labels,
        "random layers": np.mean(shuffled, axis=0),
        "oracle": right.any(axis=1),
        "oracle layers": depth[earliest_right_exit(right)],
    }
    for part_name, part in parts_of(store, seed):
        neighbours = part.search(queries, max(KS))
        for k in KS:
            plan = replace(rule, datastore=part).chosen(Neighbours(neighbours.rows[:, :k], neighbours.distances[:, :k]))
            names = [f"k {k}"] * (part_name == "100%") + [f"store {part_name}"] * (k == rule.k)
            for name in names:
                values |= {f"score {name}": right[every, plan], f"layers {name}": depth[plan]}
    return values


def _with_values(recorded: Record, labels: np.ndarray, values: dict[str, np.ndarray]) -> SeedRecord:
    """The record of the reported examples, and figures of each of them that no rule of ours gives."""
    listed = {name: np.round(np.asarray(row_values, float), 5).tolist() for name, row_values in values.items()}
    recorded = recorded._replace(labels=labels)
    return SeedRecord(recorded, recorded.take(np.arange(0)), {"values": listed})


def profile_distances(run: Run, recorded: Record, queries: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """RAEE's Fig. 2 as numbers: means over rows and exits of |v - p|, where p are the values of a row and v are the
    mean values of its neighbours, or of as many collected rows drawn at random.
    """
    query_values, store = exit_values(recorded.logits, labels), run.rule.datastore
    near = store.search(queries, PROFILE_NEIGHBOURS).rows
    drawn = np.random.default_rng(run.config["seed"]).integers(len(store), size=near.shape)
    distances = (np.abs(store.values[rows].mean(axis=1) - query_values).mean() for rows in (near, drawn))
    return dict(zip(("neighbours", "by lot"), map(float, distances)))


def of_compared(run: Run, task: Task, reference: dict | None) -> tuple[dict, dict, SeedRecord]:
    """AdaInfer, CALM and SLEB on RAEE's model, through the same prompt, with the seconds to prepare each of them, and
    the record of all exits.

    Their labelled rows are drawn from the rows of which RAEE's datastore is built.
    """
    seed, model = run.config["seed"], run.model
    _, rows = rows_of(task, None, None, seed)
    known = subset(untrained_rows(run, task), HELD_OUT_ROWS, seed)
    encoded, encoded_known = run.encode(rows.texts), run.encode(known.texts)
    recorded = record(run.segments(), encoded, BATCH_SIZE, "reading", run.whole_model())
    begin = time.perf_counter()
    fitted = record(run.segments(), encoded_known, BATCH_SIZE, "reading")._replace(labels=known.labels)
    rule = svm(fitted, right_of(fitted)["gold"])
    fitting = time.perf_counter() - begin
    by_svm = recorded.replay(rule)
    adainfer = summary(by_svm, recorded, task, rows.labels)
    begin = time.perf_counter()
    few = np.random.default_rng(seed).permutation(len(known))[:PRUNED_ROWS]
    layers = _sleb_layers(run, encoded_known.batch(few), torch.from_numpy(known.labels[few]))
    pruning = time.perf_counter() - begin
    pruned = PromptModel(sleb.with_layers(model.backbone, layers), run.tokenizer, (len(layers),)).eval()
    short = record(pruned.segments(), encoded, BATCH_SIZE, "reading")
    by_gap = recorded.replay(_gap_for(fitted, len(layers)))
    gaps = summary(by_gap, recorded, task, rows.labels)
    predicted = {"full": recorded.predictions[:, -1], "SLEB": short.predictions[:, -1]}
    predicted |= {"AdaInfer": by_svm.logits.argmax(axis=1), "CALM": by_gap.logits.argmax(axis=1)}
    values = {name: answers == rows.labels for name, answers in predicted.items()}
    sizes = {path.name: path.stat().st_size / 1e6 for path in (run.folder / "datastore").iterdir()}
    figures = {
        "full": exit_scores(recorded, task, rows.labels)[-1],
        "AdaInfer": adainfer["score"],
        "AdaInfer layers": adainfer["mean_layers"],
        "AdaInfer seconds": fitting,
        "CALM": gaps["score"],
        "CALM layers": gaps["mean_layers"],
        "SLEB": exit_scores(short, task, rows.labels)[-1],
        "SLEB layers": float(len(layers)),
        "SLEB seconds": pruning,
        "RAEE seconds": read_json(run.folder / "metrics.json")["seconds"],
        "RAEE index megabytes": sizes.pop("index.hnsw"),
        "RAEE values megabytes": sum(sizes.values()),
    }
    return figures, {}, _with_values(recorded, rows.labels, values)


def _gap_for(seen: Record, layers: int) -> Threshold:
    """CALM for an answer of one token: the threshold on the gap between the two most probable label words, among the
    percentiles of the gaps of these rows, with which their mean number of layers is nearest to `layers`.
    """
    gaps = np.quantile(seen.confidence(GAP), np.linspace(0, 1, 101))
    rules = [Threshold(float(gap), GAP) for gap in gaps]
    return min(rules, key=lambda rule: abs(seen.replay(rule).layers_run.mean() - layers))


@torch.inference_mode()
def _sleb_layers(run: Run, inputs: Inputs, labels: torch.Tensor) -> list[int]:
    """The layers that SLEB's search keeps, with the loss of the label words instead of that of the next token."""
    backbone = run.model.backbone
    layers = list(range(backbone.config.num_hidden_layers))

    def loss(remaining: list[int]) -> float:
        short = PromptModel(sleb.with_layers(backbone, remaining), run.tokenizer, (len(remaining),)).eval()
        logits = short(*(torch.from_numpy(x) for x in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids)))
        return task_loss(logits, labels).item()

    for _ in range(sleb.Config(share=PRUNED).count(len(layers))):
        layers.remove(min(layers[1:-1], key=lambda removed: loss([layer for layer in layers if layer != removed])))
    return layers
