"""The config of a T5, v1.0 or v1.1, and its biases by relative position."""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.activations import ACTIVATIONS
from mini_ee.backbones.backbone import LARGEST, check_fields, check_fixed, check_integer, known_fields, shortened

GATED = "gated-"

THEIR_KEYS = {  # ours -> Hugging Face's
    "hidden_size": "d_model",
    "num_hidden_layers": "num_decoder_layers",
    "num_encoder_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "max_tokens": "n_positions",
}

FIXED_KEYS = {"is_encoder_decoder": (True,), "is_decoder": (False,), "is_causal": (True,)}


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """The keys of a Hugging Face config.json that the model reads, under the names that all backbones have.

    num_hidden_layers counts the decoder's layers, where the exits are. Positions are relative, so that no length is too
    long for the model; max_tokens is that of its training. Raises ValueError on a value that no model can have.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_encoder_layers: int
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    max_tokens: int = 512
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    feed_forward_proj: str = "relu"
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = True
    pad_token_id: int = 0
    decoder_start_token_id: int = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    token_types = None  # there is no use for them

    def __post_init__(self):
        check_fields(self, from_zero=("pad_token_id", "decoder_start_token_id"))
        for stop in self.stop_tokens:
            check_integer("eos_token_id", stop, least=0, most=LARGEST["vocab_size"])
        if self.decoder_start_token_id >= self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id must be below vocab_size, "
                f"got {self.decoder_start_token_id} and {self.vocab_size}"
            )
        if not isinstance(self.feed_forward_proj, str) or self.activation not in ACTIVATIONS:
            raise ValueError(
                f"feed_forward_proj must be one of {', '.join(ACTIVATIONS)}, each with or without {GATED!r} before it, "
                f"got {shortened(self.feed_forward_proj)}"
            )
        near, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if near < 4 or most <= near // 2:
            raise ValueError(
                f"relative_attention_num_buckets must be at least 4, and relative_attention_max_distance above half of "
                f"it, got {near} and {most}"
            )

    @classmethod
    def from_hugging_face(cls, config: dict) -> "T5Config":
        """From the content of a config.json, of transformers 4 or 5. Keys that change nothing here are passed over.

        Version 5 always says that the head is tied: whether it is, the file of weights tells (`T5.fitted`).
        """
        check_fixed(config, FIXED_KEYS)
        given = {key: value for key, value in config.items() if key not in THEIR_KEYS}
        given |= {ours: config[theirs] for ours, theirs in THEIR_KEYS.items() if config.get(theirs) is not None}
        if "num_encoder_layers" in given:
            given.setdefault("num_hidden_layers", given["num_encoder_layers"])
        given.setdefault("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
        check_fixed(given, {"scale_decoder_outputs": (True, False)})  # transformers 5 takes null for false
        if isinstance(given.get("eos_token_id"), list):
            given["eos_token_id"] = tuple(given["eos_token_id"])
        start = given.get("pad_token_id")
        try:
            made = cls(**known_fields(cls, given, {} if start is None else {"decoder_start_token_id": start}))
        except ValueError as error:
            raise ValueError(_in_their_words(str(error))) from None
        check_fixed(config, {"dense_act_fn": (made.activation,), "is_gated_act": (made.gated,)})
        return made

    def to_dict(self) -> dict:
        """As Hugging Face writes it; `from_hugging_face` reads it back."""
        config = {THEIR_KEYS.get(key, key): value for key, value in asdict(self).items()}
        return config | {"is_encoder_decoder": True}

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part multiplies two maps (v1.1)."""
        return self.feed_forward_proj.startswith(GATED)

    @property
    def activation(self) -> str:
        """A name of ACTIVATIONS; the gated gelu is its tanh form."""
        name = self.feed_forward_proj.removeprefix(GATED)
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else name

    @property
    def head_width(self) -> int:
        return self.head_dim

    @property
    def key_value_heads(self) -> int:
        return self.num_attention_heads

    def window(self, layer: int) -> None:
        """No layer reads the nearest tokens alone."""

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens with which a text ends, as eos_token_id names them."""
        ends = self.eos_token_id
        return [] if ends is None else list(ends) if isinstance(ends, tuple) else [ends]


def _in_their_words(message: str) -> str:
    """An error with the keys that the file has."""
    for ours, theirs in THEIR_KEYS.items():
        message = message.replace(ours, theirs)
    return message


def buckets(distances: Tensor, both: bool, config: T5Config) -> Tensor:
    """Which bucket j - i is in, int64 -> int64. both: j may be behind i; half of the buckets are for those.

    Half of a side's buckets are for one distance each; the others grow with the logarithm up to the largest distance.
    In float32, as Hugging Face computes it: distances at the edge of a bucket fall where the model learned them.
    """
    count, most = config.relative_attention_num_buckets, config.relative_attention_max_distance
    first = torch.zeros_like(distances)
    if both:
        count //= 2
        first, distances = (distances > 0) * count, distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    near = count // 2
    steps = torch.log(distances.clamp(min=1).float() / near) / math.log(most / near) * (count - near)
    far = (near + steps.long()).clamp(max=count - 1)
    return first + torch.where(distances < near, distances, far)


class Biases(nn.Module):
    """What is added to the scores of every layer of a stack: a number for each bucket and head."""

    def __init__(self, config: T5Config, both: bool):
        super().__init__()
        self.config, self.both = config, both
        self.table = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions (B, T) and (S,) -> (B, H, T, S)."""
        return self.of_distances(keys - queries[..., None])

    def of_distances(self, distances: Tensor) -> Tensor:
        """j - i, (B, T, S) -> (B, H, T, S)."""
        most = self.config.relative_attention_max_distance  # beyond it all distances are one
        every = torch.arange(-most, most + 1, device=self.table.weight.device)
        by_distance = self.table(buckets(every, self.both, self.config))
        return F.embedding(distances.clamp(-most, most) + most, by_distance).permute(0, 3, 1, 2)
