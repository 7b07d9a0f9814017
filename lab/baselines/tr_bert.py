"""TR-BERT (Ye et al. 2021, arXiv:2105.11618v1): at two depths a policy selects the tokens that do not exit.

Paper: Ye, Lin, Huang, Sun, TR-BERT: Dynamic Token Reduction for Accelerating BERT Inference, NAACL 2021,
arXiv:2105.11618v1. Code: thunlp/TR-BERT at bfac1d9.

Symbols    L layers; policies after layers 1 and L / 2, pi(keep | h_t) = sigmoid(W GELU(V h_t)) from each token's state
           a     the selection: which tokens are kept at both depths. At inference pi >= .5; in training drawn from pi
           n_d   number of tokens of the example at depth d = 1, 2, from which the policy there selects
           d(a)  mean number of layers that the tokens of the example run
           R(a) = -H(y, P(x, a)) - alpha d(a) / L        the reward of this selection

The first token ([CLS]) is always kept. A token that has exited is not read any more, by other tokens or by the head.

Training   1. fine-tune everything without token exits
           2. the policies alone: REINFORCE over `samples` drawn selections of each example; the baseline b of each is
              the mean reward of the others: -(R(a) - b) (ln pi_1(a) / n_1 + ln pi_2(a) / n_2)
           3. everything: the mean cross-entropy of the drawn selections plus the loss of step 2

Deviations, pinned in tests/lab/methods/test_tr_bert.py:
1. Theirs keeps equally many tokens of every row of a batch, as many as of the row with most, without a mask. So results
   depend on the batch. Here rows are padded to the longest, with a mask.
2. [CLS], which is always kept, adds nothing to ln pi_d(a).
3. alpha is the price of layers, per token of the example; theirs of the mean share of tokens kept at the two depths,
   relative to the padded length. Except for padding they differ by the first layer.
4. The baseline excludes the selection itself; theirs is the mean over all.
5. Policies have a larger learning rate than the backbone, which gets no gradient from them.
6. No guide: for half of step 2, their first selection imitates the tokens with the largest gradients. No soft targets
   in step 3, and the task's own learning rate.
7. Heads read the mean over the kept tokens by default; theirs read the first (`pool`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.consistent import leave_one_out
from mini_ee.lab.backbones.backbone import Backbone, Tensors, tensor_on, token_places
from mini_ee.lab.baselines.tokenwise import RemainingTokens, TokenwiseExits, gather_tokens, token_costs
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import States
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.policies import POLICY_WIDTH, policy_network
from mini_ee.lab.training.stages import Batch, Stage, row_losses
from mini_ee.train import task_loss

INITIAL_KEEP = 0.9  # pi(keep) of every token before step 2


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the policies. Raises ValueError for an invalid value."""

    alpha: float = option(0.2, "price of all tokens in all layers, in nats; a larger one keeps fewer tokens", least=0)
    samples: int = option(8, "selections per example; the baseline of each is the mean reward of the others", least=2)
    policy_epochs: int = option(3, "epochs of step 2", least=1)
    policy_lr: float = option(3e-3, "learning rate of the policies in step 2", above=0)
    task_epochs: int = option(1, "epochs of step 3", least=1)


# ---- The model ----
class Selection(NamedTuple):
    """The remaining tokens of B rows, the log-probability of their selection, and its cost."""

    hidden: Tensor  # (B, T', D)
    mask: Tensor  # (B, T') bool: False at padding, and at tokens that have exited but are still computed
    layers: Tensor  # (B,), the mean over the tokens of the row
    log_p: Tensor  # (B,), sum over depths of ln pi_d / n_d, over remaining and removed tokens
    flops: float  # FLOPs of each row


def likely(logits: Tensor) -> Tensor:
    """The selection at inference: tokens with pi >= .5."""
    return logits >= 0


def draw(logits: Tensor) -> Tensor:
    """A selection drawn from pi."""
    return torch.rand_like(logits) < torch.sigmoid(logits)


class ReducedExits(TokenwiseExits):
    """A backbone with policies that select the remaining tokens. Raises ValueError for a backbone of one layer.

    A state is the input of the head and one number more, d(a) / L: (B, D + 1).
    """

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config):
        super().__init__(backbone, exits, num_labels, pool)
        backbone.split_layer(0)
        self.layers, width = backbone.config.num_hidden_layers, backbone.config.hidden_size
        if self.layers < 2:
            raise ValueError(f"TR-BERT chooses between layers, and the backbone has {self.layers}; give a deeper one")
        self.ends = (*sorted({1, self.layers // 2}), self.layers)
        self.selectors = nn.ModuleList(policy_network(width, INITIAL_KEEP) for _ in self.ends[:-1])
        self.policy_flops = 2.0 * POLICY_WIDTH * (width + 1)  # FLOPs per token

    def through(self, inputs: Tensors | Inputs, keep: Callable[[Tensor], Tensor], remove: bool = True) -> Selection:
        """Run all layers. keep: policy logits (B, T) -> which tokens remain, (B, T) bool.

        remove: the others are removed from the batch; if False, they are masked but still computed.
        """
        hidden, start, layers, log_p, flops = self.backbone.embed(inputs), 0, 0.0, 0.0, 0.0
        attention_mask = tensor_on(hidden.device, inputs.attention_mask)
        mask = torch.ones_like(hidden[..., 0], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        length = mask.sum(dim=1)
        for policy, stop in zip((*self.selectors, None), self.ends):  # no policy after the last layer
            width = hidden.shape[1]
            context = self.backbone.context(Tensors(mask, mask))  # made of the mask alone; the ids give the shape
            hidden = self.backbone.run_layers(hidden, context, start, stop)
            count = mask.sum(dim=1)  # n_d
            layers = layers + (stop - start) * count / length
            flops += (stop - start) * self.backbone.layer_flops(width)
            if policy is not None:
                logits = policy(hidden.detach())[..., 0]
                chosen = keep(logits)
                # ln pi of the action of each token; 0 at padding and at tokens that exited before; without [CLS].
                log_pi = F.logsigmoid(torch.where(chosen, logits, -logits)) * mask
                log_p = log_p + log_pi[:, 1:].sum(dim=1) / count
                # Remaining tokens stay if chosen, the first token always.
                mask, start = mask & (chosen | (token_places(mask) == 0)), stop
                flops += self.policy_flops * width
                hidden, mask = compact(hidden, mask) if remove else (hidden, mask)
        return Selection(hidden, mask, layers, log_p, flops)

    def run_reduced(self, inputs: Tensors | Inputs) -> RemainingTokens:
        selection = self.through(inputs, likely)
        return RemainingTokens(selection.hidden, self._mask(selection), token_costs(selection.layers, selection.flops))

    def run_all(self, inputs: Tensors | Inputs) -> RemainingTokens:
        selection = self.through(inputs, likely, remove=False)
        return RemainingTokens(selection.hidden, self._mask(selection))

    def _mask(self, selection: Selection) -> Tensor | None:
        return self.backbone.context(Tensors(selection.mask, selection.mask)).padding

    def logits_of(self, selection: Selection) -> Tensor:
        """Logits (B, C) from the remaining tokens."""
        return self.classify(0, self.heads[0].state(selection.hidden, self._mask(selection)))

    def each_state(self, *inputs: Tensor) -> Iterator[Tensor]:
        selection = self.through(Tensors(*inputs), likely)
        state = self.heads[0].state(selection.hidden, self._mask(selection))
        yield torch.cat((state, selection.layers.to(state)[:, None] / self.layers), dim=1)

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, D) or (B, D + 1) -> logits (B, C)."""
        return super().classify(k, state[:, : self.backbone.config.hidden_size])


def compact(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Remove the tokens that `mask` does not keep; rows are padded to the longest. Returns states and mask.

    A stable sort of the mask puts the remaining tokens first, in order, so the first `most` columns have them all.
    """
    (most,) = mask.sum(dim=1).amax(dim=0, keepdim=True).tolist()
    order = mask.byte().sort(dim=1, descending=True, stable=True).indices[:, :most]
    return gather_tokens(order, hidden, None)[0], mask.gather(1, order)


# ---- Training ----
def explore(model: ReducedExits, batch: Batch, config: Config) -> tuple[Tensor, Tensor]:
    """For n drawn selections of each example: its losses (B, n), and the REINFORCE loss of the policies."""

    def copies(tensor: Tensor) -> Tensor:
        """Each example n times in a row, so that all selections run as one batch."""
        return tensor.repeat_interleave(config.samples, dim=0)

    selection = model.through(Tensors(*map(copies, batch.inputs)), draw)
    by_row = (-1, config.samples)
    losses = row_losses(model.logits_of(selection), copies(batch.labels)).view(by_row)
    rewards = reward(losses.detach(), selection.layers.view(by_row) / model.layers, config)
    # Losses are detached in the rewards: the policies learn from their values, the model from `losses` itself.
    return losses, -((rewards - leave_one_out(rewards)) * selection.log_p.view(by_row)).mean()


def reward(losses: Tensor, shares: Tensor, config: Config) -> Tensor:
    """R from the losses and from d(a) / L."""
    return -losses - config.alpha * shares


def joint_loss(model: ReducedExits, batch: Batch, config: Config) -> Tensor:
    """The loss of step 3."""
    losses, policy_loss = explore(model, batch, config)
    return losses.mean() + policy_loss


@torch.no_grad()
def held_out_reward(model: ReducedExits, held_out: States, config: Config) -> dict[str, float]:
    """The mean reward of the held-out set at inference as `score`, and the mean layers of a token."""
    states, labels = held_out.batch(np.arange(len(held_out)), next(model.parameters()).device)
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
            validate=partial(held_out_reward, config=config),
            settings={"epochs": config.policy_epochs, "head_lr": config.policy_lr},
        ),
        Stage(
            name="everything",
            trainable=lambda name: True,
            loss=partial(joint_loss, config=config),
            validate=partial(held_out_reward, config=config),
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
