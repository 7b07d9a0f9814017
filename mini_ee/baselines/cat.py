"""CAT: beside each exit a small classifier that says whether the exit agrees with the last one.

Source: Schuster, Fisch, Jaakkola, Barzilay 2021, Consistent Accelerated Inference via Confident Adaptive Transformers,
arXiv:2104.08803v2. We had the abstract and the published code (TalSchuster/CATs, commit 746c5fc), not the equations.

Symbols    C classes; K exits, the last after all L layers; n = K - 1 inner exits, k = 0 .. n - 1
           p^k (B, C)          what inner exit k says, as probabilities, after its temperature
           F                   1 where the class of exit k is that of the last exit: what a meta classifier predicts

    inner exit        dropout, Linear(D, 32), tanh, Linear(32, C), divided by a temperature
    meta classifier   of  [its class one-hot (C), its 32 hidden values, its top probability, its top gap, what exits
                      k - 1 .. 1 gave its class (the first exit is left out; zeros up to n - 2), k / n]
                      Linear(., 32), tanh, and the logit of F; per exit, or `shared` by all

Stages: fine-tune, inner exits (mean cross-entropy), temperatures, meta classifiers (cross-entropy, each class of F with
the same weight in a batch), each with all before it frozen. While meta classifiers learn, the states that inner exits
read and the 32 hidden values are dropped out. Temperatures and meta classifiers learn from rows of train that nothing
before them has seen, half of `apart` each. A unit leaves by Policy: the cut of `mini-ee calibrate
--promise conformal` (calibration.py) is the paper's shared calibration, and serves every other method too.

Deviations, 1 to 5 of them pinned in tests/test_cat.py:
1. One logit for F, the difference of the paper's two: the same loss and the same scores.
2. Heads read the mean over tokens by default; theirs the first (`pool`). Exits need not sit after every layer.
3. No regression (theirs takes |difference| <= .5 for agreement), and no tokens, whose classes are too many to read.
4. Fine-tuning leaves the rows apart out too, so that the last exit is on them what it is on fresh ones.
5. Where the exit is named beforehand no other head is computed; ONNX graphs compute the inner heads there too.
6. Temperatures learn at rate .01 by default, since there are few rows for them; theirs at .001, over more steps.
7. Not here: inner exits that read the logits of those before them (`use_history_logits`), and an F that is 1 only if
   the last exit is right as well (`joint_meta`).
8. The conformal cut is taken from all calibration examples; theirs leaves out those whose exits all agree with the last
   (src/conformal.py, 107), and so guarantees agreement among the others alone: here less strict, but for all examples.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.backbone import Backbone, LayerContext, tensor_on
from mini_ee.data.options import Settings, option
from mini_ee.exits.heads import HEAD_DROPOUT, ExitHead
from mini_ee.exits.rows import RowExits, RowSegments, States
from mini_ee.rules import Policy
from mini_ee.segments import Reading
from mini_ee.training.default_rule import sweep
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, Stage

INNER = 32  # hidden values of an inner exit, and of a meta classifier
HEADS, TEMPERATURES, META = 0, 1, 2  # parts of train


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the stages. Raises ValueError on a value that makes no sense."""

    target: str = option(
        "label", "what inner exits learn: the label, or what the last exit says", choices=("label", "last")
    )
    shared: bool = option(False, "one meta classifier for all exits")
    apart: float = option(0.2, "share of train for temperatures and meta classifiers alone", above=0, below=1)
    temperature_lr: float = option(0.01, "learning rate of the temperatures", above=0)
    meta_epochs: int = option(10, "of the meta classifiers", least=1)
    meta_lr: float = option(3e-3, "learning rate of the meta classifiers", above=0)


# ---- The equations ----
def features(logits: Tensor, inner: Tensor, before: Tensor | None, k: int, exits: int) -> Tensor:
    """What a meta classifier reads at exit k of so many inner ones: (B, C + 32 + 2 + max(n - 2, 0) + 1).

    logits (B, C); inner (B, 32); before (B, k - 1, C): probabilities at the exits k - 1 .. 1, None where k < 2.
    """
    p = logits.softmax(dim=1)
    said = F.one_hot(p.argmax(dim=1), p.shape[1]).to(p.dtype)
    first, second = p.topk(2, dim=1).values.split(1, dim=1)
    history = [] if before is None else [(before * said[:, None]).sum(dim=2)]
    tail = torch.zeros_like(p[:, :1]) + torch.tensor(_tail(k, exits), dtype=p.dtype, device=p.device)
    return torch.cat((said, inner, first, first - second, *history, tail), dim=1)


def _tail(k: int, exits: int) -> list[float]:
    """The zeros that fill the history up, and how far the exit is."""
    return [0.0] * (max(exits - 2, 0) - max(k - 1, 0)) + [k / exits]


def remember(before: Tensor | None, logits: Tensor, k: int) -> Tensor | None:
    """Probabilities at the exits k .. 1, (B, k, C), from those at k - 1 .. 1; None at the first exit."""
    if k == 0:
        return None
    p = logits.softmax(dim=1)[:, None]
    return p if before is None else torch.cat((p, before), dim=1)


def balanced_loss(logits: Tensor, agrees: Tensor) -> Tensor:
    """Cross-entropy of F, (N,) each, in which either class weighs the same; the mean where all are of one."""
    weights = torch.where(agrees, len(agrees) / agrees.sum(), len(agrees) / (~agrees).sum())
    losses = F.binary_cross_entropy_with_logits(logits, agrees.float(), reduction="none")
    return (weights * losses).sum() / weights.sum()


# ---- The model ----
class InnerHead(ExitHead):
    """An exit before the last."""

    def __init__(self, width: int, num_labels: int, pool: str, norm: nn.Module | None):
        super().__init__(width, num_labels, pool, norm)
        self.dense, self.out = nn.Linear(width, INNER), nn.Linear(INNER, num_labels)
        for linear in (self.dense, self.out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        self.temperature = nn.Parameter(torch.ones(1))

    def inner(self, state: Tensor) -> Tensor:
        return super().inner(self.dropout(state) if self.training else state)

    def conclude(self, inner: Tensor) -> Tensor:
        return self.out(inner) / self.temperature


class MetaClassifiers(nn.Module):
    """How likely inner exits agree with the last: one network each, or one for all."""

    def __init__(self, exits: int, classes: int, shared: bool):
        super().__init__()
        width = classes + INNER + 2 + max(exits - 2, 0) + 1
        networks = (nn.Sequential(nn.Linear(width, INNER), nn.Tanh(), nn.Linear(INNER, 1)) for _ in range(exits))
        self.networks = nn.ModuleList([next(networks)] if shared else networks)
        self.flops = 2.0 * INNER * (width + 1)  # of one exit_logit

    def network(self, k: int) -> nn.Module:
        """That of exit k."""
        return self.networks[k % len(self.networks)]


class CatExits(RowExits):
    """Inner exits with temperatures, and meta classifiers that read what all exits so far have said.

    Raises ValueError for a single exit.
    """

    def __init__(self, backbone: Backbone, exits: tuple[int, ...], num_labels: int, pool: str, config: Config):
        super().__init__(backbone, exits, num_labels, pool)
        if len(exits) < 2:
            raise ValueError(f"CAT needs at least two exits to choose from, got {len(exits)}")
        for k in range(len(exits) - 1):
            self.heads[k] = InnerHead(backbone.config.hidden_size, num_labels, pool, backbone.exit_norm())
        self.policy = MetaClassifiers(len(exits) - 1, num_labels, config.shared)

    def decide(self, k: int, inner: Tensor, logits: Tensor, before: Tensor | None) -> Tensor:
        """The exit_logit (B,) of exit k; arguments as of `features`, with no gradient into them."""
        inner = F.dropout(inner, HEAD_DROPOUT) if self.policy.training else inner
        read = features(logits.detach(), inner.detach(), before, k, len(self.exits) - 1)
        return self.policy.network(k)(read)[:, 0]

    def exit_logits(self, states: list[Tensor]) -> Tensor:
        """What the meta classifiers say at all exits but the last: (B, K - 1)."""
        before, found = None, []
        for k, head in enumerate(self.heads[:-1]):
            with torch.no_grad():
                inner = head.inner(states[k])
                logits = head.conclude(inner)
            found.append(self.decide(k, inner, logits, before))
            before = remember(before, logits, k)
        return torch.stack(found, dim=1).float()

    def segments(self) -> "CatSegments":
        return CatSegments(self)


# ---- Segments ----
class CatState(NamedTuple):
    """The rows still in the model, and what the exits have said of them."""

    hidden: Tensor  # (B, T, D)
    context: LayerContext
    decides: bool = True  # False: heads are named already, and no meta classifier is asked
    inner: Tensor | None = None  # (B, 32) of the exit just reached, None at the last
    logits: Tensor | None = None
    before: Tensor | None = None  # as `features` takes it
    seen: Tensor | None = None  # the same with this exit

    def keep(self, rows: np.ndarray) -> "CatState":
        index = tensor_on(self.hidden.device, rows)
        tensors = (each if each is None else each[index] for each in self[3:])
        return CatState(self.hidden[index], self.context.keep(index), self.decides, *tensors)


class CatSegments(RowSegments):
    """The segments of a CatExits in eval mode. `advance` ends with the head: later exits read what it says."""

    carried = "seen"  # the probabilities at the exits so far

    def start(self, inputs) -> CatState:
        return CatState(*super().start(inputs))

    def select_heads(self, heads, state: CatState) -> CatState:
        return state._replace(decides=False)

    def advance(self, k: int, state: CatState) -> CatState:
        hidden, context, *_ = super().advance(k, state)
        if not (state.decides and self._decides(k)):
            return CatState(hidden, context, state.decides)
        head = self.model.heads[k]
        inner = head.inner(head.state(hidden, context.padding))
        logits = head.conclude(inner)
        return CatState(hidden, context, True, inner, logits, state.seen, remember(state.seen, logits, k))

    def read_logits(self, k: int, state: CatState) -> Reading:
        logits = state.logits
        if logits is None:
            logits = self.model.classify(k, self.model.heads[k].state(state.hidden, state.context.padding))
        return Reading(logits.float().numpy(force=True))

    def read_state(self, k: int, state: CatState) -> Reading:
        if state.logits is None:
            return self.read_logits(k, state)
        exit_logit = self.model.decide(k, state.inner, state.logits, state.before)
        return Reading(None, exit_logit.float().numpy(force=True))

    def state_flops(self, k: int) -> float:
        return self.model.policy.flops + self.model.heads[k].flops(tokens=0) if self._decides(k) else 0.0


# ---- Training ----
def recipe(model: CatExits, config: Config) -> list[Stage]:
    """The four stages."""
    last = f"heads.{len(model.exits) - 1}."
    split, temperatures = partial(parts, apart=config.apart), partial(temperature_loss, config=config)

    def inner(name: str) -> bool:
        return name.startswith("heads.") and not name.startswith(last)

    return [
        Stage(
            name="fine-tune",
            trainable=lambda name: name.startswith(("backbone.", last)),
            loss=lambda model, batch: part_loss(model(*batch.inputs)[-1:], batch.labels, batch.targets == HEADS),
            score=lambda scores: float(scores[-1]),
            make_targets=split,
        ),
        Stage(
            name="heads",
            trainable=lambda name: inner(name) and not name.endswith("temperature"),
            loss=partial(heads_loss, config=config),
            score=lambda scores: float(np.mean(scores[:-1])),
            make_targets=split,
        ),
        Stage(
            name="temperatures",
            trainable=lambda name: name.endswith("temperature"),
            loss=temperatures,
            validate=lambda model, held: {"score": -held_loss(temperatures, TEMPERATURES, model, held)},
            on_states=True,
            make_targets=split,
            settings={"head_lr": config.temperature_lr, "warmup": 0.0},
        ),
        Stage(
            name="meta",
            trainable=lambda name: name.startswith("policy."),
            loss=meta_loss,
            validate=lambda model, held: {"score": -held_loss(meta_loss, META, model, held)},
            on_states=True,
            make_targets=split,
            settings={"epochs": config.meta_epochs, "head_lr": config.meta_lr, "warmup": 0.0},
        ),
    ]


def parts(model: CatExits, data, apart: float) -> np.ndarray:
    """Which part of train each row is in, (N,); the same in every stage."""
    drawn = np.random.default_rng(0).permutation(len(data)) / len(data)
    return np.where(drawn >= apart, HEADS, np.where(drawn < apart / 2, TEMPERATURES, META))


def part_loss(each: list[Tensor], labels: Tensor, rows: Tensor) -> Tensor:
    """The mean cross-entropy over exits and those rows (B,) bool; 0 where there are none. each: logits (B, C)."""
    losses = torch.stack([F.cross_entropy(logits.float(), labels, reduction="none") for logits in each])
    return losses[:, rows].sum() / (len(each) * rows.sum().clamp(min=1))


def heads_loss(model: CatExits, batch: Batch, config: Config) -> Tensor:
    """The inner exits', on the labels or on what the last exit says."""
    return inner_loss(model(*batch.inputs), batch, HEADS, config)


def temperature_loss(model: CatExits, batch: Batch, config: Config) -> Tensor:
    """The same under the temperatures, on rows of their own."""
    each = [model.classify(k, state) for k, state in enumerate(batch.states)]
    return inner_loss(each, batch, TEMPERATURES, config)


def inner_loss(each: list[Tensor], batch: Batch, part: int, config: Config) -> Tensor:
    """The mean cross-entropy of the inner exits on a part of train. each: logits (B, C) of all exits."""
    target = each[-1].argmax(dim=1) if config.target == "last" else batch.labels
    return part_loss(each[:-1], target, batch.targets == part)


def meta_loss(model: CatExits, batch: Batch) -> Tensor:
    """The mean over exits of the balanced loss, on the third part."""
    rows = batch.targets == META
    *states, last = (state[rows] for state in batch.states)
    states = [*(F.dropout(state, HEAD_DROPOUT, model.policy.training) for state in states), last]
    exit_logits = model.exit_logits(states)
    with torch.no_grad():
        said = torch.stack([model.classify(k, state).argmax(dim=1) for k, state in enumerate(states)], dim=1)
    if not rows.any():
        return exit_logits.sum()
    columns = zip(exit_logits.unbind(dim=1), (said[:, :-1] == said[:, -1:]).unbind(dim=1))
    return sum(balanced_loss(*column) for column in columns) / exit_logits.shape[1]


@torch.no_grad()
def held_loss(loss, part: int, model: CatExits, held: States) -> float:
    """A loss on rows that were held out, all of them as if of its part."""
    states, labels = held.batch(np.arange(len(held)), next(model.parameters()).device)
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
