"""SWIFT: random sets of skipped layers are tried on the newest tokens of the text.

Source: Xia et al. 2025, SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration, arXiv:2410.06916.

After a round, a random set of as many layers is tried: it is skipped from then on if without it more of the last
CONTEXT tokens are predicted as the full model wrote them ("matchness"), after the full model's keys and values of the
text before. A try costs a pass of these tokens through the layers that stay, so the choice ends after TRIES of them, or
at a matchness of ENOUGH.

Deviations from the paper, with their tests in tests/lab/methods/test_skipped_layers.py:
1. Whole layers are skipped; the paper chooses attention and MLP apart
   (test_each_draft_loads_the_layers_that_stay_and_each_round_all_of_them).
2. All tries are random; in the paper every 25th is proposed by Bayesian optimization
   (test_layers_that_change_little_are_found_and_then_drafts_are_right).
3. One sequence of drafts is verified, and not a tree (test_the_text_is_the_full_models).
"""

from collections import deque

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.exits.skipped_layers import Skipper, SkippingSegments, through

CONTEXT, TRIES, ENOUGH = 32, 300, 0.95


class Swift(Skipper):
    """Chooses by the share of the last tokens that are predicted without some layers, for random sets of layers."""

    def begin(self, segments: SkippingSegments, newest: int) -> None:
        super().begin(segments, newest)
        self.random, self.tokens = np.random.default_rng(0), deque[int](maxlen=CONTEXT + 1)
        self.tries, self.matchness = 0, 0.0

    def choose_layers(self, written: list[int], states: list[Tensor]) -> None:
        self.tokens.extend(written)
        if len(self.tokens) <= CONTEXT or self.tries == TRIES or self.matchness >= ENOUGH:
            return
        if self.tries == 0:
            self.matchness = self.matchness_without(self.skipped)
        drawn = self.random.choice(np.arange(1, self.layers - 1), len(self.skipped), replace=False)
        layers = set(drawn.tolist())
        self.tries += 1
        if (matchness := self.matchness_without(layers)) > self.matchness:
            self.matchness = matchness
            self.skip(layers)

    def matchness_without(self, layers: set[int]) -> float:
        """The share of the last CONTEXT tokens that the decoder without these layers predicts."""
        ids, segments = torch.tensor([[*self.tokens]], device=self.segments.decoder.device), self.segments
        stay, at = self.staying(layers), range(self.newest - CONTEXT, self.newest)
        slots = [
            tensors[layer][0, :, at.start : at.stop]
            for layer in stay
            for tensors in (segments.cache.keys, segments.cache.values)
        ]
        true = [slot.clone() for slot in slots]
        hidden = segments.embed(ids[:, :-1], [[*at]])
        logits = through(segments.decoder, hidden, segments.block([0], [[*at]]), stay)
        for slot, value in zip(slots, true):
            slot.copy_(value)
        self.layers_loaded += len(stay)
        return float((logits.argmax(-1) == ids[:, 1:]).float().mean())
