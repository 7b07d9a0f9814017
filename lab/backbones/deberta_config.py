"""DeBERTa v1 and v2: the config, the table of relative positions, and the names of weights in files."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import (
    HeadLayout,
    Layout,
    check_fields,
    check_fixed,
    known_fields,
    token_places,
)
from mini_ee.lab.backbones.bert import ACTIVATIONS
from mini_ee.lab.data.values import shortened

CONV_ACTIVATIONS = ACTIVATIONS | {"tanh": torch.tanh}
TERMS = ("c2p", "p2c")
OF_V2 = ("share_att_key", "position_buckets", "norm_rel_ebd", "conv_kernel_size", "conv_groups", "conv_act")
NONE_BELOW_1 = ("max_relative_positions", "position_buckets", "conv_kernel_size")  # -1 and 0 mean None


@dataclass(frozen=True, kw_only=True)
class DebertaConfig:
    """The keys of a Hugging Face config.json that this file reads.

    `embedding_size` is E; None means E = hidden_size. `max_relative_positions` None means max_position_embeddings.
    Raises ValueError for invalid values.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    embedding_size: int | None = None
    type_vocab_size: int = 0
    pad_token_id: int = 0
    position_biased_input: bool = True
    relative_attention: bool = False
    pos_att_type: tuple[str, ...] = ()
    max_relative_positions: int | None = None
    position_buckets: int | None = None
    share_att_key: bool = False
    norm_rel_ebd: str = "none"
    conv_kernel_size: int | None = None
    conv_groups: int = 1
    conv_act: str = "tanh"
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-7
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True

    def __post_init__(self):
        check_fields(self, from_zero=("pad_token_id", "type_vocab_size"))
        for name, known in (("hidden_act", ACTIVATIONS), ("conv_act", CONV_ACTIVATIONS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {shortened(value)}")
        if len(set(self.pos_att_type)) < len(self.pos_att_type) or set(self.pos_att_type) - set(TERMS):
            raise ValueError(f"pos_att_type must be some of {', '.join(TERMS)}, got {shortened(self.pos_att_type)}")
        if self.norm_rel_ebd not in ("none", "layer_norm"):
            raise ValueError(f"norm_rel_ebd must be none or layer_norm, got {shortened(self.norm_rel_ebd)}")
        if self.conv_kernel_size and (not self.conv_kernel_size % 2 or self.hidden_size % self.conv_groups):
            raise ValueError(
                f"conv_kernel_size must be odd and hidden_size a multiple of conv_groups, "
                f"got {self.conv_kernel_size}, {self.hidden_size} and {self.conv_groups}"
            )
        if self.position_buckets and not 2 <= self.position_buckets < 2 * (self.reach - 1):
            raise ValueError(
                f"position_buckets must be from 2 to less than twice max_relative_positions - 1, "
                f"got {self.position_buckets} and {self.reach}"
            )

    @classmethod
    def from_hugging_face(cls, config: dict) -> "DebertaConfig":
        """From the content of a config.json. Keys that do not change the forward pass are ignored."""
        v1 = config.get("model_type") == "deberta"
        given = {key: value for key, value in config.items() if not (v1 and key in OF_V2)}
        for key in NONE_BELOW_1:
            value = given.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                given[key] = None
        terms, norms = given.get("pos_att_type"), given.get("norm_rel_ebd")
        if isinstance(terms, str):
            terms = [term.strip() for term in terms.lower().split("|")]
        if terms is not None and not (isinstance(terms, list | tuple) and all(isinstance(term, str) for term in terms)):
            raise ValueError(f"pos_att_type must be some of {', '.join(TERMS)}, got {shortened(terms)}")
        given["pos_att_type"] = None if terms is None else tuple(terms)
        if isinstance(norms, str) and "layer_norm" in (parts := [part.strip() for part in norms.lower().split("|")]):
            given["norm_rel_ebd"] = "layer_norm" if set(parts) <= {"layer_norm", "none"} else norms
        if config.get("legacy") is False:  # this head is always tied
            given["tie_word_embeddings"] = True
        made = cls(**known_fields(cls, given, {}))
        width = made.hidden_size
        fixed = {"talking_head": (False, None)} if v1 else {"attention_head_size": (made.head_width, None)}
        fixed |= {"pooler_hidden_size": (width, None)}
        fixed |= {"embedding_size": (width, None)} if config.get("legacy") is False else {}
        check_fixed(config, fixed)
        return made

    def to_dict(self) -> dict:
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
            if value is not None and not (self.model_type == "deberta" and key in OF_V2)
        }

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def token_types(self) -> int | None:
        return self.type_vocab_size or None

    @property
    def max_tokens(self) -> int:
        """Maximum length of an input."""
        return self.max_position_embeddings

    @property
    def reach(self) -> int:
        """The distance from which on all distances share a row."""
        return self.max_relative_positions or self.max_position_embeddings

    @property
    def span(self) -> int:
        """Half the number of rows of the table of relative positions."""
        return self.position_buckets or self.reach

    @property
    def terms(self) -> tuple[str, ...]:
        """The position terms of attention: c2p, p2c, both or none."""
        return self.pos_att_type if self.relative_attention else ()


def table_rows(distances: Tensor, config: DebertaConfig) -> Tensor:
    """row(r): distances i - j, int64 -> rows of the table.

    With buckets (v2), distances up to `near`, half the buckets, have a row each. Larger ones up to reach - 1 share the
    next near - 1 rows by their logarithm, so that near maps to near and reach - 1 to 2 near - 1.
    """
    if config.position_buckets:
        near = config.position_buckets // 2
        far = distances.abs().clamp(min=near)
        steps = (
            torch.log(far / near)
            / torch.log(far.new_tensor((config.reach - 1) / near, dtype=torch.float32))
            * (near - 1)
        )
        distances = torch.where(far > near, distances.sign() * (steps.ceil().long() + near), distances)
    return (distances + config.span).clamp(0, 2 * config.span - 1)  # distance 0 is row `span`


class Positions(nn.Module):
    """P, with one row per relative position or bucket of positions.

    whole_table: layers map all rows of P, and then select those of the distances. This is faster where everything that
    depends on weights alone is computed once.
    """

    whole_table = False

    def __init__(self, config: DebertaConfig):
        super().__init__()
        self.config = config
        self.table = nn.Embedding(2 * config.span, config.hidden_size) if config.relative_attention else None
        normed = config.norm_rel_ebd == "layer_norm"
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if normed else None
        distances = torch.arange(1 - config.max_tokens, config.max_tokens, device="cpu")
        self.register_buffer(
            "rows", table_rows(distances, config), persistent=False
        )  # distance r at r + max_tokens - 1

    def forward(self, ids: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`table`, `rows` and `distance` of `LayerContext`. ids: (B, T)."""
        if not self.config.terms:
            return None, None, None
        assert self.table is not None
        places = token_places(ids)  # 0 .. T - 1
        last = places[-1:]  # (1,), T - 1
        distances = torch.cat((places - last, places[1:]))  # (S,), 1 - T .. T - 1
        rows = self.rows[distances + self.config.max_tokens - 1]
        index = places[:, None] - places + last  # (T, T): i - j has index i - j + T - 1 in `distances`
        if self.whole_table:
            return self.normed(self.table.weight), rows, index
        return self.normed(self.table(rows)), None, index

    def normed(self, table: Tensor) -> Tensor:
        return table if self.norm is None else self.norm(table)


# ---- Hugging Face's names ----
_LAYER = "encoder.layer.{i}"

_NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.to_hidden": "embeddings.embed_proj",
    "embeddings.norm": "embeddings.LayerNorm",
    "positions.table": "encoder.rel_embeddings",
    "positions.norm": "encoder.LayerNorm",
    "layers.{i}.attention_output": f"{_LAYER}.attention.output.dense",
    "layers.{i}.attention_norm": f"{_LAYER}.attention.output.LayerNorm",
    "layers.{i}.up": f"{_LAYER}.intermediate.dense",
    "layers.{i}.down": f"{_LAYER}.output.dense",
    "layers.{i}.output_norm": f"{_LAYER}.output.LayerNorm",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
}

V1 = {
    "layers.{i}": f"{_LAYER}.attention.self",  # q_bias, v_bias
    "layers.{i}.qkv": f"{_LAYER}.attention.self.in_proj",
    "layers.{i}.pos_proj": f"{_LAYER}.attention.self.pos_proj",
    "layers.{i}.pos_q_proj": f"{_LAYER}.attention.self.pos_q_proj",
}

V2 = {
    "layers.{i}.qkv": f"{_LAYER}.attention.self.{{query_proj|key_proj|value_proj}}",
    "layers.{i}.pos_proj": f"{_LAYER}.attention.self.pos_key_proj",
    "layers.{i}.pos_q_proj": f"{_LAYER}.attention.self.pos_query_proj",
    "layers.{i}.conv.conv": "encoder.conv.conv",
    "layers.{i}.conv.norm": "encoder.conv.LayerNorm",
}

_OTHER_HEAD = "lm_predictions.lm_head"  # in Microsoft's files


def layout(architecture: str, names: dict[str, str]) -> Layout:
    """The Layout of a version; names: V1 or V2."""
    return Layout(
        names=_NAMES | names,
        prefix="deberta.",
        architecture=architecture,
        renamed=(
            ("LayerNorm.gamma", "LayerNorm.weight"),
            ("LayerNorm.beta", "LayerNorm.bias"),
            (f"{_OTHER_HEAD}.bias", "cls.predictions.bias"),
            *(
                (f"{_OTHER_HEAD}.{part}.{leaf}", f"cls.predictions.transform.{part}.{leaf}")
                for part in ("dense", "LayerNorm")
                for leaf in ("weight", "bias")
            ),
        ),
        ignored=r"(.*\.)?(position_ids|token_type_ids)|pooler\..*|mask_predictions\..*",
        head=HeadLayout(dense="pooler.dense", activation="gelu", activation_key="pooler_hidden_act"),
        config_keys=frozenset(
            {"legacy", "talking_head", "attention_head_size", "pooler_hidden_size", "pooler_hidden_act"}
        ),
    )
