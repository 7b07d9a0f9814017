"""What backbones that generate text have in common, and the base of decoders whose tokens read all before them.

GenerativeConfig     what the config of such a backbone says unless the family says otherwise
GenerativeBackbone   the base class of all that generate, encoder-decoders too
CausalDecoder        embeddings, layers, the final norm and the head to words; where tokens are, and what they read

A family of CausalDecoder is one file: a config, a layer, and of these methods those that differ

    make_layer(depth)          a layer: layer(hidden, context, depth, adapt) -> hidden, and
                               layer.write_keys(hidden, context, depth), which writes its keys and values alone
    exit_norm()                the norm before a head
    embed_tokens(ids, at)      embeddings, where they know positions
    position_bias(at, reads)   what positions add to the scores of attention
    config.rope_frequencies()  the frequencies of rotary positions, with config.rotary_width

All of it is torch code. An export runs the same code on values of a graph, so it asks no tensor for its content. What
a layer calls of its context, `context`, is in cache.py: with_exited, without_exited, rotate, attend and write.

The final norm belongs to the head: hidden[L] comes before it.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import (
    Adapt,
    Backbone,
    Tensors,
    check_fields,
    is_traced,
    known_fields,
    padding_mask,
    tensor_on,
    token_places,
)
from mini_ee.backbones.cache import Cache, GraphBlock, LayerContext, readable, token_positions
from mini_ee.backbones.hub import hugging_face_names
from mini_ee.backbones.shapes import check


class GenerativeConfig:
    """What a config of a backbone that generates says, unless a field or a property of its own says otherwise.

    A family's config is a frozen dataclass that derives from it. Raises ValueError on a value that no model can have.
    """

    token_types = None  # there is no use for them
    sliding_window: int | None = None  # how many tokens, itself included, a token reads in layers with a window
    head_bias = False  # whether the head to words has a bias
    rotary_width = 0  # how many of a head's numbers rotate
    rope_scale = 1.0  # what cos and sin are multiplied with
    short_tokens: int | None = None  # texts of more tokens turn by other frequencies; None: all turn alike

    def __post_init__(self):
        check_fields(self)

    @classmethod
    def from_hugging_face(cls, config: dict) -> Self:
        """From the content of a config.json whose keys are the names of the fields."""
        fields = known_fields(cls, config, {})
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})

    def to_dict(self) -> dict:
        """As Hugging Face writes it; `from_hugging_face` reads it back."""
        return asdict(self)

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens with which a text ends, as eos_token_id names them."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, tuple) else [ends]

    @property
    def key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def max_tokens(self) -> int:
        """The longest text, prompt and continuation together."""
        return self.max_position_embeddings

    def window(self, depth: int) -> int | None:
        """How many tokens, itself included, a token reads in the layer at this depth, from 0; None: all before it."""
        return None


class GenerativeBackbone(Backbone):
    """A backbone that writes text. Its final norm belongs to the head to words, which may be that of the embeddings.

    lm_head is None where it is tied to the embeddings, and where the checkpoint has none.
    """

    generates = True
    graph_context: ClassVar[type[GraphBlock]] = GraphBlock  # of its layers in ONNX graphs
    norm: nn.Module | None

    @classmethod
    def parts(cls, config) -> dict[str, str]:
        """A head that is tied is always there."""
        return {} if config.tie_word_embeddings else {"lm_head": "lm_head"}

    @property
    def has_lm_head(self) -> bool:
        return self.norm is not None and (self.config.tie_word_embeddings or self.lm_head is not None)

    @property
    def vocabulary(self) -> dict[str, str]:
        """The linear map onto the vocabulary: weight and bias -> names of parameters."""
        if not self.has_lm_head:
            raise self.no_lm_head()
        if self.lm_head is None:
            return {"weight": "embeddings.weight"}
        return {name: f"lm_head.{name}" for name, _ in self.lm_head.named_parameters()}

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """LM logits, (..., D) -> (..., V) float32, as `Backbone.lm_logits` says: the final norm and the head."""
        parameters = (self.get_parameter(name) for name in self.vocabulary.values())
        return F.linear(self.norm(hidden), *(each if words is None else each[words] for each in parameters)).float()

    def without_heads(self) -> Self:
        self.lm_head = self.norm = None
        return self

    def run_layers(self, hidden: Tensor, context, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says; fills the layers' caches."""
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context, depth, adapt and partial(adapt, depth))
        return hidden

    def copy_state(self, hidden: Tensor, context, start: int, stop: int) -> None:
        """State copying (Elbayad et al. 2020): hidden (B, T, D) stands in for hidden[start] .. hidden[stop - 1].

        The layers start + 1 .. stop each write their keys and values, through their own input norm, and compute no
        more.
        """
        for depth in range(start, stop):
            self.layers[depth].write_keys(hidden, context, depth)

    @property
    def max_written(self) -> int:
        """The longest text that is written token by token, prompt and continuation together."""
        return self.config.max_tokens

    def decoder_start_tokens(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The tokens that stand before what is written to each of the prompts."""
        return prompts

    def room(self, prompts: Sequence[Sequence[int]]) -> int:
        """How many tokens can be written to the longest of the prompts."""
        return self.max_written - max(map(len, self.decoder_start_tokens(prompts)))

    def read_prompts(self, prompts: Sequence[Sequence[int]], cache) -> None:
        """Put what is read apart into the cache."""

    def embed_written(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The embeddings of tokens (B, T) at these positions, -1 for padding, that read a cache: (B, T, D)."""
        raise NotImplementedError

    def block(self, positions: Tensor, cache: Cache | None = None, rows: list[int] | None = None):
        """What the layers need to run tokens at these positions (B, T) int64, -1 for padding, made once for all layers.

        With a cache the tokens read its slots up to their own; rows says which of its rows they are, None: all, in
        order. Raises ValueError where a position is above the cache's or the model's last.
        """
        raise NotImplementedError

    def aligned_block(self, low: int, tokens: int, cache: Cache):
        """`block` where all rows of the cache are at low .. low + tokens - 1."""
        raise NotImplementedError

    def read_texts(self, input_ids: Tensor, counted: Tensor) -> tuple[Any, Tensor]:
        """Inputs for whole texts (B, T), and where in their hidden states the tokens stand that count.

        counted (B, T) bool: of each text those behind what is given, and the last of that.
        """
        return Tensors(input_ids), counted

    @property
    def token_weights(self) -> int:
        """How many weights of a layer a token is multiplied with that reads a cache."""
        return sum(weight.numel() for weight in self.layers[0].parameters() if weight.dim() == 2)


class CausalDecoder(GenerativeBackbone):
    """Embeddings, L layers, the final norm and the head to words; a token reads itself and what is before it."""

    poolings = ("mean",)  # the first token reads nothing but itself
    reads_prompt_at = "last"
    head_architecture = "ForCausalLM"

    def __init__(self, config, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(map(self.make_layer, range(config.num_hidden_layers)))
        self.norm, self.lm_head = self.exit_norm(), None
        if lm_head and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self._add_rotary_tables()
        self.apply(self.initialise)

    def _add_rotary_tables(self) -> None:
        """cos and sin of every position. Behind them, if long texts turn by other frequencies, those of long texts."""
        config, cos, sin = self.config, None, None
        if config.rotary_width:
            short = config.short_tokens
            sets = [(config.max_tokens, {})] if short is None else [(short, {}), (config.max_tokens, {"long": True})]
            angles = [torch.arange(n, device="cpu")[:, None] * config.rope_frequencies(**which) for n, which in sets]
            angle = torch.cat(angles)
            cos, sin = angle.cos() * config.rope_scale, angle.sin() * config.rope_scale
            cos, sin = cos.repeat(1, 2), torch.cat((-sin, sin), dim=-1)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    # ---- What differs between families ----
    def make_layer(self, depth: int) -> nn.Module:
        """The layer at this depth, from 0."""
        raise NotImplementedError

    def embed_tokens(self, ids: Tensor, at: Tensor) -> Tensor:
        """The embeddings (B, T, D) of tokens (B, T) at the positions `at`, (B or 1, T), from 0."""
        return self.embeddings(ids)

    def position_bias(self, at: Tensor, reads: Tensor) -> Tensor | None:
        """What is added to the score of a token at `at`, (B or 1, T), for one at `reads`, (B or 1, S).

        Returns (B or 1, H, T, S). None: nothing is added.
        """
        return None

    @classmethod
    def tied(cls, config) -> dict[str, str]:
        """The head, where the config says so."""
        if not config.tie_word_embeddings:
            return {}
        (head,), (words,) = (
            hugging_face_names(config.model_type, f"{name}.weight") for name in ("lm_head", "embeddings")
        )
        return {head: words}

    # ---- Whole rows ----
    @property
    def max_written(self) -> int:
        """As `GenerativeBackbone.max_written` says: where longer texts turn otherwise, keys in a cache would not."""
        return self.config.short_tokens or self.config.max_tokens

    @property
    def device(self) -> torch.device:
        return self.embeddings.weight.device

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, T, D), as `Backbone.embed` says. Token types are passed over."""
        ids, mask = (tensor_on(self.device, each) for each in (inputs.input_ids, inputs.attention_mask))
        tokens, limit = check(ids, "B T")["T"], self.config.max_tokens
        at = token_places(ids)[None] if mask is None else token_positions(mask).clamp(min=0)
        if tokens > limit and int(at.max()) >= limit:
            raise ValueError(f"expected at most {limit} tokens, got {tokens}: truncate the input")
        return self.embed_tokens(ids, at)

    def context(self, inputs) -> LayerContext | GraphBlock:
        """Where the tokens of whole rows are, padded on either side; padded on the right they are the quickest.

        Raises ValueError where there are more tokens than the model has positions.
        """
        if is_traced(inputs.attention_mask):
            return GraphBlock.of_texts(self, inputs.attention_mask.bool())
        tokens, attention_mask = check(inputs.input_ids, "B T")["T"], inputs.attention_mask
        padding, limit = padding_mask(attention_mask, self.device), self.config.max_tokens
        some_long = self.max_written < tokens and self.max_written < limit
        if some_long or padding is not None and not _padded_on_the_right(attention_mask):
            mask = np.ones(inputs.input_ids.shape, bool) if attention_mask is None else attention_mask
            return self.block(token_positions(tensor_on(self.device, mask)))._replace(padding=padding)
        if tokens > limit:
            raise ValueError(f"expected at most {limit} tokens, got {tokens}: truncate the input")
        # What is before a token is all that it reads: padding behind it needs no mask.
        return self._causal(self._cos_sin(slice(0, tokens)), tokens)._replace(padding=padding)

    # ---- Tokens that read a cache ----
    def embed_written(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(input_ids, positions.clamp(min=0))

    def block(self, positions: Tensor, cache: Cache | None = None, rows: list[int] | None = None) -> LayerContext:
        """As `GenerativeBackbone.block` says. Without a cache the tokens read each other."""
        tokens = check(positions, "B T")["T"]
        low, high = (int(bound) for bound in positions.aminmax())
        limit = self.config.max_tokens if cache is None else cache.capacity
        if high >= limit:
            raise ValueError(f"expected at most {limit} tokens, got {high + 1}: shorten the prompt")
        at, end = positions.clamp(min=0), high + 1
        # Most often all rows are at the same places: one of them serves for all.
        aligned = low >= 0 and high == low + tokens - 1
        aligned = aligned and (tokens == 1 or bool((positions == torch.arange(low, end, device=at.device)).all()))
        if aligned and cache is not None and rows is None:
            return self.aligned_block(low, tokens, cache)
        place = at[:1] if aligned else at
        if (short := self.config.short_tokens) is not None:  # where the numbers for long texts begin
            place = place + short * (positions.amax(1, keepdim=True)[: len(place)] >= short)
        cos_sin = self._cos_sin(place)
        if cache is None and aligned:
            return self._causal(cos_sin, tokens)
        if cache is None:
            real = positions >= 0
            seen = (real[:, None, :] | ~real[:, :, None])[:, None]  # no token reads padding
            mask, window_mask = self.masks(positions, positions, seen)
            return LayerContext(self.config, *cos_sin, mask, False, end, window_mask=window_mask)
        index = torch.arange(len(positions)) if rows is None else torch.tensor(rows)
        write = (index.to(at.device)[:, None], torch.where(positions < 0, cache.capacity, positions))
        mask, window_mask = self.masks(at, self._places(end), end=end)
        return LayerContext(
            self.config, *cos_sin, mask, False, end, cache=cache, rows=rows, slots=write, window_mask=window_mask
        )

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> LayerContext:
        """As `GenerativeBackbone.aligned_block` says. Asks no tensor anything."""
        end = low + tokens
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: shorten the prompt")
        cos_sin, write = self._cos_sin(slice(low, end)), (slice(None), slice(low, end))
        if tokens == 1 or low == 0:
            return self._causal(cos_sin, tokens, low)._replace(cache=cache, slots=write)
        slots = self._places(end)
        mask, window_mask = self.masks(slots[:, low:], slots, end=end)
        return LayerContext(self.config, *cos_sin, mask, False, end, cache=cache, slots=write, window_mask=window_mask)

    def _causal(self, cos_sin: tuple, tokens: int, low: int = 0) -> LayerContext:
        """Rows that are all at low .. low + tokens - 1, and read from 0 on: one token, or low is 0."""
        end, slots = low + tokens, self._places(low + tokens)
        at = slots[:, low:]
        bias, window_mask = self.position_bias(at, slots), None
        if bias is None and not self._reaches_start(end):
            window_mask = readable(at, slots, self.config.sliding_window)
        if bias is None:
            return LayerContext(self.config, *cos_sin, None, tokens > 1, end, window_mask=window_mask)
        mask, window_mask = self.masks(at, slots, end=end)
        return LayerContext(self.config, *cos_sin, mask, False, end, window_mask=window_mask)

    def masks(self, at: Tensor, reads: Tensor, seen: Tensor | None = None, end: int | None = None) -> list:
        """What tokens at `at` read of those at `reads`, of layers without and with a window, see `LayerContext`.

        seen: which of them may be read besides. end: of what is read; where all windows reach back to the first token,
        the second is None.
        """
        window, bias = self.config.sliding_window, self.position_bias(at, reads)
        masks = [readable(at, reads), None]
        if window is not None and not (end is not None and self._reaches_start(end)):
            masks[1] = readable(at, reads, window)
        if seen is not None:
            masks = [mask if mask is None else mask & seen for mask in masks]
        if bias is not None:
            masks = [mask if mask is None else bias.masked_fill(~mask, -torch.inf) for mask in masks]
        return masks

    def _reaches_start(self, end: int) -> bool:
        """Whether windows reach from the last of `end` tokens back to the first."""
        return self.config.sliding_window is None or end <= self.config.sliding_window

    def _places(self, end: int) -> Tensor:
        return torch.arange(end, device=self.device)[None]

    def _cos_sin(self, at: Tensor | slice) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin (B or 1, T, 1, R) of positions (B or 1, T), or of a slice of them."""
        if self.cos is None:
            return None, None
        if isinstance(at, slice):
            return self.cos[None, at, None], self.sin[None, at, None]
        return self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2)


def _padded_on_the_right(attention_mask: Tensor | np.ndarray) -> bool:
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
