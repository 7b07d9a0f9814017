"""HashEE (Sun et al. 2022, arXiv:2203.01670v1): a table gives each type of token the layer after which it exits.

Paper: Sun, Liu, Zhu, Geng, Wu, He, Ni, Xie, Huang, Qiu, A Simple Hash-Based Early Exiting Approach For Language
Understanding and Generation, Findings of ACL 2022, arXiv:2203.01670v1. Code: txsun1997/HashEE at a1d005c.

No confidence measure is computed, and no exit rule is trained.

Symbols    V types of tokens; L layers; e(v) in 1 .. L, the table
           h_l (T, D)   states after layer l: h_l[t] = Layer_l(h_{l-1})[t] where e(x_t) >= l, else h_{l-1}[t]

A token that has exited is still attended to: its state stays the same and gives keys and values to every later layer.
Its query and its feed-forward part need not be computed. Types that are not in the training set, the first token of a
row and all special tokens ([CLS], [SEP], [UNK]) run through all layers. Everything is trained at once, with token exits
as at inference.

Tables     frequency   by frequency of the type; the most frequent types exit first
           mi          by mutual information of the type and the label; the highest exit first
           random      in a random order, drawn once

The types are divided into G groups of equal size. Group g = 1 .. G exits after layer 1 + (g - 1) floor(L / G): with 12
layers and 6 groups after layers 1, 3, .., 11; with 6 layers after each. Remaining types run through all layers.

Computation: the tokens of a row are sorted by exit layer, deepest first. So each layer computes the first n tokens,
where n is the largest number in any row. The depth of a row is the mean over its tokens; its FLOPs count the n
tokens of each layer, as computed.

Deviations, pinned in tests/lab/methods/test_hashee.py:
1. The released code has no attention mask: padding is attended to, so the logits of a row depend on its batch. Here
   padding is masked.
2. Counts are from train only; theirs include dev.
3. `mi` counts every occurrence of a type (theirs leaves out the first, and takes at most two labels).
4. Heads read the mean over tokens by default, including those that exited; theirs read the first (`pool`), through a
   pooler.
5. G is at most L. No clusters of embeddings, no tables of whole examples, and no random layer for each occurrence,
   which could let [CLS] exit.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone, SplitLayer, Tensors, tensor_on, token_places
from mini_ee.lab.baselines.tokenwise import RemainingTokens, TokenwiseExits, gather_tokens, token_costs
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.row_exits import RowData
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Stage
from mini_ee.train import task_loss

TABLES = ("frequency", "mi", "random")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the table. Raises ValueError for an invalid value."""

    table: str = option("frequency", "order in which types of tokens are divided into groups", choices=TABLES)
    groups: int = option(
        6, "number of groups of types: one exits after layer 1, the next L / groups layers later, and so on", least=1
    )


# ---- The table ----
def exit_layers(data: RowData, vocabulary: int, layers: int, config: Config) -> np.ndarray:
    """e, (V,) in 1 .. L. Raises ValueError for `mi` of a regression."""
    ids = np.concatenate(data.encoded.ids)
    counts, table = np.bincount(ids, minlength=vocabulary), np.full(vocabulary, layers)
    counts[[special_id for special_id in data.encoded.special_ids if special_id < vocabulary]] = 0
    seen = np.flatnonzero(counts)
    if config.table == "random":
        order = np.random.default_rng(0).permutation(seen)
    elif config.table == "mi":
        if data.task.regression:
            raise ValueError(f"--table mi needs classes, and {data.task.name} is a regression; give frequency")
        labels = np.repeat(data.labels, [len(row) for row in data.encoded.ids])
        order = seen[np.argsort(-mutual_information(ids, labels, vocabulary)[seen], kind="stable")]
    else:
        order = seen[np.argsort(-counts[seen], kind="stable")]
    groups = min(config.groups, layers)
    size = max(1, len(order) // groups)
    for group in range(groups):
        table[order[group * size : (group + 1) * size]] = 1 + group * (layers // groups)
    return table


def mutual_information(ids: np.ndarray, labels: np.ndarray, vocabulary: int) -> np.ndarray:
    """sum_y p(v, y) ln(p(v, y) / (p(v) p(y))) of each type: (V,). ids, labels: (N,), of all tokens."""
    joint = np.zeros((vocabulary, labels.max() + 1))
    np.add.at(joint, (ids, labels), 1 / len(ids))
    alone = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0)
    return (joint * np.log(np.divide(joint, alone, out=np.ones_like(joint), where=joint > 0))).sum(axis=1)


# ---- A layer, for the tokens that have not exited ----
def attend(layer: SplitLayer, first: Tensor, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """`attend` of a layer with queries of the first n tokens only: (B, n, D), keys (B, T, D) -> (B, n, D)."""
    if first.shape == hidden.shape:
        return layer.attend(hidden, mask)
    width, (weight, bias) = hidden.shape[2], (layer.qkv.weight, layer.qkv.bias)
    query = F.linear(first, weight[:width], bias[:width])
    key, value = F.linear(hidden, weight[width:], bias[width:]).chunk(2, dim=2)
    query, key, value = (projected.unflatten(2, (layer.heads, -1)).transpose(1, 2) for projected in (query, key, value))
    dropout = layer.attention_dropout if layer.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    return layer.attention_norm(first + layer.dropout(layer.attention_output(attended.transpose(1, 2).flatten(2))))


# ---- The model ----
class HashExits(TokenwiseExits):
    """A backbone whose tokens exit by a table: a parameter without gradient, because a graph knows no buffers."""

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config):
        super().__init__(backbone, exits, num_labels, pool)
        key_value = backbone.split_layer(0).qkv.weight[backbone.config.hidden_size :].numel()
        self.layers = backbone.config.num_hidden_layers
        self.table = nn.Parameter(torch.full((backbone.config.vocab_size,), float(self.layers)), requires_grad=False)
        weights, attention = backbone.layer_weights().values()
        self.token_flops = 2.0 * (weights - key_value)  # FLOPs of a token that has not exited, per layer
        self.pair_flops = 4.0 * attention  # FLOPs of such a token with each token that it attends to
        self.key_value_flops = 2.0 * key_value * self.layers  # FLOPs of keys and values, of every token in all layers

    def depths(self, inputs: Tensors | Inputs) -> Tensor:
        """The number of layers that each token runs, (B, T): 0 at padding."""
        device = self.table.device
        ids = tensor_on(device, inputs.input_ids)
        depths = torch.where(token_places(ids) == 0, float(self.layers), self.table[ids])
        return depths if inputs.attention_mask is None else depths * tensor_on(device, inputs.attention_mask)

    def run_reduced(self, inputs: Tensors | Inputs) -> RemainingTokens:
        """Tokens sorted by depth, the deepest first: layer l computes the first n_l tokens, the most of any row.

        In rows with fewer tokens that have not exited, the others keep their states. The order of tokens matters to no
        layer, as positions are added before. The first token stays first, because it runs all layers and the sort is
        stable; so a head that reads the first token finds it.
        """
        hidden, mask = self.backbone.embed(inputs), self.backbone.context(inputs).padding
        depths, order = self.depths(inputs).sort(dim=1, descending=True, stable=True)
        hidden, mask = gather_tokens(order, hidden, mask)
        runs = depths[:, None] > torch.arange(self.layers, device=depths.device)[:, None]  # (B, L, T)
        counts = runs.sum(dim=2)  # (B, L)
        most, equal = counts.amax(dim=0), (counts == counts[:1]).all(dim=0)  # (L,): n_l; whether all rows have n_l
        for depth, width in enumerate(most.tolist()):
            layer, first = self.backbone.split_layer(depth), hidden[:, :width]
            new = layer.feed_forward(attend(layer, first, hidden, mask))  # all T tokens are attended to
            new = new if torch.is_nonzero(equal[depth]) else torch.where(runs[:, depth, :width, None], new, first)
            hidden = new if width == hidden.shape[1] else torch.cat((new, hidden[:, width:]), dim=1)
        tokens, computed = depths.shape[1], most.sum().double()
        flops = computed * (self.token_flops + self.pair_flops * tokens) + self.key_value_flops * tokens
        return RemainingTokens(hidden, mask, token_costs(counts.sum(dim=1) / (depths > 0).sum(dim=1), flops))

    def run_all(self, inputs: Tensors | Inputs) -> RemainingTokens:
        """By the equation: each layer runs on all tokens, and tokens that have exited keep their states."""
        hidden, context, depths = self.backbone.embed(inputs), self.backbone.context(inputs), self.depths(inputs)
        for depth in range(self.layers):
            new = self.backbone.run_layers(hidden, context, depth, depth + 1)
            hidden = torch.where(depths[..., None] > depth, new, hidden)
        return RemainingTokens(hidden, context.padding)


# ---- Training ----
def recipe(model: HashExits, config: Config) -> list[Stage]:
    """One stage, which starts by filling the table."""
    return [
        Stage(
            name="fine-tune",
            trainable=lambda name: name != "table",
            loss=lambda model, batch: task_loss(model(*batch.inputs)[0], batch.labels),
            score=lambda scores: float(scores[0]),
            begin=partial(fill_table, config=config),
        )
    ]


def fill_table(model: HashExits, data: RowData, config: Config) -> None:
    """Compute e from the training examples."""
    table = exit_layers(data, len(model.table), model.layers, config)
    model.table.data.copy_(torch.from_numpy(table))


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=HashExits,
    exits=lambda num_layers: (num_layers,),
    lacks=("exits",),
)
