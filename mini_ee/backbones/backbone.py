"""What every backbone offers, so that nobody asks which one it is.

Backbone    the base class: what differs is a class attribute or a small method
Tensors     the inputs of a backbone, as tensors
Layout      how Hugging Face keeps a model type in a folder
check_*     what configs have in common

A family is one file: its config, its Backbone, and at the end BACKBONE (the class) and LAYOUTS (model_type -> Layout);
registry.py names the file.

The config of a backbone is a frozen dataclass with from_hugging_face(dict), to_dict(), and at least model_type,
vocab_size, hidden_size, num_hidden_layers, num_attention_heads, head_width, max_tokens and token_types: how many token
types there are, None where the model has no use for them.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from mini_ee.backbones.targets import TARGETS
from mini_ee.data.values import check_value, shortened

Adapt = Callable[[int, str, Tensor, Tensor], Tensor]
"""(index of a stored layer, name of a linear map in it, its input, its output) -> the output with what is added.

An attribute `streams` may say that a batch is so many equal groups of rows, one after the other, with adapters of their
own: what all rows read alike, such as a table of positions, is then adapted once for each group, not for each row.
"""

AdaptLayer = Callable[[str, Tensor, Tensor], Tensor]
"""The same of one layer."""


# ---- Inputs ----
class Tensors(NamedTuple):
    """The inputs of a backbone, each (B, T) int64. No mask: nothing is padded. No types: all are 0."""

    input_ids: Tensor
    attention_mask: Tensor | None = None  # 1 at tokens, 0 at padding
    token_type_ids: Tensor | None = None


def tensor_on(device: torch.device, array: Tensor | np.ndarray | None) -> Tensor | None:
    """An array or a tensor as a tensor on a device; None stays None."""
    return (
        torch.from_numpy(array).to(device)
        if isinstance(array, np.ndarray)
        else None
        if array is None
        else array.to(device)
    )


def is_traced(x) -> bool:
    """Whether code runs on values of a graph, which is written thereby (export/tracing.py)."""
    return x is not None and not isinstance(x, Tensor | np.ndarray)


def sizes_of(counts: Tensor) -> list[int]:
    """(n,) -> n sizes. A function of its own: in a graph they are known only when it runs."""
    if has_torch_function_unary(counts):
        return handle_torch_function(sizes_of, (counts,), counts)
    return counts.tolist()


def token_places(ids: Tensor) -> Tensor:
    """(B, T) -> 0, 1, ... T - 1. A function of its own: torch.arange takes no size of a graph."""
    if has_torch_function_unary(ids):
        return handle_torch_function(token_places, (ids,), ids)
    return torch.arange(ids.shape[1], device=ids.device)


def padding_mask(attention_mask: Tensor | np.ndarray | None, device: torch.device | None = None) -> Tensor | None:
    """(B, T) of 1 and 0 -> (B, 1, 1, T) of true and false, or None where nothing is padded (attention is faster so).

    An array is looked at where it is: on a GPU the question to a tensor waits for the device.
    """
    if attention_mask is None:
        return None
    if isinstance(attention_mask, np.ndarray):
        full = np.count_nonzero(attention_mask) == attention_mask.size  # quicker than all()
    else:
        full = torch.is_nonzero(attention_mask.all())
    return None if full else tensor_on(device, attention_mask).bool()[:, None, None, :]


class LayerContext(Protocol):
    """What all layers need besides the hidden states, made once a batch: masks, positions, a cache."""

    padding: Tensor | None  # (B, 1, 1, T), true at tokens; None: nothing is padded

    def keep(self, rows: np.ndarray | Tensor) -> "LayerContext":
        """That of these rows of the batch alone. rows: (N,) int64."""

    def repeat(self, count: int) -> "LayerContext":
        """That of the batch, `count` times one after the other."""


class SplitLayer(Protocol):
    """A post-norm layer in parts: attention, added to its input and normalised; then the feed-forward part."""

    heads: int
    qkv: nn.Linear  # of the queries, the keys and the values, one above the other
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm  # what `attend` ends with
    output_norm: nn.LayerNorm  # what `feed_forward` ends with
    dropout: nn.Dropout
    attention_dropout: float

    def attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """hidden -> a, both (B, T, D). mask: the `padding` of an LayerContext."""

    def mlp(self, hidden: Tensor) -> Tensor:
        """a -> FFN(a), both (B, T, D)."""

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """a -> the layer's output, LN(dropout(FFN(a)) + a)."""


# ---- The backbone ----
UNTIED = "its decoder is not tied to the word embeddings"
"""Why the masked-LM head of a checkpoint is left out."""


class Backbone(nn.Module):
    """Embeddings, `layers`, and, where the checkpoint has it, the head to words.

    Depth is counted in layers run: hidden[0] is the embedding output, hidden[k] the output of the k-th layer, k = 1..L.
    """

    Config: ClassVar[type]
    poolings: ClassVar[tuple[str, ...]] = ("first", "mean")  # of a row's tokens, that make sense
    generates: ClassVar[bool] = False  # it writes text, token by token: a GenerativeBackbone
    is_encoder_decoder: ClassVar[bool] = False  # an encoder reads what is given; a decoder reads what it writes alone
    made_once: ClassVar[str | None] = None  # a field (B, S, D) of its contexts that costs too much to compute again
    reads_prompt_at: ClassVar[str] = "mask"  # or "last", "first": the token through which the head to words is read
    head_architecture: ClassVar[str] = "ForMaskedLM"  # how Hugging Face ends the name of a model with the head to words

    config: Any
    layers: nn.ModuleList
    lm_head: nn.Module | None
    left_out: tuple[str, ...] = ()  # tensors of the checkpoint that are no part of this, such as a classifier's head
    untied_head: bool = False  # a masked-LM head is among them: its decoder is not tied to the word embeddings

    @classmethod
    def fitted(cls, config, tensors: dict[str, Tensor]):
        """The config, where a file's tensors, under Hugging Face's names, say more than its config.json."""
        return config

    @classmethod
    def parts(cls, config) -> dict[str, str]:
        """Arguments of the class that say whether a part is there -> the module that is that part."""
        return {"lm_head": "lm_head"}

    @classmethod
    def tied(cls, config) -> dict[str, str]:
        """Tensors of the head, under Hugging Face's names, that a file may hold again -> what they are tied to."""
        return {}

    @classmethod
    def unused(cls, config) -> str:
        """Names of tensors that a file may hold and a model of this config does not read, as a regular expression."""
        return "(?!)"

    def embed(self, inputs) -> Tensor:
        """hidden[0], (B, T, D). inputs: what has input_ids and so on, (B, T) int64, as arrays or tensors.

        Raises ValueError where T is above config.max_tokens.
        """
        raise NotImplementedError

    def context(self, inputs) -> LayerContext:
        """What run_layers needs besides hidden states. inputs as in `embed`."""
        raise NotImplementedError

    def run_layers(
        self, hidden: Tensor, context: LayerContext, start: int, stop: int, adapt: Adapt | None = None
    ) -> Tensor:
        """hidden[start] -> hidden[stop], both (B, T, D): runs the layers start + 1 .. stop.

        adapt: what adapters add to the linear maps of the layers.
        """
        raise NotImplementedError

    def split_layer(self, depth: int) -> SplitLayer:
        """The layer between hidden[depth] and hidden[depth + 1], in parts. Raises ValueError if it is not post-norm."""
        raise ValueError(
            f"expected a backbone of post-norm layers, as BERT, RoBERTa, ALBERT and ElasticBERT have, found a "
            f"{self.config.model_type}: give such a checkpoint"
        )

    def lm_logits(self, hidden: Tensor, words: Tensor | None = None) -> Tensor:
        """Logits of the head to words, (..., D) -> (..., V) float32; of these words alone, (C,) int64: (..., C).

        Raises ValueError where the checkpoint has no such head.
        """
        raise NotImplementedError

    @property
    def vocabulary(self) -> dict[str, str]:
        """The linear map onto the vocabulary that lm_logits ends with: weight and bias -> names of parameters."""
        raise NotImplementedError

    @property
    def projections(self) -> dict[str, tuple[str, int]]:
        """What adapters may be put on: those of TARGETS whose maps a layer has."""
        maps = dict(self.layers[0].named_children())
        return {name: place for name, place in TARGETS.items() if place[0] in maps}

    @property
    def has_lm_head(self) -> bool:
        """Whether there is a head to words."""
        return self.lm_head is not None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def exit_norm(self) -> nn.Module | None:
        """A new norm that an exit's head must begin with, or None where layers end with one."""
        return None

    def without_heads(self) -> Self:
        """The same backbone, without what exits do not read."""
        self.lm_head = None
        return self

    def first_layers(self, count: int) -> Self:
        """A copy of the embeddings and the layers 1 .. count."""
        first = deepcopy(self.layers[:count])
        small = deepcopy(self, {id(self.layers): first}).without_heads()  # the other layers are not copied
        small.config = self.config_of(range(count))
        return small

    def config_of(self, layers: Sequence[int]):
        """The config of a backbone that has only these layers, counted from 0."""
        return replace(self.config, num_hidden_layers=len(layers))

    def layer_weights(self) -> dict[str, int]:
        """What `layer_flops` below asks of one layer."""
        weights = sum(weight.numel() for weight in self.layers[0].parameters() if weight.dim() == 2)
        return {"weights": weights, "attention": self.config.head_width * self.config.num_attention_heads}

    def layer_flops(self, tokens: int) -> float:
        """Floating-point operations of one layer on one row."""
        return layer_flops(**self.layer_weights(), tokens=tokens)

    def start_flops(self, tokens: int) -> float:
        """Those of what runs before the first layer: of the map behind the embeddings, where there is one."""
        mapped = getattr(self.embeddings, "to_hidden", None)
        return 2.0 * tokens * mapped.weight.numel() if mapped else 0.0

    def projected(self, target: str, tokens: int) -> int:
        """How many vectors a layer makes this projection of, on one row."""
        return tokens

    def lm_head_flops(self, words: int) -> float:
        """Those of the head to words on one state, for so many words."""
        dense = getattr(self.lm_head, "dense", None)
        inner = self.get_parameter(self.vocabulary["weight"]).shape[1]
        return 2.0 * ((dense.weight.numel() if dense else 0) + inner * words)

    @property
    def text_layers(self) -> int:
        """How many layers read the text."""
        return self.config.num_hidden_layers

    def text_states(self, inputs, layer: int) -> tuple[Tensor, Tensor | None]:
        """The states of a text's tokens after a layer, (B, T, D), with their `padding`: what texts are compared by."""
        context = self.context(inputs)
        return self.run_layers(self.embed(inputs), context, 0, layer), context.padding

    def text_flops(self, layer: int, tokens: int) -> float:
        """Floating-point operations of text_states on one row."""
        return layer * self.layer_flops(tokens)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """hidden[L] alone, (B, T, D). Arguments as in `hidden_states`."""
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
        """The error of whoever needs the head to words where there is none."""
        kind = "masked-LM" if self.head_architecture == "ForMaskedLM" else "LM"
        why = f", the file's was left out ({some_of(self.left_out)})" if self.left_out else ""
        why += f" because {UNTIED}" if self.untied_head else ""
        one = "a tied one" if self.untied_head else "one"
        return ValueError(
            f"this {self.config.model_type} has no {kind} head{why}: load a checkpoint that was saved with {one}"
        )

    def initialise(self, module: nn.Module) -> None:
        """Draw the weights of a linear map or of embeddings, as Hugging Face does; for nn.Module.apply."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def layer_flops(weights: int, attention: int, tokens: int) -> float:
    """Operations of a layer on one row, a multiply-add as two: matrix products, and every token against every other.

    weights: of the matrices; attention: the width of all heads together.
    """
    return 2.0 * tokens * weights + 4.0 * tokens * tokens * attention


# ---- The folder ----
@dataclass(frozen=True, kw_only=True)
class Layout:
    """How Hugging Face keeps a model type in a folder.

    names: our modules -> theirs. {i} is the layer, counted from 0 in ours, {i-1} one less; {a|b} are several tensors
    that ours stacks. prefix: before all names but those of the head; classifier_prefix: the same in a model for
    classification, if it differs. architecture: `Bert`, of BertModel. renamed: old
    endings of names -> today's. ignored: tensors that carry no weight of ours, as a regular expression. fused: modules
    of theirs that hold several of ours, in equal shares of rows -> what the names of ours add to theirs.
    """

    names: dict[str, str]
    prefix: str
    architecture: str
    classifier_prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: str = "(?!)"
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()


# ---- Configs ----
LARGEST = {"vocab_size": 2**24, "max_position_embeddings": 2**22, "num_hidden_layers": 1000, "num_encoder_layers": 1000}
LARGEST_SIZE = 2**20  # of the other integers: a size above is a typing error or damage, and no memory holds it
LARGEST_NUMBER = 1e12


def check_integer(name: str, value, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless the value is a whole number from `least` to `most`, by default what LARGEST says."""
    check_value(name, value, int, least=least, most=most or LARGEST.get(name, LARGEST_SIZE))


def check_fields(config, from_zero: tuple[str, ...] = (), free: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless integers are at least 1 and not huge, and numbers are from 0 to 1.

    from_zero: integers that may be 0. free: fields that are not looked at.
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
    """Raise ValueError for a key that would change what is computed; allowed: key -> the values that change nothing."""
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise ValueError(f"{key} must be {values[0]!r}, got {shortened(config[key])}: not supported")


def known_fields(kind: type, given: dict, defaults: dict) -> dict:
    """The arguments of a config's class among the keys of a config.json, with defaults for those that are not there.

    Raises ValueError for a key that must be there and is not.
    """
    known = {field.name for field in fields(kind)}
    found = defaults | {key: value for key, value in given.items() if key in known and value is not None}
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in found]
    if missing:
        raise ValueError(f"missing key {', '.join(missing)}")
    return found


def some_of(names) -> str:
    """The first names of many, for a message."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
