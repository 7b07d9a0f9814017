"""Lossless decoding without training: the decoder drafts with some of its layers skipped, chosen while it writes.

Source: Xia et al. 2025, SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration, arXiv:2410.06916.

A round is that of lossless.py, but all layers verify: a draft without layer i tells nothing about layer i + 1. In the
layers that stay, a draft reads the keys and values of the full model; its own are replaced when it is verified.

The first and the last layer stay. At first, skipped layers are evenly spread over the others. After a round, a random
set of as many layers is tried: it is skipped from then on if without it more of the last CONTEXT tokens are predicted
as the full model wrote them ("matchness"), after the full model's keys and values of the text before. A try costs a
pass of these tokens through the layers that stay, so the choice ends after TRIES of them, or at a matchness of ENOUGH.

Deviations from the paper, with their tests in tests/lab/methods/test_skipped_layers.py:
1. Whole layers are skipped; the paper chooses attention and MLP apart.
2. All tries are random; in the paper every 25th is proposed by Bayesian optimization.
3. One sequence of drafts is verified, and not a tree (test_the_text_is_the_full_models).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.exits.decoding import Step
from mini_ee.lab.exits.generation import TokenSegments, capacity_for
from mini_ee.lab.exits.lossless import CONFIDENCE_THRESHOLD, DRAFT, Drafter, draft_and_verify

SKIPPED = 0.45  # share of the layers, as in the paper
CONTEXT, TRIES, ENOUGH = 32, 300, 0.95


def through(decoder: GenerativeBackbone, hidden: Tensor, context: Any, layers: Iterable[int]) -> Tensor:
    """The logits (B, T, V) of a decoder that has these layers only (from 0), from the embeddings (B, T, D)."""
    for layer in layers:
        hidden = decoder.run_layers(hidden, context, layer, layer + 1)
    return decoder.lm_logits(hidden)


class SkippingSegments(TokenSegments):
    """Exit 0 is before the first layer, so that all layers verify; the layers in `stay` draft its tokens."""

    stay: list[int]

    def draft_logits(self, k: int, hidden: Tensor, block: Any) -> Tensor:
        return through(self.decoder, hidden, block, self.stay)[:, -1]


class Skipper(Drafter):
    """Which layers are skipped. One serves one call of `draft_and_verify`, for one prompt."""

    def __init__(self, segments: SkippingSegments, start: int, skipped: float, most: int, confidence_threshold: float):
        """start: the position of the last token of the prompt."""
        super().__init__(most, confidence_threshold)
        self.layers = segments.exits[-1]
        inner = self.layers - 2
        if not 1 <= (count := round(skipped * self.layers)) <= inner:
            least, largest = 1 / self.layers, inner / self.layers
            raise ValueError(f"the share of skipped layers must be from {least:.2f} to {largest:.2f}, got {skipped}")
        self.segments, self.random = segments, np.random.default_rng(0)
        self.tokens, self.newest = deque[int](maxlen=CONTEXT + 1), start
        self.tries, self.matchness = 0, 0.0
        self.skip({1 + (2 * at + 1) * inner // (2 * count) for at in range(count)})

    def skip(self, layers: set[int]) -> None:
        """Skip these layers, from 0, from now on."""
        self.skipped = layers
        self.segments.stay = [layer for layer in range(self.layers) if layer not in layers]

    def limit(self, logits: Tensor, drafted: int, most: int) -> int:
        """An unsure token ends the draft, but is verified with it: unlike the state of an exit, it is all there is."""
        self.layers_loaded += len(self.segments.stay)
        return most if super().limit(logits, drafted, most) > drafted else drafted + 1

    def observe(self, segments: TokenSegments, states: list[Tensor], true: Tensor, read: Tensor) -> None:
        written = true[0, read[0]].tolist()
        self.tokens.extend(written)
        self.newest += len(written)
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
        stay = [layer for layer in range(self.layers) if layer not in layers]
        at = range(self.newest - CONTEXT, self.newest)
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
        return float((logits.argmax(-1) == ids[:, 1:]).float().mean())


def generate_skipping(
    decoder: GenerativeBackbone,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    skipped: float = SKIPPED,
    draft: int = DRAFT,
    confidence_threshold: float = CONFIDENCE_THRESHOLD,
    stop: Sequence[int] = (),
) -> tuple[Iterator[Step], Skipper]:
    """The full model's greedy text, and what chooses the layers. skipped: the share of layers. Else as in lossless.py.

    layers_run of an accepted draft is 0. Raises ValueError for a share that leaves no layer to skip or to stay.
    """
    exits, capacity = (0, decoder.config.num_hidden_layers), capacity_for(decoder, [prompt], max_new_tokens)
    segments = SkippingSegments(decoder, exits, (), "recompute", 1, capacity)
    start = len(decoder.decoder_start_tokens([prompt])[0]) - 1
    skipper = Skipper(segments, start, skipped, draft, confidence_threshold)
    return draft_and_verify(segments, [prompt], max_new_tokens, skipper, frozenset(stop)), skipper
