"""Lossless decoding without training: the decoder drafts with some of its layers skipped, chosen while it writes.

A round is that of lossless.py, but all layers verify: a draft without layer i tells nothing about layer i + 1. In the
layers that stay, a draft reads the keys and values of the full model; its own are replaced when it is verified.

The first and the last layer stay. At first, skipped layers are evenly spread over the others. After a round, a Skipper
may choose as many others: swift.py and clasp.py. One sequence of drafts is verified, and not a tree.
"""

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import Step
from mini_ee.lab.exits.generation import TokenSegments, capacity_for
from mini_ee.lab.exits.lossless import CONFIDENCE_THRESHOLD, DRAFT, Drafter, draft_and_verify
from mini_ee.lab.registry import SKIPPERS

SKIPPED = 0.45  # share of the layers: that of SWIFT, and among the 40 to 60% of CLaSp


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
    """Which layers are skipped. One serves one text, `generate_skipping`; a subclass chooses in `choose_layers`."""

    segments: SkippingSegments
    newest: int  # the position of the last token of the text, which no layer has read yet

    def __init__(self, skipped: float = SKIPPED, most: int = DRAFT, confidence_threshold: float = CONFIDENCE_THRESHOLD):
        """skipped: the share of layers. Else as a Drafter."""
        super().__init__(most, confidence_threshold)
        self.share = skipped

    def begin(self, segments: SkippingSegments, newest: int) -> None:
        """Before the first round. Raises ValueError for a share that leaves no layer to skip or to stay."""
        self.segments, self.newest, self.layers = segments, newest, segments.exits[-1]
        inner = self.layers - 2
        if not 1 <= (count := round(self.share * self.layers)) <= inner:
            least, largest = 1 / self.layers, inner / self.layers
            raise ValueError(f"the share of skipped layers must be from {least:.2f} to {largest:.2f}, got {self.share}")
        self.skip({1 + (2 * at + 1) * inner // (2 * count) for at in range(count)})

    def skip(self, layers: set[int]) -> None:
        """Skip these layers, from 0, from now on."""
        self.skipped, self.segments.stay = layers, self.staying(layers)

    def staying(self, layers: set[int]) -> list[int]:
        """The layers that stay if these are skipped."""
        return [layer for layer in range(self.layers) if layer not in layers]

    def limit(self, logits: Tensor, drafted: int, most: int) -> int:
        """An unsure token ends the draft, but is verified with it: unlike the state of an exit, it is all there is."""
        self.layers_loaded += len(self.segments.stay)
        return most if super().limit(logits, drafted, most) > drafted else drafted + 1

    def observe(self, segments: TokenSegments, states: list[Tensor], true: Tensor, read: Tensor) -> None:
        written = true[0, read[0]].tolist()
        self.newest += len(written)
        self.choose_layers(written, [state[0, len(written) - 1] for state in states])

    def choose_layers(self, written: list[int], states: list[Tensor]) -> None:
        """After each round. written: its tokens. states: of the token before the newest, (D,) before each layer."""


def load_skipper(name: str) -> type[Skipper]:
    """The class of a name in registry.SKIPPERS."""
    module, _, kind = SKIPPERS[name].partition(":")
    return getattr(import_module(module), kind)


def generate_skipping(
    decoder: GenerativeBackbone,
    prompt: Sequence[int],
    skipper: Skipper,
    *,
    max_new_tokens: int,
    stop: Sequence[int] = (),
) -> Iterator[Step]:
    """The full model's greedy text. layers_run of an accepted draft is 0. Else as in lossless.py.

    Raises WrongArguments for an encoder-decoder.
    """
    if decoder.is_encoder_decoder:
        raise WrongArguments(
            f"drafts with skipped layers: expected a decoder without an encoder, found a {decoder.config.model_type}; "
            f"let an exit draft, without --draft-by"
        )
    exits, capacity = range(decoder.config.num_hidden_layers + 1), capacity_for(decoder, [prompt], max_new_tokens)
    segments = SkippingSegments(decoder, tuple(exits), (), "recompute", 1, capacity)
    skipper.begin(segments, len(decoder.decoder_start_tokens([prompt])[0]) - 1)
    return draft_and_verify(segments, [prompt], max_new_tokens, skipper, frozenset(stop))
