"""CAT (Schuster et al. 2021, arXiv:2104.08803v2): a meta classifier predicts whether an exit agrees with the last one.

Source: Schuster, Fisch, Jaakkola, Barzilay 2021, Consistent Accelerated Inference via Confident Adaptive Transformers,
arXiv:2104.08803v2. Written from the abstract and the published code (TalSchuster/CATs, commit 746c5fc).

Symbols    C classes; K exits, the last after all L layers; n = K - 1 inner exits, k = 0 .. n - 1
           p^k (B, C)          probabilities at inner exit k, after its temperature
           F                   1 if exit k predicts the class of the last exit: the target of its meta classifier

    inner exit        dropout, Linear(D, 32), tanh, Linear(32, C), divided by a temperature
    meta classifier   input  [predicted class one-hot (C), the 32 hidden values, largest probability, its lead over the
                      second, the probabilities of this class at exits k - 1 .. 1 (not at exit 0; zeros fill up to
                      n - 2 values), k / n]; then Linear(., 32), tanh, and the logit of F; one per exit, or one for all
                      (`shared`)

Stages: fine-tune, inner exits (mean cross-entropy), temperatures, meta classifiers (cross-entropy, both classes of F
with the same weight in a batch); each freezes what the stages before it trained. While meta classifiers learn, there is
dropout on the states that inner exits read and on the 32 hidden values. Temperatures and meta classifiers learn from
examples of train that the stages before have not seen, half of `apart` each. An example exits by the rule Policy. Its
cut by `mini-ee calibrate --guarantee conformal` (calibration.py), which every other method can use too, is the paper's
shared calibration.

Deviations, 1 to 5 of them pinned in tests/lab/methods/test_cat.py:
1. One logit for F, the difference of the paper's two: the same loss and the same scores.
2. Heads read the mean over tokens by default; theirs read the first (`pool`). Exits need not be after every layer.
3. No regression (theirs counts |difference| <= .5 as agreement), and no tokens, which have too many classes as input.
4. Fine-tuning does not see the examples set apart either, so on them the last exit behaves as on new ones.
5. If the exit is known beforehand, no other head is computed; ONNX graphs compute the inner heads nevertheless.
6. The learning rate of temperatures is .01 by default, as few examples are left for them; theirs is .001, with more
   steps.
7. Not here: inner exits that read the logits of the exits before them (`use_history_logits`), and an F that is 1 only
   if the last exit is right as well (`joint_meta`).
8. The conformal cut uses all calibration examples. Theirs leaves out the examples whose exits all agree with the last
   one (src/conformal.py, 107), so it guarantees agreement among the others. Here it is less strict, but for all.
"""

from collections.abc import Callable, Container, Sized
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.lab.backbones.backbone import Backbone, LayerContext, tensor_on
from mini_ee.lab.data.settings import Settings, option
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.exits.heads import HEAD_DROPOUT, ExitHead
from mini_ee.lab.exits.row_exits import RowExits, RowSegments, RowState, States
from mini_ee.lab.rules import Policy
from mini_ee.lab.training.default_rule import sweep
from mini_ee.lab.training.method import Method
from mini_ee.lab.training.stages import Batch, Stage, all_logits, reads_states

INNER_WIDTH = 32  # hidden values of an inner exit, and of a meta classifier
HEADS_PART, TEMPERATURES_PART, META_PART = 0, 1, 2  # the part of train from which each learns


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the stages. Raises ValueError for an invalid value."""

    target: str = option(
        "label", "target of the inner exits: the label, or the prediction of the last exit", choices=("label", "last")
    )
    shared: bool = option(False, "share one meta classifier among all exits, in place of one per exit")
    apart: float = option(
        0.2, "share of train that is set apart for temperatures and meta classifiers", above=0, below=1
    )
    temperature_lr: float = option(0.01, "learning rate of the temperatures", above=0)
    meta_epochs: int = option(10, "epochs of the meta classifiers", least=1)
    meta_lr: float = option(3e-3, "learning rate of the meta classifiers", above=0)


# ---- The equations ----
def features(logits: Tensor, inner: Tensor, before: Tensor | None, k: int, exits: int) -> Tensor:
    """The input of a meta classifier at exit k; exits: n, their number. (B, C + 32 + 2 + max(n - 2, 0) + 1).

    logits (B, C); inner (B, 32); before (B, k - 1, C): probabilities at the exits k - 1 .. 1, None if k < 2.
    """
    p = logits.softmax(dim=1)
    predicted = F.one_hot(p.argmax(dim=1), p.shape[1]).to(p.dtype)
    first, second = p.topk(2, dim=1).values.split(1, dim=1)
    # The product with the one-hot class selects its probability at each earlier exit: (B, k - 1, C) -> (B, k - 1).
    history = [] if before is None else [(before * predicted[:, None]).sum(dim=2)]
    tail = torch.zeros_like(p[:, :1]) + torch.tensor(_tail(k, exits), dtype=p.dtype, device=p.device)
    return torch.cat((predicted, inner, first, first - second, *history, tail), dim=1)


def _tail(k: int, exits: int) -> list[float]:
    """The zeros that pad the history to n - 2 values, and k / n."""
    return [0.0] * (max(exits - 2, 0) - max(k - 1, 0)) + [k / exits]


def remember(before: Tensor | None, logits: Tensor, k: int) -> Tensor | None:
    """Probabilities at the exits k .. 1, (B, k, C), from those at k - 1 .. 1. None at exit 0, which is left out."""
    if k == 0:
        return None
    p = logits.softmax(dim=1)[:, None]
    return p if before is None else torch.cat((p, before), dim=1)


def balanced_loss(logits: Tensor, agrees: Tensor) -> Tensor:
    """Cross-entropy of F with equal total weight for both classes; the plain mean if only one occurs. (N,) each."""
    # The weight of a class that does not occur is inf, but no example has it.
    weights = torch.where(agrees, len(agrees) / agrees.sum(), len(agrees) / (~agrees).sum())
    losses = F.binary_cross_entropy_with_logits(logits, agrees.float(), reduction="none")
    return (weights * losses).sum() / weights.sum()


# ---- The model ----
class InnerHead(ExitHead):
    """An exit before the last."""

    def __init__(self, width: int, num_labels: int, pool: str, norm: nn.Module | None):
        super().__init__(width, num_labels, pool, norm)
        self.dense, self.out = nn.Linear(width, INNER_WIDTH), nn.Linear(INNER_WIDTH, num_labels)
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        self.temperature = nn.Parameter(torch.ones(1))

    def inner(self, state: Tensor) -> Tensor:
        return super().inner(self.dropout(state) if self.training else state)

    def conclude(self, inner: Tensor) -> Tensor:
        return self.out(inner) / self.temperature


class MetaClassifiers(nn.Module):
    """Predict whether inner exits agree with the last: a network per exit, or one for all."""

    def __init__(self, exits: int, classes: int, shared: bool):
        super().__init__()
        width = classes + INNER_WIDTH + 2 + max(exits - 2, 0) + 1
        networks = (
            nn.Sequential(nn.Linear(width, INNER_WIDTH), nn.Tanh(), nn.Linear(INNER_WIDTH, 1)) for _ in range(exits)
        )
        self.networks = nn.ModuleList([next(networks)] if shared else networks)
        self.flops = 2.0 * INNER_WIDTH * (width + 1)  # of one exit_logit

    def network(self, k: int) -> nn.Module:
        """That of exit k."""
        return self.networks[k % len(self.networks)]


class CatExits(RowExits):
    """Inner exits with temperatures, and meta classifiers that read the predictions of all exits so far.

    Raises ValueError for a single exit.
    """

    policy: MetaClassifiers

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config):
        super().__init__(backbone, exits, num_labels, pool)
        if len(exits) < 2:
            raise ValueError(f"CAT needs at least two exits to choose from, got {len(exits)}")
        for k in range(len(exits) - 1):
            self.heads[k] = InnerHead(backbone.config.hidden_size, num_labels, self.heads[k].pool, backbone.exit_norm())
        self.policy = MetaClassifiers(len(exits) - 1, num_labels, config.shared)

    def decide(self, k: int, inner: Tensor, logits: Tensor, before: Tensor | None) -> Tensor:
        """The exit_logit (B,) of exit k; arguments as in `features`, which get no gradient."""
        inner = F.dropout(inner, HEAD_DROPOUT) if self.policy.training else inner
        inputs = features(logits.detach(), inner.detach(), before, k, len(self.exits) - 1)
        return self.policy.network(k)(inputs)[:, 0]

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """The logits of the meta classifiers, at all exits but the last: (B, K - 1)."""
        before, exit_logits = None, []
        for k, head in enumerate(self.heads[:-1]):
            with torch.no_grad():
                inner = head.inner(states[k])
                logits = head.conclude(inner)
            exit_logits.append(self.decide(k, inner, logits, before))
            before = remember(before, logits, k)
        return torch.stack(exit_logits, dim=1).float()

    def segments(self) -> "CatSegments":
        return CatSegments(self)


# ---- Segments ----
class CatState(NamedTuple):
    """The rows still in the model, and the outputs of the exits that they have passed."""

    hidden: Tensor  # (B, T, D)
    context: LayerContext
    inner: Tensor | None = None  # (B, 32) of the exit just reached, None at the last
    logits: Tensor | None = None
    before: Tensor | None = None  # probabilities at the exits before this one, as in `features`
    seen: Tensor | None = None  # the same including this exit: `before` of the next one

    def keep(self, rows: np.ndarray) -> "CatState":
        index = tensor_on(self.hidden.device, rows)
        tensors = (tensor if tensor is None else tensor[index] for tensor in self[2:])
        return CatState(self.hidden[index], self.context.keep(index), *tensors)


class CatSegments(RowSegments):
    """The segments of a CatExits in eval mode. `advance` includes the head, because later exits read its output."""

    carried = "seen"  # the probabilities at the exits so far
    decides = True  # False: the exits are known beforehand, and no meta classifier runs

    def start(self, inputs: Inputs) -> CatState:
        return CatState(*super().start(inputs))

    def select_heads(self, heads: Container[int]) -> "CatSegments":
        some = copy(self)
        some.decides = False
        return some

    def advance(self, k: int, state: CatState) -> CatState:
        hidden, context = super().advance(k, RowState(state.hidden, state.context))
        if not (self.decides and self.has_policy and k < len(self.exits) - 1):
            return CatState(hidden, context)
        head = self.model.heads[k]
        inner = head.inner(head.state(hidden, context.padding))
        logits = head.conclude(inner)
        return CatState(hidden, context, inner, logits, state.seen, remember(state.seen, logits, k))

    def read(self, k: int, state: CatState) -> np.ndarray:
        logits = state.logits
        if logits is None:
            logits = self.model.classify(k, self.model.heads[k].state(state.hidden, state.context.padding))
        return logits.float().numpy(force=True)

    def exit_logit(self, k: int, state: CatState) -> np.ndarray:
        if state.logits is None:
            return super().exit_logit(k, RowState(state.hidden, state.context))
        return self.model.decide(k, state.inner, state.logits, state.before).float().numpy(force=True)

    def state_flops(self, k: int, needs: str) -> float:
        head = self.model.heads[k].flops(tokens=0)
        return self.model.policy.flops + head if super().state_flops(k, needs) else 0.0


# ---- Training ----
def recipe(model: CatExits, config: Config) -> list[Stage]:
    """The four stages."""
    last = f"heads.{len(model.exits) - 1}."
    split = partial(parts, apart=config.apart)
    temperatures = partial(inner_loss, part=TEMPERATURES_PART, config=config)

    def inner(name: str) -> bool:
        return name.startswith("heads.") and not name.startswith(last)

    return [
        Stage(
            name="fine-tune",
            trainable=lambda name: name.startswith(("backbone.", last)),
            loss=lambda model, batch: part_loss(model(*batch.inputs)[-1:], batch.labels, batch.targets == HEADS_PART),
            score=lambda scores: float(scores[-1]),
            make_targets=split,
        ),
        Stage(
            name="heads",
            trainable=lambda name: inner(name) and not name.endswith("temperature"),
            loss=partial(inner_loss, part=HEADS_PART, config=config),
            score=lambda scores: float(np.mean(scores[:-1])),
            on_states=reads_states(model),
            make_targets=split,
        ),
        Stage(
            name="temperatures",
            trainable=lambda name: name.endswith("temperature"),
            loss=temperatures,
            validate=lambda model, held_out: {
                "score": -held_out_loss(temperatures, TEMPERATURES_PART, model, held_out)
            },
            on_states=True,
            make_targets=split,
            settings={"head_lr": config.temperature_lr, "warmup": 0.0},
        ),
        Stage(
            name="meta",
            trainable=lambda name: name.startswith("policy."),
            loss=meta_loss,
            validate=lambda model, held_out: {"score": -held_out_loss(meta_loss, META_PART, model, held_out)},
            on_states=True,
            make_targets=split,
            settings={"epochs": config.meta_epochs, "head_lr": config.meta_lr, "warmup": 0.0},
        ),
    ]


def parts(model: CatExits, data: Sized, apart: float) -> np.ndarray:
    """The part of train that each example belongs to, (N,); the same in every stage."""
    drawn = np.random.default_rng(0).permutation(len(data)) / len(data)
    return np.where(drawn >= apart, HEADS_PART, np.where(drawn < apart / 2, TEMPERATURES_PART, META_PART))


def part_loss(exit_logits: list[Tensor], labels: Tensor, rows: Tensor) -> Tensor:
    """The mean cross-entropy over exits and selected rows (B,) bool, or 0 without any. exit_logits: (B, C) per exit."""
    losses = torch.stack([F.cross_entropy(logits.float(), labels, reduction="none") for logits in exit_logits])
    return losses[:, rows].sum() / (len(exit_logits) * rows.sum().clamp(min=1))


def inner_loss(model: CatExits, batch: Batch, part: int, config: Config) -> Tensor:
    """The mean cross-entropy of the inner exits on a part of train, on the labels or on the last exit's predictions."""
    exit_logits = all_logits(model, batch)
    target = exit_logits[-1].argmax(dim=1) if config.target == "last" else batch.labels
    return part_loss(exit_logits[:-1], target, batch.targets == part)


def meta_loss(model: CatExits, batch: Batch) -> Tensor:
    """The mean over exits of the balanced loss, on the part of train for meta classifiers."""
    assert batch.states is not None and batch.targets is not None  # the stage learns from states
    rows = batch.targets == META_PART
    *states, last = (state[rows] for state in batch.states)
    states = [*(F.dropout(state, HEAD_DROPOUT, model.policy.training) for state in states), last]
    exit_logits = model.exit_logits(states)
    with torch.no_grad():
        predicted = torch.stack([model.classify(k, state).argmax(dim=1) for k, state in enumerate(states)], dim=1)
    if not rows.any():  # a batch without this part: a loss of 0 that still has a gradient
        return exit_logits.sum()
    columns = zip(exit_logits.unbind(dim=1), (predicted[:, :-1] == predicted[:, -1:]).unbind(dim=1))
    return sum(balanced_loss(*column) for column in columns) / exit_logits.shape[1]


@torch.no_grad()
def held_out_loss(loss: Callable[[CatExits, Batch], Tensor], part: int, model: CatExits, held_out: States) -> float:
    """A loss on the held-out set, all of which counts as the part of this loss."""
    states, labels = held_out.batch(np.arange(len(held_out)), next(model.parameters()).device)
    return float(loss(model, Batch((), labels, states, torch.full_like(labels, part))))


METHOD = Method(
    Config,
    recipe,
    units=("rows",),
    model=CatExits,
    candidates=sweep(Policy()),
    exits=None,
    classes_only=True,
    lacks=("head",),
)
