"""BERT, RoBERTa, XLM-RoBERTa, ALBERT and ElasticBERT, from scratch.

Sources: Devlin et al. 2018 (BERT), Liu et al. 2019 (RoBERTa), Conneau et al. 2020 (XLM-RoBERTa, a RoBERTa), Lan et al.
2019 (ALBERT), Liu et al. 2021 (ElasticBERT). All are one stack of post-norm layers. The differences:

    RoBERTa       positions count from pad_token_id + 1 and skip padding; its masked-LM head is fixed to gelu
    ALBERT        L layers share one set of weights; embeddings are E wide and mapped to D
    ElasticBERT   every layer has a pooler of its own

mini_ee/bert.py is the reference, equal in tests/core/test_core_models.py. This file has in addition these families, the
masked-LM head, poolers, stacked projections and ALBERT's sharing. Hidden states and logits agree with those of
transformers: tests/lab/parity/test_bert.py.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.activations import ACTIVATIONS, check_activation
from mini_ee.lab.backbones.backbone import (
    Adapt,
    AdaptLayer,
    Backbone,
    HeadLayout,
    Layout,
    Tensors,
    check_fields,
    check_fixed,
    check_tokens,
    copies_of,
    known_fields,
    padding_mask,
    rows_of,
    tensor_on,
)
from mini_ee.lab.backbones.layers import Adapted, StackedLinear
from mini_ee.lab.data.tokenizer import Inputs

# Hugging Face's defaults for missing keys of config.json, if they differ from those of BertConfig.
TYPE_DEFAULTS: dict[str, dict] = {
    "bert": {},
    "elasticbert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "albert": {
        "embedding_size": 128,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}

# Keys that would change the computation, and the values that are implemented.
FIXED_KEYS = {
    "position_embedding_type": ("absolute", None),
    "num_hidden_groups": (1,),
    "inner_group_num": (1,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The keys of a Hugging Face config.json that this file reads.

    `embedding_size` is E; None means E = hidden_size. If tie_word_embeddings is false, the masked-LM head is not
    loaded, because ours is tied. Raises ValueError for invalid values.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    embedding_size: int | None = None
    type_vocab_size: int = 2
    pad_token_id: int = 0
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self):
        check_fields(self, from_zero=("pad_token_id",))
        if not self.mapped and self.embedding_size not in (None, self.hidden_size):
            raise ValueError(f"embedding_size may differ from hidden_size in albert only, got {self.embedding_size}")
        if self.max_tokens < 1:
            raise ValueError(
                f"max_position_embeddings must be above pad_token_id + 1, "
                f"got {self.max_position_embeddings} and {self.pad_token_id}"
            )
        check_activation("hidden_act", self.hidden_act)

    @classmethod
    def from_hugging_face(cls, config: dict) -> Self:
        """From the content of a config.json. Keys that do not change the forward pass are ignored."""
        check_fixed(config, FIXED_KEYS)
        return cls(**known_fields(cls, config, TYPE_DEFAULTS.get(config.get("model_type", ""), {})))

    def to_dict(self) -> dict:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def token_types(self) -> int | None:
        return self.type_vocab_size

    @property
    def counted(self) -> bool:
        """Whether positions count from pad_token_id + 1 and skip padding."""
        return self.model_type in ("roberta", "xlm-roberta")

    @property
    def mapped(self) -> bool:
        """Whether embeddings are mapped from E to D."""
        return self.model_type == "albert"

    @property
    def head_act(self) -> str:
        """The activation of the masked-LM head."""
        return "gelu" if self.counted else self.hidden_act

    @property
    def max_tokens(self) -> int:
        """Maximum length of an input. RoBERTa reserves its first pad_token_id + 1 positions."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.counted else 0)


class LayerContext(NamedTuple):
    """The input of all layers besides the hidden states."""

    padding: Tensor | None  # (B, 1, 1, T), true at tokens; None: no padding

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        return self._replace(padding=rows_of(self.padding, rows))

    def repeat(self, count: int) -> "LayerContext":
        return self._replace(padding=copies_of(self.padding, count))


class Embeddings(nn.Module):
    """Word + position + token type, normalised; ALBERT then maps from E to D."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        width = config.embedding_size or config.hidden_size
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_position_embeddings, width)
        self.token_type = nn.Embedding(config.token_types, width) if config.token_types else None
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.to_hidden = nn.Linear(width, config.hidden_size) if config.mapped else None
        self.int8_maps = ("to_hidden",) if config.mapped else ()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        words = self.word(input_ids)
        if self.token_type is not None:
            words = words + (self.token_type.weight[0] if token_type_ids is None else self.token_type(token_type_ids))
        if self.config.counted:
            # cumsum numbers the tokens from 1 and skips padding; padding itself has position pad_token_id.
            real = (input_ids != self.config.pad_token_id).long()
            positions = self.position(real.cumsum(1) * real + self.config.pad_token_id)
        else:
            positions = self.position.weight[: input_ids.shape[1]]
        embedded = self.dropout(self.norm(words + positions))
        return embedded if self.to_hidden is None else self.to_hidden(embedded)


class Layer(Adapted):
    """Self-attention, then the feed-forward part, each added to its input and normalised (post-norm)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.qkv = StackedLinear(width, (width, width, width), bias=True)  # at batch 1 it saves 4% of a layer
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.attention_dropout = config.attention_probs_dropout_prob

    def forward(self, hidden: Tensor, mask: Tensor | None, adapt: AdaptLayer | None = None) -> Tensor:
        """hidden (B, T, D); mask (B, 1, 1, T), true at tokens, or None without padding. Returns (B, T, D)."""
        return self.feed_forward(self.attend(hidden, mask, adapt), adapt)

    def attend(self, hidden: Tensor, mask: Tensor | None, adapt: AdaptLayer | None = None) -> Tensor:
        """The first part: hidden -> LN(hidden + dropout(attention))."""
        heads = self.linear("qkv", hidden, adapt).view(*hidden.shape[:2], 3, self.heads, -1)  # (B, T, 3, H, D/H)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, D/H) each
        dropout = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        attended = attended.transpose(1, 2).flatten(2)
        return self.attention_norm(hidden + self._drop(self.linear("attention_output", attended, adapt)))

    def feed_forward(self, hidden: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """The second part: hidden -> LN(hidden + dropout(FFN(hidden)))."""
        return self.output_norm(hidden + self._drop(self.mlp(hidden, adapt)))

    def mlp(self, hidden: Tensor, adapt: AdaptLayer | None = None) -> Tensor:
        """FFN(hidden)."""
        return self.linear("down", self.activation(self.linear("up", hidden, adapt)), adapt)

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.training else x  # the call in eval mode would take 2% of a layer at batch 1


class MaskedLMHead(nn.Module):
    """Dense, activation, norm, then a linear map onto the vocabulary, which is tied to the word embeddings."""

    def __init__(self, config: Any, activation: str):
        """config: a BertConfig, or one with the same keys. activation: a name of ACTIVATIONS."""
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = ACTIVATIONS[activation]

    def forward(self, hidden: Tensor, word_embeddings: Tensor, words: Tensor | None = None) -> Tensor:
        """(..., D), (V, E) -> (..., V). words (C,): only their logits, (..., C)."""
        weight, bias = (word_embeddings, self.bias) if words is None else (word_embeddings[words], self.bias[words])
        return F.linear(self.norm(self.activation(self.dense(hidden))), weight, bias)


class Bert(Backbone):
    """The backbone: embeddings, L layers, and poolers and a masked-LM head if the checkpoint has them."""

    Config = BertConfig
    vocabulary = {"weight": "embeddings.word.weight", "bias": "lm_head.bias"}

    def __init__(self, config: BertConfig, pooler: bool = True, lm_head: bool = True):
        super().__init__()
        self.config = config
        shared = config.model_type == "albert"
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(1 if shared else config.num_hidden_layers))
        last = config.num_hidden_layers
        depths = range(1, last + 1) if config.model_type == "elasticbert" else [last]
        self.poolers = nn.ModuleDict(
            {str(depth): nn.Linear(config.hidden_size, config.hidden_size) for depth in depths if pooler}
        )
        self.lm_head = MaskedLMHead(config, config.head_act) if lm_head else None
        self.apply(self.initialise)

    @classmethod
    def parts(cls, config: BertConfig) -> dict[str, str]:
        return {"pooler": f"poolers.{config.num_hidden_layers}", "lm_head": "lm_head"}

    @classmethod
    def tied(cls, config: BertConfig) -> dict[str, str]:
        """The head's map onto the vocabulary is the word embeddings; its bias may be stored under two names."""
        head = LAYOUTS[config.model_type].names["lm_head"]
        return {f"{head}.decoder.weight": "embeddings.word_embeddings.weight", f"{head}.decoder.bias": f"{head}.bias"}

    def embed(self, inputs: Tensors | Inputs) -> Tensor:
        device = self.embeddings.word.weight.device  # self.device iterates over modules, which is slow at batch 1
        ids, types = tensor_on(device, inputs.input_ids), tensor_on(device, inputs.token_type_ids)
        check_tokens(ids, self.config.max_tokens)
        return self.embeddings(ids, types)

    def context(self, inputs: Tensors | Inputs) -> LayerContext:
        return LayerContext(padding_mask(inputs.attention_mask, self.embeddings.word.weight.device))

    def split_layer(self, depth: int) -> Layer:
        return self.layers[depth % len(self.layers)]

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        for depth in range(start, stop):
            stored = depth % len(self.layers)  # ALBERT stores one layer, which is layer 0 at every depth
            hidden = self.layers[stored](hidden, context.padding, adapt and partial(adapt, stored))
        return hidden

    def pooled(self, hidden: Tensor, depth: int | None = None) -> Tensor:
        """tanh(dense(first token)) of hidden[depth], (B, T, D) -> (B, D). depth: L by default."""
        depth = self.config.num_hidden_layers if depth is None else depth
        if str(depth) not in self.poolers:
            raise ValueError(f"expected a pooler at layer {depth}, this backbone has them at {list(self.poolers)}")
        return torch.tanh(self.poolers[str(depth)](hidden[:, 0]))

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        if self.lm_head is None:
            raise self.no_lm_head()
        return self.lm_head(hidden, self.embeddings.word.weight, words).float()

    def without_heads(self) -> "Bert":
        self.lm_head, self.poolers = None, nn.ModuleDict()
        return self


# ---- Hugging Face's names ----
_NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.qkv": "encoder.layer.{i}.attention.self.{query|key|value}",
    "layers.{i}.attention_output": "encoder.layer.{i}.attention.output.dense",
    "layers.{i}.attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "layers.{i}.up": "encoder.layer.{i}.intermediate.dense",
    "layers.{i}.down": "encoder.layer.{i}.output.dense",
    "layers.{i}.output_norm": "encoder.layer.{i}.output.LayerNorm",
    "poolers.{i}": "pooler.dense",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
}

_ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"

_ALBERT_NAMES = _NAMES | {
    "embeddings.to_hidden": "encoder.embedding_hidden_mapping_in",
    "layers.{i}.qkv": f"{_ALBERT_LAYER}.attention.{{query|key|value}}",
    "layers.{i}.attention_output": f"{_ALBERT_LAYER}.attention.dense",
    "layers.{i}.attention_norm": f"{_ALBERT_LAYER}.attention.LayerNorm",
    "layers.{i}.up": f"{_ALBERT_LAYER}.ffn",
    "layers.{i}.down": f"{_ALBERT_LAYER}.ffn_output",
    "layers.{i}.output_norm": f"{_ALBERT_LAYER}.full_layer_layer_norm",
    "poolers.{i}": "pooler",
    "lm_head.dense": "predictions.dense",
    "lm_head.norm": "predictions.LayerNorm",
    "lm_head": "predictions",
}


def _layout(prefix: str, architecture: str, names: dict[str, str], head: HeadLayout | None = None) -> Layout:
    return Layout(
        names=names,
        prefix=prefix,
        architecture=architecture,
        renamed=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
        ignored=r"(.*\.)?(position_ids|token_type_ids)|cls\.seq_relationship\..*|sop_classifier\..*",
        head=head,
        config_keys=frozenset(FIXED_KEYS),
    )


_ROBERTA_HEAD = {"lm_head.dense": "lm_head.dense", "lm_head.norm": "lm_head.layer_norm", "lm_head": "lm_head"}

_ROBERTA_CLASSIFIER = HeadLayout(dense="classifier.dense", out="classifier.out_proj")

BACKBONE = Bert
LAYOUTS = {
    "bert": _layout("bert.", "Bert", _NAMES, HeadLayout(dense="pooler.dense")),
    "elasticbert": _layout("elasticbert.", "ElasticBert", _NAMES | {"poolers.{i}": "encoder.pooler.{i-1}.dense"}),
    "roberta": _layout("roberta.", "Roberta", _NAMES | _ROBERTA_HEAD, _ROBERTA_CLASSIFIER),
    "xlm-roberta": _layout("roberta.", "XLMRoberta", _NAMES | _ROBERTA_HEAD, _ROBERTA_CLASSIFIER),
    "albert": _layout("albert.", "Albert", _ALBERT_NAMES, HeadLayout(dense="pooler")),
}
