"""Llama and its family, from scratch: embeddings, layers, the final norm and the head to words.

    llama_family.py   what each model_type is: Llama, Gemma, Phi, Mistral, Qwen2, Qwen3, Phi-3
    llama_config.py   the config, and the rotary frequencies that it asks for
    llama_layer.py    a layer
    cache.py          where tokens stand, and the key/value cache

The final norm belongs to the head: hidden[L] comes before it.

LongRoPE (Phi-3) has factors for short and for long texts. Here the length of each row chooses them; in transformers the
longest row of a batch chooses for all. So in a batch of long and short rows each row equals what transformers computes
for that row alone, and a short row differs from what transformers computes in that batch.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Adapt, is_traced, padding_mask, tensor_on
from mini_ee.backbones.cache import Around, Cache, GraphBlock, Writer, graph_cache, readable, token_positions
from mini_ee.backbones.llama_config import LAYER_TYPES, DecoderConfig
from mini_ee.backbones.llama_family import MEMBERS
from mini_ee.backbones.llama_layer import Layer, norm_of
from mini_ee.backbones.shapes import check


class Decoder(Writer):
    """The backbone: embeddings, L layers, the final norm and the head to words."""

    Config = DecoderConfig
    poolings = ("mean",)  # the first token reads nothing but itself
    reads_prompt_at = "last"
    head_architecture = "ForCausalLM"

    def __init__(self, config: DecoderConfig, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, depth) for depth in range(config.num_hidden_layers))
        self.norm = norm_of(config)
        self.lm_head = None
        if lm_head and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.biased("lm_head"))
        short = config.short_tokens
        sets = [(config.max_tokens, False)] if short is None else [(short, False), (config.max_tokens, True)]
        angle = torch.cat([torch.arange(n, device="cpu")[:, None] * config.rope_frequencies(long) for n, long in sets])
        cos, sin = angle.cos() * config.rope_scale, angle.sin() * config.rope_scale
        self.register_buffer("cos", cos.repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)
        self.apply(self.initialise)

    @classmethod
    def tied(cls, config: DecoderConfig) -> dict[str, str]:
        """The head, where the config says so."""
        return {"lm_head.weight": "embed_tokens.weight"} if config.tie_word_embeddings else {}

    @property
    def max_written(self) -> int:
        """As `Writer.max_written` says: where LongRoPE turns a longer text otherwise, keys in a cache would not."""
        return self.config.short_tokens or self.config.max_tokens

    @property
    def vocabulary(self) -> dict[str, str]:
        """The linear map onto the vocabulary: weight and bias -> names of parameters."""
        if not self.has_lm_head:
            raise self.no_lm_head()
        if self.lm_head is None:
            return {"weight": "embeddings.weight"}
        return {name: f"lm_head.{name}" for name, _ in self.lm_head.named_parameters()}

    def exit_norm(self) -> nn.Module:
        """Layers leave the sums that they add to unnormed."""
        return norm_of(self.config)

    def config_of(self, kept):
        """As `Backbone.config_of` says; each layer keeps its window."""
        config, windows = super().config_of(kept), list(map(self.config.window, range(self.config.num_hidden_layers)))
        if len(set(windows)) == 1:
            return config
        return replace(config, layer_types=tuple(LAYER_TYPES[windows[layer] is not None] for layer in kept))

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, T, D), as `Backbone.embed` says. Token types are passed over."""
        ids = tensor_on(self.cos.device, inputs.input_ids)
        check(ids, "B T")
        hidden = self.embeddings(ids)
        if self.config.member.scaled_embeddings:
            hidden = hidden * hidden.new_tensor(self.config.hidden_size**0.5)  # rounded to the model's dtype, as theirs
        return hidden

    def around(self, inputs) -> Around:
        """Where the tokens of whole rows stand, padded on either side; padded on the right they are the quickest.

        Raises ValueError where there are more tokens than the model has positions.
        """
        if is_traced(inputs.attention_mask):
            return self._graph_around(inputs)
        tokens, attention_mask = check(inputs.input_ids, "B T")["T"], inputs.attention_mask
        padding = padding_mask(attention_mask, self.cos.device)
        some_long = self.config.short_tokens is not None and tokens > self.config.short_tokens
        if some_long or padding is not None and not _padded_on_the_right(attention_mask):
            mask = np.ones(inputs.input_ids.shape, bool) if attention_mask is None else attention_mask
            return self.block(token_positions(tensor_on(self.cos.device, mask)))._replace(padding=padding)
        if tokens > self.config.max_tokens:
            raise ValueError(f"expected at most {self.config.max_tokens} tokens, got {tokens}: truncate the input")
        cos, sin, places = self.cos[None, :tokens, None], self.sin[None, :tokens, None], self._places(tokens)
        # What is before a token is all that it reads: padding behind it needs no mask.
        return Around(self.config, cos, sin, None, True, tokens, padding, near=self._near(places, places, tokens))

    def block(self, positions: Tensor, cache: Cache | None = None, rows: list[int] | None = None) -> Around:
        """What the layers need to run tokens at these positions, made once for all layers.

        positions: (B, T) int64, -1 for padding (`token_positions`). With a cache the tokens read its slots up to their
        own; rows says which of its rows they are, None: all, in order. Without one they read each other.
        Raises ValueError where a position is above the cache's or the model's last.
        """
        tokens = check(positions, "B T")["T"]
        low, high = (int(bound) for bound in positions.aminmax())
        limit = self.config.max_tokens if cache is None else cache.capacity
        if high >= limit:
            raise ValueError(f"expected at most {limit} tokens, got {high + 1}: shorten the prompt")
        at, end = positions.clamp(min=0), high + 1
        # Most often all rows stand at the same places: one of them serves for all.
        aligned = low >= 0 and high == low + tokens - 1
        aligned = aligned and (tokens == 1 or bool((positions == torch.arange(low, end, device=at.device)).all()))
        if aligned and cache is not None and rows is None:
            return self.aligned_block(low, tokens, cache)
        place = at[:1] if aligned else at
        if (short := self.config.short_tokens) is not None:  # where the numbers for long texts begin
            place = place + short * (positions.amax(1, keepdim=True)[: len(place)] >= short)
        cos, sin = self.cos[place].unsqueeze(2), self.sin[place].unsqueeze(2)
        if cache is None and aligned:
            return Around(self.config, cos, sin, None, True, end, near=self._near(at[:1], at[:1], end))
        if cache is None:
            real = positions >= 0
            seen = (real[:, None, :] | ~real[:, :, None])[:, None]  # no token reads padding
            masks = readable(positions, positions), self._near(positions, positions, end)
            mask, near = (each if each is None else each & seen for each in masks)
            return Around(self.config, cos, sin, mask, False, end, near=near)
        index = torch.arange(len(positions)) if rows is None else torch.tensor(rows)
        write = (index.to(at.device)[:, None], torch.where(positions < 0, cache.capacity, positions))
        slots = self._places(end)
        mask, near = readable(at, slots), self._near(at, slots, end)
        return Around(self.config, cos, sin, mask, False, end, cache=cache, rows=rows, slots=write, near=near)

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> Around:
        """`block` where all rows of the cache stand at low .. low + tokens - 1. Asks no tensor anything."""
        end = low + tokens
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: shorten the prompt")
        cos, sin, write = self.cos[None, low:end, None], self.sin[None, low:end, None], (slice(None), slice(low, end))
        reaches = self.config.sliding_window is None or end <= self.config.sliding_window
        if reaches and (tokens == 1 or low == 0):
            return Around(self.config, cos, sin, None, tokens > 1, end, cache=cache, slots=write)
        slots = self._places(end)
        near = self._near(slots[:, low:], slots, end)
        return Around(
            self.config, cos, sin, readable(slots[:, low:], slots), False, end, cache=cache, slots=write, near=near
        )

    def _places(self, end: int) -> Tensor:
        return torch.arange(end, device=self.cos.device)[None]

    def _near(self, at: Tensor, reads: Tensor, end: int) -> Tensor | None:
        """What layers with a window read, as `readable` says; None where it reaches back to the first token."""
        window = self.config.sliding_window
        return None if window is None or end <= window else readable(at, reads, window)

    def _graph_around(self, inputs) -> GraphBlock:
        """The context of whole rows in a graph; no token reads padding, on either side."""
        mask = inputs.attention_mask.bool()
        at = token_positions(mask).clamp(min=0)
        seen = readable(at, at) & mask[:, None, None, :]
        block = GraphBlock(mask.g, self.config, at.name, (at[:, None, None, :].name, seen.name))
        block.padding = mask[:, None, None, :]
        return block

    def graph_block(self, g, first: int) -> GraphBlock:
        """block with a cache, for a graph whose first layer is this, from 0. Declares the inputs positions (B, T), -1
        for padding, rows (B,): which prompts the tokens belong to, and that layer's cache."""
        at, slots, cache = graph_cache(g, first, self.config.key_value_heads * self.config.head_width)
        seen = g.op("LessOrEqual", slots, g.op("Unsqueeze", at, g.integers(1, 3)))
        return GraphBlock(g, self.config, at, (slots, seen), cache)

    def run_layers(self, hidden: Tensor, around: Around, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says; fills the layers' caches."""
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, around, depth, adapt and partial(adapt, depth))
        return hidden

    def propagate(self, hidden: Tensor, around: Around, start: int, stop: int) -> None:
        """State copying (Elbayad et al. 2020): hidden (B, T, D) stands in for hidden[start] .. hidden[stop - 1].

        The layers start + 1 .. stop each write its keys and values, through their own input norm, and compute no more.
        """
        for depth in range(start, stop):
            self.layers[depth].write_keys(hidden, around, depth)

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """LM logits, (..., D) -> (..., V) float32, as `Backbone.lm_logits` says: the final norm and the head."""
        if not self.has_lm_head:
            raise self.no_lm_head()
        normed, head = self.norm(hidden), self.lm_head
        if words is None:
            return (F.linear(normed, self.embeddings.weight) if head is None else head(normed)).float()
        weight = (self.embeddings if head is None else head).weight[words]
        bias = None if head is None or head.bias is None else head.bias[words]
        return F.linear(normed, weight, bias).float()


def _padded_on_the_right(attention_mask: Tensor | np.ndarray) -> bool:
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


BACKBONE = Decoder
LAYOUTS = {model_type: member.layout for model_type, member in MEMBERS.items()}
