"""The base class of all backbones, so that the rest of the code does not depend on the family of a model.

Backbone    the base class; families differ in class attributes and small methods
Tensors     the inputs of a backbone, as tensors
Layout      the names of a model type's tensors in a Hugging Face folder
check_*     checks that the configs of several families share

A family is one file: its config, its Backbone, and at the end BACKBONE (the class) and LAYOUTS (model_type -> Layout).
registry.py names the file.

The config of a backbone is a frozen dataclass with from_hugging_face(dict), to_dict(), and at least model_type,
vocab_size, hidden_size, num_hidden_layers, num_attention_heads, head_width, max_tokens and token_types, the number of
token types (None if the model does not use them).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.lab.backbones.targets import TARGETS
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.data.values import check_value, shortened

Adapt = Callable[[int, str, Tensor, Tensor], Tensor]
"""(index of a stored layer, name of a linear map in it, its input, its output) -> the output plus that of adapters.

It may have an attribute `streams`: the number of equal groups of consecutive rows in the batch, each with adapters of
its own. An input that all rows share, such as a table of positions, is then adapted once per group, not once per row.
"""

AdaptLayer = Callable[[str, Tensor, Tensor], Tensor]
"""Adapt for one layer, without the first argument."""


# ---- Inputs ----
class Tensors(NamedTuple):
    """The inputs of a backbone, each (B, T) int64."""

    input_ids: Tensor
    attention_mask: Tensor | None = None  # 1 at tokens, 0 at padding; None: no padding
    token_type_ids: Tensor | None = None  # None: all 0


def tensor_on(device: torch.device, array: Tensor | np.ndarray | None) -> Any:
    """An array or a tensor as a tensor on a device; None stays None."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array).to(device)
    return None if array is None else array.to(device)


def token_places(ids: Tensor) -> Tensor:
    """(B, T) -> 0, 1, ... T - 1."""
    return torch.arange(ids.shape[1], device=ids.device)


def check_tokens(ids: Any, most: int | None = None) -> int:
    """T of ids (B, T). Raises ValueError for other axes, and for more than `most` tokens."""
    if len(ids.shape) != 2:
        raise ValueError(f"expected 'B T' (2 dimensions), got shape {tuple(ids.shape)}")
    if most is not None and ids.shape[1] > most:
        raise ValueError(f"expected at most {most} tokens, got {ids.shape[1]}: truncate the input")
    return ids.shape[1]


def rows_of(tensor: Tensor | None, rows: np.ndarray | Tensor) -> Any:
    """These rows of a tensor, for `LayerContext.keep`; None stays None."""
    return None if tensor is None else tensor[tensor_on(tensor.device, rows)]


def copies_of(tensor: Tensor | None, count: int) -> Any:
    """`count` copies of a tensor, one after the other, for `LayerContext.repeat`; None stays None."""
    return None if tensor is None else tensor.repeat(count, *[1] * (tensor.dim() - 1))


def padding_mask(attention_mask: Tensor | np.ndarray | None, device: torch.device | None = None) -> Tensor | None:
    """(B, T) of 1 and 0 -> (B, 1, 1, T) bool, or None without padding, because attention is faster without a mask.

    An array is tested on the CPU; testing a tensor on a GPU would wait for the device.
    """
    if attention_mask is None:
        return None
    if isinstance(attention_mask, np.ndarray):
        full = np.count_nonzero(attention_mask) == attention_mask.size  # quicker than all()
    else:
        full = torch.is_nonzero(attention_mask.all())
    return None if full else tensor_on(device, attention_mask).bool()[:, None, None, :]


class LayerContext(Protocol):
    """The inputs of all layers besides the hidden states, made once per batch: masks, positions, a cache."""

    padding: Tensor | None  # (B, 1, 1, T), true at tokens; None: no padding

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        """The context of the given rows of the batch. rows: (N,) int64."""

    def repeat(self, count: int) -> "LayerContext":
        """The context of `count` copies of the batch, one after the other."""


class SplitLayer(Protocol):
    """A post-norm layer in parts: attention, added to its input and normalised; then the feed-forward part."""

    training: bool
    heads: int
    qkv: nn.Linear  # rows: the maps of queries, of keys, of values
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm  # the end of `attend`
    output_norm: nn.LayerNorm  # the end of `feed_forward`
    dropout: nn.Dropout
    attention_dropout: float

    def attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """hidden -> a, both (B, T, D). mask: the `padding` of a LayerContext."""

    def mlp(self, hidden: Tensor) -> Tensor:
        """a -> FFN(a), both (B, T, D)."""

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """a -> the layer's output, LN(dropout(FFN(a)) + a)."""


# ---- The backbone ----
UNTIED = "its decoder is not tied to the word embeddings"
"""The reason why the masked-LM head of a checkpoint is not loaded."""


class Backbone(nn.Module):
    """Embeddings, `layers`, and the LM head if the checkpoint has one (of a masked LM or of a decoder).

    Depth counts layers: hidden[0] is the output of the embeddings, hidden[k] that of the k-th layer, k = 1..L.
    """

    Config: ClassVar[Any]
    poolings: ClassVar[tuple[str, ...]] = ("first", "mean")  # the poolings over tokens that are useful for this family
    generates: ClassVar[bool] = False  # True: it generates text token by token, and is a GenerativeBackbone
    is_encoder_decoder: ClassVar[bool] = False  # True: an encoder reads the input; the decoder reads its own output
    reads_prompt_at: ClassVar[str] = "mask"  # the token whose state the LM head reads: "mask", "last" or "first"
    head_architecture: ClassVar[str] = "ForMaskedLM"  # ending of Hugging Face's class names for models with an LM head

    config: Any
    layers: nn.ModuleList
    lm_head: nn.Module | None
    left_out: tuple[str, ...] = ()  # tensors of the checkpoint that were not loaded, such as those of a classifier
    foreign: tuple[str, ...] = ()  # tensors of the checkpoint that belong to no part of the model, such as a loss's
    dense_weights: dict[str, Tensor] = {}  # of a sentence encoder: of its linear maps after the pooling
    classification_head: "FineTunedHead | None" = None  # the own head of a `...ForSequenceClassification`
    untied_head: bool = False  # True: they include a masked-LM head that is not tied to the word embeddings

    @classmethod
    def fitted(cls, config: Any, tensors: dict[str, Tensor]) -> Any:
        """The config, corrected by the checkpoint's tensors (Hugging Face's names) if config.json is ambiguous."""
        return config

    @classmethod
    def parts(cls, config: Any) -> dict[str, str]:
        """Optional parts: the bool argument of the class for each -> the name of its module."""
        return {"lm_head": "lm_head"}

    @classmethod
    def tied(cls, config: Any) -> dict[str, str]:
        """Tensors that a file may store a second time -> the tensors they are tied to; Hugging Face's names."""
        return {}

    @classmethod
    def unused(cls, config: Any) -> str:
        """A regular expression for the names of tensors that a file may have but a model of this config does not."""
        return "(?!)"

    def embed(self, inputs: Tensors | Inputs) -> Tensor:
        """hidden[0], (B, T, D). inputs: (B, T) int64 each, tensors or arrays.

        Raises ValueError if T is above config.max_tokens.
        """
        raise NotImplementedError

    def context(self, inputs: Tensors | Inputs) -> LayerContext:
        """The context for run_layers. inputs as in `embed`."""
        raise NotImplementedError

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D): runs the layers start + 1 .. stop.

        adapt: adds the output of adapters to the linear maps of the layers.
        """
        raise NotImplementedError

    def split_layer(self, depth: int) -> SplitLayer:
        """The layer between hidden[depth] and hidden[depth + 1], in parts. Raises ValueError if it is not post-norm."""
        raise ValueError(
            f"expected a backbone of post-norm layers, as BERT, RoBERTa, ALBERT and ElasticBERT have, found a "
            f"{self.config.model_type}: give such a checkpoint"
        )

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """Logits of the LM head, (..., D) -> (..., V) float32. words (C,) int64: only their logits, (..., C).

        Raises ValueError if the checkpoint has no LM head.
        """
        raise NotImplementedError

    @property
    def vocabulary(self) -> dict[str, str]:
        """The linear map onto the vocabulary at the end of the LM head: weight and bias -> names of parameters."""
        raise NotImplementedError

    @property
    def projections(self) -> dict[str, tuple[str, int]]:
        """The projections that adapters may be put on: those of TARGETS whose linear map is in a layer."""
        maps = dict(self.layers[0].named_children())
        return {name: place for name, place in TARGETS.items() if place[0] in maps}

    @property
    def has_lm_head(self) -> bool:
        return self.lm_head is not None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def exit_norm(self) -> nn.Module | None:
        """A new norm for the beginning of an exit's head, or None if layers end with a norm."""
        return None

    def without_heads(self) -> Self:
        """The same backbone, after its modules that exits do not read are removed."""
        self.lm_head = None
        return self

    def first_layers(self, count: int) -> Self:
        """A copy of the embeddings and the layers 1 .. count."""
        first = deepcopy(self.layers[:count])
        # The second argument is deepcopy's memo: `first` replaces the layers, so the others are not copied.
        small = deepcopy(self, {id(self.layers): first}).without_heads()
        small.config = self.config_of(range(count))
        return small

    def config_of(self, layers: Sequence[int]) -> Any:
        """The config of a backbone that has only these layers, counted from 0."""
        return replace(self.config, num_hidden_layers=len(layers))

    def layer_weights(self) -> dict[str, int]:
        """The first two arguments of the function `layer_flops` for one layer."""
        attention = self.config.head_width * self.config.num_attention_heads
        return {"weights": matrix_weights(self.layers[0]), "attention": attention}

    def layer_flops(self, tokens: int) -> float:
        """FLOPs of one layer on one row."""
        return layer_flops(**self.layer_weights(), tokens=tokens)

    def start_flops(self, tokens: int) -> float:
        """FLOPs before the first layer on one row: of the map from embeddings to hidden states, if there is one."""
        mapped = getattr(self.embeddings, "to_hidden", None)
        return 2.0 * tokens * mapped.weight.numel() if mapped else 0.0

    def projected(self, target: str, tokens: int) -> int:
        """The number of vectors of one row that a layer applies this projection to."""
        return tokens

    def lm_head_flops(self, words: int) -> float:
        """FLOPs of the LM head on one state, for that many words."""
        dense = getattr(self.lm_head, "dense", None)
        inner = self.get_parameter(self.vocabulary["weight"]).shape[1]
        return 2.0 * ((dense.weight.numel() if dense else 0) + inner * words)

    @property
    def text_layers(self) -> int:
        """The number of layers that read the input text."""
        return self.config.num_hidden_layers

    def text_states(self, inputs: Tensors | Inputs, layer: int) -> tuple[Tensor, Tensor | None]:
        """The states of the input's tokens after a layer, (B, T, D), and their `padding`; queries are made of them."""
        context = self.context(inputs)
        return self.run_layers(self.embed(inputs), context, 0, layer), context.padding

    def text_flops(self, layer: int, tokens: int) -> float:
        """FLOPs of text_states on one row."""
        return layer * self.layer_flops(tokens)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """hidden[L], (B, T, D). Arguments as in `Tensors`."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        return self.run_layers(self.embed(inputs), self.context(inputs), 0, self.config.num_hidden_layers)

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """All L + 1 hidden states, each (B, T, D); [0] is the embedding output. Arguments as in `Tensors`."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        context, states = self.context(inputs), [self.embed(inputs)]
        for depth in range(self.config.num_hidden_layers):
            states.append(self.run_layers(states[-1], context, depth, depth + 1))
        return tuple(states)

    def no_lm_head(self) -> ValueError:
        """The error to raise if there is no LM head and one is needed."""
        kind = "masked-LM" if self.head_architecture == "ForMaskedLM" else "LM"
        why = f", the file's was left out ({some_of(self.left_out)})" if self.left_out else ""
        why += f" because {UNTIED}" if self.untied_head else ""
        one = "a tied one" if self.untied_head else "one"
        return ValueError(
            f"this {self.config.model_type} has no {kind} head{why}: load a checkpoint that was saved with {one}"
        )

    def initialise(self, module: nn.Module) -> None:
        """Initialise a linear map or embeddings as Hugging Face does; for nn.Module.apply."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def matrix_weights(layer: nn.Module) -> int:
    """The number of weights in the matrices of a layer."""
    return sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)


def layer_flops(weights: int, attention: int, tokens: int) -> float:
    """FLOPs of a layer on one row, a multiply-add counted as two: products with weights, and of tokens with tokens.

    weights: number of values in the layer's matrices. attention: the width of all heads together.
    """
    return 2.0 * tokens * weights + 4.0 * tokens * tokens * attention


# ---- The folder ----
class HeadLayout(NamedTuple):
    """The head of a `...ForSequenceClassification`: its linear maps under Hugging Face's names, without prefix.

    In this order: `norm`, pooling, `dense`, its activation, `dense_norm`, `out`. pool: the token whose state it reads,
    "first" or "last", or the "mean"; "tokens": each. config.json may name another activation or pooling under a key.
    """

    out: str = "classifier"
    dense: str | None = None
    dense_norm: str | None = None
    norm: str | None = None  # the final norm, of a backbone whose layers end with a sum
    activation: str = "tanh"
    activation_key: str | None = None
    pool: str = "first"
    pool_key: str | None = None
    dense_bias_key: str | None = None  # the key for whether `dense` has a bias; None: it has one
    normalize: bool = False  # the pooled vector to length 1, as a SetFit model does


class FineTunedHead(NamedTuple):
    """The own head of a model in a folder. weights: `out.weight`, `dense.bias` and so on -> tensor."""

    layout: HeadLayout
    weights: dict[str, Tensor]
    multi_label: bool = False  # whether an input may have several labels at once
    token_kind: str = ""  # of token_tasks.py, if it labels tokens


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The names of a model type's tensors in a Hugging Face folder.

    names: our module -> their module. {i} is our layer number from 0, {i-1} one less; {a|b} stands for several of
    their tensors that ours stacks. prefix: of all names but those of the LM head; classifier_prefix: the same in a
    model for classification, if it differs. architecture: `Bert` for BertModel. renamed: old endings of names ->
    current ones. ignored: a regular expression for tensors that are not loaded. fused: a module of theirs that stacks
    several of ours in equal shares of rows -> the last parts of our names. head: that of a fine-tuned classifier; None:
    such a head is not loaded. config_keys: of config.json, besides the fields of the config, that the family checks or
    that do not count in it.
    """

    names: dict[str, str]
    prefix: str
    architecture: str
    classifier_prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: str = "(?!)"
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    head: HeadLayout | None = None
    config_keys: frozenset[str] = frozenset()


# ---- Configs ----
LARGEST = {"vocab_size": 2**24, "max_position_embeddings": 2**22, "num_hidden_layers": 1000, "num_encoder_layers": 1000}
LARGEST_SIZE = 2**20  # of the other integers: a larger one is a typing error or damage, and needs too much memory
LARGEST_NUMBER = 1e12


def check_integer(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless the value is a whole number from `least` to `most` (default: see LARGEST)."""
    check_value(name, value, int, least=least, most=most or LARGEST.get(name, LARGEST_SIZE))


def check_fields(config: Any, from_zero: tuple[str, ...] = (), free: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless integers are at least 1 and not huge, and floats are from 0 to 1.

    from_zero: integers that may be 0. free: fields that are not checked.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in free:
            continue
        if field.type in (int, int | None) and value is not None:
            check_integer(field.name, value, 0 if field.name in from_zero else 1)
        if field.type is float:
            check_value(field.name, value, float, least=0, most=1)
        if field.type is bool:
            check_value(field.name, value, bool)
    if getattr(config, "head_dim", None) is None and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, "
            f"got {config.hidden_size} and {config.num_attention_heads}"
        )


def check_fixed(config: dict, allowed: dict[str, tuple]) -> None:
    """Raise ValueError for a setting that is not implemented. allowed: key -> the values that are."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise ValueError(f"{key} must be {values[0]!r}, got {shortened(config[key])}: not supported")


def known_fields(kind: type, given: dict, defaults: dict) -> dict:
    """The arguments for a config class, from the keys of a config.json; defaults: for keys that it does not have.

    Raises ValueError for a missing key that has no default.
    """
    known = {field.name for field in fields(kind)}
    field_values = defaults | {key: value for key, value in given.items() if key in known and value is not None}
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in field_values]
    if missing:
        raise ValueError(f"missing key {', '.join(missing)}")
    return field_values


def in_their_words(message: str, their_keys: dict[str, str]) -> str:
    """An error with the keys that the file has; their_keys: ours -> theirs."""
    for ours, theirs in their_keys.items():
        message = message.replace(ours, theirs)
    return message


def some_of(names: Sequence[str]) -> str:
    """The first three names, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
