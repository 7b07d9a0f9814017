"""Cosine predictor (Xin et al. 2021, EACL): maps on a frozen encoder, and a module that predicts how good each is.

BERxiT's learning-to-exit module, for embeddings: it predicts the cosine c_k of exit k to the full embedding from the
pooled hidden state s_k, and a text exits if the prediction is above the cut of the rule `policy`.

    loss = sum over k < K of mean over texts of (sigmoid(f_k(s_k)) - c_k)^2

Symbols:   f_k: a network of two layers for exit k; c_k: 1 - the loss of the map of exit k, see embedding_stages.py.

Paper: Xin et al., BERxiT: Early Exiting for BERT with Better Fine-Tuning and Extension to Regression, EACL 2021,
2021.eacl-main.8.

Deviations:
1. BERxiT has one linear map for all exits. Cosines differ more between exits than between texts, so each exit has a
   network of its own.
2. The encoder is frozen. First the maps are trained, then the networks.
3. The default rule has the lowest cut with which the mean cosine on held-out texts is at least --min-cosine.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.exits.embedding_exits import EmbeddingExits, reached_cosines
from mini_ee.lab.recording import Record
from mini_ee.lab.rules import Never, Policy, Rule
from mini_ee.lab.sweep import from_loose_to_strict
from mini_ee.lab.training.embedding_stages import full_embeddings, maps_stage
from mini_ee.lab.training.method import Method, NoConfig
from mini_ee.lab.training.policies import POLICY_WIDTH, policy_network
from mini_ee.lab.training.stages import Batch, Stage

CUTS = 50  # cuts among which the default rule is chosen


class Predictors(nn.Module):
    """One network per exit but the last."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        self.networks = nn.ModuleList(policy_network(width, 0.5) for _ in exits[:-1])
        self.flops = 2.0 * width * POLICY_WIDTH + 2.0 * POLICY_WIDTH  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of the predicted cosine: (..., D) -> (...)."""
        return self.networks[k](state)[..., 0]


def prediction_loss(model: EmbeddingExits, batch: Batch) -> Tensor:
    """The equation above."""
    assert batch.states is not None and batch.targets is not None
    before_last = enumerate(batch.states[:-1])
    cosines = [F.cosine_similarity(model.classify(k, state), batch.targets, dim=1) for k, state in before_last]
    predicted = torch.sigmoid(model.exit_logits(batch.states))
    return ((predicted - torch.stack(cosines, dim=1).detach()) ** 2).mean(dim=0).sum()


@torch.no_grad()
def minus_loss(model: EmbeddingExits, held: Any) -> dict[str, float]:
    """Minus the loss on held-out texts. held: EmbeddingStates."""
    batch = Batch((), held.labels, list(held.states.unbind(dim=1)), full_embeddings(model, held))
    return {"score": -prediction_loss(model, batch).item()}


def recipe(model: EmbeddingExits, config: NoConfig) -> list[Stage]:
    """The maps, then the networks."""
    if len(model.exits) == 1:
        return []
    predictors = Stage(
        name="predictors",
        trainable=lambda name: name.startswith("policy."),
        loss=prediction_loss,
        on_states=True,
        validate=minus_loss,
        make_targets=full_embeddings,
    )
    return [maps_stage(), predictors]


def loosest(recorded: Record, least_cosine: float) -> Rule:
    """The lowest cut at which the mean cosine of the recorded texts is at least `least_cosine`; else never."""
    rules = from_loose_to_strict(Policy(), recorded, CUTS)
    means = (float(np.mean(reached_cosines(recorded, rule))) for rule in rules)
    return next((rule for rule, mean in zip(rules, means) if mean >= least_cosine), Never())


METHOD = Method(
    recipe=recipe,
    units=("embeddings",),
    policy=Predictors,
    exits=None,
    defaults={"embeddings": {"head_lr": 1e-3, "epochs": 20}},
    lacks=("lr",),
    default_rule=loosest,
)
