"""RAEE (Huang et al. 2024, arXiv:2405.15198): nearest neighbours in a datastore choose the exit before the model runs.

The equations with their symbols: mini_ee/raee.py, as tests: tests/spec/test_3_raee.py. Here they choose the exits of
any model, with queries of its own or of another encoder, from a datastore on disk; without torch in a served model.

Training:   Algorithm 3.1: run every exit on examples whose class is known; the datastore stores their values and their
            embeddings (raee_datastore.py). raee_collect.py selects the examples and writes the run.
Inference:  Algorithm 3.2, the rule Retrieval: embed x, retrieve its k nearest neighbours, choose the exit by Eq. 4 to 6

Deviations from the paper, and what it leaves open:
1. Probabilities are over classes, or over the label words of a prompt as in the paper's Fig. 2.
2. A query is the mean of the states of any layer of the model, or the embedding of a sentence encoder (`encoder`); the
   paper has both (raee_encoders.py).
3. A model that is read through a prompt may first be fine-tuned on a few examples (`shots`); the paper's is not.
The others are those of mini_ee/raee.py.
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
from mini_ee.lab.methods.raee_datastore import MOST_SHARDS, Datastore, Embed, Neighbours
from mini_ee.lab.recording import record
from mini_ee.lab.rules import RULES, Planned, Rule
from mini_ee.lab.segments import Segments
from mini_ee.lab.training.method import Method
from mini_ee.raee import (
    FALLBACK_TOP,
    NEIGHBOURS,
    TAU,
    chosen_exit,
    exit_distribution,
    exit_values,
    neighbour_weights,
    passing_values,
)


# ---- Algorithm 3.1: collect ----
def collect(
    segments: Segments, encoded: Encoded, labels: np.ndarray, batch_size: int, progress: str | None = None
) -> np.ndarray:
    """Run every exit on N examples: values (N, K). Heads that were trained on them would all look right."""
    return exit_values(record(segments, encoded, batch_size, progress).logits, labels)


# ---- Algorithm 3.2: choose the exit ----
@dataclass(frozen=True)
class Retrieval(Rule):
    """Exit where the k nearest collected examples vote most: their weighted probabilities of the right label, summed.

    Algorithm 3.2, lines 2 to 8. A probability below tau does not count (Eq. 4).

    include_embeddings: layer 0 is an exit too, if the datastore has values for it. The settings are in a run's
    config.json; `with_datastore` adds the datastore and the encoder of the queries, which `plan` needs.
    """

    k: int = option(NEIGHBOURS, "number of neighbours that vote", least=1)
    tau: float = option(TAU, "least probability at which a neighbour's exit votes, Eq. 4", least=0, most=1)
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

    def opened(self, folder: Path, source: dict, backbone: Any) -> "Retrieval":
        """With the datastore in a run's folder. source: `retrieval` of its config.json. It needs torch."""
        from mini_ee.lab.methods.raee_encoders import open_encoder

        return self.served(folder, open_encoder(source, backbone))

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

    k: int = option(NEIGHBOURS, "number of neighbours that vote", least=1)
    tau: float = option(TAU, "least probability at which a neighbour's exit votes, Eq. 4", least=0, most=1)
    fallback_top: int = option(
        FALLBACK_TOP,
        "number of best correct exits that vote if no exit of a neighbour reaches tau",
        least=0,
        metavar="N",
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

    return collect_run(request, say)


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
