"""RAEE (Huang et al. 2024, arXiv:2405.15198): nearest neighbours in a datastore choose the exit before the model runs.

Paper: Huang et al., RAEE: A Robust Retrieval-Augmented Early Exit Framework for Efficient Inference, 2024,
arXiv:2405.15198. The equations as tests: tests/spec/test_3_raee.py.

Symbols:    x, y       an example and its class
            l or j     one of the K exits (the paper's m layers)
            z          the exit that is chosen for x
            $p_i^j$    the probability of the right class at exit j for the collected example i, 0 if exit j is wrong:
                       `values` (N, K) of all N collected examples; (B, k, K) of the k neighbours $v_1 ... v_k$ of each
                       row of a batch
            distances  (B, k) from a query to its neighbours, nearest first
            $tau$      the least $p_i^j$ that votes
Training:   Algorithm 3.1: run every exit on examples whose class is known; the datastore stores their values and their
            embeddings (raee_datastore.py). raee_collect.py selects the examples and writes the run.
Inference:  Algorithm 3.2, the rule Retrieval: embed x, retrieve its k nearest neighbours, choose the exit by Eq. 4 to 6

Deviations from the paper, and what it leaves open:
1. Probabilities are over classes, or over the label words of a prompt as in the paper's Fig. 2; line 8 of Algorithm 3.1
   takes them over the vocabulary.
2. If no exit of a neighbour reaches tau, its three best correct exits vote (`fallback_top` 3), as in the authors'
   code; 0 is Eq. 4 as printed, where such a neighbour does not vote.
3. A query is the mean of the model's own token embeddings (`layer` 0), or the embedding of a sentence encoder
   (`encoder`); the paper has both (raee_encoders.py).
4. The paper does not specify the distance of Eq. 5; here it is the squared L2 distance of vectors of length 1.
5. A model that is read through a prompt may first be fine-tuned on a few examples (`shots`); the paper's is not.

This file imports no torch at the top, because the runtime without torch uses it to choose exits.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mini_ee.lab.data.settings import Settings, check_options, option
from mini_ee.lab.data.tokenizer import Encoded, Inputs
from mini_ee.lab.methods.raee_controls import ablation, controls, retrieved
from mini_ee.lab.methods.raee_datastore import Datastore, Embed, Neighbours
from mini_ee.lab.methods.raee_shards import MOST_SHARDS
from mini_ee.lab.recording import record
from mini_ee.lab.rules import RULES, Planned, Rule
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.method import Method


# ---- Algorithm 3.1: collect ----
def exit_values(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Lines 8 to 11: $p_i^j$, the probability of the right class if exit j predicts it, else 0.

    logits (N, K, C) of every exit, labels (N,) -> values (N, K) float32.
    """
    num_classes = logits.shape[2]
    if len(labels) != len(logits) or not np.isin(labels, range(num_classes)).all():
        raise ValueError(
            f"expected {len(logits)} labels from 0 to {num_classes - 1}, "
            f"found {len(labels)}, such as {np.unique(labels)[:5].tolist()}"
        )
    logits = logits.astype(np.float64)
    odds = np.exp(logits - logits.max(axis=2, keepdims=True))  # at most 1: nothing overflows
    right = logits.argmax(axis=2) == np.asarray(labels)[:, None]
    return np.where(right, odds.max(axis=2) / odds.sum(axis=2), 0).astype(np.float32)


def collect(
    segments: Segments, encoded: Encoded, labels: np.ndarray, batch_size: int, progress: str | None = None
) -> np.ndarray:
    """Run every exit on N examples: values (N, K). Heads that were trained on them would all look right."""
    return exit_values(record(segments, encoded, batch_size, progress).logits, labels)


# ---- Algorithm 3.2: choose the exit ----
def neighbour_weights(distances: np.ndarray) -> np.ndarray:
    """Eq. 5: squared distances (B, k) -> (B, k) float64.

    $$P(v_i | x) = min_j distance(v_j, x) / distance(v_i, x)$$

    The nearest neighbour weighs 1. In the limit of distance 0, neighbours at distance 0 weigh 1 and all others 0.
    """
    distances = np.asarray(distances, np.float64)
    nearest = distances.min(axis=1, keepdims=True)
    # 0 / 0 keeps the 1 of `out`. If a distance is 0, `nearest` is 0, and the positive distances give 0.
    return np.divide(nearest, distances, out=np.ones_like(distances), where=distances > 0)


def passing_values(values: np.ndarray, tau: float, fallback_top: int = 0) -> np.ndarray:
    """The inner sum of Eq. 4, $1(p_i^l >= tau) p_i^l$: values (B, k, K) of the neighbours -> (B, k, K).

    fallback_top: if no exit of a neighbour passes, this many of its best correct exits do, the earlier of two equals
    first (3 in the authors' code, 0 in the paper).
    """
    passes = (values > 0) & (values >= tau)  # an exit of value 0 is wrong: it never votes, even if tau is 0
    if fallback_top:
        # argsort of argsort is the rank: 0 for the exit with the largest value of a neighbour
        rank = np.argsort(np.argsort(-values, axis=2, kind="stable"), axis=2)
        passes |= (rank < fallback_top) & ~passes.any(axis=2, keepdims=True)
    return np.where(passes, values, 0)


def exit_distribution(values: np.ndarray, distances: np.ndarray, tau: float = 0.9, fallback_top: int = 0) -> np.ndarray:
    """Eq. 4, not normalised, as in the paper.

    $$P(z = l | x) = sum_i P(v_i | x) 1(p_i^l >= tau) p_i^l$$

    values (B, k, K) and squared distances (B, k) of the k neighbours -> (B, K) float64.
    """
    votes = neighbour_weights(distances)[:, :, None] * passing_values(values, tau, fallback_top)
    return np.sort(votes, axis=1).sum(axis=1)  # sorted: so rounding does not depend on the order of the neighbours


def chosen_exit(distribution: np.ndarray) -> np.ndarray:
    """Eq. 6, $f(x) = argmax_l P(z = l | x)$: (B, K) -> exit index (B,).

    The earliest of equal exits. If no neighbour votes, the last exit, m.
    """
    last = distribution.shape[1] - 1
    return np.where(distribution.any(axis=1), distribution.argmax(axis=1), last)


# ---- The rule ----
@dataclass(frozen=True)
class Retrieval(Rule):
    """Exit where the k nearest collected examples vote most: their weighted probabilities of the right label, summed.

    Algorithm 3.2, lines 2 to 8. A probability below tau does not count (Eq. 4).

    include_embeddings: layer 0 is an exit too, if the datastore has values for it. The settings are in a run's
    config.json; `with_datastore` adds the datastore and the encoder of the queries, which `plan` needs.
    """

    k: int = option(12, "number of neighbours that vote", least=1)
    tau: float = option(0.9, "least probability at which a neighbour's exit votes, Eq. 4", least=0, most=1)
    fallback_top: int = option(
        0, "number of best correct exits that vote if no exit of a neighbour reaches tau", least=0, metavar="N"
    )
    include_embeddings: bool = False
    datastore: Datastore | None = field(default=None, repr=False, compare=False)
    embed: Embed | None = field(default=None, repr=False, compare=False)
    name = "raee"
    needs = None
    plans_from_texts = True

    def __post_init__(self):
        check_options(self)
        if self.include_embeddings and self.datastore is not None and self.datastore.exits[0] != 0:
            raise ValueError(
                f"include_embeddings needs values of layer 0, the datastore has exits {self.datastore.exits}; "
                f"collect it again with --include-embeddings"
            )

    def plan(self, inputs: Inputs) -> np.ndarray:
        if self.datastore is None or self.embed is None:
            raise ValueError("the rule raee plans from a datastore, this one has none; give it one with with_datastore")
        return self.chosen(self.datastore.search(self.embed(inputs), self.k))

    def chosen(self, neighbours: Neighbours) -> np.ndarray:
        """Eq. 4 to 6 on neighbours from the datastore: exit index (B,)."""
        values = self._values_of(neighbours)
        return chosen_exit(exit_distribution(values, neighbours.distances, self.tau, self.fallback_top))

    def weights_and_votes(self, neighbours: Neighbours) -> tuple[np.ndarray, np.ndarray]:
        """The two factors in the sum of Eq. 4: weights (B, k) by Eq. 5, and votes of the neighbours (B, k, K)."""
        values = passing_values(self._values_of(neighbours), self.tau, self.fallback_top)
        return neighbour_weights(neighbours.distances), values

    def _values_of(self, neighbours: Neighbours) -> np.ndarray:
        """Values of the neighbours, (B, k, K); 0 at layer 0 unless it is an exit."""
        assert self.datastore is not None  # the neighbours come from it
        values = self.datastore.values[neighbours.rows]
        if self.datastore.exits[0] == 0 and not self.include_embeddings:
            values[:, :, 0] = 0
        return values

    def of_batches(self, inputs: Iterable[Inputs]) -> Iterator[tuple[Inputs, Planned]]:
        """Each batch with its plan; the next batch is planned while the model runs on this one."""
        return plan_ahead(self, inputs)

    def plan_flops(self, inputs: Inputs) -> float:
        """FLOPs of the embedding of a row. The search is not counted: hnswlib does not report how many distances it
        computes. A measured speed-up includes it.
        """
        flops = getattr(self.embed, "flops", None)
        return flops(inputs) if flops else 0.0

    def check(self, num_exits: int) -> None:
        if self.datastore is not None and len(self.datastore.exits) != num_exits:
            raise ValueError(
                f"the datastore was collected at {len(self.datastore.exits)} exits, the model has {num_exits}; "
                f"collect it again with this model"
            )

    # ---- On disk ----
    def to_dict(self) -> dict:
        settings = super().to_dict()
        return {key: value for key, value in settings.items() if key not in ("datastore", "embed")}

    def with_datastore(self, datastore: Datastore, embed: Embed) -> "Retrieval":
        """The same settings with a datastore. embed: Inputs -> (B, D), the encoder of the datastore."""
        return replace(self, datastore=datastore, embed=embed)

    def opened(self, folder: Path, config: dict, model: Any) -> "Retrieval":
        from mini_ee.lab.methods.raee_encoders import open_encoder  # needs torch

        return self.served(folder, open_encoder(config["retrieval"], model.backbone))

    def save(self, folder: Path) -> None:
        assert self.datastore is not None
        self.datastore.save(folder / "datastore")

    def served(self, folder: Path, embed: Any) -> "Retrieval":
        """With the datastore in a run's folder. embed: an Embed with the `name` of its encoder."""
        return self.with_datastore(Datastore.load(folder / "datastore", embed.name), embed)


RULES[Retrieval.name] = Retrieval


def plan_ahead(rule: Rule, inputs: Iterable[Inputs]) -> Iterator[tuple[Inputs, Planned]]:
    """Each batch with its plan; while the caller runs the model on one, a thread plans the next.

    The paper runs both in parallel (Section 3.2). Every plan is waited for, so no result depends on timing.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        plans: Iterator[Any] = ((batch, thread.submit(rule.plan, batch)) for batch in inputs)
        for (batch, plan), _ in pairwise(chain(plans, [None])):  # reads one ahead: the next plan is submitted already
            yield batch, Planned(plan.result())


# ---- The method ----
@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method: of the rule, of the queries, and of the prompt."""

    k: int = option(12, "number of neighbours that vote", least=1)
    tau: float = option(0.9, "least probability at which a neighbour's exit votes, Eq. 4", least=0, most=1)
    fallback_top: int = option(
        3, "number of best correct exits that vote if no exit of a neighbour reaches tau", least=0, metavar="N"
    )
    include_embeddings: bool = option(False, "add an exit at layer 0, the embeddings; it needs a prompt")
    layer: int = option(0, "layer of the model whose states are the queries; 0 is the embeddings", least=0)
    encoder: Path | None = option(
        None, "folder of a sentence encoder for the queries, in place of --layer", metavar="DIR"
    )
    shards: int = option(
        1, "number of indexes of the datastore, built and searched in parallel", least=1, most=MOST_SHARDS
    )
    shots: int | None = option(
        None, "number of examples per class on which the checkpoint is fine-tuned first", least=1, metavar="N"
    )
    template: str | None = option(
        None, 'template of the prompt, such as "{text} It was {mask}."; decoders: without {mask}', metavar="TEXT"
    )
    words: tuple[str, ...] | None = option(None, "label word of each class: negative=terrible,positive=great")
    prompts: Path | None = option(
        None, "JSON file of prompts, in the format of the built-in prompts.json", metavar="FILE"
    )


def train(request: Any, say: Callable[[str], None]) -> Any:
    """Algorithm 3.1: collect, and write the run. Arguments as in Method.train; their types need torch."""
    from mini_ee.lab.methods.raee_collect import collect_run  # needs torch

    config = request.config
    rule = Retrieval(config.k, config.tau, config.fallback_top, config.include_embeddings)
    return collect_run(request, rule, collect, say)


METHOD = Method(
    Config,
    units=("rows", "prompts"),
    exits=None,
    no_exit_0="which --include-embeddings adds to the exits of a prompt",
    classes_only=True,
    train=train,
    controls=controls,
    ablation=ablation,
    neighbours=retrieved,
    # for few-shot fine-tuning; LM-BFF's models are larger, with lr 1e-5
    defaults={"rows": {"lr": 3e-4, "epochs": 15, "batch_size": 8}},
    lacks=("pool", "head", "head_lr", "max_loss", "confidence"),
)
