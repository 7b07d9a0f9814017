"""DistilBERT, from scratch: BERT's layers, half as many, without token types and pooler.

Source: Sanh et al. 2019, arXiv 1910.01108. config.json and the file of weights have names of their own; norms have an
eps of 1e-12 whatever config.json says. Transformers (5.23) agrees in every hidden state and logit:
tests/lab/parity/test_bert.py.
"""

from dataclasses import replace
from typing import Self

from mini_ee.lab.backbones import bert
from mini_ee.lab.backbones.backbone import HeadLayout, check_fixed, in_their_words
from mini_ee.lab.backbones.bert import Bert, BertConfig

THEIR_KEYS = {  # ours -> Hugging Face's
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
BOTH = ("hidden_size", "num_hidden_layers", "num_attention_heads")  # which a file may have under our names too
NONE = ("layer_norm_eps", "type_vocab_size", "embedding_size")  # keys of a BERT that it does not obey


class DistilBertConfig(BertConfig):
    """The keys of a Hugging Face config.json that are read, under BERT's names."""

    token_types = None

    @classmethod
    def from_hugging_face(cls, config: dict) -> Self:
        """From the content of a config.json. Keys that do not change the forward pass are passed over."""
        given = {key: value for key, value in config.items() if key not in (*THEIR_KEYS, *NONE)}
        given |= {ours: config[theirs] for ours, theirs in THEIR_KEYS.items() if theirs in config}
        unrenamed = {ours: config[ours] for ours in BOTH if ours in config}
        check_fixed(unrenamed, {ours: (given.get(ours, value),) for ours, value in unrenamed.items()})
        try:
            return super().from_hugging_face(unrenamed | given)
        except ValueError as error:
            raise ValueError(in_their_words(str(error), THEIR_KEYS)) from None

    def to_dict(self) -> dict:
        """As Hugging Face writes it; `from_hugging_face` reads it back."""
        return {THEIR_KEYS.get(key, key): value for key, value in super().to_dict().items() if key not in NONE}


class DistilBert(Bert):
    """The backbone: embeddings, L layers, and, where the checkpoint has it, a masked-LM head."""

    Config = DistilBertConfig

    def __init__(self, config: DistilBertConfig, lm_head: bool = True):
        super().__init__(config, pooler=False, lm_head=lm_head)

    @classmethod
    def parts(cls, config: DistilBertConfig) -> dict[str, str]:
        return {"lm_head": "lm_head"}

    @classmethod
    def tied(cls, config: DistilBertConfig) -> dict[str, str]:
        return {"vocab_projector.weight": "embeddings.word_embeddings.weight"}


# ---- Hugging Face's names ----
_LAYER = "transformer.layer.{i}"
_OF_BERT = bert.LAYOUTS["bert"]
_NAMES = {
    "layers.{i}.qkv": f"{_LAYER}.attention.{{q_lin|k_lin|v_lin}}",
    "layers.{i}.attention_output": f"{_LAYER}.attention.out_lin",
    "layers.{i}.attention_norm": f"{_LAYER}.sa_layer_norm",
    "layers.{i}.up": f"{_LAYER}.ffn.lin1",
    "layers.{i}.down": f"{_LAYER}.ffn.lin2",
    "layers.{i}.output_norm": f"{_LAYER}.output_layer_norm",
    "lm_head.dense": "vocab_transform",
    "lm_head.norm": "vocab_layer_norm",
    "lm_head": "vocab_projector",
}

BACKBONE = DistilBert
LAYOUTS = {
    "distilbert": replace(
        _OF_BERT,
        names=_OF_BERT.names | _NAMES,
        prefix="distilbert.",
        architecture="DistilBert",
        head=HeadLayout(dense="pre_classifier", activation="relu"),
        config_keys=_OF_BERT.config_keys | {*THEIR_KEYS.values(), "sinusoidal_pos_embds", "tie_weights_"},
    )
}
