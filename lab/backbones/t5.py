"""T5 v1.0 and v1.1, from scratch: an encoder reads the text, a decoder writes the answer; exits are in the decoder.

Source: Raffel et al. 2020, arXiv 1910.10683v4 (v1.0); v1.1 is published only as code. Layers are pre-norm, with RMS
norms and no biases. Attention is unscaled, softmax(q_i . k_j + b_r). Positions enter only through b, a number per head
and bucket of distances r = j - i. All layers of a stack share b; cross attention has none. The versions differ in:

    v1.0    down(relu(up)); the LM head is tied to the embeddings, and its input is multiplied by 1 / sqrt(D)
    v1.1    down(gelu(gate) * gated); the LM head has weights of its own, and its input is unscaled

Depth counts the decoder's layers. `context` runs the whole encoder, whose FLOPs are part of `start_flops`. Hidden
states are the decoder's: (B, 1, D), of the start token, which stands for the whole row; or those of `decoder_input_ids`
if the inputs have them (`Pairs`). So an exit saves layers of the decoder. RAEE counts T5's layers from the encoder on,
and does not specify what an exit in the encoder would read.

A decoder layer computes its keys and values of the encoder's output itself, only for the rows that reach it. Text is
generated with a cache as by any decoder. If a token exits early, its own keys are missing in the layers above; those of
the encoder's output do not depend on it. FLOPs of a token include neither the encoder nor these keys and values.

Hidden states and logits agree with those of transformers (5.23): tests/lab/parity/test_t5.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import (
    Layout,
    Tensors,
    check_tokens,
    layer_flops,
    matrix_weights,
    padding_mask,
    tensor_on,
    token_places,
)
from mini_ee.lab.backbones.cache import Cache
from mini_ee.lab.backbones.generative import GenerativeBackbone
from mini_ee.lab.backbones.relative_biases import Biases
from mini_ee.lab.backbones.t5_layers import (
    FIXED_KEYS,
    THEIR_KEYS,
    EncoderLayer,
    HeadNorm,
    Layer,
    LayerContext,
    Memory,
    Pairs,
    T5Config,
    norm_of,
)
from mini_ee.lab.data.tokenizer import Inputs


# ---- The backbone ----
class T5(GenerativeBackbone):
    """The backbone: embeddings, the encoder, the decoder's L layers, and the LM head with its norm."""

    Config = T5Config
    poolings = ("first",)  # a row has one state, that of the start token
    is_encoder_decoder = True
    reads_prompt_at = "first"
    head_architecture = "ForConditionalGeneration"

    def __init__(self, config: T5Config, lm_head: bool = True):
        super().__init__()
        self.config = config
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder_biases, self.biases = Biases(config, both=True), Biases(config, both=False)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.encoder_norm = norm_of(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.lm_head = HeadNorm(config), None
        if lm_head and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.apply(self.initialise)

    @classmethod
    def fitted(cls, config: T5Config, tensors: dict[str, Tensor]) -> T5Config:
        """If the file's LM head differs from the embeddings, it is not tied, whatever config.json says."""
        head, words = tensors.get("lm_head.weight"), tensors.get("shared.weight")
        untied = head is not None and words is not None and not torch.equal(head, words)
        return replace(config, tie_word_embeddings=False) if untied else config

    @classmethod
    def tied(cls, config: T5Config) -> dict[str, str]:
        """The embeddings of both stacks, and the LM head if the config ties it."""
        copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
        return dict.fromkeys(copies + ["lm_head.weight"] * config.tie_word_embeddings, "shared.weight")

    def exit_norm(self) -> nn.Module:
        """A norm, because layers are pre-norm: their output is not normed."""
        return norm_of(self.config)

    def embed(self, inputs: Tensors | Inputs | Pairs) -> Tensor:
        """hidden[0]: (B, 1, D), of the start token; (B, T, D), of the decoder's tokens if inputs are Pairs."""
        device = self.embeddings.weight.device
        check_tokens(inputs.input_ids)
        written = getattr(inputs, "decoder_input_ids", None)
        if written is None:
            start = self.embeddings.weight[self.config.decoder_start_token_id]
            return self.dropout(start.expand(inputs.input_ids.shape[0], 1, -1))
        return self.dropout(self.embeddings(tensor_on(device, written)))

    def encode(self, inputs: Tensors | Inputs | Pairs, stop: int) -> tuple[Tensor, Tensor | None]:
        """The states after the first `stop` layers of the encoder, (B, S, D), not normed; and the padding mask."""
        ids = tensor_on(self.embeddings.weight.device, inputs.input_ids)
        check_tokens(ids, self.config.max_tokens)
        places = token_places(ids)
        readable, bias = padding_mask(inputs.attention_mask, ids.device), self.encoder_biases(places[None], places)
        if readable is not None:
            bias = bias.masked_fill(~readable, -torch.inf)
        hidden = self.dropout(self.embeddings(ids))
        for layer in self.encoder[:stop]:
            hidden = layer(hidden, bias)
        return hidden, readable

    def context(self, inputs: Tensors | Inputs | Pairs) -> LayerContext:
        """The encoder's output with its mask, and the biases of the decoder's tokens."""
        hidden, readable = self.encode(inputs, len(self.encoder))
        written = getattr(inputs, "decoder_input_ids", None)
        places = torch.arange(1 if written is None else written.shape[1], device=hidden.device)
        bias = self.biases(places[None], places).masked_fill(places > places[:, None], -torch.inf)
        return LayerContext(self.config.num_attention_heads, self.dropout(self.encoder_norm(hidden)), readable, bias)

    # ---- Token by token ----
    def decoder_start_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The start token for each; the encoder reads the prompts."""
        return [[self.config.decoder_start_token_id]] * len(prompts)

    def read_prompts(self, prompts: Sequence[Sequence[int]], cache: Cache) -> None:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        hidden, readable = self.encode(Tensors(ids, torch.arange(ids.shape[1]) < lengths), len(self.encoder))
        cache.memory = Memory(self.encoder_norm(hidden), readable)

    def embed_written(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embeddings(input_ids)

    def block(self, positions: Tensor, cache: Cache, rows: list[int] | None = None) -> LayerContext:
        """As `GenerativeBackbone.block`, but always with a cache."""
        end = int(positions.max()) + 1
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: ask for fewer tokens")
        at, slots = positions.clamp(min=0), torch.arange(end, device=positions.device)
        bias = self.biases(at, slots).masked_fill(slots > at[:, None, :, None], -torch.inf)
        readable = cache.memory.readable
        readable = readable if readable is None or rows is None else readable[rows]
        heads = self.config.num_attention_heads
        index = cache.slots_of(positions, rows)
        return LayerContext(heads, None, readable, bias, cache=cache, rows=rows, slots=index)

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> LayerContext:
        places = torch.arange(low, low + tokens, device=cache.keys.device)
        block = self.block(places[None], cache)
        return block._replace(slots=(slice(None), slice(low, low + tokens)))

    def read_texts(self, input_ids: Tensor, counted: Tensor) -> tuple[Pairs, Tensor]:
        """The encoder reads each text up to the first token that counts. The decoder reads the start token in place of
        that token, then the tokens after it."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        first = counted.int().argmax(1, keepdim=True)  # (B, 1): argmax is the first of equal values
        width = int((counted.sum(1) if counted.any() else first + 1).max())
        # (B, width): first, first + 1, ..; clamped, as these places may be beyond the end of a row.
        from_first = (first + places[:width]).clamp(max=len(places) - 1)
        written = input_ids.gather(1, from_first)
        written[:, 0] = self.config.decoder_start_token_id
        counts = counted.gather(1, from_first) & (first + places[:width] < len(places))  # not at clamped places
        given = int(first.max()) + 1
        return Pairs(input_ids[:, :given], (places[:given] <= first).long(), written), counts

    @property
    def token_weights(self) -> int:
        """Without the maps to keys and values of the encoder's output, which are computed once per prompt."""
        return super().token_weights - self.layers[0].cross_key_value.weight.numel()

    # ---- States of the input text: those of the encoder ----
    @property
    def text_layers(self) -> int:
        return self.config.num_encoder_layers

    def text_states(self, inputs: Tensors | Inputs, layer: int) -> tuple[Tensor, Tensor | None]:
        return self.encode(inputs, layer)

    def text_flops(self, layer: int, tokens: int) -> float:
        attention = self.config.head_width * self.config.num_attention_heads
        return layer * layer_flops(matrix_weights(self.encoder[0]), attention, tokens)

    # ---- FLOPs ----
    def start_flops(self, tokens: int) -> float:
        """FLOPs of the encoder on one row."""
        return self.text_flops(len(self.encoder), tokens)

    def layer_flops(self, tokens: int) -> float:
        """FLOPs of one decoder layer on one token (the start token), if the encoder read that many tokens."""
        layer = self.layers[0]
        of_memory, width = layer.cross_key_value.weight.numel(), layer.cross_query.out_features
        return 2.0 * self.token_weights + 2.0 * of_memory * tokens + 4.0 * width * (1 + tokens)

    def projected(self, target: str, tokens: int) -> int:
        return tokens if target in ("cross_key", "cross_value") else 1

    def initialise(self, module: nn.Module) -> None:
        """As Hugging Face: the standard deviation is initializer_factor for word embeddings and an untied LM head, and
        initializer_factor / sqrt(inputs) for other linear maps."""
        config, factor = self.config, self.config.initializer_factor
        if isinstance(module, nn.Embedding):
            words = module is self.embeddings
            nn.init.normal_(module.weight, std=factor if words else factor * config.hidden_size**-0.5)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=factor if module is self.lm_head else factor * module.in_features**-0.5)
        for name in ("qkv", "cross_query"):  # queries are smaller by 1 / sqrt(d), because scores are not scaled
            if isinstance(module, EncoderLayer) and hasattr(module, name):
                with torch.no_grad():
                    getattr(module, name).weight[: self.layers[0].attention_output.in_features] *= config.head_dim**-0.5


# ---- Hugging Face's names ----
def _stack(ours: str, theirs: str, mlp: int) -> dict[str, str]:
    """Names of a stack's layers. mlp: the index of the feed-forward part, in Hugging Face's names."""
    block = f"{theirs}.block.{{i}}.layer"
    return {
        f"{ours}.{{i}}.attention_norm": f"{block}.0.layer_norm",
        f"{ours}.{{i}}.qkv": f"{block}.0.SelfAttention.{{q|k|v}}",
        f"{ours}.{{i}}.attention_output": f"{block}.0.SelfAttention.o",
        f"{ours}.{{i}}.mlp_norm": f"{block}.{mlp}.layer_norm",
        f"{ours}.{{i}}.up": f"{block}.{mlp}.DenseReluDense.wi",
        f"{ours}.{{i}}.gate": f"{block}.{mlp}.DenseReluDense.wi_0",
        f"{ours}.{{i}}.gated": f"{block}.{mlp}.DenseReluDense.wi_1",
        f"{ours}.{{i}}.down": f"{block}.{mlp}.DenseReluDense.wo",
    }


_CROSS = "decoder.block.{i}.layer.1"

_NAMES = {
    "embeddings": "shared",
    "encoder_biases.table": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "biases.table": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    **_stack("encoder", "encoder", 1),
    "encoder_norm": "encoder.final_layer_norm",
    **_stack("layers", "decoder", 2),
    "layers.{i}.cross_norm": f"{_CROSS}.layer_norm",
    "layers.{i}.cross_query": f"{_CROSS}.EncDecAttention.q",
    "layers.{i}.cross_key_value": f"{_CROSS}.EncDecAttention.{{k|v}}",
    "layers.{i}.cross_output": f"{_CROSS}.EncDecAttention.o",
    "norm": "decoder.final_layer_norm",
    "lm_head": "lm_head",
}

BACKBONE = T5
LAYOUTS = {
    "t5": Layout(
        names=_NAMES,
        prefix="",
        architecture="T5",
        classifier_prefix="transformer.",
        config_keys=frozenset(
            {*THEIR_KEYS.values(), *FIXED_KEYS, "dense_act_fn", "is_gated_act", "is_encoder_decoder"}
        ),
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # not used
    )
}
