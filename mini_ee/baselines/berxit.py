"""BERxiT (Xin et al. 2021): the last exit and all exits in turns, with a learning-to-exit module."""

import torch
from torch import Tensor, nn

from mini_ee.backbones.bert import Bert
from mini_ee.backbones.llama import Decoder
from mini_ee.training.fit import Batch, Stage, depth_weighted_sum, task_loss
from mini_ee.units.rows import PolicyExits


# ---- BERxiT ----
class BerxitExits(PolicyExits):
    """One learning-to-exit module for all exits, a linear map of the pooled state to how certain the head may be."""

    def __init__(self, backbone: Bert | Decoder, exits: tuple[int, ...], num_labels: int, pool: str = "mean"):
        super().__init__(backbone, exits, num_labels, pool)
        if len(exits) < 2:
            raise ValueError(f"BERxiT needs at least two exits to choose from, got {len(exits)}")
        self.certainty = nn.Linear(backbone.config.hidden_size, 1)
        self.policy_flops = 2.0 * backbone.config.hidden_size

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of the certainty, (B,), of a state (B, D) of whichever exit."""
        return self.certainty(state)[:, 0]

    def graph_exit_logit(self, g, k: int, state: str) -> str:
        """exit_logit."""
        return g.op("Squeeze", g.linear(state, self.certainty), g.integers(1))


def berxit(model: BerxitExits) -> list[Stage]:
    """One stage: the last exit's loss in even steps, all exits' and the module's in odd ones."""
    return [
        Stage(
            name="alternating",
            learns=lambda name: True,
            loss=alternating_loss,
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]


def alternating_loss(model: BerxitExits, batch: Batch) -> Tensor:
    """The objective whose turn it is; the module learns with all exits, by the squared error of its certainty."""
    states = model.states(*batch.inputs)
    last = len(states) - 1
    if batch.step % 2 == 0:
        return task_loss(model.classify(last, states[last]), batch.labels)
    said = [model.classify(k, state) for k, state in enumerate(states)]
    truth = torch.stack([true_certainty(logits.detach(), batch.labels) for logits in said[:-1]], dim=1)
    certainty = torch.sigmoid(model.exit_logits(states))
    return sum(task_loss(logits, batch.labels) for logits in said) + ((certainty - truth) ** 2).mean(dim=0).sum()


def true_certainty(logits: Tensor, labels: Tensor) -> Tensor:
    """What the module should say: 1 where the head is right, else 0; for numbers 1 - tanh |error|. (B, C) -> (B,)."""
    if labels.is_floating_point():
        return 1 - torch.tanh((logits[:, 0].float() - labels).abs())
    return (logits.argmax(dim=1) == labels).float()
