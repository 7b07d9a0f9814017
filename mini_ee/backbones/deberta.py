"""DeBERTa v1 and v2 (v3 is a v2), from scratch: attention that keeps what a token is and where it stands apart.

Sources: He et al. 2021, arXiv 2006.03654v6 (v1), He et al. 2023, arXiv 2111.09543v4 (v3); v2 is published as code alone
(microsoft/DeBERTa). Layers are BERT's, post-norm, but for the attention. With one table P of relative positions,

    score_ij = (q_i . k_j + q_i . K_r + k_j . Q_r) / sqrt((1 + n) d),    K = P W_K,  Q = P W_Q,  r = row(i - j)

q_i . K_r is c2p, k_j . Q_r is p2c, n of the two are there (`pos_att_type`), and d is the width of a head. The paper has
the row of j - i in the last term; the published code, v1 and v2, has that of i - j, and so has this file. Embeddings
are zero at padding. What differs:

    v1    queries and values have biases, keys none; W_K has none (`pos_proj`), W_Q one (`pos_q_proj`); row r + span
    v2    all have biases; W_K and W_Q are those of keys and queries where `share_att_key` says so; far rows are shared
          (`position_buckets`); P may be normed; the first layer may add a convolution of the embeddings

K and Q do not depend on the input. Here only the rows that some i - j reaches are computed, once a batch and layer, and
with adapters once for each stream; in ONNX they and their adapters are constants, which ONNX Runtime folds as it loads.

The masked-LM head is the one that `cls.predictions` or `lm_predictions.lm_head` holds: both compute the same.
Transformers (5.23) agrees in every hidden state and logit: tests/test_deberta.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones import bert
from mini_ee.backbones.backbone import Adapt, AdaptLayer, Backbone, layer_flops, padding_mask, tensor_on
from mini_ee.backbones.bert import ACTIVATIONS, Adapted, Bert, MaskedLMHead, StackedLinear, graph_activation
from mini_ee.backbones.deberta_config import CONV_ACTIVATIONS, TERMS, V1, V2, DebertaConfig, Positions, layout
from mini_ee.backbones.shapes import check

MAPS = dict(zip(TERMS, ("pos_proj", "pos_q_proj")))  # term -> the map of its positions


# ---- What all layers need ----
class Around(NamedTuple):
    """What all layers need besides the hidden states. S = 2 T - 1: distances i - j from 1 - T on."""

    padding: Tensor | None  # (B, 1, 1, T), true where a token may be read; None: nothing is padded
    table: Tensor | None  # (S, D), the rows of P that the distances have; None: no positions are read
    index: Tensor | None  # (T, T), which of these is i - j

    keep, repeat = bert.Around.keep, bert.Around.repeat  # what positions read is the same for all rows


class GraphAround(NamedTuple):
    """What the layers of an ONNX graph need besides their input."""

    shape: str  # (2,): B and T
    mask: str  # (B, T): true where there is a token
    table: str | None  # (2 span, D): P
    rows: str | None  # (S,): the rows of the table that distances have
    index: str | None  # (T, T)


class Embeddings(nn.Module):
    """Word, and position and token type where the config has them; mapped from E to D, normed, zero at padding."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width) if config.position_biased_input else None
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.to_hidden = nn.Linear(width, config.hidden_size, bias=False) if width != config.hidden_size else None
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None, padding: Tensor | None) -> Tensor:
        """(B, T) twice and (B, 1, 1, T) -> (B, T, D)."""
        embedded = self.word(input_ids)
        if self.position is not None:
            embedded = embedded + self.position.weight[: input_ids.shape[1]]
        if self.token_type is not None:
            types = self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids)
            embedded = embedded + types
        embedded = self.norm(embedded if self.to_hidden is None else self.to_hidden(embedded))
        return self.dropout(embedded if padding is None else embedded * padding[:, 0, 0, :, None])

    def graph(self, g) -> str:
        """forward; declares the inputs that it takes, (B, T)."""
        ids = g.input("input_ids", "batch", "tokens")
        embedded = g.op("Gather", g.parameter(self.word.weight), ids)
        if self.position is not None:
            positions = g.op("Slice", g.parameter(self.position.weight), g.integers(0), g.shape(ids, 1, 2))
            embedded = g.op("Add", embedded, positions)
        if self.token_type is not None:
            types = g.input("token_type_ids", "batch", "tokens")
            embedded = g.op("Add", embedded, g.op("Gather", g.parameter(self.token_type.weight), types))
        if self.to_hidden is not None:
            flat = g.linear(g.flatten(embedded, self.to_hidden.in_features), self.to_hidden, int8=True)
            embedded = g.unflatten(flat, g.shape(ids, 0, 2))
        mask = g.op("Unsqueeze", g.input("attention_mask", "batch", "tokens"), g.integers(2))
        return g.op("Mul", g.apply(self.norm, embedded), g.cast(mask, g.dtype))


# ---- A layer ----
class HeadByHead(StackedLinear):
    """Queries, keys and values in one product; in a file, their rows stand together head by head."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, (width, width, width), bias=False)
        self.heads = heads

    def to_file(self, weight: Tensor) -> Tensor:
        """(3 H d, D), ours -> the file's, (H 3 d, D)."""
        return weight.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)

    def from_file(self, weight: Tensor) -> Tensor:
        """(H 3 d, D), the file's -> ours."""
        return weight.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


class Convolution(nn.Module):
    """Of v2's first layer: its output and a convolution of its input over tokens, added and normed; zero at padding."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        width, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=config.conv_groups)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.activation = CONV_ACTIVATIONS[config.conv_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, embedded: Tensor, hidden: Tensor, padding: Tensor | None) -> Tensor:
        """(B, T, D) twice and (B, 1, 1, T) -> (B, T, D)."""
        inner = self.dropout(self.conv(embedded.transpose(1, 2)).transpose(1, 2))
        output = self.norm(hidden + self.activation(inner))
        return output if padding is None else output * padding[:, 0, 0, :, None]

    def graph(self, g, embedded: str, hidden: str, around: GraphAround) -> str:
        """forward, on (B T, D)."""
        width, pad = self.conv.in_channels, self.conv.padding[0]
        columns = g.op("Transpose", g.unflatten(embedded, around.shape, width), perm=(0, 2, 1))
        parameters = g.parameter(self.conv.weight), g.parameter(self.conv.bias)
        inner = g.op("Conv", columns, *parameters, pads=(pad, pad), group=self.conv.groups)
        inner = g.flatten(g.op("Transpose", inner, perm=(0, 2, 1)), width)
        tanh = self.activation is torch.tanh
        inner = g.op("Tanh", inner) if tanh else graph_activation(g, inner, self.activation)
        real = g.cast(g.flatten(around.mask, 1), g.dtype)
        return g.op("Mul", g.apply(self.norm, g.op("Add", hidden, inner)), real)


class Layer(Adapted):
    """Disentangled self-attention, then the feed-forward part, each added to its input and normed (post-norm)."""

    def __init__(self, config: DebertaConfig, first: bool):
        super().__init__()
        width, v1 = config.hidden_size, config.model_type == "deberta"
        self.heads, self.terms, self.shared = config.num_attention_heads, config.terms, config.share_att_key
        self.share = (1 + len(config.pos_att_type)) ** -0.5  # of each term; without positions too, as published
        self.scale = self.share * config.head_width**-0.5
        self.qkv = HeadByHead(width, self.heads) if v1 else StackedLinear(width, (width, width, width), bias=True)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) if v1 else None for _ in range(2))
        for term, name in MAPS.items():
            if term in self.terms and not self.shared:
                setattr(self, name, nn.Linear(width, width, bias=not v1 or term == "p2c"))
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.conv = Convolution(config) if first and config.conv_kernel_size else None
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.attention_dropout = config.attention_probs_dropout_prob

    def forward(self, hidden: Tensor, around: Around, adapt: AdaptLayer | None = None, streams: int = 1) -> Tensor:
        """(B, T, D) -> (B, T, D). adapt: what adapters add to the linear maps of this layer, one of each stream."""
        linear = partial(self.linear, adapt=adapt)
        query, key, value = linear("qkv", hidden).chunk(3, dim=-1)
        if self.q_bias is not None:
            query, value = query + self.q_bias, value + self.v_bias
        query, key, value = (self.by_head(each) for each in (query, key, value))
        mask, positions = around.padding, None
        if self.terms:
            table = self.dropout(around.table)
            tables = self.tables(linear, table if adapt is None else table.expand(streams, -1, -1))
            tables = {
                term: each.repeat_interleave(len(hidden) // streams, 0) if streams > 1 else each
                for term, each in tables.items()
            }
            positions = self.position_scores(query, key, tables, around.index) * self.scale
            mask = positions if mask is None else positions.masked_fill(~mask, -torch.inf)
        dropout = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )
        attended = linear("attention_output", attended.transpose(1, 2).flatten(2))
        attended = self.attention_norm(hidden + self.dropout(attended))
        inner = self.activation(linear("up", attended))
        output = self.output_norm(attended + self.dropout(linear("down", inner)))
        return output if self.conv is None else self.conv(hidden, output, around.padding)

    def by_head(self, x: Tensor) -> Tensor:
        """(..., T, D) -> (..., H, T, d)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def tables(self, linear: Callable[[str, Tensor], Tensor], table: Tensor) -> dict[str, Tensor]:
        """K and Q by term, (H, S, d) each; of one table for each stream, (n, S, D), (n, H, S, d)."""
        if self.shared:
            query, key, _ = linear("qkv", table).chunk(3, dim=-1)
            found = {"c2p": key, "p2c": query}
        else:
            found = {term: linear(MAPS[term], table) for term in self.terms}
        return {term: self.by_head(found[term]) for term in self.terms}

    def position_scores(self, query: Tensor, key: Tensor, tables: dict[str, Tensor], index: Tensor) -> Tensor:
        """q_i . K_r + k_j . Q_r, (B, H, T, T)."""
        shape, scores = (*query.shape[:2], *index.shape), []
        if "c2p" in tables:
            scores.append((query @ tables["c2p"].mT).gather(-1, index.expand(shape)))
        if "p2c" in tables:
            scores.append((key @ tables["p2c"].mT).gather(-1, index.T.expand(shape)).mT)
        return sum(scores)

    def graph(self, g, hidden: str, around: GraphAround, adapt: Callable | None = None, streams: int = 1) -> str:
        """forward, on (B T, D) but for the attention itself."""
        linear = partial(self.graph_linear, g, adapt=adapt)
        width = self.attention_output.in_features
        qkv = g.unflatten(linear("qkv", hidden), around.shape, 3 * width)
        query, key, value = g.several(3, "Split", qkv, axis=2, num_outputs=3)
        if self.q_bias is not None:
            query, value = (
                g.op("Add", each, g.parameter(bias)) for each, bias in ((query, self.q_bias), (value, self.v_bias))
            )
        real = g.op("Unsqueeze", around.mask, g.integers(1, 2))
        if self.terms:
            tables = self.graph_tables(g, around, adapt, streams)
            scores = self.graph_position_scores(g, query, key, tables, around.index)
            mask = g.op("Where", real, scores, g.number(-np.inf))
        else:
            mask = g.readable(around.mask, around.mask)
        query = g.op("Mul", query, g.number(self.share))
        attended = g.attention(query, key, value, mask, self.heads, self.heads)
        attended = linear("attention_output", g.flatten(attended, width))
        attended = g.apply(self.attention_norm, g.op("Add", hidden, attended))
        inner = graph_activation(g, linear("up", attended), self.activation)
        output = g.apply(self.output_norm, g.op("Add", attended, linear("down", inner)))
        return output if self.conv is None else self.conv.graph(g, hidden, output, around)

    def graph_position_scores(self, g, query: str, key: str, tables: dict[str, str], index: str) -> str:
        """position_scores, scaled: (B, T, D) twice -> (B, H, T, T)."""
        found = []
        for term, content in (("c2p", query), ("p2c", key)):
            if term in self.terms:
                product = g.op("MatMul", self.graph_by_head(g, content, (0, 2, 1, 3)), tables[term])
                shape = g.op("Concat", g.shape(product, 0, 3), g.shape(index, 0, 1), axis=0)
                at = index if term == "c2p" else g.op("Transpose", index, perm=(1, 0))
                scores = g.op("GatherElements", product, g.op("Expand", at, shape), axis=3)
                found.append(scores if term == "c2p" else g.op("Transpose", scores, perm=(0, 1, 3, 2)))
        return g.op("Mul", found[0] if len(found) == 1 else g.op("Add", *found), g.number(self.scale))

    def graph_by_head(self, g, x: str, order: tuple[int, ...]) -> str:
        """(B, T, D) -> (B, T, H, d) in another order of axes."""
        return g.op("Transpose", g.op("Reshape", x, g.integers(0, 0, self.heads, -1)), perm=order)

    def graph_tables(self, g, around: GraphAround, adapt: Callable | None, streams: int) -> dict[str, str]:
        """tables, transposed: (1 or B, H, d, S). All products are of constants alone, those of adapters too."""

        def linear(name: str) -> str:
            whole = g.linear(around.table, getattr(self, name), int8=True)  # (2 span, O)
            if adapt is None:
                return g.op("Unsqueeze", g.op("Gather", whole, around.rows), g.integers(0))
            x, y = (g.op("Concat", *[each] * streams, axis=0) for each in (around.table, whole))
            size = g.integers(streams, -1, getattr(self, name).out_features)
            each = g.op("Gather", g.op("Reshape", adapt(name, x, y), size), around.rows, axis=1)
            if streams == 1:
                return each
            batch = g.op("Div", g.shape(around.mask, 0, 1), g.integers(streams))
            every = g.op("Concat", g.integers(1), batch, g.integers(1, 1), axis=0)
            rows = g.op("Expand", g.op("Unsqueeze", each, g.integers(1)), every)
            return g.op("Reshape", rows, g.op("Concat", g.integers(-1), g.shape(each, 1, 3), axis=0))

        if self.shared:
            query, key, _ = g.several(3, "Split", linear("qkv"), axis=2, num_outputs=3)
            found = {"c2p": key, "p2c": query}
        else:
            found = {term: linear(MAPS[term]) for term in self.terms}
        return {term: self.graph_by_head(g, found[term], (0, 2, 3, 1)) for term in self.terms}


# ---- The backbone ----
class Deberta(Backbone):
    """The backbone: embeddings, positions, L layers, and, where the checkpoint has it, a masked-LM head."""

    Config = DebertaConfig
    vocabulary, lm_logits, graph_lm_logits = Bert.vocabulary, Bert.lm_logits, Bert.graph_lm_logits  # the head is BERT's
    graph_embed = Bert.graph_embed

    def __init__(self, config: DebertaConfig, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.positions = Positions(config)
        self.layers = nn.ModuleList(Layer(config, first=depth == 0) for depth in range(config.num_hidden_layers))
        self.lm_head = MaskedLMHead(config) if lm_head else None
        self.apply(self.initialise)

    @classmethod
    def tied(cls, config: DebertaConfig) -> dict[str, str]:
        """The head's map onto the vocabulary is that of the embeddings, and its bias may have two names."""
        head = "cls.predictions"
        return {f"{head}.decoder.weight": "embeddings.word_embeddings.weight", f"{head}.decoder.bias": f"{head}.bias"}

    @classmethod
    def unused(cls, config: DebertaConfig) -> str:
        """Microsoft's files hold absolute positions where none are added."""
        return "(?!)" if config.position_biased_input else r"embeddings\.position_embeddings\.weight"

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, T, D), as `Backbone.embed` says."""
        device = self.embeddings.word.weight.device  # self.device walks over the modules: felt at batch 1
        ids, types = tensor_on(device, inputs.input_ids), tensor_on(device, inputs.token_type_ids)
        tokens = check(ids, "B T")["T"]
        if tokens > self.config.max_tokens:
            raise ValueError(f"expected at most {self.config.max_tokens} tokens, got {tokens}: truncate the input")
        return self.embeddings(ids, types, padding_mask(inputs.attention_mask, device))

    def around(self, inputs) -> Around:
        """The padding mask, and what positions read."""
        padding = padding_mask(inputs.attention_mask, self.embeddings.word.weight.device)
        return Around(padding, *self.positions(inputs.input_ids.shape[1]))

    def graph_around(self, g, mask: str) -> GraphAround:
        """around. mask (B, T): true where there is a token."""
        return GraphAround(g.shape(mask, 0, 2), mask, *self.positions.graph(g, g.shape(mask, 1, 2)))

    def run_layers(self, hidden: Tensor, around: Around, start: int, stop: int, adapt: Adapt | None = None) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says."""
        streams = getattr(adapt, "streams", None) or len(hidden)  # a table for each, else for each row
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, around, adapt and partial(adapt, depth), streams if adapt else 1)
        return hidden

    def graph_layers(self, g, hidden: str, around: GraphAround, start: int, stop: int, adapt=None) -> str:
        """run_layers. adapt: (index of a layer, name of a linear map, its input, its output) -> its output."""
        flat, streams = g.flatten(hidden, self.config.hidden_size), getattr(adapt, "streams", 1)
        for depth in range(start, stop):
            flat = self.layers[depth].graph(g, flat, around, adapt and partial(adapt, depth), streams)
        return g.unflatten(flat, around.shape, self.config.hidden_size)

    # ---- What it costs ----
    def layer_flops(self, tokens: int) -> float:
        """Of one layer on a row alone, with the maps of the positions and their products."""
        layer, width, positions = self.layers[0], self.config.hidden_size, 2 * tokens - 1
        maps = (layer.qkv, layer.attention_output, layer.up, layer.down)
        read = [layer.qkv] if layer.shared else [getattr(layer, MAPS[term]) for term in layer.terms]
        of_positions = sum(each.weight.numel() for each in read) if layer.terms else 0
        own = layer_flops(sum(each.weight.numel() for each in maps), width, tokens)
        return own + 2.0 * positions * (of_positions + len(layer.terms) * tokens * width)

    def projected(self, target: str, tokens: int) -> int:
        positions = 2 * tokens - 1
        if target in MAPS.values():
            return positions
        shared = self.layers[0].shared and self.layers[0].terms and target in ("query", "key", "value")
        return tokens + positions if shared else tokens

    def start_flops(self, tokens: int) -> float:
        """With the convolution of the embeddings."""
        conv = self.layers[0].conv
        return super().start_flops(tokens) + (2.0 * tokens * conv.conv.weight.numel() if conv else 0.0)


BACKBONE = Deberta
LAYOUTS = {"deberta": layout("Deberta", V1), "deberta-v2": layout("DebertaV2", V2)}
