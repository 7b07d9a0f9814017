"""RAEE (Huang et al. 2024): the nearest neighbours of an example choose its exit before the model runs.

Paper: Lianming Huang et al., RAEE: A Robust Retrieval-Augmented Early Exit Framework for Efficient Inference, 2024,
arXiv:2405.15198.

    Eq. 1   P(y | x) = P(y | h_f(x)): the prediction is that of exit f(x), which loop.early_exit runs to

    Algorithm 3.1   collect: run every exit on labelled examples, and index them by key:
        Eq. 2   keys: the embeddings of the examples: own_embedding
        Eq. 3   values: p_i^j, the probability of the right class at exit j for example i, 0 if j is wrong: exit_values
    Algorithm 3.2   Retrieval.plan: embed x, retrieve its k neighbours v_i, and take the exit for which they vote most:
        Eq. 4   P(z = l | x) = sum_i P(v_i | x) 1(p_i^l >= tau) p_i^l: exit_distribution, passing_values
        Eq. 5   P(v_i | x) = min_j d(v_j, x) / d(v_i, x): neighbour_weights
        Eq. 6   f(x) = argmax_l P(z = l | x), the earliest of equal exits: chosen_exit

Symbols: l or j = 1 .. m the exits, here 0 .. K - 1; values (N, K): p_i^j of the N collected examples, (B, k, K) of the
k neighbours of each row of a batch; distances (B, k).

Deviations from the paper, and what it leaves open, with the test in tests/spec/test_3_raee.py:
1. The paper trains nothing: a pretrained model reads each example through a prompt, and its LM head predicts after each
   layer, by line 8 of Algorithm 3.1 over the vocabulary, by section 2 over the label tokens. Here each exit has a head
   over classes (test_algorithm_3_1_reads_every_exit_of_the_model), and the script fine-tunes the BERT and the heads, by
   the mean cross-entropy over all exits. The lab has the paper's prompts: `mini-ee train raee --model DIR --task DIR`.
2. If no exit of a neighbour reaches tau, its three best correct exits vote, as in the authors' code; fallback_top = 0
   gives Eq. 4 as printed (test_eq4_if_no_exit_of_a_neighbour_reaches_tau_its_best_correct_exits_vote).
3. If no neighbour votes, all exits are equal in Eq. 6, and the earliest would be taken. Here it is the last
   (test_eq6_if_no_neighbour_votes_the_example_runs_through_all_layers).
4. The paper leaves open how the embeddings of a text's tokens become one key, whether a key has length 1, and what the
   distance is; FAISS is an example of an index. Here a key is their mean, of length 1, the distance the squared L2
   distance, and the index hnswlib's (test_algorithm_3_2_is_eq_4_to_6_on_the_k_nearest).

Collected examples must not have trained the exits: on those, every exit would look right.
The control: the vote of the neighbours' labels needs no exit, and no layer. RAEE has to beat it.

A served model chooses exits with this file, on a machine without torch: only functions that train or collect import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mini_ee.rules import Rule

if TYPE_CHECKING:
    from torch import Tensor

    from mini_ee.bert import Exits
    from mini_ee.data import Inputs, Rows

NEIGHBOURS, TAU, FALLBACK_TOP = 12, 0.9, 3
M, EF_CONSTRUCTION, EF = 16, 400, 256  # of hnswlib: links of an element; elements compared when adding, and searching

REPORTED = """
The paper (RoBERTa-large, zero-shot, eight tasks): 54.05 on average for the full model, 63.41 for RAEE (Table 1) after
15.3 of 24 layers (Table 8). Its neighbours are labelled examples, so RAEE has to beat the control."""


# ---- Algorithm 3.1: collect ----
def exit_values(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Lines 8 to 11 of Algorithm 3.1, $p_i^j$: logits (N, K, C) of every exit, labels (N,) -> (N, K) float32."""
    classes = logits.shape[2]
    if len(labels) != len(logits) or not np.isin(labels, range(classes)).all():
        few = np.unique(labels)[:5].tolist()
        raise ValueError(f"expected {len(logits)} labels from 0 to {classes - 1}, found {len(labels)}, such as {few}")
    logits = logits.astype(np.float64)
    odds = np.exp(logits - logits.max(axis=2, keepdims=True))  # at most 1: nothing overflows
    right = logits.argmax(axis=2) == np.asarray(labels)[:, None]
    return np.where(right, odds.max(axis=2) / odds.sum(axis=2), 0).astype(np.float32)


# ---- Algorithm 3.2: choose the exit ----
def neighbour_weights(distances: np.ndarray) -> np.ndarray:
    """Eq. 5, $P(v_i | x)$: squared distances (B, k) -> (B, k) float64. The nearest neighbour weighs 1.

    In the limit of distance 0, neighbours at distance 0 weigh 1 and all others 0.
    """
    distances = np.asarray(distances, np.float64)
    nearest = distances.min(axis=1, keepdims=True)
    return np.divide(nearest, distances, out=np.ones_like(distances), where=distances > 0)  # 0 / 0 keeps the 1


def passing_values(values: np.ndarray, tau: float, fallback_top: int = 0) -> np.ndarray:
    """The inner factor of Eq. 4, $1(p_i^l >= tau) p_i^l$: (B, k, K) -> (B, k, K).

    fallback_top: how many of its best correct exits vote for a neighbour none of whose exits passes.
    """
    passes = (values > 0) & (values >= tau)  # an exit of value 0 is wrong: it never votes, even if tau is 0
    if fallback_top:
        rank = np.argsort(np.argsort(-values, axis=2, kind="stable"), axis=2)  # 0 for a neighbour's largest value
        passes |= (rank < fallback_top) & ~passes.any(axis=2, keepdims=True)
    return np.where(passes, values, 0)


def exit_distribution(values: np.ndarray, distances: np.ndarray, tau: float = TAU, fallback_top: int = 0) -> np.ndarray:
    """Eq. 4, $P(z = l | x)$, not normalised, as in the paper: values (B, k, K), distances (B, k) -> (B, K)."""
    votes = neighbour_weights(distances)[:, :, None] * passing_values(values, tau, fallback_top)
    return np.sort(votes, axis=1).sum(axis=1)  # sorted: so rounding does not depend on the order of the neighbours


def chosen_exit(distribution: np.ndarray) -> np.ndarray:
    """Eq. 6, $f(x)$: (B, K) -> exit index (B,). The earliest of equal exits; the last exit if no neighbour votes."""
    return np.where(distribution.any(axis=1), distribution.argmax(axis=1), distribution.shape[1] - 1)


# ---- The rule ----
def unit(vectors: np.ndarray) -> np.ndarray:
    """(N, D), each of length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Retrieval(Rule):
    """Plans the exit of each row: Algorithm 3.2 on an index of the collected examples."""

    needs = None

    def __init__(
        self,
        embed: Callable[[Inputs], np.ndarray],
        vectors: np.ndarray,
        values: np.ndarray,
        k: int = NEIGHBOURS,
        tau: float = TAU,
        fallback_top: int = FALLBACK_TOP,
    ):
        """embed: a batch -> its queries (B, D). vectors (N, D), values (N, K): of the collected examples."""
        try:
            import hnswlib
        except ImportError:
            raise ValueError("RAEE searches with hnswlib, which is not installed: pip install hnswlib") from None
        self.embed, self.values, self.tau, self.fallback_top = embed, values, tau, fallback_top
        self.k = min(k, len(values))
        self.index = hnswlib.Index("l2", vectors.shape[1])
        self.index.init_index(len(vectors), M=M, ef_construction=EF_CONSTRUCTION, random_seed=0)
        self.index.add_items(unit(vectors), num_threads=1)  # one thread: the same index each time
        self.index.set_ef(max(EF, self.k))

    def neighbours(self, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
        """Line 7 of Algorithm 3.2: row numbers of the k nearest collected examples, and distances, (B, k) each."""
        rows, distances = self.index.knn_query(unit(self.embed(inputs)), self.k)
        return rows.astype(np.int64), distances

    def plan(self, inputs: Inputs) -> np.ndarray:
        rows, distances = self.neighbours(inputs)
        return chosen_exit(exit_distribution(self.values[rows], distances, self.tau, self.fallback_top))


def own_embedding(model: Exits) -> Callable[[Inputs], Tensor]:
    """A batch -> (B, D): the mean of the model's token embeddings, which `start` computes again.

    The report counts neither this nor the search.
    """
    import torch

    @torch.no_grad()
    def embed(inputs: Inputs) -> Tensor:
        weights = inputs.mask[..., None].float()
        return (model.bert.embed(inputs) * weights).sum(1) / weights.sum(1)

    return embed


def collect(model: Exits, data: Rows, **settings) -> Retrieval:
    """Algorithm 3.1: run every exit on examples that trained none of them. settings: k, tau, fallback_top."""
    from mini_ee.data import of_all

    embed = own_embedding(model)
    values = exit_values(of_all(model, data).numpy(), data.labels.numpy())
    return Retrieval(lambda inputs: embed(inputs).numpy(), of_all(embed, data).numpy(), values, **settings)


def vote_of_labels(rule: Retrieval, collected: Rows, data: Rows) -> float:
    """The control: the accuracy of the majority of the neighbours' labels, without any exit."""
    rows, _ = rule.neighbours(data.batch(range(len(data))))
    labels = collected.labels.numpy()[rows]  # (N, k)
    counts = np.stack([(labels == label).sum(axis=1) for label in range(data.outputs)], axis=1)
    return float((counts.argmax(axis=1) == data.labels.numpy()).mean())


# ---- The script ----
@dataclass
class RAEEOptions:
    """Options of the script. It repeats those of train.Options, because importing train.py would import torch."""

    model: str = field(default="bert", metadata={"help": "folder of a BERT of Hugging Face, or the built-in one"})
    task: str = field(default="", metadata={"help": "TSV, CSV or JSONL file, or a folder with train and dev files"})
    rows: int = field(default=4000, metadata={"help": "most training rows; three quarters are collected"})
    exits: tuple[int, ...] = field(default=(), metadata={"help": "exit layers, up to the last (every layer)"})
    epochs: int = field(default=4, metadata={"help": "epochs of the training of the BERT and its exits"})
    lr: float = field(default=4e-4, metadata={"help": "learning rate of the BERT and its exits"})
    neighbours: int = field(default=NEIGHBOURS, metadata={"help": "neighbours that vote"})
    tau: float = field(default=TAU, metadata={"help": "least probability at which a neighbour's exit votes"})
    seed: int = field(default=0, metadata={"help": "random seed"})
    picture: str = field(default="", metadata={"help": "file of the picture; by default, one named after the paper"})
    out: str = field(default="", metadata={"help": "new folder, for model.onnx, which stops by itself"})


def main(options: RAEEOptions) -> tuple[Exits, Rule, Rows]:
    """Train the BERT with its exits on a quarter of the rows, collect on the others."""
    import torch

    from mini_ee.bert import Bert, Exits
    from mini_ee.data import open_task, report, usual_rules
    from mini_ee.train import task_loss, train

    torch.manual_seed(options.seed)
    bert = Bert.load(options.model)
    rows, test = open_task(options.task, options.model, len(bert.position.weight), options.rows, options.seed)
    if not rows.names:
        raise ValueError("RAEE needs classes: a value is the probability of the right class")
    learn, collected = rows.split(0.25, 0.75)
    model = Exits(bert, options.exits or range(1, len(bert.layers) + 1), rows.outputs).eval()
    print(f"RAEE: BERT and exits learn from {len(learn)} rows; values are collected on {len(collected)} others")

    def loss(batch: Tensor) -> Tensor:
        logits = model(learn.batch(batch.numpy()))
        return task_loss(logits.flatten(0, 1), learn.labels[batch].repeat_interleave(len(model.exits)))

    train({model: options.lr}, len(learn), loss, options.epochs)
    rules = {"RAEE": (rule := collect(model, collected, k=options.neighbours, tau=options.tau))} | usual_rules(rows)
    control = vote_of_labels(rule, collected, test)
    print(f"control: the vote of the neighbours' labels has an accuracy of {control:.3f}, and runs no layer")
    report(model, test, rules, "RAEE", options.picture or "raee.png")
    print(REPORTED)
    return model, rule, test


if __name__ == "__main__":
    from mini_ee.train import script

    script(main, RAEEOptions, __doc__)
