"""Llama's family: what each model_type is, in its layout and a few switches. No other file has a list of them.

Sources: Touvron et al. 2023 (Llama 1, 2), Llama team 2024 (Llama 3), Gemma team 2024 (Gemma 1), Javaheripi et al. 2023
(Phi-2), Jiang et al. 2023 (Mistral), Yang et al. 2024 and 2025 (Qwen2, Qwen3), Abdin et al. 2024 (Phi-3).
"""

from dataclasses import dataclass

from mini_ee.backbones.backbone import Layout

WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
SWITCHES = WINDOWS | {"attention_bias"}
"""Keys of config.json that not every member obeys."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A layer has the modules that the layout names; the switches say how they compute.

    Without `mlp_norm` attention and MLP stand side by side, without `gate` the MLP is not gated, `query_norm` and
    `key_norm` are norms of each head.
    """

    layout: Layout
    defaults: dict  # what Hugging Face takes for a key that config.json leaves out
    norm: str = "rms"  # RMSNorm; "rms, 1 + w": it stores w - 1; "layer": LayerNorm
    biased: tuple[str, ...] = ()  # maps that have a bias: "qkv", "attention_output", "mlp", "lm_head"
    switches: frozenset[str] = frozenset()  # those of SWITCHES that it obeys
    partial_rotary: bool = False  # a part of each head may stay as it is
    rope_types: tuple[str, ...] = ("default", "llama3")
    original_length: int | None = None  # `original_max_position_embeddings` where it is left out, beside `rope_scaling`
    scaled_embeddings: bool = False  # embeddings times sqrt(D)
    gelu_is_tanh: bool = False  # the oldest files say gelu and mean its tanh form

    def has(self, module: str) -> bool:
        """Whether a layer has this module."""
        return "layers.{i}." + module in self.layout.names

    @property
    def eps_key(self) -> str:
        """How config.json calls norm_eps."""
        return "layer_norm_eps" if self.norm == "layer" else "rms_norm_eps"


_PHI_NAMES = {
    "embeddings": "embed_tokens",
    "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
    "layers.{i}.qkv": "layers.{i}.self_attn.{q|k|v}_proj",
    "layers.{i}.attention_output": "layers.{i}.self_attn.dense",
    "layers.{i}.up": "layers.{i}.mlp.fc1",
    "layers.{i}.down": "layers.{i}.mlp.fc2",
    "norm": "final_layernorm",
    "lm_head": "lm_head",
}

_LLAMA_NAMES = _PHI_NAMES | {
    "layers.{i}.attention_output": "layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "layers.{i}.mlp.up_proj",
    "layers.{i}.down": "layers.{i}.mlp.down_proj",
    "norm": "norm",
}

_QWEN3_NAMES = _LLAMA_NAMES | {
    "layers.{i}.query_norm": "layers.{i}.self_attn.q_norm",
    "layers.{i}.key_norm": "layers.{i}.self_attn.k_norm",
}

_PHI3_NAMES = _LLAMA_NAMES | {
    "layers.{i}.qkv": "layers.{i}.self_attn.qkv_proj",
    "layers.{i}.gate": "layers.{i}.mlp.gate_up_proj.gate",
    "layers.{i}.up": "layers.{i}.mlp.gate_up_proj.up",
}


def _layout(architecture: str, names: dict[str, str] = _LLAMA_NAMES, fused: tuple = ()) -> Layout:
    ignored = r"(.*\.)?rotary_emb\.inv_freq"
    return Layout(names=names, prefix="model.", architecture=architecture, ignored=ignored, fused=fused)


def _defaults(act: str = "silu", eps: float = 1e-6, tied: bool = False, **more) -> dict:
    return {"hidden_act": act, "norm_eps": eps, "tie_word_embeddings": tied} | more


MEMBERS = {
    "llama": Member(layout=_layout("Llama"), defaults=_defaults()),
    "gemma": Member(
        layout=_layout("Gemma"),
        defaults=_defaults("gelu_pytorch_tanh", tied=True, head_dim=256),
        norm="rms, 1 + w",
        scaled_embeddings=True,
        gelu_is_tanh=True,
    ),
    "phi": Member(
        layout=_layout("Phi", _PHI_NAMES),
        defaults=_defaults("gelu_new", 1e-5, partial_rotary_factor=0.5),
        norm="layer",
        biased=("qkv", "attention_output", "mlp", "lm_head"),
        partial_rotary=True,
    ),
    "mistral": Member(
        layout=_layout("Mistral"),
        defaults=_defaults(num_key_value_heads=8, sliding_window=4096),
        switches=frozenset({"sliding_window"}),
    ),
    "qwen2": Member(
        layout=_layout("Qwen2"),
        defaults=_defaults(num_key_value_heads=32, sliding_window=4096, max_window_layers=28),
        biased=("qkv",),
        switches=WINDOWS,
    ),
    "qwen3": Member(
        layout=_layout("Qwen3", _QWEN3_NAMES),
        defaults=_defaults(num_key_value_heads=32, head_dim=128, sliding_window=4096, max_window_layers=28),
        switches=SWITCHES,
    ),
    "phi3": Member(
        layout=_layout("Phi3", _PHI3_NAMES, fused=(("mlp.gate_up_proj", ("gate", "up")),)),
        defaults=_defaults(eps=1e-5, pad_token_id=32000),
        switches=frozenset({"sliding_window"}),
        partial_rotary=True,
        rope_types=("default", "longrope", "su"),
        original_length=4096,
    ),
}
