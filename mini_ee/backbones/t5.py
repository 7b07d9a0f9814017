"""T5 v1.0 and v1.1, from scratch: an encoder reads the text, a decoder writes the answer; exits are in the decoder.

Source: Raffel et al. 2020, arXiv 1910.10683v4 (v1.0); v1.1 is published as code alone. Layers are pre-norm, with RMS
norms and no biases, and attention is not scaled: the sums are softmax(q_i . k_j + b_r). Positions are known through b
alone, a number for each head and bucket of distances r = j - i, which all layers of a stack share; attention of the
decoder to the encoder's output has none. What differs:

    v1.0    down(relu(up)); the head is tied to the embeddings, and its input times 1 / sqrt(D)
    v1.1    down(gelu(gate) * gated); a head of its own, its input unscaled

Depth counts the decoder's layers. `context` runs the whole encoder, and its cost is that of the start (`start_flops`).
Hidden states are those of the decoder: (B, 1, D), of the token that it starts with, through which a row is read; or
those of `decoder_input_ids` where inputs have them (`Pairs`). So an exit saves layers of the decoder: RAEE counts T5's
layers from the encoder on, and does not say what an exit in there would read.

Keys and values of the encoder's output are made by the layer that reads them, for the rows that come there: what is not
run costs nothing. Text is written over caches as by any decoder; a token that has left leaves its own keys above, those
of the encoder's output are fixed. As a prompt's, the encoder's cost is not a token's, nor is reading its output.

In ONNX graphs of tokens the keys and values of all layers come from a graph of their own, which runs once: see T5Block.
Transformers (5.23) agrees in every hidden state and logit: tests/parity/test_t5.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.backbones.backbone import Layout, Tensors, layer_flops, padding_mask, tensor_on, token_places
from mini_ee.backbones.cache import Cache, GraphBlock, cache_inputs
from mini_ee.backbones.generative import GenerativeBackbone
from mini_ee.backbones.shapes import check
from mini_ee.backbones.t5_layers import (
    Biases,
    EncoderLayer,
    HeadNorm,
    Layer,
    LayerContext,
    Memory,
    Pairs,
    T5Config,
    norm_of,
)

# ---- In graphs ----
MEMORY = "memory"  # what names of inputs begin with that hold what was made of the prompts


class T5Block(GraphBlock):
    """Tokens whose past stands in caches, as GraphBlock has them, and whose prompts an encoder has read.

    What it made of them is fixed: `memory_keys_3` and `memory_values_3` of the decoder's layer 3 (from 0), (prompts,
    memory, H d), and memory_mask (prompts, memory), 1 at tokens.
    """

    scale = 1.0

    @classmethod
    def over_caches(cls, g, decoder, first: int) -> "T5Block":
        at, slots, cache = cache_inputs(g, decoder.config, first)
        distances = slots - at[..., None]
        biases = decoder.biases.of_distances(distances).masked_fill((distances > 0)[:, None], -torch.inf)
        return cls(decoder.config, at, (biases, None), cache=cache)

    def attend_memory(self, depth: int, layer, query: Tensor, adapt=None, dropout: float = 0.0) -> Tensor:
        """(B, T, H d) -> (B, T, H d): what the tokens read of their prompts."""
        g, queries = query.g, query.name
        kept = [
            g.input(f"{MEMORY}_{kind}_{depth}", "prompts", "memory", self.width, dtype=g.dtype)
            for kind in ("keys", "values")
        ]
        mask, heads = g.input(f"{MEMORY}_mask", "prompts", "memory"), self.config.num_attention_heads

        def attended(keys: str, values: str, mask: str) -> list:
            seen = g.readable(g.cast(mask, bool), queries)
            read = g.attention(queries, keys, values, seen, heads, heads, self.scale)
            return [g.value(read, "some", "tokens", self.width)]

        everyone = g.op("Equal", g.shape(queries, 0, 1), self._cache.prompts)
        of_some = lambda: attended(*(g.op("Gather", each, self._cache.rows) for each in (*kept, mask)))  # noqa: E731
        return query.like(g.either(everyone, lambda: attended(*kept, mask), of_some)[0].name)

    @staticmethod
    def write_memory(decoder, g) -> None:
        """The graph memory.onnx: input_ids and attention_mask (prompts, memory) -> what this takes of the prompts."""
        names, axes = ("input_ids", "attention_mask"), ("prompts", "memory")
        ids, mask = (g.tensor(g.input(name, *axes), *axes, dtype=np.int64) for name in names)
        with g.tracing():
            states = decoder.encoder_norm(decoder.encode(Tensors(ids, mask), decoder.text_layers)[0])
            for depth, layer in enumerate(decoder.layers):
                heads = layer.linear("cross_key_value", states, None).chunk(2, dim=-1)
                for kind, each in zip(("keys", "values"), heads):
                    g.output(f"{MEMORY}_{kind}_{depth}", each.name, *axes, each.shape[-1])
        g.output(f"{MEMORY}_mask", g.op("Identity", mask.name), *axes, dtype=np.int64)


# ---- The backbone ----
class T5(GenerativeBackbone):
    """The backbone: embeddings, the encoder, the decoder's L layers, and the head to words with its norm."""

    Config = T5Config
    poolings = ("first",)  # there is one
    is_encoder_decoder = True
    made_once = "memory"
    graph_context = T5Block
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
        """A head in the file that is not that of the embeddings is a head of its own, whatever config.json says."""
        head, words = tensors.get("lm_head.weight"), tensors.get("shared.weight")
        own = head is not None and words is not None and not torch.equal(head, words)
        return replace(config, tie_word_embeddings=False) if own else config

    @classmethod
    def tied(cls, config: T5Config) -> dict[str, str]:
        """The embeddings of both stacks, and the head where the config says so."""
        copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
        return dict.fromkeys(copies + ["lm_head.weight"] * config.tie_word_embeddings, "shared.weight")

    def exit_norm(self) -> nn.Module:
        """Layers leave the sums that they add to unnormed."""
        return norm_of(self.config)

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, 1, D), of the start token; (B, T, D) of what has been written, where inputs are Pairs."""
        device = self.embeddings.weight.device
        check(inputs.input_ids, "B T")
        written = getattr(inputs, "decoder_input_ids", None)
        if written is None:
            start = self.embeddings.weight[self.config.decoder_start_token_id]
            return self.dropout(start.expand(inputs.input_ids.shape[0], 1, -1))
        return self.dropout(self.embeddings(tensor_on(device, written)))

    def encode(self, inputs, stop: int) -> tuple[Tensor, Tensor | None]:
        """What the encoder makes of the texts in its first `stop` layers, (B, S, D), unnormed; and their padding."""
        ids = tensor_on(self.embeddings.weight.device, inputs.input_ids)
        tokens, places = check(ids, "B S")["S"], token_places(ids)
        if tokens > self.config.max_tokens:
            raise ValueError(f"expected at most {self.config.max_tokens} tokens, got {tokens}: truncate the input")
        readable, bias = padding_mask(inputs.attention_mask, ids.device), self.encoder_biases(places[None], places)
        if readable is not None:
            bias = bias.masked_fill(~readable, -torch.inf)
        hidden = self.dropout(self.embeddings(ids))
        for layer in self.encoder[:stop]:
            hidden = layer(hidden, bias)
        return hidden, readable

    def context(self, inputs) -> LayerContext:
        """The encoder's output, with its mask, and the biases of what is written."""
        hidden, readable = self.encode(inputs, len(self.encoder))
        written = getattr(inputs, "decoder_input_ids", None)
        places = torch.arange(1 if written is None else written.shape[1], device=hidden.device)
        bias = self.biases(places[None], places).masked_fill(places > places[:, None], -torch.inf)
        return LayerContext(self.config.num_attention_heads, self.dropout(self.encoder_norm(hidden)), readable, bias)

    # ---- Token by token ----
    def decoder_start_tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The start token: prompts are the encoder's."""
        return [[self.config.decoder_start_token_id]] * len(prompts)

    def read_prompts(self, prompts: Sequence[Sequence[int]], cache: Cache) -> None:
        """The encoder's output for all prompts."""
        ids = nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        lengths = torch.tensor([[len(prompt)] for prompt in prompts])
        hidden, readable = self.encode(Tensors(ids, torch.arange(ids.shape[1]) < lengths), len(self.encoder))
        cache.memory = Memory(self.encoder_norm(hidden), readable)

    def embed_written(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.embeddings(input_ids)

    def block(self, positions: Tensor, cache: Cache, rows: list[int] | None = None) -> LayerContext:
        """As `GenerativeBackbone.block` says; there is always a cache."""
        end = int(positions.max()) + 1
        if end > cache.capacity:
            raise ValueError(f"expected at most {cache.capacity} tokens, got {end}: ask for fewer tokens")
        at, slots = positions.clamp(min=0), torch.arange(end, device=positions.device)
        bias = self.biases(at, slots).masked_fill(slots > at[:, None, :, None], -torch.inf)
        index = torch.arange(len(positions)) if rows is None else torch.tensor(rows)
        write = (index.to(at.device)[:, None], torch.where(positions < 0, cache.capacity, positions))
        readable = cache.memory.readable
        readable = readable if readable is None or rows is None else readable[rows]
        heads = self.config.num_attention_heads
        return LayerContext(heads, None, readable, bias, cache=cache, rows=rows, slots=write)

    def aligned_block(self, low: int, tokens: int, cache: Cache) -> LayerContext:
        places = torch.arange(low, low + tokens, device=cache.keys.device)
        block = self.block(places[None], cache)
        return block._replace(slots=(slice(None), slice(low, low + tokens)))

    def read_texts(self, input_ids: Tensor, counted: Tensor) -> tuple[Pairs, Tensor]:
        """The encoder reads up to the first token that counts; in its place stands the start token."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        first = counted.int().argmax(1, keepdim=True)
        width = int((counted.sum(1) if counted.any() else first + 1).max())
        from_there = (first + places[:width]).clamp(max=len(places) - 1)
        written = input_ids.gather(1, from_there)
        written[:, 0] = self.config.decoder_start_token_id
        counts = counted.gather(1, from_there) & (first + places[:width] < len(places))
        given = int(first.max()) + 1
        return Pairs(input_ids[:, :given], (places[:given] <= first).long(), written), counts

    @property
    def token_weights(self) -> int:
        """Keys and values of the encoder's output are made once, as those of a prompt are."""
        return super().token_weights - self.layers[0].cross_key_value.weight.numel()

    # ---- What texts are compared by ----
    @property
    def text_layers(self) -> int:
        """Those of the encoder."""
        return self.config.num_encoder_layers

    def text_states(self, inputs, layer: int) -> tuple[Tensor, Tensor | None]:
        """The encoder's, which reads the text."""
        return self.encode(inputs, layer)

    def text_flops(self, layer: int, tokens: int) -> float:
        """Of text_states on one row."""
        config = self.config
        weights = sum(weight.numel() for weight in self.encoder[0].parameters() if weight.dim() == 2)
        return layer * layer_flops(weights, config.head_width * config.num_attention_heads, tokens)

    # ---- What it costs ----
    def start_flops(self, tokens: int) -> float:
        """The encoder's, on one row."""
        return self.text_flops(len(self.encoder), tokens)

    def layer_flops(self, tokens: int) -> float:
        """Of one layer of the decoder, on one token of a row whose text has so many."""
        layer = self.layers[0]
        weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
        of_memory, width = layer.cross_key_value.weight.numel(), layer.cross_query.out_features
        return 2.0 * (weights - of_memory) + 2.0 * of_memory * tokens + 4.0 * width * (1 + tokens)

    def projected(self, target: str, tokens: int) -> int:
        return tokens if target in ("cross_key", "cross_value") else 1

    def initialise(self, module: nn.Module) -> None:
        """As Hugging Face does: embeddings by initializer_factor, a map by that over the root of its inputs."""
        config, factor = self.config, self.config.initializer_factor
        if isinstance(module, nn.Embedding):
            words = module is self.embeddings
            nn.init.normal_(module.weight, std=factor if words else factor * config.hidden_size**-0.5)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=factor if module is self.lm_head else factor * module.in_features**-0.5)
        for name in ("qkv", "cross_query"):  # their queries are drawn smaller, as scores are not scaled
            if isinstance(module, EncoderLayer) and hasattr(module, name):
                with torch.no_grad():
                    getattr(module, name).weight[: self.layers[0].attention_output.in_features] *= config.head_dim**-0.5


# ---- Hugging Face's names ----
def _stack(ours: str, theirs: str, feed: int) -> dict[str, str]:
    block = f"{theirs}.block.{{i}}.layer"
    return {
        f"{ours}.{{i}}.attention_norm": f"{block}.0.layer_norm",
        f"{ours}.{{i}}.qkv": f"{block}.0.SelfAttention.{{q|k|v}}",
        f"{ours}.{{i}}.attention_output": f"{block}.0.SelfAttention.o",
        f"{ours}.{{i}}.mlp_norm": f"{block}.{feed}.layer_norm",
        f"{ours}.{{i}}.up": f"{block}.{feed}.DenseReluDense.wi",
        f"{ours}.{{i}}.gate": f"{block}.{feed}.DenseReluDense.wi_0",
        f"{ours}.{{i}}.gated": f"{block}.{feed}.DenseReluDense.wi_1",
        f"{ours}.{{i}}.down": f"{block}.{feed}.DenseReluDense.wo",
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
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # nothing reads it
    )
}
