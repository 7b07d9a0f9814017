"""PALBERT (Balagansky and Gavrilov 2022, arXiv:2204.03276v4): the exit is a latent variable; the rule is Q-exit.

Paper: Nikita Balagansky, Daniil Gavrilov, PALBERT: Teaching ALBERT to Ponder, NeurIPS 2022, arXiv:2204.03276v4; after
PonderNet (Banino et al. 2021). Code: tinkoff-ai/palbert at 52a79af.

Symbols:   s_k = tanh(pooler(h_k)), the input of the classifier of exit k, s_0 = 0;
           lambda_k = sigmoid(MLP([s_k; s_{k-1}])), the probability to exit at k of an example that reached it;
           p_k = lambda_k prod_{j<k} (1 - lambda_j), at the last exit the remaining probability;
           g = the prior, geometric with lambda_p over layers, truncated at the last.
Training:  the mean over examples of sum_k p_k H(y, P_k) + beta KL.
Inference: Q-exit, the rule q-exit: exit at the first k with 1 - prod_{j<=k} (1 - lambda_j) > q.

Deviations: 1. in the released training p_L is lambda_L prod_{j<L} (1 - lambda_j), so the probabilities may sum to less
than 1; once their sum exceeds .95 the others are set to .05 / L. Here p_L is the remaining probability, and all is
computed in logarithms; 2. KL(g || p) is that of the code (`forward`), KL(p || g) the other reading of the paper
(`reverse`); 3. every exit has its own pooler and classifier, as in all systems here; one MLP serves all exits; 4. if
there are fewer exits than layers, an exit has the prior of the layers since the exit before (exit 0: that of one
layer); 5. learning rates and epochs are those that all systems share here (theirs: 1e-5, up to 25 epochs, no dropout in
the layers).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import LayerContext, tensor_on
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.heads import HEAD_DROPOUT
from mini_ee.lab.exits.row_exits import RowExits, RowSegments, RowState
from mini_ee.lab.rules import QExit
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage, joint_stage, row_losses

DIRECTIONS = ("forward", "reverse")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    beta: float = option(0.5, "weight of the divergence from the prior", least=0)
    prior: float = option(0.1, "probability lambda_p to exit after a layer under the prior", above=0, below=1)
    kl: str = option(
        "forward",
        "divergence from the prior: KL(prior || p) (forward), or KL(p || prior) (reverse)",
        choices=DIRECTIONS,
    )


# ---- The equations ----
def log_exit_probabilities(exit_logits: Tensor) -> Tensor:
    """ln p_k from the logits of lambda_1 .. lambda_{K-1}: (N, K - 1) -> (N, K); p sums to 1."""
    before = F.pad(F.logsigmoid(-exit_logits).cumsum(dim=1), (1, 0))
    return before + F.pad(F.logsigmoid(exit_logits), (0, 1))


def log_prior(exits: tuple[int, ...], chance: float) -> Tensor:
    """ln g_k: (K,). A geometric distribution over layers; the last exit has the remaining probability.

    If there is an exit 0, the embeddings count as a layer too.
    """
    depths = [layer + (exits[0] == 0) for layer in exits]
    survival = (1 - chance) ** torch.tensor([0, *depths[:-1]], dtype=torch.float64)  # P(no exit before exit k)
    return (survival - torch.cat((survival[1:], survival.new_zeros(1)))).log().float()


def pondering_loss(losses: Tensor, exit_logits: Tensor, prior: Tensor, config: Config) -> Tensor:
    """The mean over rows of sum_k p_k losses_k + beta KL. losses (N, K), exit_logits (N, K - 1), prior ln g (K,)."""
    log_p = log_exit_probabilities(exit_logits)
    p, g = log_p.exp(), prior.exp()
    kl = (g * (prior - log_p)).sum(1) if config.kl == "forward" else (p * (log_p - prior)).sum(1)
    return ((p * losses).sum(1) + config.beta * kl).mean()


# ---- The model ----
class Ponder(nn.Module):
    """The MLP of all exits. A state is [s_k; s_{k-1}], (N, 2 D). Raises ValueError for a single exit."""

    def __init__(self, width: int, exits: tuple[int, ...]):
        super().__init__()
        if len(exits) < 2:
            raise ValueError(f"PALBERT needs at least two exits to choose from, got {len(exits)}")
        layers = [part for _ in range(3) for part in (nn.Linear(2 * width, 2 * width), nn.Tanh())]
        self.network = nn.Sequential(nn.Dropout(HEAD_DROPOUT), *layers, nn.Linear(2 * width, 1))
        self.flops = 4.0 * width * (3 * 2 * width + 1)  # of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of lambda_k: (..., 2 D) -> (...)."""
        return self.network(state)[..., 0]


class PonderExits(RowExits):
    """A RowExits whose states are [s_k; s_{k-1}]."""

    def each_state(self, *inputs: Tensor) -> list[Tensor]:
        """The state of every exit, (B, 2 D) each: its head reads the first half, the MLP both."""
        pooled = list(super().each_state(*inputs))
        s = [head.inner(state) for head, state in zip(self.heads, pooled)]
        return [torch.cat(pair, dim=1) for pair in zip(s, [torch.zeros_like(s[0]), *s])]

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, 2 D) -> logits (B, C) of exit k."""
        return self.heads[k].conclude(state[:, : state.shape[1] // 2])

    def segments(self) -> "PonderSegments":
        return PonderSegments(self)


def loss(model: PonderExits, batch: Batch, config: Config) -> Tensor:
    """pondering_loss of a batch."""
    states = model.states(*batch.inputs)
    losses = torch.stack([row_losses(model.classify(k, s), batch.labels) for k, s in enumerate(states)], dim=1)
    prior = log_prior(model.exits, config.prior).to(losses.device)
    return pondering_loss(losses, model.exit_logits(states), prior, config)


def recipe(model: PonderExits, config: Config) -> list[Stage]:
    """One stage: everything is trained at once."""
    return [joint_stage(model, name="ponder", loss=partial(loss, config=config))]


# ---- Segments: s_k goes with the rows to the next exit ----
class PonderState(NamedTuple):
    """The rows still in the model."""

    hidden: Tensor  # (B, T, D)
    context: LayerContext
    current: Any = None  # s_k of the exit just reached, (B, D); None before the first
    before: Any = None  # s_{k-1}

    def keep(self, rows: np.ndarray) -> "PonderState":
        index = tensor_on(self.hidden.device, rows)
        return PonderState(self.hidden[index], self.context.keep(index), self.current[index], self.before[index])


class PonderSegments(RowSegments):
    """The segments of a PonderExits."""

    carried = "current"

    def start(self, inputs: Inputs) -> PonderState:
        return PonderState(*super().start(inputs))

    def advance(self, k: int, state: PonderState) -> PonderState:
        hidden, context = super().advance(k, RowState(state.hidden, state.context))
        current = self.model.heads[k].inner(self.model.heads[k].state(hidden, context.padding))
        before = torch.zeros_like(current) if state.current is None else state.current
        return PonderState(hidden, context, current, before)

    def read(self, k: int, state: PonderState) -> np.ndarray:
        return self.model.heads[k].conclude(state.current).float().numpy(force=True)

    def exit_logit(self, k: int, state: PonderState) -> np.ndarray:
        return self.decided(k, torch.cat((state.current, state.before), dim=1))

    def flops(self, k: int, inputs: Inputs) -> tuple[float, float]:
        layers, read = super().flops(k, inputs)
        out = self.model.heads[k].out
        concluded = 2.0 * out.in_features * out.out_features
        return layers + read - concluded, concluded

    def whole(self) -> RowSegments:
        """The last exit alone: the other heads and the MLP are not computed."""
        return RowSegments(self.model)


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=lambda backbone, exits, num_labels, pool, config: PonderExits(backbone, exits, num_labels, pool, Ponder),
    candidates=sweep(QExit()),
    exits=None,
)
