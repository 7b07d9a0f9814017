"""Llama, Gemma and Phi, from scratch; their config is llama_config.py, their key/value cache cache.py.

Sources: Touvron et al. 2023 (Llama 1, 2), Llama team 2024 (Llama 3), Gemma team 2024 (Gemma 1), Javaheripi et al. 2023
(Phi-2). All are one stack of pre-norm layers with rotary positions (Su et al. 2021). They differ here:

    Llama    SwiGLU; Llama 3 stretches the slow rotary frequencies (`rope_scaling`)
    Gemma    embeddings times sqrt(D), norms that scale by 1 + w, GeGLU, heads wider than D/H, the head tied
    Phi      attention and MLP side by side on one LayerNorm, biases everywhere, only a part of each head rotates

The final norm belongs to the head: hidden[L] comes before it. Agreement with transformers is pinned in
tests/test_decoder.py.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Adapt, AdaptLayer, Backbone, Layout, padding_mask, tensor_on
from mini_ee.backbones.bert import StackedLinear, graph_activation
from mini_ee.backbones.cache import Around, Cache, GraphBlock, GraphCache, token_positions
from mini_ee.backbones.llama_config import ACTIVATIONS, DecoderConfig, rope_frequencies
from mini_ee.backbones.shapes import check

GATED = ("llama", "gemma")  # act(gate) * up; phi has up alone


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, Eq. 34): the pairs (x_i, x_{i+R/2}) turn, what is beyond R stays.

    heads (B, T, H, d); cos and sin (B or 1, T, 1, R), with -sin in the first half. Returns (B, T, H, d).
    """
    width = cos.shape[-1]
    turning = heads[..., :width]
    turned = torch.addcmul(turning * cos, turning.roll(width // 2, -1), sin)
    return turned if width == heads.shape[-1] else torch.cat((turned, heads[..., width:]), dim=-1)


# ---- The layers ----
class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * w (Zhang & Sennrich 2019), in float32; Gemma stores w - 1."""

    def __init__(self, width: int, eps: float, offset: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if offset else torch.ones(width))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:  # added in float32: in bfloat16 1 + w would keep two digits of w
            return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

    def graph(self, g, x: str) -> str:
        """forward; its statistics are float32 by the standard."""
        weight = g.parameter(self.weight)
        weight = g.op("Add", weight, g.number(1.0)) if self.offset else weight
        return g.op("RMSNormalization", x, weight, epsilon=self.eps)


def norm_of(config: DecoderConfig) -> nn.Module:
    """A norm as the model has them, of weight one."""
    if config.model_type == "phi":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps, offset=config.model_type == "gemma")


class Layer(nn.Module):
    """Attention and MLP, each on a normed input and added to the stream; Phi adds both at once, on one norm."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        width, bias, inner = config.hidden_size, config.model_type == "phi", config.intermediate_size
        self.parallel, self.gated = config.model_type == "phi", config.model_type in GATED
        self.heads, self.key_value_heads = config.num_attention_heads, config.key_value_heads
        self.head_width = config.head_width
        query, key_value = self.heads * self.head_width, self.key_value_heads * self.head_width
        self.attention_norm = norm_of(config)
        self.qkv = StackedLinear(width, (query, key_value, key_value), bias)
        self.attention_output = nn.Linear(query, width, bias)
        if not self.parallel:
            self.mlp_norm = norm_of(config)
        if self.gated:  # gate and up stay two products: as one, batch 8 takes 9 % longer
            self.gate = nn.Linear(width, inner, bias)
        self.up = nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(
        self,
        hidden: Tensor,
        around: Around,
        keys: Tensor | None,
        values: Tensor | None,
        adapt: AdaptLayer | None = None,
    ) -> Tensor:
        """hidden (B, T, D) -> (B, T, D). keys, values: this layer's cache, read and written; None: the block alone.

        adapt: what adapters add to the linear maps of this layer.
        """
        normed = self.attention_norm(hidden)
        attended = self.attention(normed, around, keys, values, adapt)
        if self.parallel:
            return hidden + attended + self.mlp(normed, adapt)
        hidden = hidden + attended
        return hidden + self.mlp(self.mlp_norm(hidden), adapt)

    def _linear(self, name: str, x: Tensor, adapt: AdaptLayer | None) -> Tensor:
        y = getattr(self, name)(x)
        return y if adapt is None else adapt(name, x, y)

    def attention(
        self,
        normed: Tensor,
        around: Around,
        keys: Tensor | None,
        values: Tensor | None,
        adapt: AdaptLayer | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D): every token reads the tokens up to itself (grouped queries: Ainslie et al. 2023)."""
        stacked = self._linear("qkv", normed, adapt).view(*normed.shape[:2], -1, self.head_width)  # (B, T, H + 2 KV, d)
        turning = self.heads + self.key_value_heads
        turned = rotate(stacked[:, :, :turning], around.cos, around.sin)
        query, key, value = turned[:, :, : self.heads], turned[:, :, self.heads :], stacked[:, :, turning:]
        if keys is None:
            attended = self._attend(query, key.transpose(1, 2), value.transpose(1, 2), around.mask, around.causal)
        else:
            keys.transpose(1, 2)[around.write], values.transpose(1, 2)[around.write] = key, value
            keys, values = keys[:, :, : around.end], values[:, :, : around.end]
            if around.rows is None:
                attended = self._attend(query, keys, values, around.mask, around.causal)
            else:  # row by row: a gathered copy of their keys takes longer than attention itself
                attended = torch.cat(
                    [
                        self._attend(query[i, None], keys[row, None], values[row, None], around.mask[i, None], False)
                        for i, row in enumerate(around.rows)
                    ]
                )
        return self._linear("attention_output", attended.transpose(1, 2).flatten(2), adapt)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=self.key_value_heads < self.heads,
        )

    def write_keys(self, hidden: Tensor, around: Around, keys: Tensor, values: Tensor) -> None:
        """The keys and values of hidden (B, T, D), as this layer's own input, into its cache; nothing is attended."""
        query, *_ = self.qkv.sizes
        bias = None if self.qkv.bias is None else self.qkv.bias[query:]
        stacked = F.linear(self.attention_norm(hidden), self.qkv.weight[query:], bias)
        key, value = stacked.view(*hidden.shape[:2], 2, -1, self.head_width).unbind(2)
        keys.transpose(1, 2)[around.write] = rotate(key, around.cos, around.sin)
        values.transpose(1, 2)[around.write] = value

    def graph_write_keys(self, g, hidden: str, block: GraphBlock, depth: int) -> None:
        """write_keys on (B T, D). The projection without its queries is cut once, when the graph is loaded."""
        query, key, value = self.qkv.sizes
        cut = [
            g.op("Slice", g.parameter(each), *map(g.integers, (query, query + key + value, 0)))
            for each in (self.qkv.weight, self.qkv.bias)
            if each is not None
        ]
        stacked = g.unflatten(g.gemm(g.apply(self.attention_norm, block.every(g, hidden)), *cut), block.every_shape)
        key, value = g.several(2, "Split", stacked, axis=2, num_outputs=2)
        block.write(g, depth, block.rotate(g, key, self.key_value_heads), value)

    def mlp(self, normed: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """down(act(gate) * up), in Phi down(act(up)): (B, T, D) -> (B, T, D)."""
        inner = self._linear("up", normed, adapt)
        inner = self.activation(self._linear("gate", normed, adapt)) * inner if self.gated else self.activation(inner)
        return self._linear("down", inner, adapt)

    def graph(self, g, hidden: str, block: GraphBlock, depth: int, adapt=None) -> str:
        """forward of the layer at this depth, from 0, on (B T, D) but for the attention itself."""

        def linear(name: str, x: str) -> str:
            y = g.linear(x, getattr(self, name), int8=name != "down")  # its input has outliers
            return y if adapt is None else adapt(name, x, y)

        def mlp(normed: str) -> str:
            inner = linear("up", normed)
            if not self.gated:
                return linear("down", graph_activation(g, inner, self.activation))
            return linear("down", g.op("Mul", graph_activation(g, linear("gate", normed), self.activation), inner))

        normed = g.apply(self.attention_norm, block.every(g, hidden))
        query, key, value = self.qkv.sizes
        stacked = g.unflatten(linear("qkv", normed), block.every_shape)
        turning, value = g.several(2, "Split", stacked, g.integers(query + key, value), axis=2)
        turned = block.rotate(g, turning, self.heads + self.key_value_heads)
        query, key = g.several(2, "Split", turned, g.integers(query, key), axis=2)
        attended = block.attend(g, depth, block.here(g, query, block.readable), key, value)
        attended = linear("attention_output", g.flatten(attended, self.attention_output.in_features))
        if self.parallel:
            return g.op("Add", g.op("Add", hidden, attended), mlp(block.here(g, normed, hidden)))
        hidden = g.op("Add", hidden, attended)
        return g.op("Add", hidden, mlp(g.apply(self.mlp_norm, hidden)))


class Decoder(Backbone):
    """The backbone: embeddings, L layers, the final norm and the head to words.

    lm_head is None where it is tied to the embeddings, and where the checkpoint has none.
    """

    Config = DecoderConfig
    poolings = ("mean",)  # the first token reads nothing but itself
    generates = True
    reads_prompt_at = "last"
    head_architecture = "ForCausalLM"

    def __init__(self, config: DecoderConfig, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = norm_of(config)
        self.lm_head = None
        if lm_head and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.model_type == "phi")
        angle = torch.arange(config.max_tokens, dtype=torch.float32, device="cpu")[:, None] * rope_frequencies(config)
        sin = angle.sin()
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)
        self.apply(self.initialise)

    @classmethod
    def parts(cls, config: DecoderConfig) -> dict[str, str]:
        """A head that is tied is always there."""
        return {} if config.tie_word_embeddings else {"lm_head": "lm_head"}

    @classmethod
    def tied(cls, config: DecoderConfig) -> dict[str, str]:
        """The head, where the config says so."""
        return {"lm_head.weight": "embed_tokens.weight"} if config.tie_word_embeddings else {}

    @property
    def has_lm_head(self) -> bool:
        """Whether there is a head to words, with its norm."""
        return self.norm is not None and (self.config.tie_word_embeddings or self.lm_head is not None)

    @property
    def vocabulary(self) -> dict[str, str]:
        """The linear map onto the vocabulary: weight and bias -> names of parameters."""
        if not self.has_lm_head:
            raise self.no_lm_head()
        if self.lm_head is None:
            return {"weight": "embeddings.weight"}
        return {name: f"lm_head.{name}" for name, _ in self.lm_head.named_parameters()}

    @property
    def projections(self) -> dict[str, tuple[str, int]]:
        """As `Backbone.projections` says; Phi has no gate."""
        maps = ("attention_output", *(["gate"] if self.layers[0].gated else []), "up", "down")
        return {"query": ("qkv", 0), "key": ("qkv", 1), "value": ("qkv", 2)} | {name: (name, 0) for name in maps}

    def exit_norm(self) -> nn.Module:
        """Layers leave the sums that they add to unnormed."""
        return norm_of(self.config)

    def without_heads(self) -> "Decoder":
        """The same backbone, without the head to words and its norm."""
        self.lm_head = self.norm = None
        return self

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, T, D), as `Backbone.embed` says. Token types are passed over."""
        ids = tensor_on(self.cos.device, inputs.input_ids)
        check(ids, "B T")
        hidden = self.embeddings(ids)
        if self.config.model_type == "gemma":
            hidden = hidden * hidden.new_tensor(self.config.hidden_size**0.5)  # rounded to the model's dtype, as theirs
        return hidden

    def graph_embed(self, g) -> str:
        """embed; declares the input input_ids, (B, T)."""
        hidden = g.op("Gather", g.parameter(self.embeddings.weight), g.input("input_ids", "batch", "tokens"))
        if self.config.model_type == "gemma":
            hidden = g.op("Mul", hidden, g.number(self.config.hidden_size**0.5))
        return hidden

    def around(self, inputs) -> Around:
        """Where the tokens of whole rows stand, padded on either side; padded on the right they are the quickest.

        Raises ValueError where there are more tokens than the model has positions.
        """
        tokens, attention_mask = check(inputs.input_ids, "B T")["T"], inputs.attention_mask
        padding = padding_mask(attention_mask, self.cos.device)
        if padding is not None and not _padded_on_the_right(attention_mask):
            positions = token_positions(tensor_on(self.cos.device, attention_mask))
            return self.block(positions)._replace(padding=padding)
        if tokens > self.config.max_tokens:
            raise ValueError(f"expected at most {self.config.max_tokens} tokens, got {tokens}: truncate the input")
        # What is before a token is all that it reads: padding behind it needs no mask.
        return Around(self.cos[None, :tokens, None], self.sin[None, :tokens, None], None, True, tokens, padding)

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
        # Most often all rows stand at the same places: slices serve where indices would be needed.
        aligned = low >= 0 and high == low + tokens - 1
        aligned = aligned and (tokens == 1 or bool((positions == torch.arange(low, end, device=at.device)).all()))
        if aligned and cache is not None and rows is None:
            return self.aligned_block(low, tokens, cache)
        if aligned:
            cos, sin = self.cos[None, low:end, None], self.sin[None, low:end, None]
        else:
            cos, sin = self.cos[at].unsqueeze(2), self.sin[at].unsqueeze(2)
        if cache is None:
            reads, padding = positions[:, None, :], positions < 0
            mask = (reads <= positions[:, :, None]) & (~padding[:, None, :] | padding[:, :, None])
            return Around(cos, sin, None if aligned else mask[:, None], aligned, end)
        index = torch.arange(len(positions)) if rows is None else torch.tensor(rows)
        write = (index.to(at.device)[:, None], torch.where(positions < 0, cache.capacity, positions))
        mask = (torch.arange(end, device=at.device) <= at[:, :, None])[:, None]
        return Around(cos, sin, mask, False, end, cache=cache, rows=rows, write=write)

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> Around:
        """`block` where all rows of the cache stand at low .. low + tokens - 1. Asks no tensor anything."""
        end = low + tokens
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: shorten the prompt")
        cos, sin, write = self.cos[None, low:end, None], self.sin[None, low:end, None], (slice(None), slice(low, end))
        if tokens == 1 or low == 0:
            return Around(cos, sin, None, tokens > 1, end, cache=cache, write=write)
        places = torch.arange(end, device=cos.device)
        return Around(cos, sin, (places <= places[low:, None])[None, None], False, end, cache=cache, write=write)

    def graph_around(self, g, mask: str) -> GraphBlock:
        """The block of whole rows. mask (B, T): true where there is a token; no token reads padding, on either side."""
        counted = g.op("CumSum", g.cast(mask, int), g.integers(1))
        at = g.op("Max", g.op("Sub", counted, g.integers(1)), g.integers(0))
        before = g.op("LessOrEqual", *(g.op("Unsqueeze", at, g.integers(*axes)) for axes in ((1, 2), (1, 3))))
        return GraphBlock(g, self.config, at, g.op("And", before, g.op("Unsqueeze", mask, g.integers(1, 2))))

    def graph_block(self, g, first: int) -> GraphBlock:
        """block with a cache, for a graph whose first layer is this, from 0. Declares the inputs positions (B, T), -1
        for padding, rows (B,): which prompts the tokens belong to, and that layer's cache."""
        positions, rows = g.input("positions", "batch", "tokens"), g.input("rows", "batch")
        width = self.config.key_value_heads * self.config.head_width
        keys = g.input(f"keys_{first}", "prompts", "slots", width, dtype=g.dtype)
        row = g.op("Expand", g.op("Unsqueeze", rows, g.integers(1)), g.shape(positions, 0, 2))
        index = g.op("Concat", *(g.op("Unsqueeze", each, g.integers(2)) for each in (row, positions)), axis=2)
        at = g.op("Max", positions, g.integers(0))
        zero, one = (g.constant(f"scalar_{value}", np.array(value)) for value in (0, 1))
        every_slot = g.op("Range", zero, g.op("Squeeze", g.shape(keys, 1, 2)), one)
        readable = g.op("LessOrEqual", every_slot, g.op("Unsqueeze", at, g.integers(1, 3)))
        return GraphBlock(g, self.config, at, readable, GraphCache(index, rows, g.shape(keys, 0, 1)))

    def run_layers(self, hidden: Tensor, around: Around, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says; fills the layers' caches."""
        cache, keys, values = around.cache, None, None
        for depth in range(start, stop):
            if cache is not None:
                keys, values = cache.keys[depth], cache.values[depth]
            hidden = self.layers[depth](hidden, around, keys, values, adapt and partial(adapt, depth))
        return hidden

    def graph_layers(self, g, hidden: str, around: GraphBlock, start: int, stop: int, adapt=None) -> str:
        """run_layers. adapt: (index of a layer, name of a linear map, its input, its output) -> its output."""
        flat = g.flatten(hidden, self.config.hidden_size)
        for depth in range(start, stop):
            flat = self.layers[depth].graph(g, flat, around, depth, adapt and partial(adapt, depth))
        return g.unflatten(flat, around.shape, self.config.hidden_size)

    def propagate(self, hidden: Tensor, around: Around, start: int, stop: int) -> None:
        """State copying (Elbayad et al. 2020): hidden (B, T, D) stands in for hidden[start] .. hidden[stop - 1].

        The layers start + 1 .. stop each write its keys and values, through their own input norm, and compute no more.
        """
        for depth in range(start, stop):
            self.layers[depth].write_keys(hidden, around, around.cache.keys[depth], around.cache.values[depth])

    def graph_propagate(self, g, hidden: str, block: GraphBlock, start: int, stop: int) -> None:
        """propagate."""
        flat = g.flatten(hidden, self.config.hidden_size)
        for depth in range(start, stop):
            self.layers[depth].graph_write_keys(g, flat, block, depth)

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

    def graph_lm_logits(self, g, hidden: str, words: Tensor | None = None) -> str:
        """lm_logits, (B, D) -> (B, V); of some words (C,) alone where they are given."""
        linear = self.embeddings if self.lm_head is None else self.lm_head
        weights = [g.parameter(each) if words is None else g.rows_of(each, words) for each in linear.parameters()]
        return g.gemm(g.apply(self.norm, hidden), *weights)


def _padded_on_the_right(attention_mask: Tensor | np.ndarray) -> bool:
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


# ---- Hugging Face's names ----
_NAMES = {
    "embeddings": "embed_tokens",
    "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
    "layers.{i}.qkv": "layers.{i}.self_attn.{q|k|v}_proj",
    "layers.{i}.attention_output": "layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "layers.{i}.mlp.up_proj",
    "layers.{i}.down": "layers.{i}.mlp.down_proj",
    "norm": "norm",
    "lm_head": "lm_head",
}

_PHI_NAMES = _NAMES | {
    "layers.{i}.attention_output": "layers.{i}.self_attn.dense",
    "layers.{i}.up": "layers.{i}.mlp.fc1",
    "layers.{i}.down": "layers.{i}.mlp.fc2",
    "norm": "final_layernorm",
}


def _layout(architecture: str, names: dict[str, str] = _NAMES) -> Layout:
    return Layout(names=names, prefix="model.", architecture=architecture, ignored=r"(.*\.)?rotary_emb\.inv_freq")


BACKBONE = Decoder
LAYOUTS = {"llama": _layout("Llama"), "gemma": _layout("Gemma"), "phi": _layout("Phi", _PHI_NAMES)}
