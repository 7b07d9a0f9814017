"""A row: one vector of a sentence or a pair, read after chosen layers of a backbone.

ExitHead            what reads hidden states: one vector a row, then a classifier
MultiExit           nn.Module: a backbone and one head an exit; its forward gives all exits' logits, for training
PolicyExits         the same, whose exits say themselves when to leave: an exit_logit beside the logits
TorchSegments       the model as segments for early_exit
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.backbones.backbone import Around, Backbone, Tensors
from mini_ee.backbones.flops import head_flops
from mini_ee.early_exit import Reading, Segments
from mini_ee.units.heads import exit_heads


def even_exits(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` exits as evenly spread as whole layers allow, the last at num_layers.

    >>> even_exits(12, 4), even_exits(6, 4)
    ((3, 6, 9, 12), (2, 3, 4, 6))
    """
    count = min(count, num_layers)
    return tuple(sorted({round(num_layers * (i + 1) / count) for i in range(count)}))


def check_exits(exits: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The same exits, or ValueError: they must ascend within 1..L and end at L."""
    ascending = all(a < b for a, b in zip(exits, exits[1:]))
    if not exits or not ascending or exits[0] < 1 or exits[-1] != num_layers:
        raise ValueError(
            f"exits must ascend from at least 1 and end at the last layer, {num_layers}, "
            f"got {','.join(map(str, exits)) or 'none'}"
        )
    return exits


class MultiExit(nn.Module):
    """A backbone with a head after each layer in `exits`. num_labels is 1 for regression."""

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str = "mean"):
        super().__init__()
        self.exits = check_exits(exits, backbone.config.num_hidden_layers)
        self.num_labels, self.pool = num_labels, pool
        self.backbone = backbone
        self.heads = exit_heads(backbone, len(exits), num_labels, pool)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, detach: bool = False
    ) -> list[Tensor]:
        """Logits (B, C) of every exit. The three inputs are (B, T) int64.

        detach: no gradient flows from an exit past the one before it (SWEET).
        """
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        around, hidden, depth, logits = self.backbone.around(inputs), self.backbone.embed(inputs), 0, []
        for layer, head in zip(self.exits, self.heads):
            hidden, depth = self.backbone.run_layers(hidden, around, depth, layer), layer
            logits.append(head(hidden, around.padding))
            hidden = hidden.detach() if detach else hidden
        return logits

    def segments(self) -> "TorchSegments":
        """What early_exit drives."""
        return TorchSegments(self)

    def whole(self) -> Segments:
        """The model without early exits, for NeverExit: what a speed-up is measured against."""
        return self.segments()


class TorchState(NamedTuple):
    """The rows still in the model."""

    hidden: Tensor  # (B, T, D)
    around: Around

    def keep(self, rows: np.ndarray) -> "TorchState":
        index = torch.from_numpy(rows).to(self.hidden.device)
        return TorchState(self.hidden[index], self.around.keep(index))


class TorchSegments(Segments):
    """The segments of a MultiExit in eval mode. Inputs are tasks.Inputs."""

    engine = "torch"

    def __init__(self, model: MultiExit):
        self.model = model.eval()
        self.exits = model.exits
        self.starts = (0, *model.exits)

    def running(self) -> torch.inference_mode:
        """Without gradients: asked once a batch, since once a call is felt at batch 1."""
        return torch.inference_mode()

    def start(self, inputs) -> TorchState:
        return TorchState(self.model.backbone.embed(inputs), self.model.backbone.around(inputs))

    def advance(self, k: int, state: TorchState) -> TorchState:
        hidden = self.model.backbone.run_layers(state.hidden, state.around, self.starts[k], self.exits[k])
        return TorchState(hidden, state.around)

    def read(self, k: int, state: TorchState) -> Reading:
        return Reading(self.model.heads[k](state.hidden, state.around.padding).float().numpy(force=True))

    def flops(self, k: int, inputs) -> tuple[float, float]:
        backbone, tokens = self.model.backbone, inputs.input_ids.shape[1]
        averaged = tokens if self.model.pool == "mean" else 0
        head = head_flops(backbone.config.hidden_size, self.model.num_labels, averaged)
        return self.layer_passes(k) * backbone.layer_flops(tokens), head


class PolicyExits(MultiExit):
    """What the models share whose exits decide. Subclasses give exit_logit and policy_flops."""

    policy_flops: float  # operations of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> (B,): above 0 where exit k, which is not the last, would rather have the row leave."""
        raise NotImplementedError

    def states(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """The pooled state of every exit, (B, D) each. The three inputs are (B, T) int64."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        around, hidden, depth, states = self.backbone.around(inputs), self.backbone.embed(inputs), 0, []
        for layer, head in zip(self.exits, self.heads):
            hidden, depth = self.backbone.run_layers(hidden, around, depth, layer), layer
            states.append(head.state(hidden, around.padding))
        return states

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C) of exit k."""
        return self.heads[k].classify(state)

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """What all exits but the last say of their states: (B, K - 1), in float32."""
        return torch.stack([self.exit_logit(k, state) for k, state in enumerate(states[:-1])], dim=1).float()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """Logits (B, C) of every exit."""
        states = self.states(input_ids, attention_mask, token_type_ids)
        return [self.classify(k, state) for k, state in enumerate(states)]

    def segments(self) -> "PolicySegments":
        """What early_exit drives."""
        return PolicySegments(self)


class PolicySegments(TorchSegments):
    """The segments of a PolicyExits in eval mode."""

    def read(self, k: int, state: TorchState) -> Reading:
        s = self.model.heads[k].state(state.hidden, state.around.padding)
        logits = self.model.classify(k, s).float().numpy(force=True)
        if k == len(self.exits) - 1:
            return Reading(logits)
        return Reading(logits, self.model.exit_logit(k, s).float().numpy(force=True))

    def flops(self, k: int, inputs) -> tuple[float, float]:
        advance, read = super().flops(k, inputs)
        return advance, read + (self.model.policy_flops if k < len(self.exits) - 1 else 0.0)
