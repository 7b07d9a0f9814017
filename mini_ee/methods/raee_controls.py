"""What `mini-ee evaluate` measures of RAEE: controls beside its figure, its tables, and the neighbours that vote.

knn_labels                 the class that most neighbours have: what the embeddings know without the exits
best_single_exit           one exit for all rows
shuffled_plan              RAEE's exits, given to rows at random
earliest_right_exit        the oracle
ablation                   the paper's Tables 2 to 4: by k, and by how much of the datastore is used
retrieved                  the paper's Tables 9 and 10: each row's neighbours and their votes

`rule` is raee.Retrieval with a datastore; `recorded` every exit of the N rows, as `record` returns it. No torch here.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mini_ee.data.tasks import Task
from mini_ee.data.tokens import Encoded, batches
from mini_ee.methods.raee_datastore import Datastore, Neighbours
from mini_ee.recording import Record, summary
from mini_ee.rules import Planned, Rule

SHUFFLES = 10  # plans of random layers whose mean is reported

KS, SHARES, WITHOUT = (2, 4, 8, 12, 16, 20), (0.2, 0.5, 1.0), "w/o"  # Tables 3, 4 and 2


# ---- The controls ----
def knn_labels(labels: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The neighbours' labels (B, k), nearest first -> the class that most of them have (B,), the nearest of equals.

    weights: what each neighbour's vote counts (B, k), in place of 1.
    """
    weights = np.ones(labels.shape) if weights is None else weights
    same = labels[:, :, None] == labels[:, None, :]
    votes = (same * weights[:, None, :]).sum(axis=2)  # (B, k): the votes for each neighbour's class
    return np.take_along_axis(labels, votes.argmax(axis=1)[:, None], axis=1)[:, 0]


def best_single_exit(values: np.ndarray) -> int:
    """(N, K) collected values -> the exit that is right most often, the earliest of equals."""
    return int((values > 0).sum(axis=0).argmax())


def shuffled_plan(plan: np.ndarray, seed: int) -> np.ndarray:
    """The same exits given to rows at random: the same mean depth, and no knowledge of the row."""
    return np.random.default_rng(seed).permutation(plan)


def earliest_right_exit(right: np.ndarray) -> np.ndarray:
    """The oracle: (N, K) bool -> the first exit that is right (N,), the last if none is."""
    return np.where(right.any(axis=1), right.argmax(axis=1), right.shape[1] - 1)


def controls(
    rule: Rule,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> dict[str, dict]:
    """The figures to compare RAEE's with on the same N rows, under the keys of the JSON answers.

    knn_labels         the neighbours' labels alone; its layers are the share of FLOPs that the queries take
    knn_weighted       the same, each vote weighted by Eq. 5 as RAEE's are
    best_single_layer  the one exit that is right most often on the collected rows
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
        return summary(recorded.replay(Planned(exit_index)), recorded, task, labels)

    def voted(weights: np.ndarray | None) -> dict:
        share = cost / recorded.full_flops
        depth = {"mean_layers": share * exits[-1], "flops_ratio": share}
        return task.score(knn_labels(rule.datastore.labels[near.rows], weights), labels) | depth

    shuffled = [planned(shuffled_plan(plan, seed + number)) for number in range(SHUFFLES)]
    random_layers = {name: float(np.mean([each[name] for each in shuffled])) for name in task.score(labels, labels)}
    random_layers["spread"] = float(np.std([each["score"] for each in shuffled]))
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
    rule: Rule,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> list[dict]:
    """RAEE's figure on N rows, one dict for each k (Table 3) and each part of the datastore (Table 4).

    database: the share of the collected rows, drawn with the seed, or WITHOUT those that the full model gets wrong
    (Table 2).
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
    """The datastores of Tables 4 and 2 with their names; without the last if the full model gets every row wrong."""
    order = np.random.default_rng(seed).permutation(len(store))
    parts = {f"{share:.0%}": order[: max(1, round(share * len(store)))] for share in SHARES}
    parts[WITHOUT] = np.flatnonzero(full_model_is_right(store.values))
    for name, rows in parts.items():
        if len(rows):
            yield name, store.take(rows) if len(rows) < len(store) else store


def full_model_is_right(values: np.ndarray) -> np.ndarray:
    """(N, K) values -> (N,) bool: the rows in the datastore of Table 2's "w/o"."""
    return values[:, -1] > 0


def retrieved(rule: Rule, encoded: Encoded, batch_size: int) -> list[dict]:
    """Each row's neighbours in the datastore, and the exit that they choose (Tables 9 and 10): one dict a row.

    layer: of the exit. neighbours, nearest first: text, label, weight by Eq. 5, and the layers that it votes for.
    """
    store, exits = rule.datastore, np.array(rule.datastore.exits)
    near = store.search(embed_all(rule, encoded, batch_size)[0], rule.k)
    layers, (weights, votes) = exits[rule.chosen(near)], rule.weights_and_votes(near)

    def neighbour(row: int, weight: float, vote: np.ndarray) -> dict:
        about = {"text": store.texts[row], "label": int(store.labels[row])}
        return about | {"weight": float(weight), "votes": exits[vote > 0].tolist()}

    answers = []
    for i, layer in enumerate(layers.tolist()):
        voters = zip(near.rows[i], weights[i], votes[i])
        answers.append({"layer": layer, "neighbours": [neighbour(*voter) for voter in voters]})
    return answers


def embed_all(rule: Rule, encoded: Encoded, batch_size: int) -> tuple[np.ndarray, float]:
    """The embeddings of all rows, (N, D), and the mean FLOPs of a row's plan."""
    queries, flops = np.empty((len(encoded), rule.datastore.dimension), np.float32), 0.0
    for rows in batches(encoded, batch_size):
        inputs = encoded.batch(rows)
        queries[rows] = rule.embed(inputs)
        flops += len(rows) * rule.plan_flops(inputs)
    return queries, flops / len(encoded)
