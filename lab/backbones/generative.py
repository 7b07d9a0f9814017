"""The base classes of backbones that generate text, and of decoders with causal attention.

GenerativeConfig     default properties of the config of such a backbone
GenerativeBackbone   the base class of all backbones that generate text, encoder-decoders included
CausalDecoder        embeddings, layers, final norm and LM head; positions and masks

A family of CausalDecoder is one file: a config, a layer, and those of these methods that differ from the defaults:

    make_layer(depth)          a layer: layer(hidden, context, depth, adapt) -> hidden, and
                               layer.write_keys(hidden, context, depth), which only writes its keys and values
    exit_norm()                the norm before a head
    embed_tokens(ids, at)      embeddings, if they depend on positions
    position_bias(at, reads)   what is added to the scores of attention
    config.rope_frequencies()  the frequencies of rotary positions, with config.rotary_width

The code must not branch on the values of tensors. A layer calls these methods of `context` (cache.py): with_exited,
without_exited, rotate, attend and write.

The final norm belongs to the head: hidden[L] is its input.
"""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import (
    Adapt,
    Backbone,
    Tensors,
    check_fields,
    check_tokens,
    known_fields,
    matrix_weights,
    padding_mask,
    tensor_on,
    token_places,
)
from mini_ee.lab.backbones.cache import Cache, LayerContext, readable, token_positions
from mini_ee.lab.backbones.hub import hugging_face_names
from mini_ee.lab.data.tokenizer import Inputs


class GenerativeConfig:
    """Default properties of the config of a backbone that generates text; fields of a subclass override them.

    A family's config is a frozen dataclass that derives from this class. Raises ValueError for invalid values.
    """

    hidden_size: Any
    num_attention_heads: Any
    max_position_embeddings: Any
    eos_token_id: Any
    token_types = None  # it does not use them
    sliding_window: int | None = (
        None  # the number of tokens, itself included, that a token reads in layers with a window
    )
    head_bias: Any = False  # whether the LM head has a bias
    rotary_width: Any = 0  # R, the number of values of a head that are rotated
    rope_scale: Any = 1.0  # factor of cos and sin
    short_tokens: Any = None  # LongRoPE: texts of more tokens use other frequencies; None: one set of frequencies

    def __post_init__(self):
        check_fields(self)

    @classmethod
    def from_hugging_face(cls, config: dict) -> Self:
        """From the content of a config.json whose keys are named like the fields."""
        fields = known_fields(cls, config, {})
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})

    def to_dict(self) -> dict:
        """The content of config.json, for `from_hugging_face`."""
        return asdict(self)  # type: ignore[call-overload]  # each subclass is a dataclass

    @property
    def stop_tokens(self) -> list[int]:
        """The tokens that end a text: eos_token_id as a list."""
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
        """Maximum length of a text, prompt and continuation together."""
        return self.max_position_embeddings

    def window(self, depth: int) -> int | None:
        """The sliding window of the layer at this depth (from 0), or None if a token reads all tokens before it."""
        return None


class GenerativeBackbone(Backbone):
    """A backbone that generates text. Its final norm belongs to the LM head.

    lm_head is None if it is tied to the embeddings, and if the checkpoint has none.
    """

    generates = True
    embeddings: nn.Embedding
    norm: Any  # a module, or None without heads

    @classmethod
    def parts(cls, config: Any) -> dict[str, str]:
        """The LM head is optional unless it is tied to the embeddings."""
        return {} if config.tie_word_embeddings else {"lm_head": "lm_head"}

    @property
    def has_lm_head(self) -> bool:
        return self.norm is not None and (self.config.tie_word_embeddings or self.lm_head is not None)

    @property
    def vocabulary(self) -> dict[str, str]:
        if not self.has_lm_head:
            raise self.no_lm_head()
        if self.lm_head is None:
            return {"weight": "embeddings.weight"}
        return {name: f"lm_head.{name}" for name, _ in self.lm_head.named_parameters()}

    def lm_rows(self, words: Tensor | None = None) -> list[Tensor]:
        """The linear map of the LM head: weight, and bias if there is one. words (C,) int64: only their rows."""
        parameters = [self.get_parameter(name) for name in self.vocabulary.values()]
        return parameters if words is None else [parameter[words] for parameter in parameters]

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None, rows: Sequence[Tensor] = ()) -> Tensor:
        """As `Backbone.lm_logits`. rows: `lm_rows` of the words, if they are read more than once."""
        rows = rows or self.lm_rows(words)
        return F.linear(self.norm(hidden), *rows).float()

    def without_heads(self) -> Self:
        self.lm_head = self.norm = None
        return self

    def run_layers(self, hidden: Tensor, context: Any, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        """As `Backbone.run_layers`. With a cache, each layer also writes its keys and values there."""
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context, depth, adapt and partial(adapt, depth))
        return hidden

    def copy_state(self, hidden: Tensor, context: Any, start: int, stop: int) -> None:
        """State copying (Elbayad et al. 2020): hidden (B, T, D) replaces hidden[start] .. hidden[stop - 1].

        The layers start + 1 .. stop write keys and values of it, through their own input norm; nothing else runs.
        """
        for depth in range(start, stop):
            self.layers[depth].write_keys(hidden, context, depth)

    @property
    def max_written(self) -> int:
        """Maximum length of a text that is generated token by token, prompt and continuation together."""
        return self.config.max_tokens

    def decoder_start_tokens(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The tokens with which the decoder begins, for each prompt: the prompt itself unless an encoder reads it."""
        return prompts

    def room(self, prompts: Sequence[Sequence[int]]) -> int:
        """The number of tokens that can be generated after the longest of the prompts."""
        return self.max_written - max(map(len, self.decoder_start_tokens(prompts)))

    def read_prompts(self, prompts: Sequence[Sequence[int]], cache: Cache) -> None:
        """Run the encoder on the prompts, if there is one, and put its output into the cache."""

    def embed_written(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The embeddings (B, T, D) of tokens (B, T) that read a cache, at these positions, -1 for padding."""
        raise NotImplementedError

    def block(self, positions: Tensor, cache: Cache | None = None, rows: list[int] | None = None) -> Any:
        """The context of all layers for tokens at these positions, (B, T) int64, -1 for padding.

        With a cache, a token reads its slots up to its own position. rows: the cache row of each row of the batch;
        None: all rows in order. Raises ValueError if a position exceeds the capacity of the cache or the model.
        """
        raise NotImplementedError

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> Any:
        """`block` for all rows of the cache, if all are at positions low .. low + tokens - 1."""
        raise NotImplementedError

    def read_texts(self, input_ids: Tensor, counted: Tensor) -> tuple[Any, Tensor]:
        """The inputs for whole texts (B, T), and a mask over their hidden states: the states whose next token counts.

        counted (B, T) bool: in each text the last given token and the tokens after it.
        """
        return Tensors(input_ids), counted

    @property
    def token_weights(self) -> int:
        """The number of weights of a layer that are multiplied with one token, if it reads a cache."""
        return matrix_weights(self.layers[0])


class CausalDecoder(GenerativeBackbone):
    """Embeddings, L layers, the final norm and the LM head; a token reads itself and the tokens before it."""

    poolings = ("mean",)  # the first token reads only itself
    reads_prompt_at = "last"
    head_architecture = "ForCausalLM"
    text_end: int | None = None  # a classifier's pad token: it reads the last token that is another one

    def __init__(self, config: Any, lm_head: bool = True):
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
        """Buffers cos and sin, (positions, R). With LongRoPE the table for short texts is followed by the one for long
        texts, so position p of a long text has index short_tokens + p."""
        config, cos, sin = self.config, None, None
        if config.rotary_width:
            short = config.short_tokens
            sets = [(config.max_tokens, {})] if short is None else [(short, {}), (config.max_tokens, {"long": True})]
            angles = [torch.arange(n, device="cpu")[:, None] * config.rope_frequencies(**which) for n, which in sets]
            angle = torch.cat(angles)
            cos, sin = angle.cos() * config.rope_scale, angle.sin() * config.rope_scale
            cos, sin = cos.repeat(1, 2), torch.cat((-sin, sin), dim=-1)  # (positions, R), as `rotate` takes them
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    # ---- What differs between families ----
    def make_layer(self, depth: int) -> nn.Module:
        """The layer at this depth, from 0."""
        raise NotImplementedError

    def embed_tokens(self, ids: Tensor, at: Tensor) -> Tensor:
        """The embeddings (B, T, D) of tokens (B, T) at positions `at`, (B or 1, T), from 0."""
        return self.embeddings(ids)

    def position_bias(self, at: Tensor, reads: Tensor) -> Tensor | None:
        """What is added to the score of a query at position `at`, (B or 1, T), and a key at `reads`, (B or 1, S).

        Returns (B or 1, H, T, S), or None to add nothing.
        """
        return None

    @classmethod
    def tied(cls, config: Any) -> dict[str, str]:
        if not config.tie_word_embeddings:
            return {}
        (head,), (words,) = (
            hugging_face_names(config.model_type, f"{name}.weight") for name in ("lm_head", "embeddings")
        )
        return {head: words}

    # ---- Whole rows ----
    @property
    def max_written(self) -> int:
        """With LongRoPE at most short_tokens: beyond it the keys in the cache would need other rotations."""
        return self.config.short_tokens or self.config.max_tokens

    @property
    def device(self) -> torch.device:
        return self.embeddings.weight.device

    def embed(self, inputs: Tensors | Inputs) -> Tensor:
        """As `Backbone.embed`; token types are ignored."""
        ids, mask = (tensor_on(self.device, tensor) for tensor in (inputs.input_ids, inputs.attention_mask))
        tokens, limit = check_tokens(ids), self.config.max_tokens
        at = token_places(ids)[None] if mask is None else token_positions(mask).clamp(min=0)
        if tokens > limit and int(at.max()) >= limit:
            check_tokens(ids, limit)
        return self.embed_tokens(ids, at)

    def context(self, inputs: Tensors | Inputs) -> LayerContext:
        """The context of whole rows, padded on either side; padding on the right is the fastest, as it needs no mask.

        Raises ValueError if a row has more tokens than the model has positions.
        """
        attention_mask: Any = inputs.attention_mask if self.text_end is None else self.until_last(inputs)
        tokens = check_tokens(inputs.input_ids)
        padding, limit = padding_mask(attention_mask, self.device), self.config.max_tokens
        some_long = self.max_written < tokens and self.max_written < limit  # some rows may use LongRoPE's second table
        if some_long or padding is not None and not _padded_on_the_right(attention_mask):
            mask = np.ones(inputs.input_ids.shape, bool) if attention_mask is None else attention_mask
            return self.block(token_positions(tensor_on(self.device, mask)))._replace(padding=padding)
        check_tokens(inputs.input_ids, limit)
        # The causal mask hides padding on the right, as it comes after all tokens of its row.
        return self._causal(self._cos_sin(slice(0, tokens)), tokens)._replace(padding=padding)

    def until_last(self, inputs: Tensors | Inputs) -> Tensor:
        """(B, T), true up to the last token whose id is not `text_end`, and at the first; causal layers see no more."""
        ids, mask = (tensor_on(self.device, tensor) for tensor in (inputs.input_ids, inputs.attention_mask))
        places, real = token_places(ids), ids != self.text_end
        real = real if mask is None else real & mask.bool()
        until = places <= (places * real).amax(1, keepdim=True)
        return until if mask is None else until & mask.bool()

    # ---- Tokens that read a cache ----
    def embed_written(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(input_ids, positions.clamp(min=0))

    def block(self, positions: Tensor, cache: Cache | None = None, rows: list[int] | None = None) -> LayerContext:
        """As `GenerativeBackbone.block`. Without a cache the tokens read each other."""
        tokens = check_tokens(positions)
        low, high = (int(bound) for bound in positions.aminmax())
        limit = self.config.max_tokens if cache is None else cache.capacity
        if high >= limit:
            raise ValueError(f"expected at most {limit} tokens, got {high + 1}: shorten the prompt")
        at, end = positions.clamp(min=0), high + 1
        # Usually all rows have the same positions: then tables of one row are broadcast over all.
        aligned = low >= 0 and high == low + tokens - 1
        aligned = aligned and (tokens == 1 or bool((positions == torch.arange(low, end, device=at.device)).all()))
        if aligned and cache is not None and rows is None:
            return self.aligned_block(low, tokens, cache)
        index = at[:1] if aligned else at
        if (short := self.config.short_tokens) is not None:  # a long row uses the second table, which begins at `short`
            index = index + short * (positions.amax(1, keepdim=True)[: len(index)] >= short)
        cos, sin = self._cos_sin(index)
        if cache is None and aligned:
            return self._causal((cos, sin), tokens)
        if cache is None:
            real = positions >= 0
            # Tokens do not read padding. Padding reads padding: a row of the mask without a key would give NaN.
            allowed = (real[:, None, :] | ~real[:, :, None])[:, None]  # (B, 1, T, T)
            mask, window_mask = self.masks(positions, positions, allowed)
            return LayerContext(self.config, cos, sin, mask, False, end, window_mask=window_mask)
        slots = cache.slots_of(positions, rows)
        mask, window_mask = self.masks(at, self._positions(end), end=end)
        return LayerContext(
            self.config, cos, sin, mask, False, end, cache=cache, rows=rows, slots=slots, window_mask=window_mask
        )

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> LayerContext:
        """As `GenerativeBackbone.aligned_block`. It reads no tensor's values, so a GPU does not have to wait."""
        end = low + tokens
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: shorten the prompt")
        (cos, sin), slots = self._cos_sin(slice(low, end)), (slice(None), slice(low, end))
        if tokens == 1 or low == 0:
            return self._causal((cos, sin), tokens, low)._replace(cache=cache, slots=slots)
        reads = self._positions(end)
        mask, window_mask = self.masks(reads[:, low:], reads, end=end)
        return LayerContext(self.config, cos, sin, mask, False, end, cache=cache, slots=slots, window_mask=window_mask)

    def _causal(self, cos_sin: tuple, tokens: int, low: int = 0) -> LayerContext:
        """The context of rows that are all at positions low .. low + tokens - 1, if tokens is 1 or low is 0.

        Then attention needs no mask: one token reads all keys, and texts from position 0 have the plain causal mask.
        """
        (cos, sin), end = cos_sin, low + tokens
        reads = self._positions(end)
        at = reads[:, low:]
        bias, window_mask = self.position_bias(at, reads), None
        if bias is None and not self._reaches_start(end):
            window_mask = readable(at, reads, self.config.sliding_window)
        if bias is None:
            return LayerContext(self.config, cos, sin, None, tokens > 1, end, window_mask=window_mask)
        mask, window_mask = self.masks(at, reads, end=end)
        return LayerContext(self.config, cos, sin, mask, False, end, window_mask=window_mask)

    def masks(self, at: Tensor, reads: Tensor, allowed: Tensor | None = None, end: int | None = None) -> list:
        """The masks of queries at positions `at` over keys at `reads`, for layers without and with a window.

        allowed: restricts both masks. end: the number of keys; if all windows include all of them, the second mask is
        None. Formats as in `LayerContext`: bool, or added to the scores if there is a position bias.
        """
        window, bias = self.config.sliding_window, self.position_bias(at, reads)
        masks = [readable(at, reads), None]
        if window is not None and not (end is not None and self._reaches_start(end)):
            masks[1] = readable(at, reads, window)
        if allowed is not None:
            masks = [mask if mask is None else mask & allowed for mask in masks]
        if bias is not None:
            masks = [mask if mask is None else bias.masked_fill(~mask, -torch.inf) for mask in masks]
        return masks

    def _reaches_start(self, end: int) -> bool:
        """Whether the window of the last of `end` tokens includes the first token."""
        return self.config.sliding_window is None or end <= self.config.sliding_window

    def _positions(self, end: int) -> Tensor:
        """0 .. end - 1, (1, end)."""
        return torch.arange(end, device=self.device)[None]

    def _cos_sin(self, at: Tensor | slice) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin (B or 1, T, 1, R) for indices into their tables, (B or 1, T), or for a slice of the tables."""
        if self.cos is None:
            return None, None
        if isinstance(at, slice):
            return self.cos[None, at, None], self.sin[None, at, None]
        return self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2)


def _padded_on_the_right(attention_mask: Tensor | np.ndarray) -> bool:
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
