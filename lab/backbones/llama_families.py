"""Llama's family: the layout and the switches of each model_type, and the keys of its config.json.

No other file lists the members. Sources: Touvron et al. 2023 (Llama 1, 2), Llama team 2024 (Llama 3), Gemma
team 2024 (Gemma 1), Javaheripi et al. 2023 (Phi-2), Jiang et al. 2023 (Mistral), Yang et al. 2024 and 2025 (Qwen2,
Qwen3), Abdin et al. 2024 (Phi-3).
"""

from dataclasses import dataclass
from typing import Any

from mini_ee.lab.backbones.backbone import HeadLayout, Layout, check_fixed
from mini_ee.lab.data.values import shortened

# ---- The members ----
WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
SWITCHES = WINDOWS | {"attention_bias"}
"""Keys of config.json that only some members use."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model_type. Its layers have the modules that the layout names; the switches select how they compute.

    Without `mlp_norm`, attention and MLP read the same norm. Without `gate`, the MLP is not gated. `query_norm` and
    `key_norm` are norms of each head.
    """

    layout: Layout
    defaults: dict  # Hugging Face's defaults for keys that config.json does not have
    norm: str = "rms"  # RMSNorm; "rms, 1 + w": its parameter is w - 1; "layer": LayerNorm
    biased: tuple[str, ...] = ()  # linear maps with a bias: "qkv", "attention_output", "mlp", "lm_head"
    switches: frozenset[str] = frozenset()  # those of SWITCHES that it uses
    partial_rotary: bool = False  # whether only a part of each head may be rotated
    rope_types: tuple[str, ...] = ("default", "llama3")
    original_length: int | None = None  # `original_max_position_embeddings` of a `rope_scaling` that does not have it
    scaled_embeddings: bool = False  # whether embeddings are multiplied by sqrt(D)
    gelu_is_tanh: bool = False  # whether gelu means its tanh approximation, as in the oldest files

    def has(self, module: str) -> bool:
        """Whether a layer has this module."""
        return "layers.{i}." + module in self.layout.names

    @property
    def eps_key(self) -> str:
        """The key of norm_eps in config.json."""
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


# Keys of config.json that `from_hugging_face` reads or checks, besides the fields of the config.
CONFIG_KEYS = frozenset(
    {"rms_norm_eps", "layer_norm_eps", "rope_parameters", "hidden_activation", "original_max_position_embeddings"}
    | {"attention_bias", "mlp_bias", "qk_layernorm", "use_bidirectional_attention", "is_causal", "default_theta"}
    | SWITCHES
)


def _layout(architecture: str, names: dict[str, str] = _LLAMA_NAMES, **more: Any) -> Layout:
    """more: `fused` and further `config_keys` of Layout."""
    ignored = r"(.*\.)?rotary_emb\.inv_freq"
    head = HeadLayout(norm=names["norm"], out="score", pool="last")
    more = {"config_keys": CONFIG_KEYS} | more
    return Layout(names=names, prefix="model.", architecture=architecture, ignored=ignored, head=head, **more)


_OWN_CODE = CONFIG_KEYS | {"auto_map"}  # the files of Phi's authors name code of the same model


def _defaults(act: str = "silu", eps: float = 1e-6, tied: bool = False, **more) -> dict:
    return {"hidden_act": act, "norm_eps": eps, "tie_word_embeddings": tied} | more


MEMBERS = {
    "llama": Member(layout=_layout("Llama"), defaults=_defaults()),
    "gemma": Member(
        layout=_layout("Gemma"),
        defaults=_defaults("gelu_pytorch_tanh", tied=True, head_dim=256, pad_token_id=0),
        norm="rms, 1 + w",
        scaled_embeddings=True,
        gelu_is_tanh=True,
    ),
    "phi": Member(
        layout=_layout("Phi", _PHI_NAMES, config_keys=_OWN_CODE),
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
        layout=_layout("Phi3", _PHI3_NAMES, fused=(("mlp.gate_up_proj", ("gate", "up")),), config_keys=_OWN_CODE),
        defaults=_defaults(eps=1e-5, pad_token_id=32000),
        switches=frozenset({"sliding_window"}),
        partial_rotary=True,
        rope_types=("default", "longrope", "su"),
        original_length=4096,
    ),
}


# ---- config.json ----
# Keys that would change the computation, and the implemented values. Not checked for members that use the key.
FIXED_KEYS = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qk_layernorm": (False, None),
    "use_bidirectional_attention": (False, None),
    "is_causal": (True,),
    "sliding_window": (None,),
    "default_theta": (None,),  # transformers 5 uses it for a Phi-3 without rope_theta
}
NULL = ("num_key_value_heads", "sliding_window", "pad_token_id")  # keys for which null does not mean the default

ORIGINAL = "original_max_position_embeddings"
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
ROPE_KEYS = {
    "llama3": LLAMA3_SCALING,
    "longrope": ("short_factor", "long_factor", "factor", "attention_factor", ORIGINAL),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_keys(config: dict) -> tuple[dict, dict]:
    """The content of a config.json -> fields of DecoderConfig, and the member's values for keys that it does not have.

    Raises ValueError for a key whose value would change the computation and is not implemented.
    """
    member = MEMBERS[config["model_type"]]
    # Without use_sliding_window, a window is off in Qwen, which has this switch, and on in the others.
    has_switch, types = "use_sliding_window" in member.switches, config.get("layer_types")
    used = config.get("use_sliding_window", not has_switch)
    if not used and (has_switch or "sliding_window" not in member.switches):
        config = config | {"sliding_window": None}
    fixed = FIXED_KEYS | {"layer_types": (None, [LAYER_TYPES[0]] * len(types) if isinstance(types, list) else None)}
    check_fixed(config, {key: values for key, values in fixed.items() if key not in member.switches})
    config = {key: value for key, value in config.items() if key not in SWITCHES - member.switches}
    given = {key: value for key, value in config.items() if value is not None} | _rope_keys(config, member)
    given["norm_eps"] = given.get(member.eps_key)
    if given.get("hidden_act") == "swish":
        given["hidden_act"] = "silu"
    if member.gelu_is_tanh:
        given["hidden_act"] = _tanh_activation(given)
    for key in ("pad_token_id", "bos_token_id"):
        if given.get(key) == -1:  # some files write -1 for none
            del given[key]
    given |= {key: tuple(given[key]) for key in ("eos_token_id", "layer_types") if isinstance(given.get(key), list)}
    return given, {key: value for key, value in member.defaults.items() if not (key in NULL and key in config)}


def written_keys(fields: dict) -> dict:
    """The fields of a DecoderConfig -> the content of config.json, for `read_keys`."""
    member = MEMBERS[fields["model_type"]]
    written = {key: value for key, value in fields.items() if key not in SWITCHES - member.switches}
    config = {key: value for key, value in written.items() if value is not None or key in member.defaults}
    config[member.eps_key] = config.pop("norm_eps")
    if "use_sliding_window" in member.switches:
        config["use_sliding_window"] = fields["sliding_window"] is not None
    if fields["layer_types"] is not None:
        config["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    if fields["rope_scaling"] is not None and member.original_length is not None:
        config[ORIGINAL] = fields["rope_scaling"][ORIGINAL]
    if (fields["pad_token_id"] or 0) >= fields["vocab_size"]:  # transformers could not make the embeddings
        config["pad_token_id"] = None
    return config


def _tanh_activation(given: dict) -> str | None:
    """The activation, with gelu as its tanh approximation. Versions of transformers read different keys of the two."""
    act, other = given.get("hidden_act"), given.get("hidden_activation")
    act, other = ("gelu_pytorch_tanh" if name in ("gelu", None) else name for name in (act, other or act))
    if other != act:
        raise ValueError(f"hidden_act and hidden_activation must agree, got {shortened(act)} and {shortened(other)}")
    return act


def _rope_keys(config: dict, member: Member) -> dict:
    """rope_theta, partial_rotary_factor and rope_scaling; transformers 5 writes them as one entry, rope_parameters.

    Raises ValueError if a file has rope_scaling and rope_parameters and they differ.
    """
    entries = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name) is not None}
    original = config.get(ORIGINAL, member.original_length)  # some files have it outside the entry
    settings = [_rope_entry(name, entry, original, member.rope_types) for name, entry in entries.items()]
    both = [{"rope_theta": config.get("rope_theta")} | entry for entry in settings]
    if len(settings) == 2 and both[0] != both[1]:
        raise ValueError("rope_parameters and rope_scaling must agree, found different ones; keep one of them")
    return settings[-1] if settings else {}


def _rope_entry(name: str, entry: object, original: int | None, kinds: tuple[str, ...]) -> dict:
    """The fields of DecoderConfig that one entry sets."""
    if not isinstance(entry, dict) or any(isinstance(value, dict) for value in entry.values()):
        raise ValueError(f"{name} must be an object that serves all layers, got {shortened(entry)}")
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind not in kinds:
        expected = " or ".join(map(repr, kinds))
        raise ValueError(f"{name}: rope_type must be {expected}, got {shortened(kind)}: not supported")
    fields = {key: entry[key] for key in ("rope_theta", "partial_rotary_factor") if entry.get(key) is not None}
    kind = "longrope" if kind == "su" else kind  # its earlier name
    scaling = {key: entry[key] for key in ROPE_KEYS.get(kind, ()) if entry.get(key) is not None}
    if kind != "default" and original is not None and scaling.setdefault(ORIGINAL, original) != original:
        raise ValueError(
            f"{name}: {ORIGINAL} must be {original} as outside the entry, got {shortened(scaling[ORIGINAL])}"
        )
    return fields | {"rope_scaling": {"rope_type": kind} | scaling if kind != "default" else None}
