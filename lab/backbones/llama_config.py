"""The config of Llama and its family, and the rotary frequencies. What differs between the families is a table outside:
llama_families.py."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mini_ee.lab.backbones.activations import check_activation
from mini_ee.lab.backbones.backbone import LARGEST, LARGEST_NUMBER, check_fields, check_integer, known_fields
from mini_ee.lab.backbones.generative import GenerativeConfig
from mini_ee.lab.backbones.llama_families import (
    LAYER_TYPES,
    LLAMA3_SCALING,
    MEMBERS,
    ORIGINAL,
    Member,
    read_keys,
    written_keys,
)
from mini_ee.lab.data.values import check_value, shortened

LARGEST_TABLE = 2**30  # values in the tables of rotary positions: 4 GiB


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(GenerativeConfig):
    """The keys of a Hugging Face config.json that this file reads.

    norm_eps: rms_norm_eps, in Phi layer_norm_eps. rope_scaling: rope_type (llama3 or longrope) and its numbers.
    num_key_value_heads: num_attention_heads if None. head_dim: hidden_size / num_attention_heads if None.
    sliding_window: the number of tokens, itself included, that a token reads in the layers that layer_types calls
    sliding_attention, or without layer_types in those from max_window_layers on. layer_types may have more entries than
    there are layers. pad_token_id is not used here, but `to_dict` writes it: Phi-3's is 32000 unless the file has null.
    There is no dropout. Raises ValueError for invalid values.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    partial_rotary_factor: float = 1.0
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    attention_bias: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        check_fields(self, from_zero=("pad_token_id", "bos_token_id", "max_window_layers"), free=("rope_theta",))
        if self.tie_word_embeddings and self.biased("lm_head"):
            raise ValueError(
                f"tie_word_embeddings must be false in {self.model_type}, whose head has a bias, got True: "
                f"not supported"
            )
        for stop in self.stop_tokens:
            check_integer("eos_token_id", stop, least=0, most=LARGEST["vocab_size"])
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.max_position_embeddings * self.head_width > LARGEST_TABLE:
            raise ValueError(
                f"max_position_embeddings times the width of a head must be at most {LARGEST_TABLE}, "
                f"got {self.max_position_embeddings} and {self.head_width}"
            )
        check_activation("hidden_act", self.hidden_act)
        if self.layer_types is not None:
            self._check_layer_types()
        self._check_rope()

    def _check_layer_types(self) -> None:
        layers, kinds = self.num_hidden_layers, self.layer_types
        if not isinstance(kinds, tuple) or len(kinds) < layers or any(kind not in LAYER_TYPES for kind in kinds):
            raise ValueError(
                f"layer_types must name {' or '.join(LAYER_TYPES)} for {layers} layers, got {shortened(kinds)}"
            )
        if LAYER_TYPES[1] in kinds and self.sliding_window is None:
            raise ValueError(f"layer_types: sliding_attention needs a sliding_window that is in use, got {kinds}")

    def _check_rope(self) -> None:
        check_value("rope_theta", self.rope_theta, float, above=0, most=LARGEST_NUMBER)
        if self.rotary_width < 2 or self.rotary_width % 2:
            raise ValueError(
                f"head_dim * partial_rotary_factor must be an even number of at least 2, got "
                f"{self.head_width} * {self.partial_rotary_factor}"
            )
        if self.partial_rotary_factor != 1 and not self.member.partial_rotary:  # transformers 5 ignores it, 4 fails
            raise ValueError(
                f"partial_rotary_factor must be 1 in {self.model_type}, got {self.partial_rotary_factor}: not supported"
            )
        if self.rope_scaling is None:
            return
        long = self.rope_scaling["rope_type"] == "longrope"
        keys = (ORIGINAL,) if long else LLAMA3_SCALING
        for key in keys:
            check_value(f"rope_scaling: {key}", self.rope_scaling.get(key), float, above=0, most=LARGEST_NUMBER)
        if long:
            self._check_long_rope(self.rope_scaling)
        elif self.rope_scaling["high_freq_factor"] <= self.rope_scaling["low_freq_factor"]:
            raise ValueError(
                f"rope_scaling: high_freq_factor must be above low_freq_factor, got {shortened(self.rope_scaling)}"
            )

    def _check_long_rope(self, scaling: dict) -> None:
        check_integer(ORIGINAL, scaling[ORIGINAL], least=2, most=LARGEST["max_position_embeddings"])
        for key in ("short_factor", "long_factor"):
            factors: Any = scaling.get(key)
            check_value(f"rope_scaling: {key}", factors, float, several=True, above=0, most=LARGEST_NUMBER)
            if len(factors) != self.rotary_width // 2:
                raise ValueError(f"rope_scaling: {key} must be {self.rotary_width // 2} numbers, got {len(factors)}")
        for key in ("factor", "attention_factor"):
            if (factor := scaling.get(key)) is not None:
                check_value(f"rope_scaling: {key}", factor, float, above=0, most=LARGEST_NUMBER)

    @classmethod
    def from_hugging_face(cls, config: dict) -> "DecoderConfig":
        """From the content of a config.json, of transformers 4 or 5. Keys that have no effect here are ignored."""
        return cls(**known_fields(cls, *read_keys(config)))

    def to_dict(self) -> dict:
        """The content of config.json, for `from_hugging_face`."""
        return written_keys(asdict(self))

    @property
    def member(self) -> Member:
        return MEMBERS[self.model_type]

    def biased(self, name: str) -> bool:
        """Whether linear maps have a bias; name: one of those in `Member.biased`."""
        return name in self.member.biased or self.attention_bias and name in ("qkv", "attention_output")

    @property
    def head_bias(self) -> bool:
        return self.biased("lm_head")

    def window(self, depth: int) -> int | None:
        types = self.layer_types
        slides = depth >= self.max_window_layers if types is None else types[depth] == LAYER_TYPES[1]
        return self.sliding_window if slides else None

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """R, the number of values of a head that are rotated."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def short_tokens(self) -> int | None:
        """LongRoPE: the maximum length for short_factor; all positions of longer texts use long_factor. Else None."""
        scaling = self.rope_scaling
        if scaling is None or scaling["rope_type"] != "longrope" or scaling[ORIGINAL] >= self.max_tokens:
            return None
        return scaling[ORIGINAL]

    def rope_frequencies(self, long: bool = False) -> Tensor:
        """theta_i = rope_theta^(-2i/R), in radians per token, (R/2,) float32; R values of a head are rotated.

        Llama 3 divides low frequencies by `factor`: those whose wavelength 2 pi / theta_i is above
        original_max_position_embeddings / low_freq_factor. High frequencies, with wavelengths below original /
        high_freq_factor, stay; between the two, the share that stays is linear in original / wavelength. LongRoPE
        (Ding et al. 2024) divides each frequency by a factor of its own; long: the factors for long texts.
        """
        width, scaling = self.rotary_width, self.rope_scaling
        slowness = self.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
        frequency = 1.0 / slowness
        if scaling is None:
            return frequency
        if scaling["rope_type"] == "longrope":
            factors = torch.tensor(scaling["long_factor" if long else "short_factor"], device="cpu")
            return 1.0 / (factors * slowness)
        factor, low, high, original = (scaling[key] for key in LLAMA3_SCALING)
        turns = original * frequency / (2 * math.pi)  # original / wavelength: rotations within the original context
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (unscaled + (1 - unscaled) / factor)

    @property
    def rope_scale(self) -> float:
        """The factor of cos and sin: in LongRoPE sqrt(1 + ln(factor) / ln(original length)), else 1."""
        scaling = self.rope_scaling
        if scaling is None or scaling["rope_type"] != "longrope":
            return 1.0
        if "attention_factor" in scaling:
            return scaling["attention_factor"]
        factor = scaling.get("factor", self.max_position_embeddings / scaling[ORIGINAL])
        return math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(scaling[ORIGINAL]))
