"""The systems that the papers compare with: a training recipe each, and the rule that it is read with.

joint          one stage; the exits' losses summed with their depth as weight (ConsistentEE, Eq. 1)
two-stage      fine-tune for the last exit, freeze, train the other heads
sweet          each layer learns from the next exit's loss alone (SWEET, Rotem et al. 2023)

deebert        two-stage; entropy (DeeBERT, Xin et al. 2020)
fastbert       as two-stage, but the other heads learn from the last one; normalised entropy (FastBERT, Liu et al. 2020)
right-tool     joint, then a temperature for each exit; max probability (Right-Tool, Schwartz et al. 2020)
pabee          joint; patience (PABEE, Zhou et al. 2020)
pcee-bert      joint; patience among confident exits (PCEE-BERT, Zhang et al. 2022)
berxit         the last exit and all exits in turns; a learning-to-exit module (BERxiT, Xin et al. 2021)

A recipe gives the stages that training.py runs; `candidates` gives the rules among which the default one is chosen.
All heads are exits.ExitHead, where a paper has a head of its own too (FastBERT): recipes and rules are compared here.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.bert import Bert
from mini_ee.decoder import Decoder
from mini_ee.evaluation import Candidates, patiences, quantiles, record, thresholds
from mini_ee.exits import MultiExit
from mini_ee.fitting import Batch, Data, Stage, depth_weighted_sum, joint_loss, task_loss
from mini_ee.policies import PolicyExits
from mini_ee.rules import PatienceConfidence, Policy, Rule

CALIBRATION_BATCH = 64


def joint(model: MultiExit) -> list[Stage]:
    """All exits and the backbone at once, under Eq. 1."""
    return [
        Stage(
            name="joint",
            learns=lambda name: True,
            loss=joint_loss,
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]


def two_stage(model: MultiExit) -> list[Stage]:
    """DeeBERT: first backbone and last head, as any fine-tuning; then the other heads, on the frozen backbone."""
    return _fine_tuned(
        model, lambda model, batch: sum(task_loss(logits, batch.labels) for logits in model(*batch.inputs)[:-1])
    )


def _fine_tuned(model: MultiExit, heads_loss: Callable[[MultiExit, Batch], Tensor]) -> list[Stage]:
    """Backbone and last head, then the other heads by a loss of their own."""
    last = f"heads.{len(model.exits) - 1}."
    stages = [
        Stage(
            name="fine-tune",
            learns=lambda name: name.startswith(("backbone.", last)),
            loss=lambda model, batch: task_loss(model(*batch.inputs)[-1], batch.labels),
            score=lambda scores: float(scores[-1]),
        )
    ]
    if len(model.exits) > 1:
        stages.append(
            Stage(
                name="heads",
                learns=lambda name: name.startswith("heads.") and not name.startswith(last),
                loss=heads_loss,
                score=lambda scores: float(np.mean(scores[:-1])),
            )
        )
    return stages


def sweet(model: MultiExit) -> list[Stage]:
    """SWEET: all exits at once, but no gradient passes from an exit to the layers below the one before it."""
    return [
        Stage(
            name="sweet",
            learns=lambda name: True,
            loss=lambda model, batch: sum(
                task_loss(logits, batch.labels) for logits in model(*batch.inputs, detach=True)
            ),
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]


# ---- FastBERT ----


def fastbert(model: MultiExit) -> list[Stage]:
    """Fine-tune backbone and last head; then the other heads learn what the last one says, labels unseen."""
    return _fine_tuned(model, self_distillation_loss)


def self_distillation_loss(model: MultiExit, batch: Batch) -> Tensor:
    """FastBERT, Eq. 7 and 8: sum over students of KL(student, teacher), in this order. A squared error where C = 1."""
    *students, teacher = (logits.float() for logits in model(*batch.inputs))
    teacher = teacher.detach()
    if model.num_labels == 1:
        return sum(F.mse_loss(student, teacher) for student in students)
    log_t = F.log_softmax(teacher, dim=1)
    return sum(
        F.kl_div(log_t, F.log_softmax(student, dim=1), reduction="batchmean", log_target=True) for student in students
    )


# ---- Right-Tool ----


def right_tool(model: MultiExit) -> list[Stage]:
    """Joint; then a temperature for each exit, fitted on the hold-out."""
    return [stage._replace(finish=calibrate) for stage in joint(model)]


def calibrate(model: MultiExit, held: Data) -> None:
    """Divide the logits of every exit by its temperature, in the weights of its head. Regression has nothing to do."""
    if model.num_labels == 1:
        return
    logits = record(model.segments(), held.encoded, CALIBRATION_BATCH).logits
    with torch.no_grad():
        for k, head in enumerate(model.heads):
            temperature = fit_temperature(logits[:, k], held.labels)
            head.out.weight /= temperature
            head.out.bias /= temperature


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """The temperature, from 1/10 to 10, under which the labels are likeliest (Guo et al. 2017).

    logits (N, C), labels (N,). The loss is convex in 1 / temperature: where its slope changes sign is found by halving.
    """
    logits = np.asarray(logits, np.float64)
    margins = logits - logits[np.arange(len(labels)), labels][:, None]  # over the label's own

    def slope(inverse: float) -> float:
        """Of the mean cross-entropy by the inverse temperature: the expected margin."""
        p = np.exp(inverse * (logits - logits.max(axis=1, keepdims=True)))
        return float(((p * margins).sum(axis=1) / p.sum(axis=1)).mean())

    low, high = np.log(0.1), np.log(10.0)  # of the inverse
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(np.exp(middle)) < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))


# ---- BERxiT ----


class BerxitExits(PolicyExits):
    """One learning-to-exit module for all exits, a linear map of the pooled state to how certain the head may be."""

    def __init__(self, backbone: Bert | Decoder, exits: tuple[int, ...], num_labels: int, pool: str = "mean"):
        super().__init__(backbone, exits, num_labels, pool)
        if len(exits) < 2:
            raise ValueError(f"BERxiT needs at least two exits to choose from, got {len(exits)}")
        self.certainty = nn.Linear(backbone.config.hidden_size, 1)
        self.policy_flops = 2.0 * backbone.config.hidden_size

    def exit_logit(self, k: int, state: Tensor) -> Tensor:
        """The logit of the certainty, (B,), of a state (B, D) of whichever exit."""
        return self.certainty(state)[:, 0]


def berxit(model: BerxitExits) -> list[Stage]:
    """One stage: the last exit's loss in even steps, all exits' and the module's in odd ones."""
    return [
        Stage(
            name="alternating",
            learns=lambda name: True,
            loss=alternating_loss,
            score=lambda scores: float(depth_weighted_sum(scores, model.exits)),
        )
    ]


def alternating_loss(model: BerxitExits, batch: Batch) -> Tensor:
    """The objective whose turn it is; the module learns with all exits, by the squared error of its certainty."""
    states = model.states(*batch.inputs)
    last = len(states) - 1
    if batch.step % 2 == 0:
        return task_loss(model.classify(last, states[last]), batch.labels)
    said = [model.classify(k, state) for k, state in enumerate(states)]
    truth = torch.stack([true_certainty(logits.detach(), batch.labels) for logits in said[:-1]], dim=1)
    certainty = torch.sigmoid(model.exit_logits(states))
    return sum(task_loss(logits, batch.labels) for logits in said) + ((certainty - truth) ** 2).mean(dim=0).sum()


def true_certainty(logits: Tensor, labels: Tensor) -> Tensor:
    """What the module should say: 1 where the head is right, else 0; for numbers 1 - tanh |error|. (B, C) -> (B,)."""
    if labels.is_floating_point():
        return 1 - torch.tanh((logits[:, 0].float() - labels).abs())
    return (logits.argmax(dim=1) == labels).float()


# ---- The rules that each system is read with ----


def confident_patiences(logits: np.ndarray, exit_logits: np.ndarray | None) -> list[Rule]:
    """Every patience from 2 on with every fifth threshold on the max probability."""
    levels = [rule.threshold for rule in thresholds(logits, None, "max_probability")[::5]]
    return [PatienceConfidence(patience, level) for patience in range(2, logits.shape[1]) for level in levels]


def cuts(logits: np.ndarray, exit_logits: np.ndarray | None) -> list[Rule]:
    """The papers' cut, .5, and cuts at quantiles of the probabilities of leaving: exit_logits (N, K - 1)."""
    chances = 1 / (1 + np.exp(-exit_logits.astype(np.float64)))
    return [Policy(), *(Policy(float(level)) for level in quantiles([chances.ravel()]))]


class System(NamedTuple):
    """How a system is trained and read."""

    recipe: Callable[[MultiExit], list[Stage]]
    candidates: Candidates  # of its default rule
    build: Callable[..., MultiExit] = MultiExit


OF_CLASSES = ("deebert", "fastbert", "right-tool", "pcee-bert")  # whose rules ask how sure an exit is
RECIPES = {"joint": joint, "two-stage": two_stage, "sweet": sweet}
SYSTEMS = {
    "deebert": System(two_stage, partial(thresholds, measure="entropy")),
    "fastbert": System(fastbert, partial(thresholds, measure="normalised_entropy")),
    "right-tool": System(right_tool, partial(thresholds, measure="max_probability")),
    "pabee": System(joint, patiences),
    "pcee-bert": System(joint, confident_patiences),
    "berxit": System(berxit, cuts, BerxitExits),
}
