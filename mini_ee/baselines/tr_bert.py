"""TR-BERT: at two depths a policy keeps some tokens of a row, and the others leave for good.

Paper: Ye, Lin, Huang, Sun, TR-BERT: Dynamic Token Reduction for Accelerating BERT Inference, NAACL 2021,
arXiv:2105.11618v1. Code: thunlp/TR-BERT at bfac1d9.

Symbols    L layers; policies after layers 1 and L / 2, pi(keep | h_t) = sigmoid(W GELU(V h_t)) of each token's state
           a     which tokens are kept, at both depths: those with pi >= .5; while it learns, drawn from pi
           n_d   tokens of the row at depth d = 1, 2, among which the policy there chooses
           d(a)  layers that a mean token of the row runs
           R(a) = -H(y, P(x, a)) - alpha d(a) / L        what keeping these tokens is worth

The first token ([CLS]) is always kept. A token that leaves is read no more, neither by others nor by the head.

Training   1. fine-tune all, no token leaving
           2. the policies alone: REINFORCE over `samples` drawn selections of each row, the mean of the others as the
              baseline: -(R(a) - b) (ln pi_1(a) / n_1 + ln pi_2(a) / n_2)
           3. everything: the mean cross-entropy of the drawn selections and the loss of step 2

Deviations, pinned in tests/test_tr_bert.py:
1. Theirs keeps as many tokens of every row as of the row with most, unmasked, so that at batches above 1 results depend
   on the batch. Here rows are filled up to the longest with a mask.
2. [CLS], which is forced, adds nothing to ln pi_d(a).
3. alpha prices layers, per token of the row; theirs the mean share of tokens kept at the two depths, of the padded
   length. But for padding they differ by the first layer.
4. The baseline leaves the selection itself out, which the mean of all does not.
5. Policies learn faster than what they read, which gets no gradient from them.
6. No guide: their first drawn selection imitates, for half of step 2, the tokens with the largest gradients. No soft
   targets in step 3, and the task's own learning rate.
7. Heads read the mean over the tokens that are kept by default; theirs the first (`pool`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone, Tensors, sizes_of, tensor_on, token_places
from mini_ee.baselines.tokenwise import RemainingTokens, TokenwiseExits, in_order, token_costs
from mini_ee.data.options import Settings, option
from mini_ee.exits.rows import States
from mini_ee.training.method import Method
from mini_ee.training.policies import POLICY_WIDTH, leave_one_out, policy_network
from mini_ee.training.stages import Batch, Stage, row_losses, task_loss

KEPT = 0.9  # pi(keep) of every token before step 2


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the policies. Raises ValueError on a value that makes no sense."""

    alpha: float = option(0.2, "the price of all tokens in all layers, in nats: the knob for speed", least=0)
    samples: int = option(8, "selections that are drawn of a row in a step", least=2)
    policy_epochs: int = option(3, "of step 2", least=1)
    policy_lr: float = option(3e-3, "learning rate of the policies in step 2", above=0)
    task_epochs: int = option(1, "of step 3", least=1)


# ---- The model ----
class Selected(NamedTuple):
    """What is left of rows, how it came to be, and what it cost."""

    hidden: Tensor  # (B, T', D)
    kept: Tensor  # (B, T') bool
    layers: Tensor  # (B,), of a mean token
    log_p: Tensor  # (B,), sum over depths of ln pi_d / n_d, of what was kept and what was not
    operations: float  # of each row


def likely(logits: Tensor) -> Tensor:
    """Which tokens the policy would keep, as in use: pi >= .5."""
    return logits >= 0


def draw(logits: Tensor) -> Tensor:
    """Which tokens are kept, drawn from pi."""
    return torch.rand_like(logits) < torch.sigmoid(logits)


class ReducedExits(TokenwiseExits):
    """A backbone with policies that keep tokens. Raises ValueError for a backbone of one layer.

    A state is that of the head, and with it the layers that a mean token ran over L: (B, D + 1).
    """

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config):
        super().__init__(backbone, exits, num_labels, pool)
        backbone.split_layer(0)
        self.layers, width = backbone.config.num_hidden_layers, backbone.config.hidden_size
        if self.layers < 2:
            raise ValueError(f"TR-BERT chooses between layers, and the backbone has {self.layers}; give a deeper one")
        self.ends = (*sorted({1, self.layers // 2}), self.layers)
        self.selectors = nn.ModuleList(policy_network(width, KEPT) for _ in self.ends[:-1])
        self.of_policy = 2.0 * POLICY_WIDTH * (width + 1)  # operations, of a token

    def through(self, inputs, keep: Callable[[Tensor], Tensor], leave: bool = True) -> Selected:
        """All layers. keep: logits (B, T) of the policy -> which tokens stay; leave: whether the others are computed
        no more, else they are only read no more.
        """
        hidden, start, layers, log_p, operations = self.backbone.embed(inputs), 0, 0.0, 0.0, 0.0
        mask = tensor_on(hidden.device, inputs.attention_mask)
        kept = torch.ones_like(hidden[..., 0], dtype=torch.bool) if mask is None else mask.bool()
        length = kept.sum(dim=1)
        for policy, stop in zip((*self.selectors, None), self.ends):
            width = hidden.shape[1]
            hidden = self.backbone.run_layers(hidden, self.backbone.context(Tensors(kept, kept)), start, stop)
            count = kept.sum(dim=1)
            layers = layers + (stop - start) * count / length
            operations += (stop - start) * self.backbone.layer_flops(width)
            if policy is not None:
                logits = policy(hidden.detach())[..., 0]
                chosen = keep(logits)
                log_pi = F.logsigmoid(torch.where(chosen, logits, -logits)) * kept
                log_p = log_p + log_pi[:, 1:].sum(dim=1) / count
                kept, start = kept & (chosen | (token_places(kept) == 0)), stop
                operations += self.of_policy * width
                hidden, kept = compact(hidden, kept) if leave else (hidden, kept)
        return Selected(hidden, kept, layers, log_p, operations)

    def run_reduced(self, inputs) -> RemainingTokens:
        found = self.through(inputs, likely)
        return RemainingTokens(found.hidden, self._mask(found), token_costs(found.layers, found.operations))

    def run_all(self, inputs) -> RemainingTokens:
        found = self.through(inputs, likely, leave=False)
        return RemainingTokens(found.hidden, self._mask(found))

    def _mask(self, found: Selected) -> Tensor | None:
        return self.backbone.context(Tensors(found.kept, found.kept)).padding

    def say(self, found: Selected) -> Tensor:
        """Logits (B, C)."""
        return self.classify(0, self.heads[0].state(found.hidden, self._mask(found)))

    def each_state(self, *inputs: Tensor) -> Iterator[Tensor]:
        found = self.through(Tensors(*inputs), likely)
        state = self.heads[0].state(found.hidden, self._mask(found))
        yield torch.cat((state, found.layers.to(state)[:, None] / self.layers), dim=1)

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, D) or (B, D + 1) -> logits (B, C)."""
        return super().classify(k, state[:, : self.backbone.config.hidden_size])


def compact(hidden: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states without the tokens that are not kept, filled up to the longest row, and which are real."""
    (most,) = sizes_of(kept.sum(dim=1).amax(dim=0, keepdim=True))
    order = kept.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return in_order(order, hidden, None)[0], kept.gather(1, order)


# ---- Training ----
def explore(model: ReducedExits, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """Of drawn selections: the losses of each row (B, n), and the policies' loss."""

    def copies(each: Tensor) -> Tensor:
        return each.repeat_interleave(config.samples, dim=0)

    found = model.through(Tensors(*map(copies, batch.inputs)), draw)
    by_row = (-1, config.samples)
    losses = row_losses(model.say(found), copies(batch.labels)).view(by_row)
    rewards = reward(losses.detach(), found.layers.view(by_row) / model.layers, config)
    return losses, -((rewards - leave_one_out(rewards)) * found.log_p.view(by_row)).mean()


def reward(losses: Tensor, shares: Tensor, config: Config) -> Tensor:
    """R, of losses and of d / L."""
    return -losses - config.alpha * shares


def joint_loss(model: ReducedExits, batch: Batch, config: Config) -> Tensor:
    """Of step 3."""
    losses, of_policies = explore(model, batch, config)
    return losses.mean() + of_policies


@torch.no_grad()
def held_out(model: ReducedExits, held: States, config: Config) -> dict[str, float]:
    """Of rows whose tokens leave as in use: the mean reward as `score`, and the mean layers of a token."""
    states, labels = held.batch(np.arange(len(held)), next(model.parameters()).device)
    shares = states[0][:, -1]
    rewards = reward(row_losses(model.classify(0, states[0]), labels), shares, config)
    return {"score": float(rewards.mean()), "mean_layers": float(shares.mean() * model.layers)}


def recipe(model: ReducedExits, config: Config) -> list[Stage]:
    """The three steps."""

    def policies(name: str) -> bool:
        return name.startswith("selectors.")

    return [
        Stage(
            name="fine-tune",
            trainable=lambda name: not policies(name),
            loss=lambda model, batch: task_loss(model(*batch.inputs)[0], batch.labels),
            score=lambda scores: float(scores[0]),
        ),
        Stage(
            name="policies",
            trainable=policies,
            loss=lambda model, batch: explore(model, batch, config)[1],
            validate=partial(held_out, config=config),
            settings={"epochs": config.policy_epochs, "head_lr": config.policy_lr},
        ),
        Stage(
            name="everything",
            trainable=lambda name: True,
            loss=partial(joint_loss, config=config),
            validate=partial(held_out, config=config),
            settings={"epochs": config.task_epochs},
        ),
    ]


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=ReducedExits,
    exits=lambda num_layers: (num_layers,),
    lacks=("exits",),
    defaults={"built-in": {"samples": 4, "policy_epochs": 2}},
)
