"""CALM, what ConsistentEE is compared with in generation: a token leaves where one measure passes one threshold.

Source: Schuster et al. 2022, Confident Adaptive Language Modeling. Its three measures of how certain a token is:

    gap          softmax response: the largest probability minus the second; the rule Threshold on breaking_ties
    saturation   cosine of the state with the one at the exit before; the rule Threshold on saturation
    classifier   one linear map for all exits, which predicts that the exit agrees with the last; the rule Policy

and its calibration, one threshold that keeps a promise on whole texts (Learn then Test: Angelopoulos et al. 2021).

Deviations: 1. exits need not sit after every layer, so "the layer before" is the exit before (at first the embeddings);
2. the threshold does not fall along the text (their lambda'(lambda, t)); 3. heads of their own instead of one LM head
for all layers: the ones of decoder_exits.py, so that the measures read the very model that ConsistentEE begins from.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_ee.backbones.llama import Decoder
from mini_ee.rules import Policy, Rule, Threshold
from mini_ee.training.fit import TrainConfig
from mini_ee.training.fit_tokens import fit_instances
from mini_ee.units.tokens import BATCH, ExitDecoder, Instances

MEASURES = {
    "gap": Threshold(0.5, "breaking_ties"),
    "saturation": Threshold(0.5, "saturation"),
    "classifier": Policy(),
}
"""The rule that reads each measure; its threshold is to be chosen (`decoder_exits.sweep`, `calibrate`)."""

CLASSIFIER_EPOCHS, CLASSIFIER_LR = 3, 3e-3


class CalmDecoder(ExitDecoder):
    """The classifier beside the heads. Arguments and errors as in ExitDecoder."""

    def __init__(self, decoder: Decoder, exits: tuple[int, ...], **lora):
        super().__init__(decoder, exits, **lora)
        self.classifier = nn.Linear(decoder.config.hidden_size, 1)

    @property
    def policies(self) -> list[Callable[[Tensor], Tensor]]:
        """The classifier's logit, behind the norm of the head at each exit."""
        return [lambda state, norm=head.norm: self.classifier(norm(state).detach())[..., 0] for head in self.heads]

    def graph_exit_logit(self, g, k: int, state: str) -> str:
        """policies[k] of states (B, D)."""
        return g.op("Squeeze", g.linear(g.apply(self.heads[k].norm, state), self.classifier), g.integers(1))


def learn_classifier(model: CalmDecoder, train: Instances, config: TrainConfig) -> None:
    """Train the classifier in place, where all else is frozen, to predict agreement; uses torch's global random state.

    Binary cross-entropy, the mean over exits and tokens.
    """
    agrees = agreement(model, train).float()

    def loss(rows: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model.exit_logits(train.states[rows]), agrees[rows])

    torch.manual_seed(config.seed)
    fit_instances(model.classifier, len(agrees), loss, CLASSIFIER_EPOCHS, CLASSIFIER_LR, config)


@torch.no_grad()
def agreement(model: ExitDecoder, some: Instances) -> Tensor:
    """Where the likeliest token of an exit is that of the last: (N, K - 1) bool."""
    said = torch.cat([model.all_logits(states).argmax(-1) for states in some.states.split(BATCH)])
    return said[:, :-1] == said[:, -1:]


# ---- Calibration ----
def calibrate(
    rules: Sequence[Rule], risk: Callable[[Rule], Sequence[float]], tolerance: float, delta: float
) -> Rule | None:
    """The loosest of the rules under which texts are worse by `tolerance` at most, in the mean.

    rules: the strictest first, chosen on other texts. risk: of a rule, what each of n calibration texts loses under it,
    in [0, 1], such as 1 - Rouge-L against the full model's. With probability 1 - delta over the draw of these texts the
    promise holds: rules are tested in turn, up to the first whose risk could come from a mean above the tolerance.
    None: not even the first passed. Raises ValueError for settings out of range, and where n texts could not pass with
    no risk at all.
    """
    for name, value in (("tolerance", tolerance), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be above 0 and below 1, got {value}")
    kept = None
    for rule in rules:
        risks = risk(rule)
        if p_value(0.0, len(risks), tolerance) > delta:
            needed = math.ceil(math.log(delta) / math.log1p(-tolerance))
            raise ValueError(
                f"too few texts to promise a tolerance of {tolerance} with delta {delta}: "
                f"at least {needed} are needed, got {len(risks)}"
            )
        if p_value(sum(risks) / len(risks), len(risks), tolerance) > delta:
            break
        kept = rule
    return kept


def p_value(mean: float, count: int, tolerance: float) -> float:
    """How likely `count` risks in [0, 1] average so little if their expectation is above the tolerance, at most.

    exp(-n KL(mean, tolerance)) (Hoeffding 1963, Theorem 1).
    """
    if mean >= tolerance:
        return 1.0
    divergence = (1 - mean) * math.log((1 - mean) / (1 - tolerance))
    divergence += mean * math.log(mean / tolerance) if mean else 0.0
    return math.exp(-count * divergence)
