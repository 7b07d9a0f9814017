"""DREE: beside the feed-forward part of its layer an exit has an adapter, so that heads do not bend the backbone.

Source: Ji, Wang, Li, Chen, Chen, Zhang 2023, Early Exit with Disentangled Representation and Equiangular Tight Frame,
2023.findings-acl.889 in the ACL Anthology (we know of no arXiv version). We had the abstract and the published code
(Jikai0Wang/DREE, commit 0bdb024), not the equations.

Symbols    a (B, T, D)         a layer's state behind its attention and that norm
           FFN(a)              what the feed-forward part of the layer adds to a
           W_down, W_up        a parallel adapter (He et al. 2021): D -> `bottleneck` -> D
           LN, LN'             the norm that ends the layer, and the exit's own, which begins as a copy of it
           M (D, C)            an equiangular tight frame: C unit vectors, the cosine of any two is -1 / (C - 1)
           k = 1 .. K          exits, the last after all L layers; here k = 0 .. K - 1, exit k after e_k = exits[k]

    task branch      z = LN'(scale W_up relu(W_down a) + FFN(a) + a)      the backbone goes on with LN(FFN(a) + a)
    logits of exit k x M, where x = v / |v|, v = BN(tanh(pooler(z)))      the last exit reads LN(FFN(a) + a)

Stage 1 fine-tunes all for the last exit. Stage 2 learns the other exits' adapters, LN' and BN, where all else stays.
Rows leave by Patience. An exit has run all of its layer but LN, and its branch comes on top. From segment to segment
go a and FFN(a), side by side as (B, T, 2 D): an exit reads both, and the layers above begin with LN(FFN(a) + a).

Deviations from the published code, 1 to 3 and 5 of them pinned in tests/test_dree.py:
1. M is drawn anew with each training and saved with it; theirs is neither parameter nor buffer, so that a checkpoint
   is right under the seed of its training alone.
2. LN' copies weight and bias of LN, at every exit; theirs the bias at the last inner exit only.
3. Heads read the mean over tokens by default; theirs the first (`pool`), of which alone the branch is then computed.
4. The pooler is drawn; theirs begins as the one that BERT was pretrained with.
5. No regression: a frame of one vector divides by 0. Exits need not sit after every layer.
6. The best epoch of stage 2 is that of the best mean score of its exits; theirs of one exit under a FLOPs limit.
"""

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone, LayerContext, SplitLayer, Tensors
from mini_ee.data.options import Settings, option
from mini_ee.exits.heads import HEAD_DROPOUT, pooled
from mini_ee.exits.rows import ExitModel, RowSegments, RowState, check_exits
from mini_ee.rules import Patience
from mini_ee.segments import Reading
from mini_ee.training.default_rule import sweep
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, Stage, task_loss

MOMENTUM, EPSILON = 0.1, 1e-5  # of batch norms, torch's own
SHORTEST = 1e-12  # of a vector that is divided by its length


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The settings of the task branches. Raises ValueError on a value that makes no sense."""

    bottleneck: int = option(128, "width of the adapters; the paper's 128 for BERT, 256 for ALBERT", least=1)
    scale: float = option(8.0, "what the adapters are multiplied with", above=0)
    adapter_epochs: int = option(1, "of the second stage; the paper's 1 for BERT, 5 for ALBERT", least=1)
    adapter_lr: float = option(8e-3, "of the second stage; the paper's 8e-3 for BERT, 1e-3 for ALBERT", above=0)


# ---- The equations ----
def equiangular_frame(width: int, classes: int) -> Tensor:
    """M = sqrt(C / (C - 1)) P (I - 1 1' / C), P from a QR of a uniform matrix: (D, C). Uses torch's random state.

    Raises ValueError for fewer than two classes, and for more than the width can hold.
    """
    if not 2 <= classes <= width:
        raise ValueError(f"an equiangular tight frame has from 2 to {width} vectors, got {classes}")
    basis, _ = torch.linalg.qr(torch.rand(width, classes))
    centred = torch.eye(classes) - 1 / classes
    return (classes / (classes - 1)) ** 0.5 * basis @ centred


def branch_loss(losses: list[Tensor], exits: tuple[int, ...]) -> Tensor:
    """Stage 2: sum_k (L - e_k) l_k / sum_k (L - e_k) over all exits but the last: shallow exits weigh most."""
    weights = [exits[-1] - layer for layer in exits[:-1]]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)


# ---- The model ----
class TaskBranch(nn.Module):
    """z of one exit: an adapter parallel to the feed-forward part of its layer."""

    def __init__(self, layer: SplitLayer, config: Config):
        super().__init__()
        width = layer.output_norm.normalized_shape[0]
        self.down, self.up = nn.Linear(width, config.bottleneck), nn.Linear(config.bottleneck, width)
        self.scale = config.scale
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        self.norm = deepcopy(layer.output_norm)

    def forward(self, state: Tensor) -> Tensor:
        """a and FFN(a) side by side, (..., 2 D) -> (..., D)."""
        attended, added = state.chunk(2, dim=-1)
        return self.norm(self.scale * self.up(F.relu(self.down(attended))) + added + attended)


class BatchNorm(nn.Module):
    """As nn.BatchNorm1d. Its statistics are parameters without gradient, as a graph knows no others."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) -> (B, D). A batch of one row has no variance: it is normed as in use."""
        learns = self.training and len(x) > 1
        mean, variance = self.mean.detach(), self.variance.detach()
        return F.batch_norm(x, mean, variance, self.weight, self.bias, learns, MOMENTUM, EPSILON)


class FrameHead(nn.Module):
    """What an exit has of its own: its branch, but for the last, its batch norm and its frame M."""

    def __init__(self, branch: TaskBranch | None, width: int, num_labels: int, pool: str):
        super().__init__()
        self.task_branch, self.pool = branch, pool
        self.dropout, self.norm = nn.Dropout(HEAD_DROPOUT), BatchNorm(width)
        self.frame = nn.Parameter(equiangular_frame(width, num_labels), requires_grad=False)

    def state(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """The vector of each row, (B, D): of a and FFN(a), (B, T, 2 D), or of the last layer's output, (B, T, D)."""
        hidden = hidden[:, :1] if self.pool == "first" else hidden
        return pooled(hidden if self.task_branch is None else self.task_branch(hidden), mask, self.pool)

    def classify(self, vector: Tensor) -> Tensor:
        """What the shared pooler gives, (B, D) -> logits (B, C), each a cosine."""
        return F.normalize(self.norm(self.dropout(vector)), eps=SHORTEST) @ self.frame

    def flops(self, tokens: int) -> float:
        """Of one row of so many tokens, the shared pooler included."""
        width, classes = self.frame.shape
        read = 1 if self.pool == "first" else tokens
        branch = 0.0 if self.task_branch is None else 4.0 * read * width * self.task_branch.down.out_features
        return branch + 2.0 * width * (width + classes) + float((tokens if self.pool == "mean" else 0) * width)


class DreeExits(ExitModel):
    """A backbone with a task branch in each layer of `exits` but the last, and one pooler for all.

    Raises ValueError for a backbone whose layers are not post-norm, and for classes that no frame holds.
    """

    policy = None

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config):
        super().__init__()
        self.exits = check_exits(exits, backbone.config.num_hidden_layers)
        self.num_labels, self.pool, self.backbone = num_labels, pool, backbone
        layers, width = [backbone.split_layer(layer - 1) for layer in exits], backbone.config.hidden_size
        self.pooler = nn.Linear(width, width)
        nn.init.normal_(self.pooler.weight, std=0.02)
        nn.init.zeros_(self.pooler.bias)
        branches = [*(TaskBranch(layer, config) for layer in layers[:-1]), None]
        self.heads = nn.ModuleList(FrameHead(branch, width, num_labels, pool) for branch in branches)

    def each_state(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
        """What each exit reads, pooled: (B, D) each. The three inputs are (B, T) int64."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        context, hidden, found = self.backbone.context(inputs), self.backbone.embed(inputs), []
        for k, head in enumerate(self.heads):
            hidden = self.advance(k, hidden, context)
            found.append(head.state(hidden, context.padding))
        return found

    def advance(self, k: int, hidden: Tensor, context: LayerContext) -> Tensor:
        """From what exit k - 1 reads, or the embeddings, to what exit k reads: (B, T, 2 D), of the last (B, T, D)."""
        backbone, start, stop = self.backbone, self.exits[k - 1] if k else 0, self.exits[k]
        if k:
            layer, (attended, added) = backbone.split_layer(start - 1), hidden.chunk(2, dim=-1)
            hidden = layer.output_norm(attended + layer.dropout(added))
        if k == len(self.exits) - 1:
            return backbone.run_layers(hidden, context, start, stop)
        layer = backbone.split_layer(stop - 1)
        attended = layer.attend(backbone.run_layers(hidden, context, start, stop - 1), context.padding)
        return torch.cat((attended, layer.mlp(attended)), dim=-1)

    def classify(self, k: int, state: Tensor) -> Tensor:
        """(B, D) -> logits (B, C) of exit k."""
        return self.heads[k].classify(torch.tanh(self.pooler(state)))

    def segments(self) -> "DreeSegments":
        return DreeSegments(self)

    @torch.no_grad()
    def copy_norms(self) -> None:
        """LN' of each exit as LN is after stage 1, weight and bias."""
        for layer, head in zip(self.exits[:-1], self.heads):
            head.task_branch.norm.load_state_dict(self.backbone.split_layer(layer - 1).output_norm.state_dict())


class DreeSegments(RowSegments):
    """The segments of a DreeExits in eval mode. The state of a row at exit k is a and FFN(a) of layer e_k."""

    def advance(self, k: int, state: RowState) -> RowState:
        return RowState(self.model.advance(k, *state), state.context)

    def read_logits(self, k: int, state: RowState) -> Reading:
        vector = self.model.heads[k].state(state.hidden, state.context.padding)
        return Reading(self.model.classify(k, vector).float().numpy(force=True))


# ---- Training ----
def recipe(model: DreeExits, config: Config) -> list[Stage]:
    """Stage 1, then stage 2 where there are exits before the last."""
    last = len(model.exits) - 1

    def fine_tunes(name: str) -> bool:
        return name.startswith(("backbone.", "pooler.", f"heads.{last}.")) and not name.endswith(".frame")

    def branches(name: str) -> bool:
        return name.startswith("heads.") and not name.startswith(f"heads.{last}.") and not name.endswith(".frame")

    first = Stage(
        name="fine-tune",
        trainable=fine_tunes,
        loss=last_loss,
        score=lambda scores: float(scores[-1]),
        finish=lambda model, held: model.copy_norms(),
    )
    second = Stage(
        name="branches",
        trainable=branches,
        loss=lambda model, batch: branch_loss(exit_losses(model, batch), model.exits),
        score=lambda scores: float(np.mean(scores[:-1])),
        settings={"epochs": config.adapter_epochs, "head_lr": config.adapter_lr},
    )
    return [first, second] if last else [first]


def last_loss(model: DreeExits, batch: Batch) -> Tensor:
    """The last exit's cross-entropy."""
    return task_loss(model.classify(len(model.exits) - 1, model.states(*batch.inputs)[-1]), batch.labels)


def exit_losses(model: DreeExits, batch: Batch) -> list[Tensor]:
    """Those of the exits before it."""
    states = model.states(*batch.inputs)[:-1]
    return [task_loss(model.classify(k, state), batch.labels) for k, state in enumerate(states)]


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=DreeExits,
    candidates=sweep(Patience(1)),
    exits=None,
    classes_only=True,
    lacks=("head",),
)
