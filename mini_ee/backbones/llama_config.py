"""The config of Llama, Gemma and Phi, and the rotary frequencies that it asks for."""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_ee.backbones.backbone import (
    LARGEST,
    check_fields,
    check_fixed,
    check_integer,
    is_number,
    known_fields,
    shortened,
)
from mini_ee.backbones.bert import ACTIVATIONS as BERT_ACTIVATIONS

ACTIVATIONS = BERT_ACTIVATIONS | {"silu": F.silu}

# What Hugging Face takes for a key that config.json leaves out.
TYPE_DEFAULTS = {
    "llama": {"hidden_act": "silu", "norm_eps": 1e-6, "tie_word_embeddings": False},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256},
    "phi": {"hidden_act": "gelu_new", "norm_eps": 1e-5, "tie_word_embeddings": False, "partial_rotary_factor": 0.5},
}

NORM_EPS = {"llama": "rms_norm_eps", "gemma": "rms_norm_eps", "phi": "layer_norm_eps"}

# Keys that would change what is computed, and the only values that this file computes.
FIXED_KEYS = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qk_layernorm": (False, None),
    "use_bidirectional_attention": (False, None),
    "sliding_window": (None,),
}

LARGEST_TABLE = 2**30  # numbers of the tables of rotary positions: 4 GiB

LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The keys of a Hugging Face config.json that this file reads, under their own names.

    `norm_eps` is rms_norm_eps, in Phi layer_norm_eps. `rope_scaling` holds the four numbers of Llama 3, None elsewhere.
    num_key_value_heads is num_attention_heads where it is None, head_dim hidden_size / num_attention_heads.
    Dropout is not applied. Raises ValueError on a value that no model can have.
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
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        if self.model_type not in TYPE_DEFAULTS:
            raise ValueError(f"model_type must be one of {', '.join(TYPE_DEFAULTS)}, got {self.model_type!r}")
        check_fields(self, from_zero=("bos_token_id",), free=("rope_theta",))
        if not is_number(self.rope_theta) or self.rope_theta <= 0:
            raise ValueError(f"rope_theta must be a number above 0, got {shortened(self.rope_theta)}")
        if self.tie_word_embeddings and self.model_type == "phi":
            raise ValueError("tie_word_embeddings must be false in phi, whose head has a bias, got True: not supported")
        stops = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        for stop in () if self.eos_token_id is None else stops:
            check_integer("eos_token_id", stop, least=0, most=LARGEST["vocab_size"])
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.rotary_width < 2 or self.rotary_width % 2:
            raise ValueError(
                f"head_dim * partial_rotary_factor must be an even number of at least 2, got "
                f"{self.head_width} * {self.partial_rotary_factor}"
            )
        if self.partial_rotary_factor != 1 and self.model_type != "phi":  # transformers 5 passes over it, 4 fails
            raise ValueError(
                f"partial_rotary_factor must be 1 in {self.model_type}, got {self.partial_rotary_factor}: not supported"
            )
        if self.max_position_embeddings * self.head_width > LARGEST_TABLE:
            raise ValueError(
                f"max_position_embeddings times the width of a head must be at most {LARGEST_TABLE}, "
                f"got {self.max_position_embeddings} and {self.head_width}"
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {shortened(self.hidden_act)}")
        if self.rope_scaling is not None:
            numbers = {key: self.rope_scaling.get(key) for key in LLAMA3_SCALING}
            wrong = [key for key, value in numbers.items() if not (is_number(value) and value > 0)]
            if wrong:
                raise ValueError(f"rope_scaling must hold a number above 0 for {', '.join(wrong)}, got {numbers}")
            if numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
                raise ValueError(f"rope_scaling: high_freq_factor must be above low_freq_factor, got {numbers}")

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens with which a text ends, as eos_token_id names them."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, tuple) else [ends]

    @classmethod
    def from_hugging_face(cls, config: dict) -> "DecoderConfig":
        """From the content of a config.json, of transformers 4 or 5. Keys that change nothing here are passed over."""
        if config.get("use_sliding_window") is False:
            config = config | {"sliding_window": None}
        check_fixed(config, FIXED_KEYS)
        model_type = config.get("model_type")
        given = {key: value for key, value in config.items() if value is not None} | _rope_keys(config)
        given["norm_eps"] = given.get(NORM_EPS.get(model_type))
        if given.get("hidden_act") == "swish":
            given["hidden_act"] = "silu"
        if model_type == "gemma":
            given["hidden_act"] = _gemma_activation(given)
        if given.get("bos_token_id") == -1:  # as some write that there is none
            del given["bos_token_id"]
        if isinstance(given.get("eos_token_id"), list):
            given["eos_token_id"] = tuple(given["eos_token_id"])
        return cls(**known_fields(cls, given, TYPE_DEFAULTS.get(model_type, {})))

    def to_dict(self) -> dict:
        """As Hugging Face writes it; `from_hugging_face` reads it back."""
        config = {key: value for key, value in asdict(self).items() if value is not None}
        config[NORM_EPS[self.model_type]] = config.pop("norm_eps")
        if self.rope_scaling is not None:
            config["rope_scaling"] = {"rope_type": "llama3"} | self.rope_scaling
        return config

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """How many of a head's numbers rotate."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def token_types(self) -> None:
        """Decoders have no use for them."""

    @property
    def max_tokens(self) -> int:
        """The longest text, prompt and continuation together."""
        return self.max_position_embeddings


def _gemma_activation(given: dict) -> str | None:
    """The oldest files say gelu and mean its tanh form; of two keys, versions of transformers obey another one."""
    act, other = given.get("hidden_act"), given.get("hidden_activation")
    act, other = ("gelu_pytorch_tanh" if name in ("gelu", None) else name for name in (act, other or act))
    if other != act:
        raise ValueError(f"hidden_act and hidden_activation must agree, got {shortened(act)} and {shortened(other)}")
    return act


def _rope_keys(config: dict) -> dict:
    """rope_theta, partial_rotary_factor and rope_scaling, which transformers 5 writes as one entry, rope_parameters.

    Raises ValueError where a file has both entries and they disagree.
    """
    entries = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name) is not None}
    found = [_rope_entry(name, entry) for name, entry in entries.items()]
    both = [{"rope_theta": config.get("rope_theta")} | entry for entry in found]
    if len(found) == 2 and both[0] != both[1]:
        raise ValueError("rope_parameters and rope_scaling must agree, found different ones; keep one of them")
    return found[-1] if found else {}


def _rope_entry(name: str, entry) -> dict:
    if not isinstance(entry, dict):
        raise ValueError(f"{name} must be an object, got {shortened(entry)}")
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{name}: rope_type must be 'default' or 'llama3', got {shortened(kind)}: not supported")
    found = {key: entry[key] for key in ("rope_theta", "partial_rotary_factor") if entry.get(key) is not None}
    found["rope_scaling"] = {key: entry.get(key) for key in LLAMA3_SCALING} if kind == "llama3" else None
    return found


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """theta_i = rope_theta^(-2i/R), in radians a token, (R/2,) float32, where R numbers of a head rotate.

    Llama 3 divides the slow ones by `factor`: those whose wavelength 2 pi / theta_i is above
    original_max_position_embeddings / low_freq_factor; the quick ones, below original / high_freq_factor, stay; between
    the two it goes over linearly in original / wavelength.
    """
    width = config.rotary_width
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, original = (config.rope_scaling[key] for key in LLAMA3_SCALING)
    turns = original * frequency / (2 * math.pi)  # how often it goes round within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)
