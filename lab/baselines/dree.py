"""DREE (Ji et al. 2023, Findings of ACL): an exit has an adapter parallel to the feed-forward part of its layer.

Source: Ji, Wang, Li, Chen, Chen, Zhang 2023, Early Exit with Disentangled Representation and Equiangular Tight Frame,
2023.findings-acl.889 in the ACL Anthology (no arXiv version is known). Written from the abstract and the published code
(Jikai0Wang/DREE, commit 0bdb024).

Symbols    a (B, T, D)         the state in a layer after its attention and attention norm
           FFN(a)              the output of the feed-forward part of the layer, which is added to a
           W_down, W_up        a parallel adapter (He et al. 2021): D -> `bottleneck` -> D
           LN, LN'             the norm that ends the layer, and that of the exit, which is initialised with a copy
           M (D, C)            an equiangular tight frame: C unit vectors, the cosine of any two is -1 / (C - 1)
           k = 1 .. K          exits, the last after all L layers; here k = 0 .. K - 1, exit k after e_k = exits[k]

    task branch      z = LN'(scale W_up relu(W_down a) + FFN(a) + a)      the backbone continues with LN(FFN(a) + a)
    logits of exit k x M, where x = v / |v|, v = BN(tanh(pooler(z)))      the last exit reads LN(FFN(a) + a)

Stage 1 fine-tunes everything for the last exit. Stage 2 trains the adapters, LN' and BN of the other exits; everything
else is frozen. Examples exit by Patience. At an exit its layer has run but for LN; the branch is extra work. A segment
passes a and FFN(a) on, concatenated as (B, T, 2 D): an exit reads both, and the layers above start with LN(FFN(a) + a).

Deviations from the published code, 1 to 3 and 5 of them pinned in tests/lab/methods/test_dree.py:
1. M is drawn in each training and saved with the model. Theirs is neither parameter nor buffer, so a checkpoint is
   valid only with the seed of its training.
2. LN' copies weight and bias of LN at every exit; theirs copies the bias at the last inner exit only.
3. Heads read the mean over tokens by default; theirs read the first (`pool`), and then compute the branch for it alone.
4. The pooler is initialised at random; theirs is the pretrained one of BERT.
5. No regression: a frame of one vector would divide by 0. Exits need not be after every layer.
6. The best epoch of stage 2 has the best mean score over its exits; theirs the best score of one exit within a FLOPs
   limit.
"""

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mini_ee.lab.backbones.backbone import Backbone, LayerContext, SplitLayer, Tensors, padding_mask
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import batches
from mini_ee.lab.exits.heads import HEAD_DROPOUT, pooled
from mini_ee.lab.exits.row_exits import STATES_BATCH, ExitModel, RowData, RowSegments, RowState, check_exits
from mini_ee.lab.rules import Patience
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage
from mini_ee.train import task_loss

MOMENTUM, EPSILON = 0.1, 1e-5  # of the batch norms; torch's defaults
MIN_VECTOR_NORM = 1e-12  # least length by which a vector is divided


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the task branches. Raises ValueError for an invalid value."""

    bottleneck: int = option(128, "width of the adapters; in the paper 128 for BERT, 256 for ALBERT", least=1)
    scale: float = option(8.0, "factor of the adapters' output", above=0)
    adapter_epochs: int = option(1, "epochs of the second stage; in the paper 1 for BERT, 5 for ALBERT", least=1)
    adapter_lr: float = option(
        8e-3, "learning rate of the second stage; in the paper 8e-3 for BERT, 1e-3 for ALBERT", above=0
    )


# ---- The equations ----
def equiangular_frame(width: int, classes: int) -> Tensor:
    """M = sqrt(C / (C - 1)) P (I - 1 1' / C), P the orthonormal basis of a random matrix: (D, C). Uses torch's random
    state. Raises ValueError for fewer than two classes, and for more classes than D.
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
    """nn.BatchNorm1d, but its statistics are parameters without gradient, because a graph knows no buffers."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) -> (B, D). A batch of one row has no variance: it uses the running statistics, as in eval mode."""
        trains = self.training and len(x) > 1
        mean, variance = self.mean.detach(), self.variance.detach()
        return F.batch_norm(x, mean, variance, self.weight, self.bias, trains, MOMENTUM, EPSILON)


class FrameHead(nn.Module):
    """The parts of one exit: its branch (not at the last exit), its batch norm and its frame M."""

    def __init__(self, branch: TaskBranch | None, width: int, num_labels: int, pool: str):
        super().__init__()
        self.task_branch, self.pool = branch, pool
        self.dropout, self.norm = nn.Dropout(HEAD_DROPOUT), BatchNorm(width)
        self.frame = nn.Parameter(equiangular_frame(width, num_labels), requires_grad=False)

    def state(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """The pooled vector of each row, (B, D), from a and FFN(a), (B, T, 2 D); at the last exit from (B, T, D)."""
        hidden = hidden[:, :1] if self.pool == "first" else hidden
        return pooled(hidden if self.task_branch is None else self.task_branch(hidden), mask, self.pool)

    def classify(self, vector: Tensor) -> Tensor:
        """The output of the shared pooler, (B, D) -> logits (B, C), each of them a cosine."""
        return F.normalize(self.norm(self.dropout(vector)), eps=MIN_VECTOR_NORM) @ self.frame

    def flops(self, tokens: int) -> float:
        """FLOPs of one row with that many tokens, the shared pooler included."""
        width, classes = self.frame.shape
        read = 1 if self.pool == "first" else tokens
        branch = 0.0 if self.task_branch is None else 4.0 * read * width * self.task_branch.down.out_features
        return branch + 2.0 * width * (width + classes) + float((tokens if self.pool == "mean" else 0) * width)


class DreeExits(ExitModel):
    """A backbone with a task branch in each exit layer but the last, and one pooler for all exits.

    Raises ValueError for a backbone whose layers are not post-norm, and for a number of classes without a frame.
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
        """The pooled state of each exit, (B, D). The three inputs are (B, T) int64."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        context, hidden, exit_states = self.backbone.context(inputs), self.backbone.embed(inputs), []
        for k, head in enumerate(self.heads):
            hidden = self.advance(k, hidden, context)
            exit_states.append(head.state(hidden, context.padding))
        return exit_states

    def branch_inputs(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """a and FFN(a) of all exits but the last, (B, T, K - 1, 2 D). Arguments as in `each_state`."""
        inputs = Tensors(input_ids, attention_mask, token_type_ids)
        context, hidden, states = self.backbone.context(inputs), self.backbone.embed(inputs), []
        for k in range(len(self.exits) - 1):
            hidden = self.advance(k, hidden, context)
            states.append(hidden)
        return torch.stack(states, dim=2)

    def advance(self, k: int, hidden: Tensor, context: LayerContext) -> Tensor:
        """From the state of exit k - 1, or the embeddings, to that of exit k: (B, T, 2 D), or (B, T, D)."""
        backbone, start, stop = self.backbone, self.exits[k - 1] if k else 0, self.exits[k]
        if k:  # finish the layer of exit k - 1, which has run but for its last norm
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
        """Copy weight and bias of LN, as they are after stage 1, to the LN' of each exit."""
        for layer, head in zip(self.exits[:-1], self.heads):
            head.task_branch.norm.load_state_dict(self.backbone.split_layer(layer - 1).output_norm.state_dict())


class DreeSegments(RowSegments):
    """The segments of a DreeExits in eval mode. The state of a row at exit k is a and FFN(a) of layer e_k."""

    def advance(self, k: int, state: RowState) -> RowState:
        return RowState(self.model.advance(k, *state), state.context)

    def read(self, k: int, state: RowState) -> np.ndarray:
        vector = self.model.heads[k].state(state.hidden, state.context.padding)
        return self.model.classify(k, vector).float().numpy(force=True)


# ---- Training ----
def recipe(model: DreeExits, config: Config) -> list[Stage]:
    """Stage 1, then stage 2 if there are exits before the last."""
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
        finish=lambda model, held_out: model.copy_norms(),
    )
    second = Stage(
        name="branches",
        trainable=branches,
        loss=lambda model, batch: branch_loss(exit_losses(model, batch), model.exits),
        make_targets=BranchInputs,
        score=lambda scores: float(np.mean(scores[:-1])),
        settings={"epochs": config.adapter_epochs, "head_lr": config.adapter_lr},
    )
    return [first, second] if last else [first]


def last_loss(model: DreeExits, batch: Batch) -> Tensor:
    """The cross-entropy of the last exit."""
    return task_loss(model.classify(len(model.exits) - 1, model.states(*batch.inputs)[-1]), batch.labels)


class BranchInputs:
    """`branch_inputs` of the rows to train on, computed once, because stage 2 trains nothing that they depend on.

    An index (B,) of rows gives (B, T, K - 1, 2 D), padded with zeros to the longest of them.
    """

    @torch.no_grad()
    def __init__(self, model: DreeExits, data: RowData):
        device, self.rows = next(model.parameters()).device, [torch.empty(0)] * len(data)
        for rows in batches(data.encoded, STATES_BATCH):
            inputs, _ = data.batch(rows, device)
            for row, row_inputs, mask in zip(rows, model.branch_inputs(*inputs).cpu(), inputs[1].cpu()):
                self.rows[row] = row_inputs[mask.bool()]

    def __getitem__(self, rows: np.ndarray) -> Tensor:
        return pad_sequence([self.rows[row] for row in rows], batch_first=True)


def exit_losses(model: DreeExits, batch: Batch) -> list[Tensor]:
    """The cross-entropies of the exits before the last, from a batch of BranchInputs as targets."""
    assert batch.targets is not None  # of this stage
    padding, losses = padding_mask(batch.inputs[1]), []
    for k, hidden in enumerate(batch.targets.unbind(dim=2)):
        losses.append(task_loss(model.classify(k, model.heads[k].state(hidden, padding)), batch.labels))
    return losses


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=DreeExits,
    candidates=sweep(Patience(1)),
    exits=None,
    no_exit_0="its exits have an adapter in their layer",
    classes_only=True,
    lacks=("head",),
)
