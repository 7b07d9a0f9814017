"""Self-supervised exits: vocabulary heads on a frozen decoder that learn from what the decoder itself says.

Paper: Florian Valade, Accelerating Large Language Model Inference with Self-Supervised Early Exits, 2024,
arXiv:2407.21082v1. In the paper's order: section 3.2 (the loss of the heads, Eq. 1), the measures of Fig. 1, and 3.3.1
(the thresholds, Eq. 2 and 3). Section 3.3.2, inference, is the rule Threshold in the loop that every method shares.

Symbols:   p_theta: the full model; p_k: head k (exits.heads.VocabularyHead), after layer e_k; penalty = lambda of
           Eq. 1; init: "scratch" draws norm and linear map, "copy" takes the model's own. K counts exits, the last of
           which is the LM head: K - 1 heads.
           D_t, D_c: texts that the model writes from the training and from the calibration batch of Table 1 (the
           paper once swaps the names). tau_k: the threshold of head k; epsilon: the share that must agree.

Deviations from the paper, and what it leaves open (tests/test_self_supervised.py):
1. The printed CE takes the softmax of what is a probability already; here it takes that of the logits.
2. The target is the likeliest token of p_theta ("hard"), as in the released code; the paper prints p_theta ("soft").
3. The heads of the epoch that agrees most on held-out text are kept.
4. Heads are copies, and lambda is 0: results/self-supervised.md has the others beside it.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mini_ee.data.options import Settings, option
from mini_ee.data.texts import CALIBRATION_PROMPTS, Text
from mini_ee.exits.heads import INITS
from mini_ee.exits.tokens import TextData, TokenExits
from mini_ee.training.default_rule import Chosen
from mini_ee.training.method import Method
from mini_ee.training.stages import Batch, Stage
from mini_ee.training.texts import Source, agreement_rule, texts_to_calibrate

TARGETS = ("soft", "hard")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the method."""

    penalty: float = option(0.0, "lambda of Eq. 1; the paper tries 0, .1 and .95", flag="--lambda", least=0, most=1)
    target: str = option("hard", "the model's likeliest token, or all that it says (soft)", choices=TARGETS)
    init: str = option("copy", "heads are drawn (scratch), or copies of the model's own", choices=INITS)


# ---- Eq. 1 ----


def head_loss(logits: Tensor, full_logits: Tensor, penalty: float, target: str = "soft") -> Tensor:
    """(1 - lambda) CE(p_k, p_theta) - lambda Entropy(p_k) at each position: (..., V), (..., V) -> (...).

    In nats and in float32. target: "soft", p_theta itself, or "hard", its likeliest token.
    """
    log_p = logits.float().log_softmax(-1)
    if target == "soft":
        cross_entropy = -(full_logits.float().softmax(-1) * log_p).sum(-1)
    else:
        cross_entropy = -log_p.gather(-1, full_logits.argmax(-1, keepdim=True))[..., 0]
    if penalty == 0:  # the entropy of a whole vocabulary is a fifth of a training step
        return cross_entropy
    return (1 - penalty) * cross_entropy - penalty * entropy(log_p)


def entropy(log_p: Tensor) -> Tensor:
    """-sum p ln p, in nats: (..., V) -> (...)."""
    return -(log_p.exp() * log_p).sum(-1)


# ---- Training ----


def recipe(model: TokenExits, config: Config) -> list[Stage]:
    """All heads at once, by Eq. 1; Fig. 1 is recorded on the way."""
    return [
        Stage(
            name="heads",
            trainable=lambda name: name.startswith("heads."),
            loss=partial(heads_loss, config=config),
            score=lambda scores: float(np.mean(scores[:-1])),
            log_metrics=metrics,
            settings={"weight_decay": 0.0},
        )
    ]


def heads_loss(model: TokenExits, batch: Batch, config: Config) -> Tensor:
    """The sum over heads of Eq. 1, the mean over all positions. The decoder is the teacher: no label is needed."""
    *each_logits, full = model(*batch.inputs)
    return sum(head_loss(logits, full, config.penalty, config.target).mean() for logits in each_logits)


@torch.no_grad()
def metrics(model: TokenExits, held: TextData, batch_size: int = 16) -> dict[str, list[float]]:
    """Fig. 1, of every head over all positions: the share where its likeliest token is the full model's (`agreement`),
    and the mean `entropy` in nats.
    """
    device, positions, totals = next(model.parameters()).device, 0, np.zeros((2, len(model.heads)))
    for begin in range(0, len(held), batch_size):
        inputs, labels = held.batch(np.arange(begin, min(begin + batch_size, len(held))), device)
        *each_logits, full = model(*inputs)
        said = full.argmax(-1)
        positions += len(labels)
        for k, logits in enumerate(each_logits):
            totals[0, k] += float((logits.argmax(-1) == said).sum())
            totals[1, k] += float(entropy(logits.log_softmax(-1)).sum())
    return dict(zip(("agreement", "entropy"), (totals / positions).tolist()))


# ---- Section 3.3.1: thresholds ----


def calibrated_rule(model: TokenExits, source: Source, held: TextData) -> Chosen:
    """tau_k of every head: the lowest confidence c_k (Eq. 2) from which on a share epsilon of the tokens of D_c agrees
    with the full model (t_k, Eq. 3). calibration.tau computes it.

    The confidence is breaking ties, p_(1) - p_(2), and epsilon is .95. Half of the texts give tau_k, the others say
    how many tokens agree under them. A model that learned from stories is calibrated on stories that were held out.
    """
    if source.options.kind == "pieces":
        held = TextData(calibration_texts(source), every=True)
    return agreement_rule(model, source, held)


def calibration_texts(source: Source) -> list[Text]:
    """D_c, which the model writes from Table 1 even if it learned from a file or from other prompts.

    Asked for as many and as long texts as in training, but for numbers that would not do: the training is over by now
    and must not fail.
    """
    options, prompts = source.options, [*map(source.tokenizer.ids_of, CALIBRATION_PROMPTS)]
    texts = options.texts and max(2, options.texts)
    new_tokens = options.new_tokens and min(options.new_tokens, max(1, source.backbone.room(prompts)))
    usual = replace(options, text=None, prompt=None, greedy=False, texts=texts, new_tokens=new_tokens)
    return texts_to_calibrate(source._replace(options=usual))


# ---- The method ----


def build(backbone: nn.Module, exits: tuple[int, ...], num_labels: int, pool: str, config: Config) -> TokenExits:
    """Heads on the decoder as it is: no adapters."""
    return TokenExits(backbone, exits, config.init)


def regular_exits(num_layers: int) -> tuple[int, ...]:
    """Section 4: heads after 6, 12, 18 and 24 of 32 layers, here in proportion; and the LM head.

    >>> regular_exits(32), regular_exits(8)
    ((6, 12, 18, 24, 32), (2, 3, 4, 6, 8))
    """
    heads = {round(num_layers * share / 16) for share in (3, 6, 9, 12)} - {0}
    return (*sorted(heads - {num_layers}), num_layers)


METHOD = Method(
    Config,
    recipe,
    units=("tokens",),
    model=build,
    exits=regular_exits,
    default_rule=calibrated_rule,
    defaults={
        "tokens": {"head_lr": 1e-2, "epochs": 20, "kind": "pieces", "rank": None},
        "built-in": {"exits": (4, 8, 12), "epochs": 8, "texts": 512},
    },
    lacks=("lr", "rank", "weight_decay"),
)
