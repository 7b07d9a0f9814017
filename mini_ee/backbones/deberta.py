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
Transformers (5.23) agrees in every hidden state and logit: tests/parity/test_deberta.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones import bert
from mini_ee.backbones.backbone import Adapt, AdaptLayer, Backbone, layer_flops, padding_mask, tensor_on
from mini_ee.backbones.bert import ACTIVATIONS, Bert, MaskedLMHead
from mini_ee.backbones.deberta_config import CONV_ACTIVATIONS, TERMS, V1, V2, DebertaConfig, Positions, layout
from mini_ee.backbones.layers import Adapted, StackedLinear
from mini_ee.backbones.shapes import check

MAPS = dict(zip(TERMS, ("pos_proj", "pos_q_proj")))  # term -> the map of its positions


# ---- What all layers need ----
class LayerContext(NamedTuple):
    """What all layers need besides the hidden states. S = 2 T - 1: distances i - j from 1 - T on."""

    padding: Tensor | None  # (B, 1, 1, T), true where a token may be read; None: nothing is padded
    table: Tensor | None  # (S, D), the rows of P that the distances have; None: no positions are read
    rows: Tensor | None  # (S,), which rows of the table these are, where it is whole: in a graph
    index: Tensor | None  # (T, T), which of these is i - j

    keep, repeat = bert.LayerContext.keep, bert.LayerContext.repeat  # what positions read is the same for all rows


class Embeddings(nn.Module):
    """Word, and position and token type where the config has them; mapped from E to D, normed, zero at padding."""

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

    def forward(
        self, hidden: Tensor, context: LayerContext, adapt: AdaptLayer | None = None, streams: int = 1
    ) -> Tensor:
        """(B, T, D) -> (B, T, D). adapt: what adapters add to the linear maps of this layer, one of each stream."""
        linear = partial(self.linear, adapt=adapt)
        query, key, value = linear("qkv", hidden).chunk(3, dim=-1)
        if self.q_bias is not None:
            query, value = query + self.q_bias, value + self.v_bias
        query, key, value = (self.by_head(each) for each in (query, key, value))
        mask, positions = context.padding, None
        if self.terms:
            table = self.dropout(context.table)
            tables = self.tables(linear, table.expand(streams, -1, -1), context.rows)
            positions = self.position_scores(query, key, tables, context.index) * self.scale
            mask = positions if mask is None else positions.masked_fill(~mask, -torch.inf)
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
        """K and Q by term, (n, H, S, d) each, of one table for each stream, (n, S, D).

        rows: of a whole table, those that are read: all that comes before is constant in a graph, and is folded.
        """
        if self.shared:
            query, key, _ = linear("qkv", table).chunk(3, dim=-1)
            found = {"c2p": key, "p2c": query}
        else:
            found = {term: linear(MAPS[term], table) for term in self.terms}
        read = {term: found[term] if rows is None else found[term][..., rows, :] for term in self.terms}
        return {term: self.by_head(each) for term, each in read.items()}

    def position_scores(self, query: Tensor, key: Tensor, tables: dict[str, Tensor], index: Tensor) -> Tensor:
        """q_i . K_r + k_j . Q_r, (B, H, T, T). The rows of the batch are as many equal groups as there are tables."""
        shape, scores = (*query.shape[:2], *index.shape), []
        for term, content, at in (("c2p", query, index), ("p2c", key, index.T)):
            if term not in tables:
                continue
            table = tables[term]
            if len(table) > 1:
                products = (content.unflatten(0, (len(table), -1)) @ table[:, None].mT).flatten(0, 1)
            else:
                products = content @ table.mT
            found = products.gather(-1, at.expand(shape))
            scores.append(found if term == "c2p" else found.mT)
        return scores[0] if len(scores) == 1 else scores[0] + scores[1]


# ---- The backbone ----
class Deberta(Backbone):
    """The backbone: embeddings, positions, L layers, and, where the checkpoint has it, a masked-LM head."""

    Config = DebertaConfig
    vocabulary, lm_logits = Bert.vocabulary, Bert.lm_logits  # the head is BERT's

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

    def context(self, inputs) -> LayerContext:
        """The padding mask, and what positions read."""
        padding = padding_mask(inputs.attention_mask, self.embeddings.word.weight.device)
        return LayerContext(padding, *self.positions(inputs.input_ids))

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says."""
        streams = (
            (getattr(adapt, "streams", None) or len(hidden)) if adapt else 1
        )  # a table for each, else for each row
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context, adapt and partial(adapt, depth), streams)
        return hidden

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
