"""ELECTRA's encoder and the head of its generator, from scratch: BERT's layers, without a pooler.

Source: Clark et al. 2020, arXiv 2003.10555. Embeddings are E wide and mapped to D if the two differ. The generator's
masked-LM head is fixed to gelu. The discriminator's head, which predicts what was replaced, is left out. Transformers
(5.23) agrees in every hidden state and logit: tests/lab/parity/test_bert.py.
"""

from dataclasses import replace
from typing import Self

from mini_ee.lab.backbones import bert
from mini_ee.lab.backbones.backbone import HeadLayout
from mini_ee.lab.backbones.bert import Bert, BertConfig


class ElectraConfig(BertConfig):
    """The keys of a Hugging Face config.json that are read, under their own names. `embedding_size` is E."""

    head_act = "gelu"

    @classmethod
    def from_hugging_face(cls, config: dict) -> Self:
        """As `BertConfig.from_hugging_face` says."""
        return super().from_hugging_face({"embedding_size": 128} | config)

    @property
    def mapped(self) -> bool:
        return self.embedding_size not in (None, self.hidden_size)


class Electra(Bert):
    """The backbone: embeddings, L layers, and, where the checkpoint has it, the generator's masked-LM head."""

    Config = ElectraConfig

    def __init__(self, config: ElectraConfig, lm_head: bool = True):
        super().__init__(config, pooler=False, lm_head=lm_head)

    @classmethod
    def parts(cls, config: ElectraConfig) -> dict[str, str]:
        return {"lm_head": "lm_head"}

    @classmethod
    def tied(cls, config: ElectraConfig) -> dict[str, str]:
        return {"generator_lm_head.weight": "embeddings.word_embeddings.weight"}


# ---- Hugging Face's names ----
_HEAD = {
    "lm_head.dense": "generator_predictions.dense",
    "lm_head.norm": "generator_predictions.LayerNorm",
    "lm_head": "generator_lm_head",
}
_OF_BERT = bert.LAYOUTS["bert"]

BACKBONE = Electra
LAYOUTS = {
    "electra": replace(
        _OF_BERT,
        names=_OF_BERT.names | {"embeddings.to_hidden": "embeddings_project"} | _HEAD,
        prefix="electra.",
        architecture="Electra",
        ignored=r"(.*\.)?(position_ids|token_type_ids)|discriminator_predictions\..*",
        head=HeadLayout(dense="classifier.dense", out="classifier.out_proj", activation="gelu"),
    )
}
