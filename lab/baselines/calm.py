"""CALM (Schuster et al. 2022, arXiv:2207.07061v2): a token exits if one measure exceeds one threshold.

Source: Schuster et al. 2022, Confident Adaptive Language Modeling, arXiv:2207.07061v2. It is the baseline
of ConsistentEE in generation. Its three confidence measures:

    gap          softmax response: the largest probability minus the second; the rule Threshold on breaking_ties
    saturation   cosine of the state with that at the exit before; the rule Threshold on saturation
    classifier   one linear map for all exits, which predicts whether the exit agrees with the last (OneForAll of
                 training/policies.py); the rule Policy

and its calibration: one threshold with a guarantee on whole texts (Learn then Test: Angelopoulos et al. 2021).

Deviations: 1. exits need not be after every layer, so "the layer before" is the exit before (for the first exit the
embeddings); 2. the threshold does not fall along the text (their lambda'(lambda, t)); 3. each exit has its own head
instead of one LM head for all layers, trained with Eq. 1 of ConsistentEE, so both methods start from the same model;
4. on examples, classifier and gap work in the same way; saturation is a measure of tokens only.
"""

import math
from collections.abc import Callable, Sequence

from torch import nn

from mini_ee.lab.data.metrics import rouge_l
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.rules import Never, Policy, Rule, Threshold
from mini_ee.lab.statistics import chernoff
from mini_ee.lab.training.default_rule import Chosen, passing, sweep
from mini_ee.lab.training.method import Method, NoConfig
from mini_ee.lab.training.policies import OneForAll, classifier_stage
from mini_ee.lab.training.stages import Stage, joint_stage
from mini_ee.lab.training.training_text import Source

MEASURE_RULES = {
    "gap": Threshold(0.5, "breaking_ties"),
    "saturation": Threshold(0.5, "saturation"),
    "classifier": Policy(),
}
"""The rule of each measure; its threshold is to be calibrated."""
TOLERANCE, DELTA = 0.3, 0.05  # of the default rule: at most this risk, with confidence 1 - delta
PROPOSING = 5  # every fifth held-out text proposes thresholds; the others test them
CLASSIFIER = {"epochs": 3, "head_lr": 3e-3, "warmup": 0.0}


def recipe(model: nn.Module, config: NoConfig) -> list[Stage]:
    """Heads and backbone with Eq. 1 of ConsistentEE; then the classifier, while everything else is frozen."""
    return [
        joint_stage(model, trainable=lambda name: not name.startswith("policy.")),
        classifier_stage("classifier", CLASSIFIER),
    ]


def guaranteed_rule(model: TokenExits, source: Source, held_out: TextData) -> Chosen:
    """For each measure the loosest threshold with CALM's guarantee on held-out texts; the first is the default rule.

    The risk of a text is 1 - Rouge-L against the greedy text of the full model. The same texts have selected the best
    epoch before; strictly, the confidence would need a model that was selected without them.
    """
    texts = held_out.texts
    proposing, tested = texts[::PROPOSING], [text for at, text in enumerate(texts) if at % PROPOSING]
    recorded, decode = record_texts(model, proposing), source.tokenizer.backend.decode

    def written(rule: Rule) -> list[str]:
        return [decode(generation.tokens) for generation in model.write(tested, rule, max_new_tokens=source.follow)]

    full = written(Never())

    def risk(rule: Rule) -> list[float]:
        return [1 - rouge_l(*pair) for pair in zip(written(rule), full)]

    rules = {measure: passing(recorded, rule) for measure, rule in MEASURE_RULES.items()}
    calibrated = {measure: calibrate_texts(some, risk, TOLERANCE, DELTA) or Never() for measure, some in rules.items()}
    metrics = {
        "own": {measure: rule.to_dict() for measure, rule in calibrated.items()},
        "sweep": {measure: [rule.to_dict() for rule in some] for measure, some in rules.items()},
    }
    guaranteed = (
        f"Texts lose at most {TOLERANCE} of Rouge-L on average, with confidence {1 - DELTA:.0%}, under each of:"
    )
    metrics["guaranteed"] = guaranteed
    guarantee = {"max_loss": TOLERANCE, "confidence": 1 - DELTA, "loss": "1 - Rouge-L of a text", "rows": len(tested)}
    return Chosen(calibrated["gap"], None if isinstance(calibrated["gap"], Never) else guarantee, None, metrics)


# ---- Calibration on whole texts ----
def calibrate_texts(
    rules: Sequence[Rule], risk: Callable[[Rule], Sequence[float]], tolerance: float, delta: float
) -> Rule | None:
    """The loosest of the rules whose mean risk is at most `tolerance`, or None.

    rules: the strictest first, chosen on other texts. risk: of a rule, the loss of each of n calibration texts under
    it, in [0, 1], such as 1 - Rouge-L against the text of the full model. The bound holds with probability 1 - delta
    over the draw of these texts: rules are tested in turn (as in `fixed_sequence`), until the first one that fails. A
    rule fails if its risks could come from a mean above the tolerance (`chernoff`). None: the first one failed. Raises
    ValueError for settings out of range, and if n texts without any risk would not be enough.
    """
    for name, value in (("tolerance", tolerance), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must be above 0 and below 1, got {value}")
    passed = None
    for rule in rules:
        risks = risk(rule)
        if chernoff(0.0, tolerance, len(risks)) > delta:
            needed = math.ceil(math.log(delta) / math.log1p(-tolerance))
            raise ValueError(
                f"too few texts to guarantee a tolerance of {tolerance} with delta {delta}: "
                f"at least {needed} are needed, got {len(risks)}"
            )
        if chernoff(sum(risks) / len(risks), tolerance, len(risks)) > delta:
            break
        passed = rule
    return passed


METHOD = Method(
    recipe=recipe,
    units=("tokens", "rows"),
    policy=OneForAll,
    candidates=sweep(Policy()),
    default_rule=guaranteed_rule,
    classes_only=True,
    defaults={"tokens": {"lr": 2e-3, "head_lr": 8e-3, "rank": 8}},
)
