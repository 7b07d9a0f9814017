"""CLaSp: dynamic programming chooses skipped layers that keep the state of the newest token close to the full model's.

Source: Chen et al. 2025, CLaSp: In-Context Layer Skip for Self-Speculative Decoding, arXiv:2505.24196.

    h_i       the state of the last verified token after i layers of the full model, which the round has computed
    f_i       layer i + 1, after the full model's keys and values of the text before
    g(i, j)   the state after i layers of which j are skipped: of g(i - 1, j - 1), which skips layer i, and
              f_{i-1}(g(i - 1, j)), the one with the larger cosine similarity to h_i (Eq. 2); g(i, 0) = h_i

The skipped layers are those on the way to g(L, M). This is approximate, because a state that is less similar after i
layers may be more similar after L: of all sets of M layers, the paper and the tests compare it with the best one.
A layer runs once on all g(i - 1, .), in slots of the cache after the text, which the next tokens replace; each reads
the text before and itself (the paper's sequence parallel). So a choice loads each layer in between once.

Deviations from the paper, with their tests in tests/lab/methods/test_skipped_layers.py:
1. The first and the last layer stay (test_the_text_is_the_full_models).
2. The first round, which has no states yet, skips layers that are evenly spread. The choice is made after it, and after
   each INTERVAL rounds from then on (test_layers_are_chosen_after_the_first_round_and_each_interval).
3. When the rest of the text is shorter than M tokens, there are no slots left, and the choice stays
   (test_no_layers_are_chosen_when_the_rest_of_the_text_is_shorter_than_they_are_many).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.lab.backbones.cache import LayerContext
from mini_ee.lab.exits.generation import TokenSegments
from mini_ee.lab.exits.skipped_layers import Skipper

INTERVAL = 128  # rounds, the fastest in the paper


class Clasp(Skipper):
    """Chooses by the states of the last verified token, after the first round and after each INTERVAL rounds."""

    rounds = 0

    def choose_layers(self, written: list[int], states: list[Tensor]) -> None:
        fits = self.newest + len(self.skipped) <= self.segments.cache.capacity
        if self.rounds % INTERVAL == 0 and fits:
            self.skip(self.closest(torch.stack(states), self.newest - 1))
        self.rounds += 1

    def closest(self, states: Tensor, at: int) -> set[int]:
        """The layers to skip. states (L, D): h_0 .. h_{L-1} of the token at this position."""
        count, ran_at = len(self.skipped), []
        block = alone(self.segments, at, count)
        best = states[1].repeat(count + 1, 1)  # best[j] = g(i, j), if j is at most the number of layers after the first
        for layer in range(1, self.layers - 1):
            after = self.segments.decoder.run_layers(best[None, 1:], block, layer, layer + 1)[0]
            computed, skipped = torch.cat((states[layer + 1, None], after)), best.roll(1, dims=0)
            similar, other = (F.cosine_similarity(g, states[layer + 1], dim=-1) for g in (computed, skipped))
            runs = similar > other
            runs[layer:], runs[0] = False, True  # there are no j skipped layers before layer j + 1
            best = torch.where(runs[:, None], computed, skipped)
            ran_at.append(runs.tolist())
        self.layers_loaded += self.layers - 2
        layers = set()
        for layer in reversed(range(1, self.layers - 1)):
            if not ran_at[layer - 1][count - len(layers)]:
                layers.add(layer)
        return layers


def alone(segments: TokenSegments, at: int, count: int) -> LayerContext:
    """The context of `count` states of one token at this position: each reads the text before it and itself.

    Their keys and values are in the slots after it.
    """
    block = segments.decoder.block(segments.array([[at] * count]), segments.cache)
    itself = F.pad(torch.eye(count, dtype=torch.bool, device=segments.decoder.device), (1, 0))  # not slot `at`

    def widened(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        hidden = False if mask.dtype == torch.bool else -torch.inf
        return torch.cat((mask[..., :at], mask[..., at:].masked_fill(~itself, hidden)), dim=-1)

    slots = segments.cache.slots_of(segments.array([[*range(at + 1, at + 1 + count)]]), None)
    masks = {"mask": widened(block.mask), "window_mask": widened(block.window_mask)}
    return block._replace(slots=slots, end=at + 1 + count, **masks)
