"""RAEE: the neighbours of a row in a datastore say after which layer it leaves.

Paper: Huang et al., RAEE: A Robust Retrieval-Augmented Early Exit Framework for Efficient Inference, 2024,
arXiv:2405.15198.

collect           Algorithm 3.1: how sure each exit is of the right answer, for rows whose label is known
Datastore         those values beside an hnswlib index of the rows' embeddings; on disk whole or not there
Retrieval         Algorithm 3.2 as a rule: embed, retrieve, Eq. 4 to 6, and the exit is known before the model runs
knn_labels, ...   the controls that stand beside every figure of RAEE

Deviations from the paper, and what it leaves open:
1. Probabilities are over classes, or over the label words of a prompt as in the paper's Fig. 2; line 8 of Algorithm 3.1
   takes them over the vocabulary.
2. A neighbour none of whose exits reaches tau votes for its three best right ones (`fallback_top` 3), as the authors'
   code has it; 0 is Eq. 4 as it is printed, where it does not vote.
3. Queries are the model's own embeddings of a row's tokens, their mean (`layer` 0), unless `encoder` names a sentence
   encoder; the paper has both ways.
4. The distance of Eq. 5, which the paper does not name, is the squared L2 distance of vectors of length 1.
5. A model read through a prompt may be fine-tuned on a few rows first (`shots`); the paper's is not.

No torch here: the runtime without torch retrieves with this file. The embedder is a callable, Inputs -> (B, D).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mini_ee.data.options import Settings, option
from mini_ee.data.tasks import Task
from mini_ee.data.tokens import Encoded, Inputs, batches
from mini_ee.methods.raee_datastore import MOST_SHARDS, Datastore, Embed, Neighbours
from mini_ee.recording import Record, record, summary
from mini_ee.rules import RULES, Planned, Rule
from mini_ee.segments import Segments
from mini_ee.training.method import Method

LOTS = 10  # drawn for the random layers
DRAWN = 8  # neighbours in Fig. 2

KS, SHARES, WITHOUT = (2, 4, 8, 12, 16, 20), (0.2, 0.5, 1.0), "w/o"  # Tables 3, 4 and 2


# Algorithm 3.1: collect
def exit_values(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N, K, C) logits of every exit, (N,) right classes -> values (N, K) float32, lines 8 to 11 of Algorithm 3.1.

    p_i^j, the probability of the right class, where exit j predicts it; 0 where the exit is wrong.
    """
    num_classes = logits.shape[2]
    if len(labels) != len(logits) or not np.isin(labels, range(num_classes)).all():
        raise ValueError(
            f"expected {len(logits)} labels from 0 to {num_classes - 1}, "
            f"found {len(labels)}, such as {np.unique(labels)[:5].tolist()}"
        )
    logits = logits.astype(np.float64)
    odds = np.exp(logits - logits.max(axis=2, keepdims=True))
    right = logits.argmax(axis=2) == np.asarray(labels)[:, None]
    return np.where(right, odds.max(axis=2) / odds.sum(axis=2), 0).astype(np.float32)


def collect(
    segments: Segments, encoded: Encoded, labels: np.ndarray, batch_size: int, progress: str | None = None
) -> np.ndarray:
    """Run every exit on every row: values (N, K). Of rows that the heads were not trained on, or all look right."""
    return exit_values(record(segments, encoded, batch_size, progress).logits, labels)


def full_model_is_right(values: np.ndarray) -> np.ndarray:
    """(N, K) values -> (N,) bool: the rows that the "w/o" variant of Table 2 keeps."""
    return values[:, -1] > 0


# Algorithm 3.2: choose
def neighbour_weights(distances: np.ndarray) -> np.ndarray:
    """Eq. 5, P(v_i | x) = min_j distance(v_j, x) / distance(v_i, x): squared distances (B, k) -> (B, k) float64.

    The nearest weighs 1. In the limit of distance 0: neighbours at distance 0 weigh 1, the rest 0.
    """
    distances = np.asarray(distances, np.float64)
    nearest = distances.min(axis=1, keepdims=True)
    return np.divide(nearest, distances, out=np.ones_like(distances), where=distances > 0)


def passing_values(values: np.ndarray, tau: float, fallback_top: int = 0) -> np.ndarray:
    """The inner sum of Eq. 4, 1(p_i^j >= tau) p_i^j: values (B, k, K) of the neighbours -> (B, k, K).

    fallback_top: a neighbour none of whose exits passes votes for so many of its best right ones, the earlier of
    equals (3 in the authors' code, 0 in the paper).
    """
    passes = (values > 0) & (values >= tau)
    if fallback_top:
        rank = np.argsort(np.argsort(-values, axis=2, kind="stable"), axis=2)
        passes |= (rank < fallback_top) & ~passes.any(axis=2, keepdims=True)
    return np.where(passes, values, 0)


def exit_distribution(values: np.ndarray, distances: np.ndarray, tau: float = 0.9, fallback_top: int = 0) -> np.ndarray:
    """Eq. 4, P(z = l | x) = sum_i P(v_i | x) 1(p_i^l >= tau) p_i^l, which the paper leaves unnormalised.

    values (B, k, K) and squared distances (B, k) of the k neighbours -> (B, K) float64.
    """
    votes = neighbour_weights(distances)[:, :, None] * passing_values(values, tau, fallback_top)
    return np.sort(votes, axis=1).sum(axis=1)  # sorted: rounding must not depend on the neighbours' order


def chosen_exit(distribution: np.ndarray) -> np.ndarray:
    """Eq. 6, f(x) = argmax_l P(z = l | x): (B, K) -> exit index (B,).

    The earliest of equals; the last exit, m, where nobody votes.
    """
    last = distribution.shape[1] - 1
    return np.where(distribution.any(axis=1), distribution.argmax(axis=1), last)


# The rule
@dataclass(frozen=True)
class Retrieval(Rule):
    """Leave where the k nearest collected rows were right, and sure of it: Algorithm 3.2, lines 2 to 8.

    tau: what a neighbour's probability must reach to vote (.9 in the paper). fallback_top: see `passing_values`.
    include_embeddings: plan exits after layer 0 too, where the datastore has one. The settings stand in a run's
    config.json; datastore and embedder are given by `with_datastore`, and without them the rule cannot plan.
    """

    k: int = option(12, "neighbours that vote")
    tau: float = option(0.9, "how sure a neighbour's exit must be to vote, Eq. 4")
    fallback_top: int = option(0, "best exits of a neighbour with none that sure", metavar="N")
    include_embeddings: bool = False
    datastore: Datastore | None = field(default=None, repr=False, compare=False)
    embed: Embed | None = field(default=None, repr=False, compare=False)
    name = "raee"
    needs = None
    plans_from_texts = True

    def __post_init__(self):
        for name, least in (("k", 1), ("fallback_top", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must be a probability from 0 to 1, got {self.tau}")
        if self.include_embeddings and self.datastore is not None and self.datastore.exits[0] != 0:
            raise ValueError(
                f"include_embeddings needs values of layer 0, the datastore has exits {self.datastore.exits}; "
                f"collect it again with that exit"
            )

    def opened(self, folder: Path, config: dict, model) -> "Retrieval":
        from mini_ee.methods.raee_encoders import open_encoder

        return self.served(folder, open_encoder(config["retrieval"], model.backbone))

    def save(self, folder: Path) -> None:
        self.datastore.save(folder / "datastore")

    def served(self, folder: Path, embed: Embed) -> "Retrieval":
        return self.with_datastore(Datastore.load(folder / "datastore", embed.name), embed)

    def with_datastore(self, datastore: Datastore, embed: Embed) -> "Retrieval":
        """The same settings, able to plan. embed: Inputs -> (B, D), the encoder that the datastore was built with."""
        return replace(self, datastore=datastore, embed=embed)

    def plan(self, inputs: Inputs) -> np.ndarray:
        if self.datastore is None:
            raise ValueError("the rule raee plans from a datastore, this one has none; give it one by with_datastore")
        return self.chosen(self.datastore.search(self.embed(inputs), self.k))

    def plan_flops(self, inputs: Inputs) -> float:
        """What a row's embedding takes. The search is not in it: how many distances it computes, hnswlib does not say.

        A measured speed-up has the search in it.
        """
        return self.embed.flops(inputs) if hasattr(self.embed, "flops") else 0.0

    def of_batches(self, inputs: Iterable[Inputs]) -> Iterator[tuple[Inputs, Planned]]:
        """The next batch is planned while the model runs on this one."""
        return plan_ahead(self, inputs)

    def chosen(self, neighbours: Neighbours) -> np.ndarray:
        """Eq. 4 to 6 on neighbours of the datastore: exit index (B,)."""
        values = self.values_of(neighbours)
        return chosen_exit(exit_distribution(values, neighbours.distances, self.tau, self.fallback_top))

    def values_of(self, neighbours: Neighbours) -> np.ndarray:
        """(B, k, K); layer 0 counts where it may be an exit."""
        values = self.datastore.values[neighbours.rows]
        if self.datastore.exits[0] == 0 and not self.include_embeddings:
            values[:, :, 0] = 0
        return values

    def check(self, num_exits: int) -> None:
        if self.datastore is not None and len(self.datastore.exits) != num_exits:
            raise ValueError(
                f"the datastore was collected at {len(self.datastore.exits)} exits, the model has {num_exits}; "
                f"collect it again with this model"
            )

    def to_dict(self) -> dict:
        settings = super().to_dict()
        return {key: value for key, value in settings.items() if key not in ("datastore", "embed")}


RULES[Retrieval.name] = Retrieval


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method: of the rule, of the queries, and of the prompt."""

    k: int = option(12, "neighbours that vote", least=1)
    tau: float = option(0.9, "how sure a neighbour's exit must be to vote, Eq. 4", least=0, most=1)
    fallback_top: int = option(3, "best exits of a neighbour none of whose exits is that sure", least=0, metavar="N")
    include_embeddings: bool = option(False, "through a prompt: layer 0 is an exit too")
    layer: int = option(0, "after which the model's own states are the queries", least=0)
    encoder: Path | None = option(None, "a sentence encoder for the queries instead", metavar="DIR")
    shards: int = option(1, "indexes of the datastore, built and searched side by side", least=1, most=MOST_SHARDS)
    shots: int | None = option(None, "fine-tune a checkpoint on so many rows a class first", least=1, metavar="N")
    template: str | None = option(None, 'such as "{text} It was {mask}."; decoders: no {mask}', metavar="TEXT")
    words: tuple[str, ...] | None = option(None, "label words by class: negative=terrible,positive=great")
    prompts: Path | None = option(None, "JSON laid out as the built-in prompts.json", metavar="FILE")


def train(request, say):
    """Collect, and write the run. Arguments as of Method.train."""
    from mini_ee.methods.raee_collect import collect_run

    return collect_run(request, say)


def plan_ahead(rule: Rule, inputs: Iterable[Inputs]) -> Iterator[tuple[Inputs, Planned]]:
    """Each batch with its plan; while the caller runs the model on one, a thread plans the next.

    The paper lets both run in parallel (Section 3.2). A plan is waited for, so no result depends on who is first.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        waiting = None
        for batch in inputs:
            asked = batch, thread.submit(rule.plan, batch)
            if waiting:
                yield waiting[0], Planned(waiting[1].result())
            waiting = asked
        if waiting:
            yield waiting[0], Planned(waiting[1].result())


# The controls
def knn_labels(labels: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """The neighbours' labels (B, k), nearest first -> the class that most of them have (B,), the nearest of equals.

    weights: what each neighbour's vote counts (B, k), in place of 1. What the embeddings know without the exits.
    """
    weights = np.ones(labels.shape) if weights is None else weights
    same = labels[:, :, None] == labels[:, None, :]
    votes = (same * weights[:, None, :]).sum(axis=2)  # (B, k): the votes for each neighbour's class
    return np.take_along_axis(labels, votes.argmax(axis=1)[:, None], axis=1)[:, 0]


def best_single_exit(values: np.ndarray) -> int:
    """(N, K) collected values -> the exit that is right most often, the earliest of equals."""
    return int((values > 0).sum(axis=0).argmax())


def shuffled_plan(plan: np.ndarray, seed: int) -> np.ndarray:
    """The same exits given to rows by lot: the same mean depth, and nothing about the row."""
    return np.random.default_rng(seed).permutation(plan)


def earliest_right_exit(values: np.ndarray) -> np.ndarray:
    """The oracle: (N, K) values -> the first exit that is right (B,), the last where none is."""
    return chosen_exit((values > 0).astype(np.float64))


def controls(
    rule: Retrieval,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> dict[str, dict]:
    """What must stand beside RAEE's figure on the same N rows, under the keys of the JSON answers.

    knn_labels         the neighbours' labels alone; its layers are what the queries take, by operations
    knn_weighted       the same, each vote weighted by Eq. 5 as RAEE's are
    best_single_layer  the one exit that is right most often on the collected rows
    random_layers      RAEE's exits given to rows by lot: the mean over LOTS draws, and `spread`, the standard deviation
    oracle             the earliest exit that is right
    full_model         the last exit

    recorded: what every exit says of these rows, as `record` returns it.
    """
    queries, cost = _queries(rule, encoded, batch_size)
    near = rule.datastore.search(queries, rule.k)
    plan, last = rule.chosen(near), len(recorded.segments.exits) - 1
    single = best_single_exit(rule.datastore.values)
    right = (recorded.logits.argmax(axis=2) == labels[:, None]).astype(np.float32)

    def planned(exit_index: np.ndarray) -> dict:
        return summary(recorded.replay(Planned(exit_index)), recorded, task, labels)

    def voted(weights: np.ndarray | None) -> dict:
        share = cost / recorded.full_flops
        depth = {"mean_layers": share * recorded.segments.exits[-1], "flops_ratio": share}
        return task.score(knn_labels(rule.datastore.labels[near.rows], weights), labels) | depth

    drawn = [planned(shuffled_plan(plan, seed + lot)) for lot in range(LOTS)]
    scores = {name: float(np.mean([each[name] for each in drawn])) for name in task.score(labels, labels)}
    return {
        "knn_labels": voted(None),
        "knn_weighted": voted(neighbour_weights(near.distances)),
        "best_single_layer": planned(np.full(len(labels), single)) | {"layer": recorded.segments.exits[single]},
        "random_layers": scores
        | {"spread": float(np.std([each["score"] for each in drawn])), "mean_layers": drawn[0]["mean_layers"]},
        "oracle": planned(earliest_right_exit(right)),
        "full_model": planned(np.full(len(labels), last)),
    }


def ablation(
    rule: Retrieval,
    recorded: Record,
    encoded: Encoded,
    task: Task,
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
) -> list[dict]:
    """RAEE's figure on N rows by k (Table 3) and by how much of the datastore there is (Table 4): one dict for each.

    database: the share of the collected rows, drawn with the seed, or WITHOUT those that the full model gets wrong
    (Table 2). recorded: what every exit says of the N rows.
    """
    store = rule.datastore
    queries, cost = _queries(rule, encoded, batch_size)
    order = np.random.default_rng(seed).permutation(len(store))
    parts = {f"{share:.0%}": order[: max(1, round(share * len(store)))] for share in SHARES}
    parts[WITHOUT] = np.flatnonzero(full_model_is_right(store.values))
    points = []
    for name, rows in parts.items():
        if not len(rows):
            continue
        part = store.take(rows) if len(rows) < len(store) else store
        near = part.search(queries, max(KS))
        for k in KS:
            plan = replace(rule, datastore=part).chosen(Neighbours(near.rows[:, :k], near.distances[:, :k]))
            point = summary(recorded.replay(Planned(plan, cost)), recorded, task, labels)
            points.append({"database": name, "rows": len(part), "k": k} | point)
    return points


def profile_distances(
    rule: Retrieval, recorded: Record, encoded: Encoded, labels: np.ndarray, batch_size: int, seed: int = 0
) -> dict[str, float]:
    """Fig. 2 as numbers: how far the values of N rows lie from the mean of their DRAWN neighbours', and from that of as
    many rows drawn by lot: the mean of |v - p| over rows and layers. recorded: what every exit says of the N rows.
    """
    own, store = exit_values(recorded.logits, labels), rule.datastore
    near = store.search(_queries(rule, encoded, batch_size)[0], DRAWN).rows
    lot = np.random.default_rng(seed).integers(len(store), size=near.shape)
    distances = (np.abs(store.values[rows].mean(axis=1) - own).mean() for rows in (near, lot))
    return dict(zip(("neighbours", "by lot"), map(float, distances)))


def retrieved(rule: Retrieval, encoded: Encoded, batch_size: int) -> list[dict]:
    """What the datastore has nearest to each row, and where that makes it leave: Tables 9 and 10, one dict a row.

    layer: where the row leaves. neighbours, nearest first: text, label, weight by Eq. 5, and the layers of Eq. 4 that
    it votes for.
    """
    store, queries = rule.datastore, _queries(rule, encoded, batch_size)[0]
    near, exits = store.search(queries, rule.k), np.array(store.exits)
    weights = neighbour_weights(near.distances)
    votes = passing_values(rule.values_of(near), rule.tau, rule.fallback_top)
    return [
        {
            "layer": int(exits[left]),
            "neighbours": [
                {
                    "text": store.texts[row],
                    "label": int(store.labels[row]),
                    "weight": float(weight),
                    "votes": exits[vote > 0].tolist(),
                }
                for row, weight, vote in zip(*each)
            ],
        }
        for left, *each in zip(rule.chosen(near), near.rows, weights, votes)
    ]


def _queries(rule: Retrieval, encoded: Encoded, batch_size: int) -> tuple[np.ndarray, float]:
    """The embeddings of all rows, (N, D), and what a plan costs for a row in the mean."""
    queries, flops = np.empty((len(encoded), rule.datastore.dimension), np.float32), 0.0
    for rows in batches(encoded, batch_size):
        inputs = encoded.batch(rows)
        queries[rows] = rule.embed(inputs)
        flops += len(rows) * rule.plan_flops(inputs)
    return queries, flops / len(encoded)


METHOD = Method(
    Config,
    units=("rows", "prompts"),
    exits=None,
    classes_only=True,
    train=train,
    controls=controls,
    ablation=ablation,
    neighbours=retrieved,
    defaults={"rows": {"lr": 3e-4, "epochs": 15, "batch_size": 8}},  # of few shots; LM-BFF's models are larger, lr 1e-5
    lacks=("pool", "head", "head_lr", "max_loss", "confidence"),
)
