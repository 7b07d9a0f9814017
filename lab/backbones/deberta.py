"""DeBERTa v1 and v2 (v3 is a v2), from scratch: disentangled attention, with separate content and position vectors.

Sources: He et al. 2021, arXiv 2006.03654v6 (v1); He et al. 2023, arXiv 2111.09543v4 (v3); v2 is published only as code
(microsoft/DeBERTa). Except for attention, the layers are BERT's (post-norm). P is one table of relative positions:

    score_ij = (q_i . k_j + q_i . K_r + k_j . Q_r) / sqrt((1 + n) d),    K = P W_K,  Q = P W_Q,  r = row(i - j)

q_i . K_r is c2p (content to position), k_j . Q_r is p2c; n is how many of the two are used (`pos_att_type`), and d is
the width of a head. In the last term the paper takes the row of j - i; the published code of both versions and this
file take that of i - j. Embeddings are 0 at padding. The versions differ in:

    v1    biases: of queries and values, and of W_Q (`pos_q_proj`), but not of W_K (`pos_proj`); row(r) = r + span
    v2    biases everywhere; W_K and W_Q are those of keys and queries if `share_att_key`; distant positions share rows
          (`position_buckets`); P may have a norm; the first layer may add a convolution of the embeddings

K and Q do not depend on the input. Only the rows of distances that occur are computed, once per batch and layer, or
once per stream if there are adapters.

The masked-LM head may be stored as `cls.predictions` or as `lm_predictions.lm_head`: both compute the same.
Hidden states and logits agree with those of transformers (5.23): tests/lab/parity/test_deberta.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import (
    Adapt,
    AdaptLayer,
    Backbone,
    Tensors,
    check_tokens,
    copies_of,
    layer_flops,
    padding_mask,
    rows_of,
    tensor_on,
)
from mini_ee.lab.backbones.bert import ACTIVATIONS, Bert, MaskedLMHead
from mini_ee.lab.backbones.deberta_config import CONV_ACTIVATIONS, TERMS, V1, V2, DebertaConfig, Positions, layout
from mini_ee.lab.backbones.layers import Adapted, StackedLinear
from mini_ee.lab.data.tokenizer import Inputs

MAPS = dict(zip(TERMS, ("pos_proj", "pos_q_proj")))  # term -> its linear map of positions


# ---- The context of layers ----
class LayerContext(NamedTuple):
    """The inputs of all layers besides the hidden states. S = 2 T - 1 distances i - j, from 1 - T to T - 1."""

    padding: Tensor | None  # (B, 1, 1, T), true at tokens; None: no padding
    table: Tensor | None  # (S, D), the row of P for each distance, or all of P; None: no relative positions
    rows: Tensor | None  # (S,), the row of P for each distance, if the table is all of P; else None
    distance: Tensor | None  # (T, T), the index of i - j among the S distances

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        return self._replace(padding=rows_of(self.padding, rows))

    def repeat(self, count: int) -> "LayerContext":
        return self._replace(padding=copies_of(self.padding, count))


class Embeddings(nn.Module):
    """Word, plus position and token type if the config has them; mapped from E to D, normed, 0 at padding."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width) if config.position_biased_input else None
        self.token_type = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.to_hidden = nn.Linear(width, config.hidden_size, bias=False) if width != config.hidden_size else None
        self.int8_maps = ("to_hidden",) if self.to_hidden else ()
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


# ---- A layer ----
class HeadByHead(StackedLinear):
    """Queries, keys and values in one product. In a file the rows of a head's query, key and value are consecutive."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, (width, width, width), bias=False)
        self.heads = heads

    def to_file(self, weight: Tensor) -> Tensor:
        """Our weight (3 H d, D) -> the file's, (H 3 d, D)."""
        return weight.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)

    def from_file(self, weight: Tensor) -> Tensor:
        """The file's weight (H 3 d, D) -> ours, (3 H d, D)."""
        return weight.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


class Convolution(nn.Module):
    """In the first layer of v2: norm(output + convolution of the input over tokens), 0 at padding."""

    def __init__(self, config: DebertaConfig):
        super().__init__()
        width, kernel = config.hidden_size, config.conv_kernel_size
        assert kernel is not None
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=config.conv_groups)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.activation = CONV_ACTIVATIONS[config.conv_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, embedded: Tensor, hidden: Tensor, padding: Tensor | None) -> Tensor:
        """(B, T, D) twice and (B, 1, 1, T) -> (B, T, D)."""
        inner = self.dropout(self.conv(embedded.transpose(1, 2)).transpose(1, 2))
        output = self.norm(hidden + self.activation(inner))
        return output if padding is None else output * padding[:, 0, 0, :, None]


class Layer(Adapted):
    """Disentangled self-attention, then the feed-forward part, each added to its input and normed (post-norm)."""

    def __init__(self, config: DebertaConfig, first: bool):
        super().__init__()
        width, v1 = config.hidden_size, config.model_type == "deberta"
        self.heads, self.terms, self.shared = config.num_attention_heads, config.terms, config.share_att_key
        self.share = (1 + len(config.pos_att_type)) ** -0.5  # as published, also if relative_attention is off
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

    def forward(
        self, hidden: Tensor, context: LayerContext, adapt: AdaptLayer | None = None, streams: int = 1
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). adapt: adds the adapters of every stream to the linear maps of this layer."""
        linear = partial(self.linear, adapt=adapt)
        query, key, value = linear("qkv", hidden).chunk(3, dim=-1)
        if self.q_bias is not None:
            query, value = query + self.q_bias, value + self.v_bias
        query, key, value = (self.by_head(projected) for projected in (query, key, value))
        mask, positions = context.padding, None
        if self.terms:
            table = self.dropout(context.table)
            tables = self.tables(linear, table.expand(streams, -1, -1), context.rows)
            positions = self.position_scores(query, key, tables, context.distance) * self.scale
            mask = positions if mask is None else positions.masked_fill(~mask, -torch.inf)  # added to q_i . k_j
        dropout = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )
        attended = linear("attention_output", attended.transpose(1, 2).flatten(2))
        attended = self.attention_norm(hidden + self.dropout(attended))
        inner = self.activation(linear("up", attended))
        output = self.output_norm(attended + self.dropout(linear("down", inner)))
        return output if self.conv is None else self.conv(hidden, output, context.padding)

    def by_head(self, x: Tensor) -> Tensor:
        """(..., T, D) -> (..., H, T, d)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def tables(self, linear: Callable[[str, Tensor], Tensor], table: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        """K (c2p) and Q (p2c), (n, H, S, d) each, from one table per stream, (n, S, D).

        rows: the rows of each distance, if the table is all of P; they are selected after the product.
        """
        if self.shared:
            query, key, _ = linear("qkv", table).chunk(3, dim=-1)
            projected = {"c2p": key, "p2c": query}
        else:
            projected = {term: linear(MAPS[term], table) for term in self.terms}
        read = {term: projected[term] if rows is None else projected[term][..., rows, :] for term in self.terms}
        return {term: self.by_head(rows_read) for term, rows_read in read.items()}

    def position_scores(self, query: Tensor, key: Tensor, tables: dict[str, Tensor], distance: Tensor) -> Tensor:
        """q_i . K_r + k_j . Q_r, (B, H, T, T). The batch consists of as many equal groups of rows as there are tables.

        Each query is multiplied with all S rows of K; then a gather takes the column of i - j for each j. In p2c the
        keys j are the rows of the product: the gather takes the column of i - j for each i, and .mT puts i first.
        """
        shape, scores = (*query.shape[:2], *distance.shape), []
        for term, content, columns in (("c2p", query, distance), ("p2c", key, distance.T)):
            if term not in tables:
                continue
            table = tables[term]
            if len(table) > 1:  # group g of rows, (B / n, H, T, d), with table g, (1, H, S, d)
                products = (content.unflatten(0, (len(table), -1)) @ table[:, None].mT).flatten(0, 1)
            else:
                products = content @ table.mT  # (B, H, T, S)
            gathered = products.gather(-1, columns.expand(shape))
            scores.append(gathered if term == "c2p" else gathered.mT)
        return scores[0] if len(scores) == 1 else scores[0] + scores[1]


# ---- The backbone ----
class Deberta(Backbone):
    """The backbone: embeddings, positions, L layers, and a masked-LM head if the checkpoint has one."""

    Config = DebertaConfig
    vocabulary, lm_logits = Bert.vocabulary, Bert.lm_logits  # the head is BERT's
    lm_head: Any

    def __init__(self, config: DebertaConfig, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.positions = Positions(config)
        self.layers = nn.ModuleList(Layer(config, first=depth == 0) for depth in range(config.num_hidden_layers))
        self.lm_head = MaskedLMHead(config, config.hidden_act) if lm_head else None
        self.apply(self.initialise)

    @classmethod
    def tied(cls, config: DebertaConfig) -> dict[str, str]:
        """The head's map onto the vocabulary is the word embeddings; its bias may be stored under two names."""
        head = "cls.predictions"
        return {f"{head}.decoder.weight": "embeddings.word_embeddings.weight", f"{head}.decoder.bias": f"{head}.bias"}

    @classmethod
    def unused(cls, config: DebertaConfig) -> str:
        """Microsoft's files have absolute positions even if the model does not add them."""
        return "(?!)" if config.position_biased_input else r"embeddings\.position_embeddings\.weight"

    def embed(self, inputs: Tensors | Inputs) -> Tensor:
        device = self.embeddings.word.weight.device  # self.device iterates over modules, which is slow at batch 1
        ids, types = tensor_on(device, inputs.input_ids), tensor_on(device, inputs.token_type_ids)
        check_tokens(ids, self.config.max_tokens)
        return self.embeddings(ids, types, padding_mask(inputs.attention_mask, device))

    def context(self, inputs: Tensors | Inputs) -> LayerContext:
        padding = padding_mask(inputs.attention_mask, self.embeddings.word.weight.device)
        return LayerContext(padding, *self.positions(inputs.input_ids))

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        # With adapters K and Q differ between streams; without equal streams, each row gets tables of its own.
        streams = (getattr(adapt, "streams", None) or len(hidden)) if adapt else 1
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context, adapt and partial(adapt, depth), streams)
        return hidden

    # ---- FLOPs ----
    def layer_flops(self, tokens: int) -> float:
        """As `Backbone.layer_flops`, with the linear maps of the positions and the products with them."""
        layer, width, positions = self.layers[0], self.config.hidden_size, 2 * tokens - 1
        maps = (layer.qkv, layer.attention_output, layer.up, layer.down)
        read = [layer.qkv] if layer.shared else [getattr(layer, MAPS[term]) for term in layer.terms]
        position_maps = sum(linear.weight.numel() for linear in read) if layer.terms else 0
        content_flops = layer_flops(sum(linear.weight.numel() for linear in maps), width, tokens)
        return content_flops + 2.0 * positions * (position_maps + len(layer.terms) * tokens * width)

    def projected(self, target: str, tokens: int) -> int:
        positions = 2 * tokens - 1
        if target in MAPS.values():
            return positions
        shared = self.layers[0].shared and self.layers[0].terms and target in ("query", "key", "value")
        return tokens + positions if shared else tokens

    def start_flops(self, tokens: int) -> float:
        """As `Backbone.start_flops`, with the convolution of the embeddings."""
        conv = self.layers[0].conv
        return super().start_flops(tokens) + (2.0 * tokens * conv.conv.weight.numel() if conv else 0.0)


BACKBONE = Deberta
LAYOUTS = {"deberta": layout("Deberta", V1), "deberta-v2": layout("DebertaV2", V2)}
