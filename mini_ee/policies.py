"""A backbone whose exits say themselves when to leave: beside the logits an exit_logit, at every exit but the last.

PolicyExits        a MultiExit whose heads share one pooled state with whatever decides; a subclass says what that is:
                   ConsistentEE's policy networks (reinforce.py), BERxiT's learning-to-exit module (baselines.py)
PolicySegments     the same model as segments for early_exit; the rule policy reads the exit_logit
"""

import torch
from torch import Tensor

from mini_ee.bert import padding_mask
from mini_ee.early_exit import Reading
from mini_ee.exits import MultiExit, TorchSegments, TorchState


class PolicyExits(MultiExit):
    """What the models share whose exits decide. Subclasses give exit_logit and policy_flops."""

    policy_flops: float  # operations of one exit_logit

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> (B,): above 0 where exit k, which is not the last, would rather have the row leave."""
        raise NotImplementedError

    def states(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """The pooled state of every exit, (B, D) each. The three inputs are (B, T) int64."""
        mask = padding_mask(attention_mask)
        hidden, depth, states = self.backbone.embed(input_ids, token_type_ids), 0, []
        for layer, head in zip(self.exits, self.heads):
            hidden, depth = self.backbone.run_layers(hidden, mask, depth, layer), layer
            states.append(head.state(hidden, mask))
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
        s = self.model.heads[k].state(state.hidden, state.mask)
        logits = self.model.classify(k, s).float().numpy(force=True)
        if k == len(self.exits) - 1:
            return Reading(logits)
        return Reading(logits, self.model.exit_logit(k, s).float().numpy(force=True))

    def flops(self, k: int, inputs) -> tuple[float, float]:
        advance, read = super().flops(k, inputs)
        return advance, read + (self.model.policy_flops if k < len(self.exits) - 1 else 0.0)
