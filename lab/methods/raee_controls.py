"""What `mini-ee evaluate` measures for RAEE: controls, the tables of the paper, and the neighbours that vote.

knn_labels                 the majority label of the neighbours: how far embeddings alone get, without exits
best_single_exit           one exit for all examples
shuffled_plan              RAEE's exits, assigned to examples at random
earliest_right_exit        the oracle
ablation                   the paper's Tables 2 to 4: by k, and by the part of the datastore that is used
retrieved                  the paper's Tables 9 and 10: the neighbours of each example and their votes

Paper: see raee.py. `rule` is raee.Retrieval with a datastore; `recorded` has every exit of the N examples, as `record`
returns it. No torch here.
The equations as tests: tests/spec/test_3_raee.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mini_ee.lab.data.tasks import Task
from mini_ee.lab.data.tokenizer import Encoded, batches
from mini_ee.lab.methods.raee_datastore import Datastore, Neighbours
from mini_ee.lab.recording import Record, summary
from mini_ee.lab.rules import Planned

Retrieval = Any  # raee.Retrieval, which imports this file

SHUFFLES = 10  # number of shuffled plans, whose mean is reported

KS, SHARES, WITHOUT = (2, 4, 8, 12, 16, 20), (0.2, 0.5, 1.0), "w/o"  # Tables 3, 4 and 2


# ---- The controls ----
def knn_labels(labels: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Majority vote: the labels of the neighbours (B, k), nearest first -> classes (B,). A tie goes to the nearest.

    weights: the weight of each vote (B, k), by default 1.
    """
    weights = np.ones(labels.shape) if weights is None else weights
    same = labels[:, :, None] == labels[:, None, :]
    votes = (same * weights[:, None, :]).sum(axis=2)  # (B, k): for each neighbour, the votes for its class
    return np.take_along_axis(labels, votes.argmax(axis=1)[:, None], axis=1)[:, 0]


def best_single_exit(values: np.ndarray) -> int:
    """Collected values (N, K) -> the exit that is right most often, the earliest of equal exits."""
    return int((values > 0).sum(axis=0).argmax())


def shuffled_plan(plan: np.ndarray, seed: int) -> np.ndarray:
    """A control: the exits of the plan, permuted among the examples. The mean depth is the same, but an example's exit
    does not depend on its content.
    """
    return np.random.default_rng(seed).permutation(plan)


def earliest_right_exit(right: np.ndarray) -> np.ndarray:
    """The oracle: (N, K) bool -> the first exit that is right (N,), the last exit if none is."""
    return np.where(right.any(axis=1), right.argmax(axis=1), right.shape[1] - 1)


def controls(
    rule: Retrieval,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> dict[str, dict]:
    """Scores to compare with RAEE's on the same N examples, under the keys of the JSON output.

    knn_labels         majority vote of the neighbours; its layers are the queries' share of all FLOPs
    knn_weighted       the same, each vote weighted by Eq. 5 as in RAEE
    best_single_layer  the one exit that is right most often on the collected examples
    random_layers      RAEE's exits shuffled: the mean over SHUFFLES, and `spread`, the standard deviation
    oracle             the earliest exit that is right
    full_model         the last exit
    """
    queries, cost = embed_all(rule, encoded, batch_size)
    near = rule.datastore.search(queries, rule.k)
    weights, _ = rule.weights_and_votes(near)
    plan, exits = rule.chosen(near), recorded.segments.exits
    single = best_single_exit(rule.datastore.values)
    right = recorded.logits.argmax(axis=2) == labels[:, None]

    def planned(exit_index: np.ndarray) -> dict:
        return summary(recorded.replay(Planned(tuple(exit_index))), recorded, task, labels)

    def voted(weights: np.ndarray | None) -> dict:
        share = cost / recorded.full_flops
        depth = {"mean_layers": share * exits[-1], "flops_ratio": share}
        return task.score(knn_labels(rule.datastore.labels[near.rows], weights), labels) | depth

    shuffled = [planned(shuffled_plan(plan, seed + number)) for number in range(SHUFFLES)]
    random_layers = {name: float(np.mean([scores[name] for scores in shuffled])) for name in task.score(labels, labels)}
    random_layers["spread"] = float(np.std([scores["score"] for scores in shuffled]))
    random_layers["mean_layers"] = shuffled[0]["mean_layers"]
    return {
        "knn_labels": voted(None),
        "knn_weighted": voted(weights),
        "best_single_layer": planned(np.full(len(labels), single)) | {"layer": exits[single]},
        "random_layers": random_layers,
        "oracle": planned(earliest_right_exit(right)),
        "full_model": planned(np.full(len(labels), len(exits) - 1)),
    }


# ---- The paper's tables ----
def ablation(
    rule: Retrieval,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> list[dict]:
    """RAEE's scores on N examples, one dict for each k (Table 3) and each part of the datastore (Table 4).

    database: the share of the collected examples, drawn with the seed, or WITHOUT the examples that the full model gets
    wrong (Table 2).
    """
    queries, cost = embed_all(rule, encoded, batch_size)
    points = []
    for name, part in parts_of(rule.datastore, seed):
        near = part.search(queries, max(KS))
        for k in KS:
            plan = replace(rule, datastore=part).chosen(Neighbours(near.rows[:, :k], near.distances[:, :k]))
            point = summary(recorded.replay(Planned(plan, cost)), recorded, task, labels)
            points.append({"database": name, "rows": len(part), "k": k} | point)
    return points


def parts_of(store: Datastore, seed: int) -> Iterator[tuple[str, Datastore]]:
    """The datastores of Tables 4 and 2 with their names. The last is left out if the full model is always wrong."""
    order = np.random.default_rng(seed).permutation(len(store))
    parts = {f"{share:.0%}": order[: max(1, round(share * len(store)))] for share in SHARES}
    parts[WITHOUT] = np.flatnonzero(full_model_is_right(store.values))
    for name, rows in parts.items():
        if len(rows):
            yield name, store.take(rows) if len(rows) < len(store) else store


def full_model_is_right(values: np.ndarray) -> np.ndarray:
    """Values (N, K) -> (N,) bool: the examples in the datastore of Table 2's "w/o"."""
    return values[:, -1] > 0


def retrieved(rule: Retrieval, encoded: Encoded, batch_size: int) -> list[dict]:
    """The neighbours of each example and the exit that they choose (Tables 9 and 10): one dict per example.

    layer: that of the exit. neighbours, nearest first: text, label, weight by Eq. 5, and the layers that it votes for.
    """
    store, exits = rule.datastore, np.array(rule.datastore.exits)
    near = store.search(embed_all(rule, encoded, batch_size)[0], rule.k)
    layers, (weights, votes) = exits[rule.chosen(near)], rule.weights_and_votes(near)

    def neighbour(row: int, weight: float, vote: np.ndarray) -> dict:
        example = {"text": store.texts[row], "label": int(store.labels[row])}
        return example | {"weight": float(weight), "votes": exits[vote > 0].tolist()}

    examples = []
    for i, layer in enumerate(layers.tolist()):
        voters = zip(near.rows[i], weights[i], votes[i])
        examples.append({"layer": layer, "neighbours": [neighbour(*voter) for voter in voters]})
    return examples


def embed_all(rule: Retrieval, encoded: Encoded, batch_size: int) -> tuple[np.ndarray, float]:
    """The embeddings of all examples, (N, D), and the mean FLOPs of the plan of one."""
    queries, flops = np.empty((len(encoded), rule.datastore.dimension), np.float32), 0.0
    for rows in batches(encoded, batch_size):
        inputs = encoded.batch(rows)
        queries[rows] = rule.embed(inputs)
        flops += len(rows) * rule.plan_flops(inputs)
    return queries, flops / len(encoded)
