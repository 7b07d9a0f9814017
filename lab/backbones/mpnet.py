"""MPNet, from scratch: BERT's layers, whose scores have a bias by relative position, as in T5.

Source: Song et al. 2020, arXiv 2004.09297.

    score_ij = q_i . k_j / sqrt(d) + b(j - i)

b is a number for each bucket of distances and each head, the same in all layers. Besides, positions are RoBERTa's,
counted from 2 and without padding, and so is the masked-LM head; there are no token types. In transformers there are
32 buckets, distances from 128 on share one, and the padding token is 1, whatever config.json says: a file that says
otherwise is refused. Transformers (5.23) agrees in every hidden state and logit: tests/lab/parity/test_bert.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from mini_ee.lab.backbones import bert
from mini_ee.lab.backbones.backbone import (
    Adapt,
    Backbone,
    check_fixed,
    copies_of,
    padding_mask,
    rows_of,
    tensor_on,
    token_places,
)
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.relative_biases import Biases


class MPNetConfig(BertConfig):
    """The keys of a Hugging Face config.json that are read, under their own names."""

    counted, token_types = True, None
    relative_attention_num_buckets, relative_attention_max_distance = 32, 128

    @classmethod
    def from_hugging_face(cls, config: dict) -> Self:
        """As `BertConfig.from_hugging_face` says."""
        check_fixed(config, {"relative_attention_num_buckets": (32,), "pad_token_id": (1,)})
        return super().from_hugging_face(config | {"pad_token_id": 1})

    def to_dict(self) -> dict:
        return {key: value for key, value in super().to_dict().items() if key != "type_vocab_size"}


class LayerContext(NamedTuple):
    """What all layers need besides the hidden states."""

    padding: Tensor | None  # (B, 1, 1, T), true where a token may be read; None: nothing is padded
    bias: Tensor  # (B, H, T, T), added to the scores, minus infinity at padding; (1, H, T, T) if nothing is padded

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        if self.padding is None:  # then the bias is the same for all rows
            return self
        return LayerContext(*(rows_of(tensor, rows) for tensor in self))

    def repeat(self, count: int) -> "LayerContext":
        return self if self.padding is None else LayerContext(*(copies_of(tensor, count) for tensor in self))


class MPNet(Bert):
    """The backbone: embeddings, biases, L layers, and, where the checkpoint has them, a pooler and a masked-LM head."""

    Config = MPNetConfig
    split_layer: Any = Backbone.split_layer  # refused: its parts would not read the biases

    def __init__(self, config: MPNetConfig, pooler: bool = True, lm_head: bool = True):
        super().__init__(config, pooler, lm_head)
        self.biases = Biases(config, both=True)
        self.biases.apply(self.initialise)

    @classmethod
    def tied(cls, config: MPNetConfig) -> dict[str, str]:
        words = "embeddings.word_embeddings.weight"
        return {"lm_head.decoder.weight": words, "lm_head.decoder.bias": "lm_head.bias"}

    def context(self, inputs) -> LayerContext:
        """The padding mask, and the biases of the distances."""
        device = self.embeddings.word.weight.device
        padding, places = padding_mask(inputs.attention_mask, device), token_places(tensor_on(device, inputs.input_ids))
        bias = self.biases(places[None], places)
        return LayerContext(padding, bias if padding is None else bias.masked_fill(~padding, -torch.inf))

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D), as `Backbone.run_layers` says."""
        for depth in range(start, stop):
            hidden = self.layers[depth](hidden, context.bias, adapt and partial(adapt, depth))
        return hidden


# ---- Hugging Face's names ----
_ATTENTION = "encoder.layer.{i}.attention"
_NAMES = {
    "biases.table": "encoder.relative_attention_bias",
    "layers.{i}.qkv": f"{_ATTENTION}.attn.{{q|k|v}}",
    "layers.{i}.attention_output": f"{_ATTENTION}.attn.o",
    "layers.{i}.attention_norm": f"{_ATTENTION}.LayerNorm",
}
_OF_ROBERTA = bert.LAYOUTS["roberta"]

BACKBONE = MPNet
LAYOUTS = {
    "mpnet": replace(
        _OF_ROBERTA,
        names=_OF_ROBERTA.names | _NAMES,
        prefix="mpnet.",
        architecture="MPNet",
        config_keys=_OF_ROBERTA.config_keys | {"relative_attention_num_buckets"},
    )
}
